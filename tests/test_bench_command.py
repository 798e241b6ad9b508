"""`krnl bench`: which table, on which device, and how it ends. Tables have tests of their own."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console

import krnl.bench.command as command
from krnl import cli
from krnl.bench.command import TABLES, Bench, run_table, table
from krnl.bench.control import machine
from krnl.bench.results import Entry, Result
from krnl.errors import ConfigError, Refused
from krnl.options import BenchOptions
from metalsim.install import metal_backend
from open_gate import OpenGate
from runs import environment, krnl_process

PYTHON = sys.executable


def fake_table(bench: Bench) -> Result:
    measured = bench.gate.measure({"one": lambda: 0.5}, bench.rounds)
    entries = (Entry("one", 2.0, "GFLOP/s", (1.5, 2.5), 3.0), Entry("two", None, "", note="no"))
    return Result("gemm", "A table", machine(bench.backend), measured, entries)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A table that takes no time, behind a gate that is open. Holds with which `force` it was
    asked for."""
    asked: list[bool] = []

    def open_gate(backend: object, force: bool) -> OpenGate:
        asked.append(force)
        return OpenGate(trusted=not force)

    monkeypatch.setattr(command, "open_gate", open_gate)
    monkeypatch.setattr(command, "table", lambda name: fake_table)
    return asked


def said(options: BenchOptions) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        run_table(options, console)
    return capture.get()


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_there(name):
    assert find_spec(f"krnl.bench.tables.{name}") is not None
    assert callable(table(name))


def test_nothing_is_there_that_is_not_listed():
    folder = Path(command.__file__).parent / "tables"
    assert {path.stem for path in folder.glob("*.py")} - {"__init__"} == set(TABLES)


def test_alone_it_lists_the_tables():
    ended = krnl_process("bench")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    for (name, line), printed in zip(TABLES.items(), lines, strict=False):
        assert printed.startswith(f"{name} ") and printed.endswith(line)


def test_a_table_as_a_process(tmp_path):
    """Forced, as other things run beside the tests."""
    json_file, png = tmp_path / "r.json", tmp_path / "r.png"
    flags = ("--device", "cpu", "--quick", "--rounds", 1, "--json", json_file, "--png", png)
    home = environment(XDG_CACHE_HOME=str(tmp_path))
    ended = krnl_process("bench", "tiles", "--force", *flags, env=home)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(json_file.read_text())["command"] == "tiles"
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("force", [False, True])
def test_a_table_is_shown_and_written(opened, tmp_path, force):
    path = tmp_path / "new" / "r.json"
    options = BenchOptions("gemm", device="cpu", rounds=3, json=str(path), force=force)
    text = said(options)
    assert opened == [force]
    assert "A table" in text and "2.00 GFLOP/s" in text
    assert ("untrusted" in text) == force
    content = json.loads(path.read_text())
    assert content["entries"][0]["trusted"] != force
    assert len(content["measurement"]["seconds"]["one"]) == 3
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]  # no temporary file is left


def test_refused_means_three(opened, monkeypatch, capsys):
    def refuse(bench: Bench) -> Result:
        raise Refused("The control ran at half of its reference. Close cc1plus.")

    monkeypatch.setattr(command, "table", lambda name: refuse)
    assert cli.run(["bench", "gemm", "--device", "cpu"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "krnl: The control ran at half of its reference. Close cc1plus.\n"


def test_the_simulator_is_refused_whatever_is_asked(monkeypatch, capsys):
    backend = metal_backend("fast")
    monkeypatch.setattr(command, "open_backend", lambda device: backend)
    for flags in ([], ["--force"], ["--relearn"]):
        assert cli.run(["bench", "gemm", "--device", "metal", *flags]) == 3
        captured = capsys.readouterr()
        assert captured.out == "" and "is a simulator" in captured.err
    assert not backend.simulation.executed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (BenchOptions("gem"), "There is no table 'gem'. Did you mean 'gemm'?"),
        (BenchOptions("xyz"), "There is no table 'xyz'. There are types, gemm"),
        (BenchOptions("gemm", rounds=0), "rounds is 0"),
        (BenchOptions("step", against="jax"), "against names 'jax'"),
        (BenchOptions("step", against="mlx"), "--mlx-python"),
        (BenchOptions("step", against="torch", torch_python="/none"), "there is no such file"),
        (
            BenchOptions("gemm", against="torch", torch_python=PYTHON),
            "only step and model have peers",
        ),
        (BenchOptions("gemm", device="cuda"), "does not have yet"),
    ],
)
def test_mistakes(opened, options, words):
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        said(options)
    assert not opened


def test_peers_are_handed_to_the_table(opened, monkeypatch):
    handed: list[Bench] = []

    def keep(bench: Bench) -> Result:
        handed.append(bench)
        return fake_table(bench)

    monkeypatch.setattr(command, "table", lambda name: keep)
    said(BenchOptions("step", "cpu", "mlx, torch", PYTHON, PYTHON, rounds=2, quick=True))
    (bench,) = handed
    assert bench.against == {"mlx": PYTHON, "torch": PYTHON}
    assert bench.quick and bench.rounds == 2


@pytest.mark.parametrize("name", ["", "gemm"])
def test_relearning_comes_first(opened, monkeypatch, name):
    class Learning(OpenGate):
        def relearn(self) -> str:
            return "The reference was lowered from 2 to 1 GFLOP/s."

    monkeypatch.setattr(command, "open_gate", lambda backend, force: Learning())
    text = said(BenchOptions(name, device="cpu", relearn=True))
    assert text.startswith("The reference was lowered from 2 to 1 GFLOP/s.")
    assert ("A table" in text) == bool(name)
