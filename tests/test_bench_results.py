"""What `krnl bench` shows: the JSON, the table, the picture; and that no figure which was forced
looks like one that was not."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from krnl.bench.condition import Condition, Process
from krnl.bench.gate import Control, Measurement
from krnl.bench.results import (
    Entry,
    Machine,
    Result,
    as_json,
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
    controls=(Control("before", 0.0, 99e9), Control("after", 3.0, 104e9)),
    reference=100e9,
    condition=CONDITION,
    when="2026-11-30T12:00:00+00:00",
    trusted=True,
    notes=("The reference was raised.",),
)
MACHINE = Machine("cpu", "Some [brand] processor", "Linux-6", "", "0.1.0")
ENTRIES = (
    Entry("a", 1234.5, "GFLOP/s", (1200.0, 1260.0), 3296, "ratio to b", 1.25),
    Entry("b", 0.0512, "ms", (0.05, 0.06)),
    Entry("half [bold]", None, "GFLOP/s", None, 122, "types_f16_f16 is a Metal kernel"),
)
RESULT = Result("types", "Products", MACHINE, MEASUREMENT, ENTRIES)
FORCED = replace(RESULT, measurement=replace(MEASUREMENT, trusted=False, reference=None))
EMPTY = Result("tiles", "Tiles", MACHINE, None, ENTRIES[2:])


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


# The schema: what each key holds. A change of it is a new SCHEMA.
NUMBER = (int, float)
MAYBE = (int, float, type(None))
SHAPE: dict[str, Any] = {
    "schema": int,
    "command": str,
    "title": str,
    "machine": {"backend": str, "device": str, "system": str, "driver": str, "krnl": str},
    "measurement": {
        "seconds": {"a": [NUMBER], "b": [NUMBER]},
        "controls": [{"place": str, "at": NUMBER, "rate": NUMBER}],
        "reference": MAYBE,
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
            "trusted": bool,
        }
    ],
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
    for result in (RESULT, FORCED):
        write_result(result, tmp_path / "result.json")
        content = json.loads((tmp_path / "result.json").read_text("utf-8"))
        assert content["schema"] == 1
        check(SHAPE, content, "result")
    a, _, half = content["entries"]
    assert (a["name"], a["value"], a["spread"], a["reported"]) == ("a", 1234.5, [1200, 1260], 3296)
    assert half["value"] is None and half["note"] == "types_f16_f16 is a Metal kernel"
    assert as_json(EMPTY)["measurement"] is None


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
    assert lines[3].split() == ["b", "0.051", "ms", "0.050", "–", "0.060"]
    assert lines[4].split()[:5] == ["half", "[bold]", "not", "here", "122"]
    assert "types_f16_f16 is a Metal kernel" in lines[4]
    assert lines[5].startswith("Some [brand] processor, Linux-6, krnl 0.1.0")
    assert "2 controls of 99 to 104 GFLOP/s, reference 100; cc1plus took 0.2" in lines[6]
    assert lines[6].startswith("2026-11-30T12:00:00+00:00")
    assert lines[7] == "The reference was raised."
    assert "untrusted" not in printed(RESULT)


def test_the_table_marks_each_forced_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Condition, "describe", lambda self: "")
    lines = printed(FORCED).splitlines()
    assert "1,234 GFLOP/s untrusted" in lines[2] and "1.25x untrusted" in lines[2]
    assert "0.051 ms untrusted" in lines[3]
    assert "untrusted" not in lines[4]  # no figure
    assert "reference never learnt" in lines[6]
    assert lines[-1] == "All figures are untrusted: they were forced."


def test_a_table_of_nothing_tells_no_circumstances() -> None:
    text = printed(EMPTY)
    assert "not here" in text and "controls" not in text


def labels(result: Result, path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Those of each axis of the picture, which is written."""
    seen: list[Figure] = []
    save = Figure.savefig

    def saving(figure: Figure, *given: Any, **named: Any) -> None:
        seen.append(figure)
        save(figure, *given, **named)

    monkeypatch.setattr(Figure, "savefig", saving)
    write_picture(result, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    return [[text.get_text() for text in axis.get_yticklabels()] for axis in seen[0].axes]


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
