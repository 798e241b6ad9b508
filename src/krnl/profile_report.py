"""What `krnl profile` shows and writes: tables, JSON, a trace for Perfetto, a picture."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from krnl.bench.results import UNTRUSTED, circumstances
from krnl.formats.files import open_atomic, user_path, write_json_atomic
from krnl.options import ProfileOptions
from krnl.profile import By, Profile, Timing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA = 2  # raised when a key is renamed, removed or means something else
WIDEST = 8  # gaps that are printed
BARS = 20  # that are drawn
WIDTH = 200  # of a table at most
SHARE = "share of the sum"  # of dispatches run one by one, which a replay of the whole is not


def report(profile: Profile, options: ProfileOptions, console: Console) -> None:
    """Prints the profile, and writes the files that were asked for."""
    print_profile(profile, console, options.by, options.dispatches)
    if options.json is not None:
        write_json_atomic(user_path(options.json), as_json(profile))
    if options.trace is not None:
        write_json_atomic(user_path(options.trace), as_trace(profile))
    if options.png is not None:
        with open_atomic(user_path(options.png)) as file:
            picture(profile, options.by).savefig(file, format="png", dpi=150)


def print_profile(
    profile: Profile, console: Console, by: By = "kernel", every: bool = False
) -> None:
    """Groups, or every dispatch; their sum against a replay; the widest gaps to the roof; under it
    where, when and how quiet."""

    def say(line: str) -> None:
        mark = "" if profile.measurement.trusted else f"{UNTRUSTED}: "
        console.print(mark + line, highlight=False, markup=False, soft_wrap=True)

    say(
        f"{profile.model}: {_pass(profile)} in {1e3 * profile.replay:.1f} ms "
        f"({profile.tokens / profile.replay:,.0f} tokens/s)"
    )
    if profile.recomputed:
        console.print(profile.recomputed, highlight=False, markup=False, soft_wrap=True)
    if profile.roof is not None:
        peaks = [f"{rate / 1e9:,.0f} GFLOP/s in {t}" for t, rate in profile.roof.flops.items()]
        say(f"the roof: {', '.join(peaks)}, {profile.roof.nbytes / 1e9:,.0f} GB/s")
    shown = profile.timings if every else profile.grouped(by)
    _print_whole(_table(profile, shown), console)
    if any(t.bound == "memory" and t.gap < 0 for t in shown):
        console.print(
            "Where more is reached than the roof, operands were still in a cache: the roof is that "
            "of memory.",
            soft_wrap=True,
        )
    difference = profile.total - profile.replay
    say(
        f"sum of dispatches {1e3 * profile.total:.2f} ms, whole replay {1e3 * profile.replay:.2f} "
        f"ms, difference {1e3 * difference:+.2f} ms ({difference / profile.replay:+.1%})"
    )
    if profile.roof is None:
        console.print(
            "What this device can do at most is not measured yet, so nothing is compared with it.",
            soft_wrap=True,
        )
    else:
        _print_whole(_gaps(profile, by), console)
    for line in circumstances(profile.machine, profile.measurement):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def as_json(profile: Profile) -> dict[str, Any]:
    """Everything; times in seconds, rates in operations and bytes a second."""
    roof, trusted = profile.roof, profile.measurement.trusted
    return {
        "schema": SCHEMA,
        "trusted": trusted,
        "machine": asdict(profile.machine),
        "model": profile.model,
        "tokens": profile.tokens,
        "documents": profile.documents,
        "targets": profile.targets,
        "activation": str(profile.activation),
        "recomputed": profile.recomputed,
        "replay": profile.replay,
        "sum": profile.total,
        "roof": roof
        and {
            "flops": {str(dtype): rate for dtype, rate in roof.flops.items()},
            "nbytes": roof.nbytes,
            "trusted": trusted,
        },
        "measurement": asdict(profile.measurement),
        "dispatches": [{**_figures(t), "trusted": trusted} for t in profile.timings],
    }


def as_trace(profile: Profile) -> dict[str, Any]:
    """Chrome's trace event format: the dispatches end to end, inside the layer that they are of.
    Times in microseconds."""
    mark = _mark(profile)
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "trusted": profile.measurement.trusted,
            "model": profile.model,
            "pass": _pass(profile),
            "circumstances": circumstances(profile.machine, profile.measurement),
        },
        "traceEvents": [
            _metadata("process_name", f"krnl profile, {profile.machine.device}{mark}"),
            _metadata("thread_name", f"one dispatch after the other{mark}"),
            *_events(profile),
        ],
    }


def picture(profile: Profile, by: By) -> "Figure":
    """Bars of the longest groups; the dark part is what the machine would need at least."""
    from matplotlib.figure import Figure

    groups = profile.grouped(by)
    shown = sorted(groups, key=lambda group: -group.seconds)[:BARS]
    shown.sort(key=groups.index, reverse=True)  # the first one on top
    figure = Figure(figsize=(10, 1.2 + 0.3 * len(shown)), layout="constrained")
    axes = figure.subplots()
    labels = [group.label for group in shown]
    mark = _mark(profile)
    measured = "#b8c4d6" if profile.measurement.trusted else "0.8"
    axes.barh(labels, [1e3 * g.seconds for g in shown], color=measured, label=f"measured{mark}")
    if profile.roof is not None:
        floors = [1e3 * (g.floor or 0.0) for g in shown]
        axes.barh(labels, floors, color="#1f4e8c", label=f"at the roof{mark}")
        axes.legend(frameon=False, loc="lower right")
    axes.set_xlabel(f"ms of {1e3 * profile.total:.1f}{mark}")
    axes.set_title(f"{profile.model}: {_pass(profile)}\n{profile.machine.device}{mark}")
    axes.grid(axis="x", alpha=0.3)
    return figure


def _pass(profile: Profile) -> str:
    documents = "1 document" if profile.documents == 1 else f"{profile.documents:,} documents"
    return f"{profile.tokens:,} tokens of {documents} with {profile.targets:,} targets"


def _mark(profile: Profile) -> str:
    """Behind a name."""
    return "" if profile.measurement.trusted else f" ({UNTRUSTED})"


def _table(profile: Profile, timings: Sequence[Timing]) -> Table:
    columns = ["dispatch", "times", "ms", SHARE, "GFLOP/s", "GB/s"]
    columns += ["under a roof of", "reached"] if profile.roof is not None else []
    columns += [""] if not profile.measurement.trusted else []
    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for t in timings:
        row = [
            t.label,
            str(t.count),
            f"{1e3 * t.seconds:.3f}",
            f"{t.seconds / profile.total:.1%}",
            f"{_rate(t.flops, t.seconds) / 1e9:,.0f}",
            f"{_rate(t.nbytes, t.seconds) / 1e9:,.1f}",
        ]
        if profile.roof is not None:
            row += [_roof(profile, t), f"{_rate(t.floor or 0.0, t.seconds):.0%}"]
        table.add_row(*row, *([] if profile.measurement.trusted else [UNTRUSTED]))
    return table


def _print_whole(table: Table, console: Console) -> None:
    """Even on a narrow terminal, which folds lines: Rich would cut figures, or their mark, away."""
    table.width = console.measure(table, options=console.options.update(max_width=WIDTH)).maximum
    console.print(table, crop=False)


def _roof(profile: Profile, timing: Timing) -> str:
    """The line of the roofline that a dispatch is under."""
    assert profile.roof is not None
    if timing.bound == "compute":
        return f"{profile.roof.flops[profile.activation] / 1e9:,.0f} GFLOP/s"
    return f"{profile.roof.nbytes / 1e9:,.0f} GB/s"


def _gaps(profile: Profile, by: By) -> Table:
    columns = ["widest gaps", "ms over the roof", SHARE]
    mark = [] if profile.measurement.trusted else [UNTRUSTED]
    table = Table(*columns, *([""] if mark else []), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for timing in sorted(profile.grouped(by), key=lambda timing: -timing.gap)[:WIDEST]:
        share = f"{timing.gap / profile.total:.1%}"
        table.add_row(timing.label, f"{1e3 * timing.gap:.2f}", share, *mark)
    return table


def _rate(amount: float, seconds: float) -> float:
    """Amount a second. What launches nothing takes no time and does nothing."""
    return amount / seconds if seconds else 0.0


def _figures(timing: Timing) -> dict[str, Any]:
    return {
        "label": timing.label,
        "kernel": timing.kernel,
        "layer": timing.layer,
        "seconds": timing.seconds,
        "flops": timing.flops,
        "nbytes": timing.nbytes,
        "floor": timing.floor,
        "bound": timing.bound,
    }


def _metadata(kind: str, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 1, "tid": 1, "args": {"name": name}}


def _events(profile: Profile) -> Iterator[dict[str, Any]]:
    """A complete event for each stretch of a layer, and inside it one for each dispatch."""

    def event(name: str, category: str, start: float, end: float, args: Any) -> dict[str, Any]:
        return {
            "name": name,
            "cat": category,
            "ph": "X",
            "ts": 1e6 * start,
            "dur": 1e6 * (end - start),
            "pid": 1,
            "tid": 1,
            "args": {**args, "trusted": profile.measurement.trusted},
        }

    start = 0.0
    for layer, group in groupby(profile.timings, key=lambda timing: timing.layer):
        inside, end = [], start
        for t in group:
            begin, end = end, end + t.seconds
            inside.append(event(t.label, t.kernel, begin, end, _figures(t)))
        yield event(layer, "layer", start, end, {})
        yield from inside
        start = end
