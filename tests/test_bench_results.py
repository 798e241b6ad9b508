"""What `krnl bench` shows: the JSON, the table, the picture; and that no figure which was forced
looks like one that was not."""

import io
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from krnl.bench.condition import Condition, Process
from krnl.bench.gate import Control, Measurement
from krnl.bench.reference import Reference
from krnl.bench.results import (
    QUICK,
    SCHEMA,
    UNTRUSTED,
    Entry,
    Machine,
    Result,
    Tool,
    as_json,
    circumstances,
    comparable,
    from_json,
    memory,
    print_result,
    timed,
    write_picture,
    write_result,
)

CONDITION = Condition(
    seconds=4.0,
    cores=2,
    others=0.25,
    heavy=(Process("cc1plus", 2, 0.2),),
    load=0.5,
    thermal="",
    throttled=False,
    power="",
    saving=False,
    clocks="",
)
MEASUREMENT = Measurement(
    seconds={"a": (2.0, 1.0, 4.0, 2.5, 1.5), "b": (1.0, 1.0, 1.0, 1.0, 1.0)},
    controls=(
        Control("GPU", "before", 0.0, 99e9),
        Control("CPU", "before", 0.0, 5e9),
        Control("GPU", "after", 3.0, 104e9),
    ),
    references={"GPU": Reference(100e9, "2026-11-29T12:00:00+00:00")},
    condition=CONDITION,
    when="2026-11-30T12:00:00+00:00",
    trusted=True,
    notes=("The reference was raised.",),
)
MACHINE = Machine("cpu", "Some [brand] processor", "Linux-6", "", "0.1.0", "12ab", 2)
TOOLS = (Tool("torch", {"torch": "2.13", "peft": "0.21"}, 2), Tool("blas", {}, None))
ENTRIES = (
    Entry("a", 1234.5, "GFLOP/s", (1200.0, 1260.0), 3296, "ratio to b", 1.25),
    Entry("b", 0.0512, "ms", (0.05, 0.06), rate=33e9),
    Entry("half [bold]", None, "GFLOP/s", None, 122, "types_f16_f16 is a Metal kernel"),
)
RESULT = Result("types", "Products", MACHINE, False, 5, MEASUREMENT, ENTRIES, TOOLS)
FORCED = replace(RESULT, measurement=replace(MEASUREMENT, trusted=False, references={}))
EMPTY = Result("tiles", "Tiles", MACHINE, True, 5, None, ENTRIES[2:])


def printed(result: Result) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_result(result, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_entries_are_medians_and_quartiles_in_their_unit() -> None:
    """More seconds are a lower rate: the ends of the spread change places."""
    rate = timed(MEASUREMENT, "a", "1/s", lambda seconds: 6 / seconds, reported=2.0, note="n")
    assert rate == Entry("a", 3.0, "1/s", (6 / 2.5, 6 / 1.5), 2.0, "n", None)
    time = timed(MEASUREMENT, "a", "ms", lambda seconds: 1e3 * seconds, ratio=0.5)
    assert time == Entry("a", 2000.0, "ms", (1500.0, 2500.0), ratio=0.5)
    assert timed(MEASUREMENT, "a", "ms", lambda s: s, flops=6).rate == 3.0  # of the median


def test_a_figure_of_the_report_stands_beside_its_equal_only() -> None:
    assert comparable(24.9, (512, "fp16"), (512, "fp16")) == 24.9
    assert comparable(24.9, (512, "fp16"), (64, "fp16")) is None
    assert comparable(24.9, (512, "fp16"), (512, "fp32")) is None


def test_memory_says_whose_it_is() -> None:
    host, device = memory("krnl", "host", 3 * 2**20), memory("krnl", "device", 2**19)
    assert (host.name, host.value, host.unit) == ("krnl, host memory", 3.0, "MiB")
    assert (device.name, device.value, device.unit) == ("krnl, device memory", 0.5, "MiB")
    assert "process" in host.note and "on the device" in device.note


# The schema: what each key holds. A change of it is a new SCHEMA.
NUMBER = (int, float)
MAYBE = (int, float, type(None))
SHAPE: dict[str, Any] = {
    "schema": int,
    "command": str,
    "title": str,
    "machine": {
        "backend": str,
        "device": str,
        "system": str,
        "driver": str,
        "krnl": str,
        "kernels": str,
        "threads": int,
    },
    "quick": bool,
    "rounds": int,
    "measurement": {
        "seconds": {"a": [NUMBER], "b": [NUMBER]},
        "controls": [{"device": str, "place": str, "at": NUMBER, "rate": NUMBER}],
        "references": {"GPU": {"rate": NUMBER, "learnt": str}},
        "condition": {
            "seconds": NUMBER,
            "cores": int,
            "others": NUMBER,
            "heavy": [{"name": str, "count": int, "share": NUMBER}],
            "load": MAYBE,
            "thermal": str,
            "throttled": bool,
            "power": str,
            "saving": bool,
            "clocks": str,
            "on_gpu": [str],
            "quota": str,
        },
        "when": str,
        "trusted": bool,
        "notes": [str],
    },
    "entries": [
        {
            "name": str,
            "value": MAYBE,
            "unit": str,
            "spread": (list, type(None)),
            "reported": MAYBE,
            "note": str,
            "ratio": MAYBE,
            "rate": MAYBE,
            "trusted": bool,
        }
    ],
    "tools": [{"name": str, "versions": dict, "threads": (int, type(None))}],
    "flags": str,
}


def check(shape: Any, value: Any, place: str) -> None:
    if isinstance(shape, dict):
        assert list(value) == list(shape), place
        for key, inner in shape.items():
            check(inner, value[key], f"{place}/{key}")
    elif isinstance(shape, list):
        assert isinstance(value, list), place
        for item in value:
            check(shape[0], item, place)
    else:
        assert isinstance(value, shape), f"{place} is {value!r}"


def test_json_follows_its_schema(tmp_path: Path) -> None:
    for trusted in (True, False):
        result = replace(RESULT, measurement=replace(MEASUREMENT, trusted=trusted))
        write_result(result, tmp_path / "result.json")
        content = json.loads((tmp_path / "result.json").read_text("utf-8"))
        assert content["schema"] == SCHEMA
        check(SHAPE, content, "result")
    assert (content["quick"], content["rounds"]) == (False, 5)
    assert (content["machine"]["kernels"], content["machine"]["threads"]) == ("12ab", 2)
    assert content["tools"][0] == {
        "name": "torch", "versions": {"torch": "2.13", "peft": "0.21"}, "threads": 2
    }  # fmt: skip
    a, _, half = content["entries"]
    assert (a["name"], a["value"], a["spread"], a["reported"]) == ("a", 1234.5, [1200, 1260], 3296)
    assert half["value"] is None and half["note"] == "types_f16_f16 is a Metal kernel"
    assert as_json(EMPTY)["measurement"] is None


@pytest.mark.parametrize("result", [RESULT, FORCED, EMPTY])
def test_json_is_read_as_it_was_written(result: Result) -> None:
    assert from_json(json.loads(json.dumps(as_json(result)))) == result
    assert from_json(as_json(result)) == result


def test_json_marks_each_figure() -> None:
    assert [entry["trusted"] for entry in as_json(RESULT)["entries"]] == [True] * 3
    assert [entry["trusted"] for entry in as_json(FORCED)["entries"]] == [False] * 3
    assert as_json(FORCED)["measurement"]["trusted"] is False


def test_the_table_says_what_was_measured_and_what_was_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Condition, "describe", lambda self: "cc1plus took 0.2 of a core")
    lines = printed(RESULT).splitlines()
    assert lines[0].strip() == "Products"
    assert "the report, M1 Pro" in lines[1]
    assert lines[2].split() == [
        *("a", "1,234", "GFLOP/s", "1,200", "–", "1,260", "3,296", "1.25x", "ratio", "to", "b"),
    ]
    assert lines[3].split() == ["b", "0.051", "ms", "0.050", "–", "0.060", "33.0"]
    assert lines[4].split()[:5] == ["half", "[bold]", "not", "here", "122"]
    assert "types_f16_f16 is a Metal kernel" in lines[4]
    assert [line.rstrip() for line in lines[5:]] == [
        "Some [brand] processor, Linux-6, krnl 0.1.0",
        "2026-11-30T12:00:00+00:00: medians of 5 rounds; cc1plus took 0.2 of a core",
        "2 controls of 99 to 104 GFLOP/s on GPU, reference 100, reached 2026-11-29",
        "1 controls of 5 to 5 GFLOP/s on CPU, reference never learnt",
        "The reference was raised.",
        "torch: torch 2.13, peft 0.21, 2 threads",
        "blas: its default of threads",
    ]
    assert "untrusted" not in printed(RESULT)


def test_one_round_is_no_median() -> None:
    alone = replace(MEASUREMENT, seconds={"a": (2.0,)})
    assert "one round alone; " in circumstances(MACHINE, alone)[1]


def test_the_table_marks_each_forced_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Condition, "describe", lambda self: "")
    lines = printed(FORCED).splitlines()
    for figure in ("1,234 GFLOP/s", "1,200 – 1,260", "1.25x"):
        assert f"{figure} untrusted" in lines[2]
    for figure in ("0.051 ms", "0.050 – 0.060", "33.0"):
        assert f"{figure} untrusted" in lines[3]
    assert "untrusted" not in lines[4]  # no figure
    where, *seen = lines[5:-2]  # tools come last
    assert "untrusted" not in where and len(seen) == 4
    assert all(line.startswith(f"{UNTRUSTED}: ") for line in seen)
    assert "reference never learnt" in seen[1]


def test_every_figure_of_an_entry_is_marked_alone() -> None:
    """Whatever an entry holds: each figure of it that was measured has the mark next to it."""
    entry = Entry("x", 1.5, "ms", (2.5, 3.5), reported=6.5, ratio=4.5, rate=5.5e9)
    assert [f.name for f in fields(Entry) if getattr(entry, f.name) == f.default] == ["note"]
    text = printed(replace(FORCED, entries=(entry,), tools=()))
    row = next(line for line in text.splitlines() if line.startswith("x"))
    cells = [" ".join(cell.split()) for cell in row.split("  ") if cell.strip()]
    assert cells == [
        "x",
        f"1.50 ms {UNTRUSTED}",
        f"2.50 – 3.50 {UNTRUSTED}",
        f"5.50 {UNTRUSTED}",
        "6.50",
        f"4.50x {UNTRUSTED}",
    ]


def test_small_sizes_are_told_from_full_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert QUICK in printed(replace(RESULT, quick=True)) and QUICK not in printed(RESULT)
    assert QUICK not in printed(EMPTY)  # nothing was shown to work
    assert as_json(EMPTY)["quick"] is True
    for result in (EMPTY, RESULT):
        figure = drawn(result, tmp_path / "a.png", monkeypatch)
        assert ("small sizes" in figure.get_suptitle()) == result.quick


def test_a_table_of_nothing_tells_no_circumstances() -> None:
    text = printed(EMPTY)
    assert "not here" in text and "controls" not in text


def drawn(result: Result, path: Path, monkeypatch: pytest.MonkeyPatch) -> Figure:
    """The picture, which is written."""
    seen: list[Figure] = []
    save = Figure.savefig

    def saving(figure: Figure, *given: Any, **named: Any) -> None:
        seen.append(figure)
        save(figure, *given, **named)

    monkeypatch.setattr(Figure, "savefig", saving)
    write_picture(result, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(Figure, "savefig", save)
    return seen[0]


def labels(result: Result, path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Those of each axis of the picture."""
    axes = drawn(result, path, monkeypatch).axes
    return [[text.get_text() for text in axis.get_yticklabels()] for axis in axes]


def test_the_picture_has_an_axis_for_each_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates, times = labels(RESULT, tmp_path / "a.png", monkeypatch)
    assert rates == ["a\n1,234 GFLOP/s", "half [bold] (not here)"]
    assert times == ["b\n0.051 ms"]


def test_the_picture_marks_each_forced_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates, times = labels(FORCED, tmp_path / "a.png", monkeypatch)
    assert "untrusted" in rates[0] and "untrusted" in times[0] and "untrusted" not in rates[1]


def test_a_picture_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = replace(EMPTY, entries=(Entry("x", None, "ms", note="why"),))
    assert labels(nothing, tmp_path / "a.png", monkeypatch) == []
