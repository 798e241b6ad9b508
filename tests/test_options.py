"""Settings of a training run that `krnl profile` has no use for."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import krnl.profile
from krnl import cli
from krnl.errors import ConfigError
from krnl.options import UNPROFILED, ProfileOptions, check_flags, passed_over
from krnl.profile import profile_run
from krnl.training.config import TrainConfig
from open_gate import OpenGate
from tiny import write_model


class Watched(TrainConfig):
    """Writes down which settings are read."""

    def __getattribute__(self, name: str) -> Any:
        if name in {field.name for field in fields(TrainConfig)}:
            object.__getattribute__(self, "__dict__").setdefault("read", set()).add(name)
        return object.__getattribute__(self, name)


def test_what_is_refused_is_what_no_profile_reads(monkeypatch, tmp_path):
    """Every setting there is, and those that will be."""
    monkeypatch.setattr(krnl.profile, "ROUNDS", 1)
    config = Watched(model=str(write_model(tmp_path / "m").folder), tokens=16, device="cpu")
    vars(config)["read"] = set()
    profile_run(config, gate=OpenGate())
    settings = {field.name for field in fields(TrainConfig)}
    assert settings - vars(config)["read"] == set(UNPROFILED)


@pytest.mark.parametrize("name", UNPROFILED)
@pytest.mark.parametrize("form", ["--{}", "--{}=1", "--no-{}"])
def test_a_flag_that_nothing_would_use_is_refused(capsys, name, form):
    for written in (name, name.replace("_", "-")):
        flag = form.format(written)
        assert cli.run(["profile", "MODEL", flag, "1"]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"krnl: {flag.partition('=')[0]} is given, and krnl profile has no")


def test_other_flags_and_values_are_not():
    used = {field.name for field in fields(ProfileOptions)} - set(UNPROFILED)
    check_flags([f"--{name.replace('_', '-')}" for name in used])
    check_flags(["data", "--model", "out", "--json=--lr"])


def test_what_a_file_sets_is_passed_over_with_a_word(monkeypatch, tmp_path, capsys):
    config = tmp_path / "train.yaml"
    model = write_model(tmp_path / "m").folder
    config.write_text(f"model: {model}\ndata: rows.jsonl\nlr: 0.5\nshuffle: false\ntokens: 16\n")
    asked: list[TrainConfig] = []

    def profiled(config: TrainConfig, *_: object) -> None:
        asked.append(config)
        raise ConfigError("That is all.")

    monkeypatch.setattr(krnl.profile, "profile_run", profiled)
    assert cli.run(["profile", str(config), "--tokens", "32"]) == 2
    assert capsys.readouterr().out == "Not used for a profile: data, shuffle, lr.\n"
    assert asked[0].tokens == 32
    assert cli.run(["profile", str(model)]) == 2
    assert capsys.readouterr().out == ""


def test_of_defaults_nothing_is_said(tmp_path: Path):
    assert passed_over(TrainConfig(model="m", rank=3)) == ""
