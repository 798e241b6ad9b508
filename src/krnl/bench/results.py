"""What a table of `krnl bench` yields, and how it is shown: a table for people, JSON, a picture."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from krnl.bench.condition import Condition, Process
from krnl.bench.gate import Control, Measurement
from krnl.bench.reference import Reference
from krnl.formats.files import open_atomic, write_json_atomic

SCHEMA = 2  # of the JSON; raised when a key goes, or means something else
UNTRUSTED = "untrusted"
REPORT = "the report, M1 Pro"
HEADS = ("", "measured", "quartiles", "GFLOP/s", REPORT, "ratio", "")
QUICK = "Small sizes (--quick): they show that all of it works, and not how fast it is."


@dataclass(frozen=True)
class Entry:
    """A line of a table. `value` None: it cannot be measured here, and `note` says why. A note
    carries no figure that was measured: only what has a field of its own is marked when forced."""

    name: str
    value: float | None
    unit: str
    spread: tuple[float, float] | None = None  # first and third quartile
    # The report's figure, taken on an M1 Pro, in the same unit: see `comparable`.
    reported: float | None = None
    note: str = ""
    ratio: float | None = None  # times as fast as what `note` names
    rate: float | None = None  # floating-point operations a second, of a time


@dataclass(frozen=True)
class Machine:
    """What was measured on."""

    backend: str
    device: str
    system: str
    driver: str
    krnl: str  # version
    kernels: str  # hash of their files
    threads: int  # of the host, that compute


@dataclass(frozen=True)
class Tool:
    """Another tool that took part, as contestants call it."""

    name: str
    versions: Mapping[str, str]  # of its packages
    threads: int | None  # None: its own default, which it does not tell


@dataclass(frozen=True)
class Result:
    """A table. `measurement` None: none of it can be measured here."""

    command: str
    title: str
    machine: Machine
    quick: bool  # small sizes
    rounds: int
    measurement: Measurement | None
    entries: tuple[Entry, ...]
    tools: tuple[Tool, ...] = ()
    flags: str = ""  # what was asked for beside the table, as on the command line

    @property
    def asked(self) -> str:
        """The command that measures this."""
        return " ".join(filter(None, ("krnl bench", self.command, self.flags)))

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
    flops: int | None = None,
) -> Entry:
    """The entry of a contestant; `value` turns seconds into the unit. `flops`: operations of one
    run, where their rate is worth a figure beside the time."""
    low, high = sorted(value(seconds) for seconds in measurement.spread(contestant))
    seconds = measurement.median(contestant)
    rate = None if flops is None else flops / seconds
    return Entry(contestant, value(seconds), unit, (low, high), reported, note, ratio, rate)


def milliseconds(measurement: Measurement, flops: Mapping[str, int], note: str = "") -> list[Entry]:
    """The entries of contestants with so many operations each."""
    return [
        timed(measurement, name, "ms", lambda s: 1e3 * s, note=note, flops=count)
        for name, count in flops.items()
    ]


def comparable(
    figure: float | None, there: tuple[object, ...], here: tuple[object, ...]
) -> float | None:
    """A figure of the report, if it may stand beside what is measured: `there` and `here` are the
    sizes and the element types of both, and must be equal. None otherwise."""
    return figure if there == here else None


MEMORY = {
    "host": "the most that its process had resident",
    "device": "the most that it had allocated on the device",
}


def memory(contestant: str, kind: Literal["host", "device"], nbytes: int) -> Entry:
    """The entry of a contestant's memory at its peak. A process says nothing of a GPU's: there it
    is the blocks that KRNL allocated, and what another tool itself reports."""
    return Entry(f"{contestant}, {kind} memory", nbytes / 2**20, "MiB", note=MEMORY[kind])


def print_result(result: Result, console: Console) -> None:
    """The table, columns that no line fills left out, and under it where, when and how quiet."""
    table = Table(title=result.title, title_justify="left", box=None, pad_edge=False)
    rows = [cells(entry, result.trusted) for entry in result.entries]
    filled = [i for i in range(len(HEADS)) if any(row[i] for row in rows)]
    for i in filled:
        table.add_column(HEADS[i], justify="right" if HEADS[i] else "left")
    for row in rows:
        table.add_row(*(row[i] for i in filled))
    console.print(table, highlight=False, markup=False)
    lines = circumstances(result.machine, result.measurement) + [told(t) for t in result.tools]
    if result.quick and result.measurement is not None:
        lines.append(QUICK)
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def circumstances(machine: Machine, measurement: Measurement | None) -> list[str]:
    """Lines: where, when, of how many rounds, how quiet, and whether it was forced."""
    driver = f", driver {machine.driver}" if machine.driver else ""
    lines = [f"{machine.device}, {machine.system}{driver}, krnl {machine.krnl}"]
    if measurement is None:
        return lines
    rounds = len(next(iter(measurement.seconds.values())))
    medians = f"medians of {rounds} rounds" if rounds > 1 else "one round alone"
    seen = [f"{measurement.when}: {medians}; {measurement.condition.describe()}"]
    seen += [*controls(measurement), *measurement.notes]
    mark = "" if measurement.trusted else f"{UNTRUSTED}: "
    return lines + [mark + line for line in seen]


def controls(measurement: Measurement) -> list[str]:
    """What the controls of each device reached, and what is known to be reached in quiet."""
    devices = dict.fromkeys(control.device for control in measurement.controls)
    return [_controls(measurement, device) for device in devices]


def _controls(measurement: Measurement, device: str) -> str:
    rates = [c.rate / 1e9 for c in measurement.controls if c.device == device]
    known = measurement.references.get(device)
    reference = "reference never learnt"
    if known is not None:
        reference = f"reference {known.rate / 1e9:,.0f}, reached {known.learnt.partition('T')[0]}"
    return (
        f"{len(rates)} controls of {min(rates):,.0f} to {max(rates):,.0f} GFLOP/s on {device}, "
        f"{reference}"
    )


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
        "quick": result.quick,
        "rounds": result.rounds,
        "measurement": asdict(result.measurement) if result.measurement else None,
        "entries": entries,
        "tools": [asdict(tool) for tool in result.tools],
        "flags": result.flags,
    }


def from_json(content: Mapping[str, Any]) -> Result:
    """The inverse of `as_json`. KeyError or TypeError if a key is missing or unknown."""
    entries = [{k: v for k, v in e.items() if k != "trusted"} for e in content["entries"]]
    return Result(
        content["command"],
        content["title"],
        Machine(**content["machine"]),
        content["quick"],
        content["rounds"],
        _measurement(content["measurement"]) if content["measurement"] else None,
        tuple(Entry(**{**e, "spread": e["spread"] and tuple(e["spread"])}) for e in entries),
        tuple(Tool(**tool) for tool in content["tools"]),
        content.get("flags", ""),
    )


def _measurement(content: Mapping[str, Any]) -> Measurement:
    condition, references = content["condition"], content["references"].items()
    heavy = tuple(Process(**process) for process in condition["heavy"])
    on_gpu = tuple(condition["on_gpu"])
    typed = {
        "seconds": {name: tuple(times) for name, times in content["seconds"].items()},
        "controls": tuple(Control(**control) for control in content["controls"]),
        "references": {device: Reference(**reference) for device, reference in references},
        "condition": Condition(**{**condition, "heavy": heavy, "on_gpu": on_gpu}),
        "notes": tuple(content["notes"]),
    }
    return Measurement(**{**content, **typed})


def write_picture(result: Result, path: Path) -> None:
    """Bars with quartiles, the report's figures beside them. Each unit has an axis of its own."""
    from matplotlib.figure import Figure

    drawn = [entry for entry in result.entries if entry.value is not None or entry.reported]
    units = list(dict.fromkeys(entry.unit for entry in drawn))
    heights = [sum(entry.unit == unit for entry in drawn) for unit in units]
    figure = Figure(figsize=(9, 1.5 + 0.4 * len(drawn) + 0.6 * len(units)), layout="constrained")
    small = ", small sizes" if result.quick else ""
    figure.suptitle(f"{result.title}\n{result.machine.device}{small}", fontsize=11)
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


def cells(entry: Entry, trusted: bool) -> tuple[str, ...]:
    """A line below HEADS."""
    return (
        entry.name,
        "not here" if entry.value is None else _figure(entry.value, entry.unit, trusted),
        "" if entry.spread is None else _marked(" – ".join(map(number, entry.spread)), trusted),
        "" if entry.rate is None else _marked(number(entry.rate / 1e9), trusted),
        "" if entry.reported is None else number(entry.reported),
        "" if entry.ratio is None else _marked(f"{number(entry.ratio)}x", trusted),
        entry.note,
    )


def _figure(value: float, unit: str, trusted: bool) -> str:
    return _marked(f"{number(value)} {unit}", trusted)


def _marked(figure: str, trusted: bool) -> str:
    return figure if trusted else f"{figure} {UNTRUSTED}"


def told(tool: Tool) -> str:
    """A tool with its versions and threads."""
    versions = ", ".join(f"{package} {version}" for package, version in tool.versions.items())
    threads = "its default of threads" if tool.threads is None else f"{tool.threads} threads"
    return f"{tool.name}: {', '.join(filter(None, (versions, threads)))}"


def number(value: float) -> str:
    """About four digits."""
    for least, digits in ((100, 0), (10, 1), (1, 2)):
        if abs(value) >= least:
            return f"{value:,.{digits}f}"
    return f"{value:.3f}"
