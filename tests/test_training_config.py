"""Settings: the same from flags, YAML and Python, and refused by name."""

import json
import math
import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from krnl.cli import _settings
from krnl.errors import ConfigError
from krnl.training.config import TrainConfig, from_dict, from_yaml
from runs import STORYTELLER, flags

GOOD = TrainConfig(model="m", data="d")

# Every field away from its default.
OTHER = TrainConfig(
    model="m", data="d", valid="v", out="o", device="cpu", precision="fp32",
    rank=4, alpha=3.5, targets=("q_proj", "v_proj"), rslora=True, dropout=0.25, init_adapter="a",
    batch_size=2, tokens=512, max_length=100, train_on="everything", shuffle=False,
    epochs=7, steps=9, lr=1e-4, schedule="linear", warmup=3, weight_decay=0.01, beta1=0.8,
    beta2=0.95, eps=1e-6, clip=0.0, seed=5, eval_every=4, save_every=6, resume=True, overwrite=True,
    recompute="layer", memory_limit=1.5, show=2,
)  # fmt: skip

HUGE = 10**400
BAD = {
    "batch_size": [0, -1, HUGE],
    "tokens": [0, HUGE],
    "epochs": [0, HUGE],
    "steps": [0, HUGE],
    "eval_every": [0, HUGE],
    "save_every": [0, HUGE],
    "show": [0, HUGE],
    "max_length": [1, 2049, HUGE],
    "rank": [0, -4, HUGE],
    "alpha": [0.0, -1.0, math.inf, math.nan],
    "dropout": [-0.1, 1.0, math.nan],
    "lr": [0.0, -1.0, math.inf, math.nan],
    "warmup": [-1, HUGE],
    "weight_decay": [-0.1, math.inf, math.nan],
    "beta1": [-0.1, 1.0, math.nan],
    "beta2": [-0.1, 1.0, math.nan],
    "eps": [0.0, math.inf, math.nan],
    "clip": [-1.0, math.inf, math.nan],
    "seed": [-1, 2**31, HUGE],
    "memory_limit": [0.0, -1.0, math.inf, math.nan],
}


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_defaults_are_usable():
    GOOD.check()


def test_other_names_every_field_but_patterns():
    same = {f.name for f in fields(TrainConfig) if getattr(OTHER, f.name) == getattr(GOOD, f.name)}
    assert same == {"model", "data", "rank_pattern", "alpha_pattern"}


def test_yaml_flags_and_python_give_the_same_settings(tmp_path):
    text = json.dumps(asdict(OTHER))  # JSON is YAML
    assert from_yaml(write(tmp_path, text)) == OTHER
    assert from_dict(asdict(OTHER), "here") == OTHER
    assert _settings("train", flags(OTHER), TrainConfig, False) == OTHER


def test_patterns(tmp_path):
    path = write(tmp_path, "rank_pattern: {q_proj: 4}\nalpha_pattern: {'layers.[01].mlp': 8}\n")
    config = from_yaml(path)
    assert config.rank_pattern == {"q_proj": 4}
    assert config.alpha_pattern == {"layers.[01].mlp": 8.0}
    assert _settings(
        "train", ["--rank-pattern", "q_proj", "4"], TrainConfig, False
    ).rank_pattern == {"q_proj": 4}


def test_flags_win_over_yaml(tmp_path):
    path = write(tmp_path, "model: m\nrank: 4\nlr: 1e-4\ntargets: q_proj\n")
    got = _settings("train", [str(path), "--rank", "8", "--no-shuffle"], TrainConfig, False)
    assert got == replace(
        TrainConfig(model="m", lr=1e-4, targets=("q_proj",)), rank=8, shuffle=False
    )


def test_the_example_is_valid():
    config = from_yaml(STORYTELLER / "train.yaml")
    config.check()
    assert (config.epochs, config.lr, config.warmup) == (3, 1e-3, 20)


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD.items() for v in values])
def test_a_value_that_makes_no_sense_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=rf"^{name} is {value}; it must be "):
        replace(GOOD, **{name: value}).check()


@pytest.mark.parametrize("name", [name for name, values in BAD.items() if math.inf in values])
def test_of_infinity_it_is_not_said_that_it_is_too_small(name):
    with pytest.raises(ConfigError, match=rf"^{name} is inf; it must be .*finite"):
        replace(GOOD, **{name: math.inf}).check()


NUMERIC = [f.name for f in fields(TrainConfig) if re.search(r"\b(int|float)\b", str(f.type))]


def test_all_numeric_settings_have_bounds():
    assert set(NUMERIC) == set(BAD) | {"rank_pattern", "alpha_pattern"}


@pytest.mark.parametrize("digits", [400, 5000])
@pytest.mark.parametrize("name", NUMERIC)
def test_a_number_of_hundreds_of_digits_is_refused_by_name(tmp_path, name, digits):
    """Too long for a float, and at last for Python to print."""
    given = {"q_proj": 10**digits} if "pattern" in name else 10**digits
    with pytest.raises(ConfigError, match=rf"^here: {name}(\.q_proj)? is a whole number of"):
        from_dict({"model": "m", name: given}, "here")
    text = "1" + "0" * digits
    with pytest.raises(ConfigError, match=r"^\S*run\.yaml(: | is not valid YAML)"):
        from_yaml(
            write(tmp_path, f"{name}: {{q: {text}}}" if "pattern" in name else f"{name}: {text}")
        )


@pytest.mark.parametrize("name", ["model", "data", "out"])
def test_what_has_to_be_there(name):
    with pytest.raises(ConfigError, match=f"^{name} is "):
        replace(GOOD, **{name: ""}).check()


def test_resume_and_overwrite_exclude_each_other():
    with pytest.raises(ConfigError, match="resume and overwrite"):
        replace(GOOD, resume=True, overwrite=True).check()


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("rnak", "rank"),
        ("batch-size", "batch_size"),
        ("learning_rate", None),
        ("warm_up", "warmup"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(tmp_path, key, hint):
    with pytest.raises(ConfigError) as error:
        from_yaml(write(tmp_path, f"{key}: 1\n"))
    assert f"run.yaml: there is no setting '{key}'" in str(error.value)
    if hint:
        assert f"Did you mean '{hint}'?" in str(error.value)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("rank: many", "rank is 'many'; it must be a whole number."),
        ("rank: 1.5", "rank is 1.5; it must be a whole number."),
        ("rank: true", "rank is True; it must be a whole number."),
        ("rank: ~", "rank is None; it must be a whole number."),
        ("rslora: 1", "rslora is 1; it must be true or false."),
        ("lr: fast", "lr is 'fast'; it must be a number."),
        ("lr: [1]", r"lr is [1]; it must be a number."),
        ("lr: yes", "lr is True; it must be a number."),
        ("model: 5", "model is 5; it must be text."),
        ("steps: x", "steps is 'x'; it must be a whole number."),
        ("targets: [1]", "targets is 1; it must be text."),
        ("rank_pattern: 4", "rank_pattern is 4; it must map patterns to numbers."),
        ("rank_pattern: {q: x}", "rank_pattern.q is 'x'; it must be a whole number."),
        ("schedule: cosin", "it must be one of constant, linear, cosine. Did you mean 'cosine'?"),
        ("recompute: mpl", "it must be one of auto, none, mlp, layer. Did you mean 'mlp'?"),
        ("precision: 16", "precision is 16; it must be one of auto, fp32, bf16, fp16."),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(tmp_path, line, sentence):
    with pytest.raises(ConfigError) as error:
        from_yaml(write(tmp_path, line))
    assert str(error.value).startswith(f"{tmp_path}/run.yaml: ")
    assert sentence in str(error.value)


@pytest.mark.parametrize("text", ["", "[1, 2]", "just words", "a: [1", "a: b: c", "\t- x"])
def test_what_is_no_settings_file(tmp_path, text):
    with pytest.raises(ConfigError, match=r"run\.yaml (must hold settings|is not valid YAML)"):
        from_yaml(write(tmp_path, text))


def test_a_repeated_key_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="lr"):
        from_yaml(write(tmp_path, "lr: 1e-4\nrank: 2\nlr: 1e-3\n"))


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        from_yaml(tmp_path / "none.yaml")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        from_yaml(tmp_path / "folder.yaml")
    write(tmp_path, "").write_bytes(b"model: \xff\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        from_yaml(tmp_path / "run.yaml")
