"""docs/measurements.md: what its script makes of stored results."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from krnl.backends.cpu import CpuBackend
from krnl.bench.control import machine
from krnl.bench.results import Entry, Result, as_json
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


def bench_result(trusted: bool = True) -> dict[str, object]:
    measured = OpenGate(trusted).measure({"one": lambda: 0.5}, 3)
    entries = (
        Entry("one", 1234.5, "GFLOP/s", (1200.0, 1300.0), 3296.0, "to the other", 1.5),
        Entry("MPSGraph", None, "GFLOP/s", note="a Mac has it"),
    )
    result = Result("gemm", "Products", machine(CpuBackend()), measured, entries)
    return json.loads(json.dumps(as_json(result)))  # type: ignore[no-any-return]


def page(script: ModuleType, folder: Path, *contents: object) -> str:
    for i, content in enumerate(contents):
        (folder / f"{i}.json").write_text(json.dumps(content))
    return script.page(folder)  # type: ignore[no-any-return]


def comparison(*tools: dict[str, object]) -> dict[str, object]:
    return {
        "kind": "peers", "title": "A step", "machine": "a machine", "when": "2026-11-30",
        "quiet": "as a mouse", "command": "bench/peers/run.py", "unit": "s/step", "digits": 2,
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
        assert "Quiet: " in section


def test_a_result_of_krnl_bench(script, tmp_path):
    text = page(script, tmp_path, bench_result())
    assert "## Products (`krnl bench gemm`)" in text
    line = "| one | 1,234 GFLOP/s | 1,200 – 1,300 | 3,296 | 1.50x | to the other |"
    assert line in text
    words = " ".join(text.split())
    assert "*2026-01-01; " in words
    assert "1 controls of 1,000 to 1,000 GFLOP/s, of which 1,000 are reached in quiet" in words
    assert "other processes took 3% of one core, load 0.50" in words
    _, missing = words.split("## Not measured")
    assert "- `krnl bench gemm`, MPSGraph (" in missing and ": a Mac has it" in missing


def test_a_forced_result_is_not_published(script, tmp_path):
    with pytest.raises(SystemExit, match="krnl bench gemm is untrusted"):
        page(script, tmp_path, bench_result(trusted=False))


def test_what_the_peers_script_wrote(script, tmp_path):
    def steps(name: str, *seconds: float) -> dict[str, object]:
        each = [{"seconds": s, "loss": 1.0, "peak": (1 + i) * 2**20} for i, s in enumerate(seconds)]
        return {"tool": name, "steps": each, "first": 1.25}

    ours, theirs = steps("krnl", 2.0, 1.0), steps("peft", 4.0, 9.0, 6.0, 5.0)
    lines = page(script, tmp_path, comparison(ours, theirs)).splitlines()
    assert "| **small**: krnl | 1.50 | 1.00 – 2.00 |  | 2 |  | 1.2 s |" in lines
    assert "| peft | 5.50 | 4.00 – 9.00 | 3.67x | 4 | 0.50x | 1.2 s |" in lines


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
