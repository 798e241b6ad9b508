"""What a table of `krnl bench` yields, and how it is shown: a table for people, JSON, a picture."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from krnl.bench.gate import Measurement
from krnl.formats.files import open_atomic, write_json_atomic

SCHEMA = 1  # of the JSON; raised when a key goes, or means something else
UNTRUSTED = "untrusted"
REPORT = "the report, M1 Pro"


@dataclass(frozen=True)
class Entry:
    """A line of a table. `value` None: it cannot be measured here, and `note` says why."""

    name: str
    value: float | None
    unit: str
    spread: tuple[float, float] | None = None  # first and third quartile
    reported: float | None = None  # the report's figure, taken on an M1 Pro, in the same unit
    note: str = ""
    ratio: float | None = None  # times as fast as what `note` names


@dataclass(frozen=True)
class Machine:
    """What was measured on."""

    backend: str
    device: str
    system: str
    driver: str
    krnl: str  # version


@dataclass(frozen=True)
class Result:
    """A table. `measurement` None: none of it can be measured here."""

    command: str
    title: str
    machine: Machine
    measurement: Measurement | None
    entries: tuple[Entry, ...]

    @property
    def trusted(self) -> bool:
        return self.measurement is None or self.measurement.trusted


def timed(
    measurement: Measurement,
    contestant: str,
    unit: str,
    value: Callable[[float], float],
    *,
    reported: float | None = None,
    note: str = "",
    ratio: float | None = None,
) -> Entry:
    """The entry of a contestant; `value` turns seconds into the unit."""
    low, high = sorted(value(seconds) for seconds in measurement.spread(contestant))
    median = value(measurement.median(contestant))
    return Entry(contestant, median, unit, (low, high), reported, note, ratio)


def print_result(result: Result, console: Console) -> None:
    """The table, and under it where, when and how quiet."""
    table = Table(title=result.title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for heading in ("measured", "quartiles", REPORT, "ratio"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for entry in result.entries:
        table.add_row(entry.name, *_cells(entry, result.trusted), entry.note)
    console.print(table, highlight=False, markup=False)
    for line in _circumstances(result):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def write_result(result: Result, path: Path) -> None:
    """As JSON. Every figure says whether it is trusted."""
    write_json_atomic(path, as_json(result))


def as_json(result: Result) -> dict[str, Any]:
    entries = [{**asdict(entry), "trusted": result.trusted} for entry in result.entries]
    return {
        "schema": SCHEMA,
        "command": result.command,
        "title": result.title,
        "machine": asdict(result.machine),
        "measurement": asdict(result.measurement) if result.measurement else None,
        "entries": entries,
    }


def write_picture(result: Result, path: Path) -> None:
    """Bars with quartiles, the report's figures beside them. Each unit has an axis of its own."""
    from matplotlib.figure import Figure

    drawn = [entry for entry in result.entries if entry.value is not None or entry.reported]
    units = list(dict.fromkeys(entry.unit for entry in drawn))
    heights = [sum(entry.unit == unit for entry in drawn) for unit in units]
    figure = Figure(figsize=(9, 1.5 + 0.4 * len(drawn) + 0.6 * len(units)), layout="constrained")
    figure.suptitle(f"{result.title}\n{result.machine.device}", fontsize=11)
    if drawn:
        axes = figure.subplots(len(units), squeeze=False, height_ratios=heights)[:, 0]
        for axis, unit in zip(axes, units, strict=True):
            _draw(axis, [entry for entry in drawn if entry.unit == unit], result.trusted)
            axis.set_xlabel(unit)
    with open_atomic(path) as file:
        figure.savefig(file, format="png", dpi=150)


def _draw(axis: Any, entries: list[Entry], trusted: bool) -> None:
    places = range(len(entries))
    values = [entry.value or 0.0 for entry in entries]
    below, above = zip(*(_reach(entry) for entry in entries), strict=True)
    axis.barh(places, values, height=0.6, color="C0" if trusted else "0.7", label="measured")
    axis.errorbar(values, places, xerr=(below, above), fmt="none", ecolor="0.2", capsize=3)
    reported = [(entry.reported, i) for i, entry in enumerate(entries) if entry.reported]
    if reported:
        axis.plot(*zip(*reported, strict=True), "D", color="C1", label=REPORT)
        axis.legend(fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    axis.set_yticks(places, [_label(entry, trusted) for entry in entries], fontsize=8)
    axis.margins(y=0.01)
    axis.invert_yaxis()
    axis.set_xlim(left=0)


def _label(entry: Entry, trusted: bool) -> str:
    if entry.value is None:
        return f"{entry.name} (not here)"
    return f"{entry.name}\n{_figure(entry.value, entry.unit, trusted)}"


def _reach(entry: Entry) -> tuple[float, float]:
    if entry.value is None or entry.spread is None:
        return 0.0, 0.0
    return entry.value - entry.spread[0], entry.spread[1] - entry.value


def _cells(entry: Entry, trusted: bool) -> tuple[str, str, str, str]:
    return (
        "not here" if entry.value is None else _figure(entry.value, entry.unit, trusted),
        "" if entry.spread is None else " – ".join(map(_number, entry.spread)),
        "" if entry.reported is None else _number(entry.reported),
        "" if entry.ratio is None else f"{entry.ratio:.2f}x" + ("" if trusted else f" {UNTRUSTED}"),
    )


def _figure(value: float, unit: str, trusted: bool) -> str:
    return f"{_number(value)} {unit}" + ("" if trusted else f" {UNTRUSTED}")


def _number(value: float) -> str:
    """About four digits."""
    for least, digits in ((100, 0), (10, 1), (1, 2)):
        if abs(value) >= least:
            return f"{value:,.{digits}f}"
    return f"{value:.3f}"


def _circumstances(result: Result) -> list[str]:
    machine, measurement = result.machine, result.measurement
    driver = f", driver {machine.driver}" if machine.driver else ""
    lines = [f"{machine.device}, {machine.system}{driver}, krnl {machine.krnl}"]
    if measurement is None:
        return lines
    rates = [control.rate / 1e9 for control in measurement.controls]
    known = measurement.reference
    reference = "reference never learnt" if known is None else f"reference {known / 1e9:,.0f}"
    lines.append(
        f"{measurement.when}: {len(rates)} controls of {min(rates):,.0f} to {max(rates):,.0f} "
        f"GFLOP/s, {reference}; {measurement.condition.describe()}"
    )
    lines += measurement.notes
    if not measurement.trusted:
        lines.append(f"All figures are {UNTRUSTED}: they were forced.")
    return lines
