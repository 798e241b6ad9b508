"""docs/measurements.md: what its script makes of stored results."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from krnl import __version__
from krnl.backends.cpu import CpuBackend
from krnl.bench.command import TABLES
from krnl.bench.control import machine
from krnl.bench.gate import Control
from krnl.bench.reference import Reference
from krnl.bench.results import SCHEMA, Entry, Result, Tool, as_json
from open_gate import OpenGate

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "scripts" / "write_measurements.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bench_result(trusted: bool = True, quick: bool = False) -> dict[str, Any]:
    measured = OpenGate(trusted).measure({"one": lambda: 0.5}, 3)
    entries = (
        Entry("one", 1234.5, "ms", (1200.0, 1300.0), 3296.0, "to the other", 1.5, 42e9),
        Entry("MPSGraph", None, "GFLOP/s", note="a Mac has it"),
    )
    measured = replace(
        measured,
        controls=(*measured.controls, Control("a GPU", "before", 0.0, 2e12)),
        references={**measured.references, "a GPU": Reference(2e12, "2025-12-31")},
    )
    tools = (Tool("torch", {"torch": "2.13"}, 2), Tool("blas", {"numpy": "2.4"}, None))
    here = machine(CpuBackend())
    result = Result("gemm", "Products", here, quick, 3, measured, entries, tools)
    return json.loads(json.dumps(as_json(result)))  # type: ignore[no-any-return]


def page(script: ModuleType, folder: Path, *contents: object) -> str:
    for i, content in enumerate(contents):
        (folder / f"{i}.json").write_text(json.dumps(content))
    return script.page(folder)  # type: ignore[no-any-return]


def comparison(*tools: dict[str, object]) -> dict[str, object]:
    return {
        "kind": "peers", "title": "A step", "machine": "a machine", "when": "2026-11-30",
        "quiet": "as a mouse", "command": "other.py", "unit": "s/step", "digits": 2,
        "about": "Of a model.", "cases": [{"name": "small", "tools": tools}], "notes": ["So."],
    }  # fmt: skip


def test_the_page_is_what_the_script_writes(script):
    written = (ROOT / "docs" / "measurements.md").read_text("utf-8")
    assert written == script.page(ROOT / "docs" / "results"), (
        "run python scripts/write_measurements.py"
    )


def test_every_figure_has_a_machine_a_day_and_how_quiet_it_was(script):
    text = script.page(ROOT / "docs" / "results")
    sections = text.split("\n## ")[1:]
    assert sections[-1].startswith("Not measured")
    for section in sections[:-1]:
        circumstances = section.splitlines()[2]
        assert circumstances.startswith("*20"), section
        assert "Quiet:" in section


def test_a_result_of_krnl_bench(script, tmp_path):
    text = page(script, tmp_path, bench_result())
    device = machine(CpuBackend()).device
    assert f"## Products, on {device}" in text
    line = "| one | 1,234 ms | 1,200 – 1,300 | 42.0 | 3,296 | 1.50x | to the other |"
    assert line in text
    words = " ".join(text.split())
    assert f"*2026-01-01; `krnl bench gemm`; {device}, " in words
    tools = "torch: torch 2.13, 2 threads; blas: numpy 2.4, its default of threads"
    assert f"krnl {__version__}; {tools}; medians of 3 rounds." in words
    for which, rate in (("a device", "1,000"), ("a GPU", "2,000")):
        controls = f"1 controls of {rate} to {rate} GFLOP/s on {which}"
        assert f"{controls}, reference {rate}, reached 2025-12-31; " in words
    assert "other processes took 3% of one core; load 0.50 on 2 cores" in words
    *_, table, missing = text.splitlines()
    assert (table, missing) == (f"- `krnl bench gemm` on {device}:", "  - MPSGraph: a Mac has it")


def test_results_stand_in_the_order_of_the_tables(script, tmp_path):
    commands = ["model", "gemm", "types", "step"]
    text = page(script, tmp_path, *({**bench_result(), "command": c} for c in commands))
    places = [text.index(f"; `krnl bench {c}`; ") for c in ("types", "gemm", "step", "model")]
    assert places == sorted(places)


def test_a_table_may_be_there_in_several_sizes(script, tmp_path):
    """Each under the command that measures it, in the order of the files; of a result from before
    commands were kept, the table's."""
    old = bench_result()
    del old["flags"]
    long = {**bench_result(), "title": "Long products", "flags": "--length 4096 --against torch"}
    text = page(script, tmp_path, old, {**bench_result(), "command": "types"}, long)
    heads = [line for line in text.splitlines() if line.startswith("## ")][:3]
    device = machine(CpuBackend()).device
    titles = ("Products", "Products", "Long products")
    assert heads == [f"## {title}, on {device}" for title in titles]
    asked = ("types`", "gemm`", "gemm --length 4096 --against torch`")
    words = " ".join(text.split())
    places = [words.index(f"; `krnl bench {command}; ") for command in asked]
    assert places == sorted(places)
    assert "- `krnl bench gemm --length 4096 --against torch` on " in " ".join(text.split())


def test_a_remark_stands_below_the_circumstances(script, tmp_path):
    text = page(script, tmp_path, {**bench_result(), "remark": "It was a warm day."})
    head, remark, table = text.split("\n\n")[3:6]
    assert head.startswith("*2026-01-01; ") and table.startswith("| ")
    assert remark == "It was a warm day."


def test_a_table_is_not_there_twice(script, tmp_path):
    """What is measured anew replaces what was there. Another device, or other rows, may be."""
    other = {**bench_result(), "title": "Others"}
    elsewhere = bench_result()
    elsewhere["machine"]["device"] = "elsewhere"
    page(script, tmp_path, bench_result(), other, elsewhere)
    with pytest.raises(SystemExit, match=r"0\.json and .*1\.json both hold krnl bench gemm"):
        page(script, tmp_path, bench_result(), bench_result())


@pytest.mark.parametrize(
    ("place", "key"),
    [("machine", "kernels"), ("machine", "threads"), ("a GPU", "learnt")],
)
def test_what_a_result_does_not_know_is_said_on_the_page_or_it_is_refused(
    script: ModuleType, tmp_path: Path, place: str, key: str
) -> None:
    content = bench_result()
    places = {"machine": content["machine"], **content["measurement"]["references"]}
    places[place][key] = None
    with pytest.raises(SystemExit, match=f"gemm, does not say {key} of {place}; measure it anew"):
        page(script, tmp_path, content)
    text = page(script, tmp_path, {**content, "converted": "It told no threads."})
    assert "\n\nIt told no threads.\n\n|" in text
    assert ("reached on an unknown day" in " ".join(text.split())) == (key == "learnt")


def test_every_command_on_the_page_can_be_run():
    for path in (ROOT / "docs" / "results").glob("*.json"):
        content = json.loads(path.read_text("utf-8"))
        command = content.get("command", "")
        if content.get("kind") == "peers":
            program = command.partition(" ")[0]
            assert program in ("", "pip") or (ROOT / program).is_file(), path
        elif command:
            assert command in TABLES, path


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (bench_result(trusted=False), "of krnl bench gemm, is untrusted"),
        (bench_result(quick=True), "of krnl bench gemm, is of small sizes"),
        ({**bench_result(), "rounds": 2}, "of krnl bench gemm, is of 2 rounds; measure 3 or more"),
        ({**bench_result(), "schema": SCHEMA - 1}, f"is of schema {SCHEMA - 1}, not {SCHEMA}"),
        ({"schema": 1, "trusted": True, "dispatches": []}, "is neither a result of krnl bench"),
        ({"kind": "peer", "title": "A step"}, "is neither a result of krnl bench"),
        ({}, "is neither a result of krnl bench"),
        ([], "is neither a result of krnl bench"),
        ({"kind": "peers", "title": "A step"}, "is damaged: it lacks 'command'"),
        ({"schema": SCHEMA, "command": "gemm", "entries": []}, "is damaged: it lacks 'quick'"),
        ({**bench_result(), "measurement": {"references": {}}}, "is damaged: it lacks 'condition'"),
        ({**bench_result(), "tools": [{"name": "mlx", "rank": 1}]}, "is damaged: .*'rank'"),
    ],
)
def test_what_is_not_worth_publishing_is_named(
    script: ModuleType, tmp_path: Path, content: object, words: str
) -> None:
    with pytest.raises(SystemExit, match=f"{tmp_path / '0.json'},? {words}"):
        page(script, tmp_path, content)


def test_a_file_that_is_no_json_is_named(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "0.json").write_text("{")
    with pytest.raises(SystemExit, match=r"0\.json is not valid JSON"):
        script.page(tmp_path)


def test_what_was_stored_by_hand(script, tmp_path):
    ours = {"name": "KRNL", "median": 2.0, "low": 1.0, "high": 3.0}
    other = {**ours, "name": "mlx", "median": 6.0, "krnl": 1.5, "of_peak": 0.25}
    rounded = {**ours, "name": "PEFT", "ratio": 1.01}
    lines = page(script, tmp_path, comparison(ours, other, rounded)).splitlines()
    assert "|  | s/step | range | KRNL is | of the peak |" in lines
    assert "| mlx (another run, KRNL 1.50) | 6.00 | 1.00 – 3.00 | 4.00x | 25% |" in lines
    assert "| PEFT | 2.00 | 1.00 – 3.00 | 1.01x |  |" in lines
    assert "So." in lines


def test_not_measured(script, tmp_path):
    text = page(script, tmp_path, {"kind": "not measured", "lines": ["Energy."]})
    assert text.endswith("## Not measured\n\n- Energy.\n")
