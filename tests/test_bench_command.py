"""`krnl bench`: which table, on which device, and how it ends. Tables have tests of their own."""

import json
import math
import re
import sys
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console

import krnl.bench.baselines as baselines
import krnl.bench.command as command
from krnl import cli
from krnl.backends.cpu import CpuBackend
from krnl.bench.command import TABLES, Bench, run_table, table
from krnl.bench.control import kernel_hash
from krnl.bench.models import SHAPES
from krnl.bench.results import QUICK, Entry, Result
from krnl.errors import ConfigError, Refused
from krnl.options import BenchOptions
from metalsim.install import metal_backend
from open_gate import OpenGate
from runs import environment, krnl_process

PYTHON = sys.executable


def fake_table(bench: Bench) -> Result:
    measured = bench.gate.measure({"one": lambda: 0.5}, bench.rounds)
    entries = (Entry("one", 2.0, "GFLOP/s", (1.5, 2.5), 3.0), Entry("two", None, "", note="no"))
    return bench.result("gemm", "A table", measured, entries)


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


@pytest.mark.parametrize(("force", "quick"), [(False, True), (True, False)])
def test_a_table_is_shown_and_written(opened, tmp_path, force, quick):
    path = tmp_path / "new" / "r.json"
    options = BenchOptions("gemm", "cpu", rounds=3, json=str(path), force=force, quick=quick)
    text = said(options)
    assert opened == [force]
    assert "A table" in text and "2.00 GFLOP/s" in text
    assert (QUICK in text) == quick
    assert ("untrusted" in text) == force
    content = json.loads(path.read_text())
    assert content["entries"][0]["trusted"] != force
    assert (content["quick"], content["rounds"]) == (quick, 3)
    assert content["machine"]["threads"] == CpuBackend().limits.threads
    assert content["machine"]["kernels"] == kernel_hash(CpuBackend())
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
        (BenchOptions("gemm", rounds=0, force=True), "rounds is 0; it must be at least 1"),
        (BenchOptions("gemm", rounds=2), "a figure worth printing takes at least 3; with --force"),
        (BenchOptions("step", against="jax"), "against names 'jax'"),
        (BenchOptions("gemm", chat=True), "chat is given, and only krnl bench model uses it"),
        (BenchOptions("step", rows=8), "rows is given, and only krnl bench model uses it"),
        (BenchOptions("gemm", memory_limit=1.0), "memory_limit is given, and only krnl bench mod"),
        (
            BenchOptions("model", memory_limit=0.0),
            "memory_limit is 0.0; it must be a finite number above 0",
        ),
        (
            BenchOptions("model", memory_limit=math.nan),
            "memory_limit is nan; it must be a finite number above 0",
        ),
        (
            BenchOptions("gemm", length=64),
            "length is given, and only krnl bench model and krnl bench step use it",
        ),
        (BenchOptions("step", length=15), "length is 15; it must be at least 16"),
        (
            BenchOptions("shapes", against="mlx", mlx_python=PYTHON),
            "names 'mlx'; of shapes it may name torch",
        ),
        (BenchOptions("model", rows=0), "rows is 0; it must be at least 1"),
        (BenchOptions("model", length=15), "length is 15; it must be at least 16"),
        (BenchOptions("model", variants="compile"), "against does not name torch"),
        (BenchOptions("model", adapters="16"), "adapters are the peers', and against names none"),
        (
            BenchOptions("shapes", against="torch", torch_python=PYTHON, adapters="16"),
            "adapters is given, and only krnl bench step and krnl bench model use it",
        ),
        (
            BenchOptions("step", against="mlx", mlx_python=PYTHON, variants="compile"),
            "against does not name torch",
        ),
        (
            BenchOptions("step", against="torch", torch_python=PYTHON, variants="eager,liger"),
            "names 'liger'; of step it may name eager, compile, autotune, graph",
        ),
        (
            BenchOptions("model", against="torch", torch_python=PYTHON, variants="eager, eager"),
            "variants names eager twice",
        ),
        (BenchOptions("step", against="mlx"), "--mlx-python"),
        (BenchOptions("step", against="torch", torch_python="/none"), "there is no such program"),
        (BenchOptions("step", against="torch", torch_python="no-python-3"), "none of that name on"),
        (BenchOptions("step", against="torch", torch_python=__file__), "no file that can be run"),
        (
            BenchOptions("step", against="torch, torch", torch_python=PYTHON),
            "against names torch twice",
        ),
        (
            BenchOptions("gemm", against="torch", torch_python=PYTHON),
            "only the tables step, model, shapes have peers",
        ),
        (BenchOptions("step", against=""), "against names ''"),
        (BenchOptions("step", torch_python=PYTHON), "torch_python is given, but against does not"),
        (
            BenchOptions("step", against="mlx", mlx_python=PYTHON, torch_python=PYTHON),
            "torch_python is given, but against does not",
        ),
        (BenchOptions("gemm", device="cuda"), "needs an NVIDIA GPU and its driver"),
    ],
)
def test_mistakes(opened, monkeypatch, options, words):
    monkeypatch.setattr("krnl.backends.cuda_driver.has_driver", lambda: False)
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        said(options)
    assert not opened


OTHER_THAN_DEFAULT = {"rounds": 3, "device": "cpu", "relearn": True}


@pytest.mark.parametrize("option", [f.name for f in fields(BenchOptions) if f.name != "table"])
def test_no_option_is_ignored_without_a_table(opened, option):
    """Every option there is, and those that will be."""
    default = getattr(BenchOptions, option)
    given = OTHER_THAN_DEFAULT.get(option, True if default is False else "x")
    assert given != default
    alone, beside = BenchOptions(), BenchOptions(relearn=True)
    for options in (replace(alone, **{option: given}), replace(beside, **{option: given})):
        if option == "relearn" or (option == "device" and options.relearn):
            command.check(options)
            continue
        with pytest.raises(ConfigError, match=f"{option} is given without a table"):
            said(options)
    assert not opened


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (("a.json", "a.json"), "json and png both name"),
        (("a.json", "sub/../a.json"), "json and png both name"),
        (("sub", "a.png"), "which is a folder"),
        (("no/a.json", "a.png"), "there is no such folder"),
    ],
)
def test_files_are_looked_at_before_anything_is_measured(opened, tmp_path, capsys, files, words):
    (tmp_path / "sub").mkdir()
    json_file, png = (str(tmp_path / file) for file in files)
    assert cli.run(["bench", "gemm", "--device", "cpu", "--json", json_file, "--png", png]) == 2
    assert words in capsys.readouterr().err
    assert not opened


def test_the_peers_scripts_are_looked_for_before_anything_is_measured(
    opened, monkeypatch, tmp_path
):
    monkeypatch.setattr(baselines, "__file__", str(tmp_path / "a/b/c/d/baselines.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="inside a clone"):
        said(BenchOptions("step", "cpu", "torch", torch_python=PYTHON))
    assert not opened


@pytest.mark.parametrize("name", TABLES)
def test_no_figure_hides_in_a_note(name):
    """What was measured has a field of its own, which is marked when it was forced."""
    backend = CpuBackend()
    if name == "hetero":
        backend.name = "metal"  # a second engine, in the GPU's place
    result = table(name)(Bench(backend, OpenGate(trusted=False), 1, True, {}))
    for entry in result.entries:
        assert not re.search(r"\d[\d.,]* ?(.?FLOP/s|.?B/s|m?s|MiB|tokens/s|%|x)\b", entry.note)
        assert entry.reported is None  # small sizes are none of the report's


def test_peers_are_handed_to_the_table(opened, monkeypatch):
    handed: list[Bench] = []

    def keep(bench: Bench) -> Result:
        handed.append(bench)
        return fake_table(bench)

    monkeypatch.setattr(command, "table", lambda name: keep)
    asked = {"variants": "eager, compile", "rounds": 3, "quick": True}
    said(BenchOptions("step", "cpu", "mlx, torch", PYTHON, PYTHON, **asked))
    (bench,) = handed
    assert bench.variants == ("eager", "compile")
    assert bench.against == {"mlx": PYTHON, "torch": PYTHON}
    assert bench.quick and bench.rounds == 3


def test_an_interpreter_may_be_found_on_the_path(tmp_path, monkeypatch):
    (tmp_path / "python-of-mine").symlink_to(PYTHON)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("python-of-mine", "~/python-of-mine"):
        options = BenchOptions("step", against="torch", torch_python=given)
        assert command.peers(options) == {"torch": str(tmp_path / "python-of-mine")}


@pytest.mark.parametrize(
    ("rows", "length", "words"),
    [
        (4, 8193, "length is 8,193, and smollm2-135m has no more than 8,192 positions"),
        (4, 10**12, "length is 1,000,000,000,000, and a pass holds fewer than 16,777,216 tokens"),
        (10**8, 16, "rows is 100,000,000 and length is 16, and a pass holds fewer than"),
    ],
)
@pytest.mark.parametrize("own", [False, True])
def test_rows_that_no_model_takes(tmp_path, monkeypatch, rows, length, words, own):
    """Before anything is written or started."""
    for work in ("write", "Trainer"):
        monkeypatch.setattr(f"krnl.bench.tables.model.{work}", lambda *_: pytest.fail("it began"))
    shape = SHAPES["smollm2-135m"]
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "smollm2-135m" / "config.json").write_text(json.dumps(shape))
    named = str(tmp_path / "smollm2-135m") if own else "smollm2-135m"
    asked = Bench(CpuBackend(), OpenGate(), 3, False, {}, model=named, rows=rows, length=length)
    with pytest.raises(ConfigError, match=words):
        table("model")(asked)


def test_files_may_be_in_the_home_folder(opened, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    said(BenchOptions("gemm", "cpu", json="~/r.json", png="~/r.png"))
    assert (tmp_path / "r.json").is_file() and (tmp_path / "r.png").is_file()


def test_what_is_trained_is_handed_to_the_table(opened, monkeypatch):
    handed: list[Bench] = []
    monkeypatch.setattr(command, "table", lambda name: lambda b: handed.append(b) or fake_table(b))
    said(BenchOptions("model", "cpu", model="llama-3.2-1b", rows=3, length=64, chat=True))
    (bench,) = handed
    assert (bench.model, bench.rows, bench.length, bench.chat) == ("llama-3.2-1b", 3, 64, True)


def test_a_result_says_how_it_was_asked_for():
    """All that decides what is measured, and nothing else: as it is typed."""
    alone = Bench(CpuBackend(), OpenGate(), 3, True, {})
    assert fake_table(alone).asked == "krnl bench gemm"
    asked = replace(alone, against={"mlx": PYTHON, "torch": PYTHON}, variants=("eager", "graph"))
    asked = replace(asked, adapters="16")
    asked = replace(asked, model="llama-3.2-1b", rows=4, length=2048, chat=True, memory_limit=2.5)
    words = fake_table(asked).asked.split()[3:]
    typed = cli._parse(BenchOptions, "bench", ["model", *words])
    for name in ("model", "rows", "length", "chat", "memory_limit"):
        assert getattr(typed, name) == getattr(asked, name)
    assert (typed.against, typed.variants) == ("mlx,torch", "eager,graph")
    assert typed.adapters == "16"


@pytest.mark.parametrize("name", ["", "gemm"])
def test_relearning_comes_first(opened, monkeypatch, name):
    class Learning(OpenGate):
        def relearn(self) -> str:
            return "The reference was lowered from 2 to 1 GFLOP/s."

    monkeypatch.setattr(command, "open_gate", lambda backend, force: Learning())
    text = said(BenchOptions(name, device="cpu", relearn=True))
    assert text.startswith("The reference was lowered from 2 to 1 GFLOP/s.")
    assert ("A table" in text) == bool(name)
