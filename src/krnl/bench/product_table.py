"""Tables of products: each line is something to time, or says by name why it cannot run here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from krnl.backends.base import Backend
from krnl.backends.cpu import CpuBackend
from krnl.bench.blas import blas_with_threads
from krnl.bench.command import Bench
from krnl.bench.control import with_cpu
from krnl.bench.gate import NO_FIGURE, Gate, Measurement
from krnl.bench.products import BlasProduct, Experiment, Work
from krnl.bench.results import Entry, Result, Tool, comparable, timed
from krnl.errors import Refused
from krnl.kernels.metal.variants import VARIANTS, Variant

SIZE, QUICK_SIZE = 2048, 512  # m, n and k of a square product; the report's figures are for SIZE
GFLOPS, MS = "GFLOP/s", "ms"


@dataclass(frozen=True)
class Line:
    """`work` None: it cannot run here, and `note` says why. `against` names the line that this one
    is compared with."""

    name: str
    work: Work | None
    reported: float | None = None
    note: str = ""
    against: str = ""


def square(quick: bool) -> int:
    return QUICK_SIZE if quick else SIZE


def sized(title: str, size: int) -> str:
    """The title of a table of square products."""
    other = "" if size == SIZE else f", where the report has {SIZE}"
    return f"{title}; m = n = k = {size}{other}"


def experiments(backend: Backend, section: int, size: int) -> list[Line]:
    """The kernels that a section of the report is about."""
    return [
        experiment(backend, variant, variant.title, size, size, size)
        for variant in VARIANTS
        if variant.section == section
    ]


def experiment(backend: Backend, variant: Variant, name: str, m: int, n: int, k: int) -> Line:
    """One of the report's kernels, which are Metal's. Its figure there is that of SIZE."""
    reported = comparable(variant.reported, (SIZE, SIZE, SIZE), (m, n, k))
    if backend.name != "metal":
        note = f"{variant.function} is a Metal kernel: --device metal"
        return Line(name, None, reported, note)
    work = Experiment(variant, m, n, k)
    most = work.most_threads(backend)
    note = "" if most is None else f"at most {most} threads in a threadgroup"
    return Line(name, work, reported, note)


def measure(bench: Bench, command: str, title: str, unit: str, lines: Sequence[Line]) -> Result:
    """Checks every product, then times them in turn, round by round. Beside a GPU the CPU's library
    is left out, and the others are timed anew, where the CPU was not quiet."""
    tools, measurement = list[Tool](), None
    if any(isinstance(line.work, BlasProduct) for line in lines):  # they are the CPU's
        bench.gate.learn()  # where this is refused, so is the table
        try:
            measurement = _measured(bench, with_cpu(bench.gate, bench.backend), lines)
        except Refused as refusal:
            if bench.backend.name == "cpu":
                raise
            lines = [_without_library(line, refusal) for line in lines]
        else:
            tools.append(blas_with_threads(_cpu(bench.backend).limits.threads))
    measurement = measurement or _measured(bench, bench.gate, lines)
    works = _works(lines)
    entries = [_entry(line, unit, works, measurement) for line in lines]
    return bench.result(command, title, measurement, entries, tools)


def _works(lines: Sequence[Line]) -> dict[str, Work]:
    return {line.name: line.work for line in lines if line.work is not None}


def _measured(bench: Bench, gate: Gate, lines: Sequence[Line]) -> Measurement | None:
    """None if there is nothing to measure."""
    contestants = {name: work.prepare(bench.backend) for name, work in _works(lines).items()}
    return gate.measure(contestants, bench.rounds) if contestants else None


def _cpu(backend: Backend) -> Backend:
    return backend if backend.name == "cpu" else CpuBackend()


def _without_library(line: Line, refusal: Refused) -> Line:
    """Itself, if it is not the library's."""
    if not isinstance(line.work, BlasProduct):
        return line
    reason = str(refusal).removeprefix(f"{NO_FIGURE} ").partition(". ")[0]
    return replace(line, work=None, note=reason)


def _entry(line: Line, unit: str, works: dict[str, Work], measurement: Measurement | None) -> Entry:
    if line.work is None or measurement is None:
        return Entry(line.name, None, unit, reported=line.reported, note=line.note)
    flops, ratio, notes = line.work.flops, None, [line.note] if line.note else []
    if line.against in works:
        other = works[line.against].flops / measurement.median(line.against)
        ratio = flops / measurement.median(line.name) / other
        notes.append(f"ratio to {line.against}")
    return timed(
        measurement,
        line.name,
        unit,
        {GFLOPS: lambda seconds: flops / seconds / 1e9, MS: lambda seconds: 1e3 * seconds}[unit],
        reported=line.reported,
        note="; ".join(notes),
        ratio=ratio,
    )
