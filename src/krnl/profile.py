"""`krnl profile`: where the time of a training pass goes, against what the machine can do."""

import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from krnl.backends.base import Roof
from krnl.backends.cpu import CpuBackend
from krnl.data.packing import Pass
from krnl.devices import activation_type, open_backend
from krnl.dtypes import DType
from krnl.errors import ConfigError
from krnl.formats.files import write_json_atomic
from krnl.model import Model
from krnl.plan.step import Call, members
from krnl.training.config import TrainConfig
from krnl.training.loop import starting_adapter
from krnl.training.session import Session, plan_training

REPEATS = 7  # medians are taken of these
WIDEST = 8  # gaps that are printed


@dataclass(frozen=True)
class Timing:
    """One dispatch, or several alike: how often, how long (seconds in all), and how much work."""

    label: str
    kernel: str
    count: int
    seconds: float
    flops: float
    nbytes: float
    floor: float  # seconds that the machine would need at least

    @property
    def gap(self) -> float:
        return self.seconds - self.floor


@dataclass(frozen=True)
class Profile:
    """A pass taken apart. `replay` is the time of the whole, run at once."""

    tokens: int
    replay: float
    timings: list[Timing]
    roof: Roof

    @property
    def total(self) -> float:
        return sum(timing.seconds for timing in self.timings)

    def grouped(self) -> list[Timing]:
        """Dispatches of one kernel put together, the longest first."""
        kernels = {timing.kernel for timing in self.timings}
        groups = [_together(k, [t for t in self.timings if t.kernel == k]) for k in kernels]
        return sorted(groups, key=lambda group: -group.seconds)


def profile_run(config: TrainConfig, documents: int = 1, labelled: float = 1.0) -> Profile:
    """Times a pass of `accumulate` at full capacity: random tokens in `documents` equal rows, of
    which the share `labelled` are targets. The data of `config` is not read."""
    model = Model.open(config.model)
    adapter, modules = starting_adapter(config, model)
    backend = open_backend(config.device)
    if not isinstance(backend, CpuBackend):
        raise ConfigError(
            f"device is '{config.device}'; only the cpu can be profiled so far: give --device cpu."
        )
    activation = activation_type(backend, config.precision)
    planned = plan_training(
        model.config,
        model.weights(backend.limits.mapped_alignment),
        adapter,
        tuple(modules),
        backend,
        activation,
        config.tokens,
        config.recompute,
    )
    session = Session(planned, model, modules, backend, config.seed)
    work = random_pass(model.config.vocab_size, config.tokens, documents, labelled)
    roof = backend.measure_roof()
    replays, runs = [], []
    for _ in range(REPEATS):
        start = time.perf_counter()
        session.accumulate(work, 1)
        replays.append(time.perf_counter() - start)
        runs.append(session.time_accumulate(work))
    seconds = np.median(runs, axis=0)
    visible = int((work.position + 1).sum())
    timings = [
        _timing(d.call, d.row.name, float(s), session.live_rows(d.call), visible, roof, activation)
        for d, s in zip(planned.accumulate.dispatches, seconds, strict=True)
    ]
    return Profile(work.live, statistics.median(replays), timings, roof)


def random_pass(vocab_size: int, tokens: int, documents: int, labelled: float) -> Pass:
    """A full pass of random tokens, the same each time."""
    if not 1 <= documents <= tokens // 2:
        raise ConfigError(
            f"documents is {documents}; it must be from 1 to half of the {tokens} tokens."
        )
    random = np.random.default_rng(0)
    edges = np.linspace(0, tokens, documents + 1).astype(np.int32)
    lengths = np.diff(edges)
    start = np.repeat(edges[:-1], lengths)
    ids = random.integers(0, vocab_size, tokens).astype(np.int32)
    chosen = random.random(tokens - 1) < labelled
    rows = np.flatnonzero((start[1:] == start[:-1]) & chosen).astype(np.int32)
    return Pass(
        tokens=ids,
        position=np.arange(tokens, dtype=np.int32) - start,
        document=np.repeat(np.arange(documents, dtype=np.int32), lengths),
        doc_start=start,
        target_row=rows,
        target=ids[rows + 1],
        capacity=tokens,
    )


def print_profile(profile: Profile, console: Console, every: bool) -> None:
    """Kernels, or every dispatch; their sum against a replay; the widest gaps to the roof."""
    peaks = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {t}" for t, rate in profile.roof.flops.items())
    console.print(
        f"{profile.tokens:,} tokens in {1e3 * profile.replay:.1f} ms: "
        f"{profile.tokens / profile.replay:,.0f} tokens/s. The machine now: {peaks}, "
        f"{profile.roof.nbytes / 1e9:.0f} GB/s",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_table(profile.timings if every else profile.grouped(), profile.total))
    difference = profile.total - profile.replay
    console.print(
        f"sum of dispatches {1e3 * profile.total:.2f} ms, whole replay {1e3 * profile.replay:.2f} "
        f"ms, difference {1e3 * difference:+.2f} ms ({difference / profile.replay:+.1%})",
        highlight=False,
        soft_wrap=True,
    )
    widest = sorted(profile.grouped(), key=lambda timing: -timing.gap)[:WIDEST]
    gaps = Table("widest gaps", "ms over the roof", "share of the pass", box=None, pad_edge=False)
    for timing in widest:
        gaps.add_row(timing.kernel, f"{1e3 * timing.gap:.2f}", f"{timing.gap / profile.total:.1%}")
    console.print(gaps)


def write_profile(profile: Profile, path: Path) -> None:
    """The profile as JSON; times in seconds."""
    flops = {str(dtype): rate for dtype, rate in profile.roof.flops.items()}
    content = {
        "tokens": profile.tokens,
        "replay": profile.replay,
        "roof": {"flops": flops, "nbytes": profile.roof.nbytes},
        "dispatches": [asdict(timing) for timing in profile.timings],
    }
    write_json_atomic(path, json.loads(json.dumps(content)))


def _timing(
    call: Call,
    kernel: str,
    seconds: float,
    live: int | None,
    visible: int,
    roof: Roof,
    activation: DType,
) -> Timing:
    """A dispatch with the work that its live rows made."""
    dims = {**call.dims, "visible": visible}
    share = 1.0
    if live is not None:
        share = live / max(1, int(call.dims["n"]))  # type: ignore[arg-type]
        dims["n"] = live
    flops = float(call.op.flops(dims))
    nbytes = sum(_bytes(call, share))
    floor = max(flops / roof.flops[activation], nbytes / roof.nbytes)
    return Timing(call.label, kernel, 1, seconds, flops, nbytes, floor)


def _bytes(call: Call, share: float) -> Iterable[float]:
    """Bytes read and written, rows that are not live left out. An updated output counts twice."""
    for parameter, argument in zip(
        call.op.inputs + call.op.outputs, call.inputs + call.outputs, strict=True
    ):
        rows = share if parameter.letters[0] == "n" else 1.0
        times = 2 if parameter.updated else 1
        yield from (times * rows * buffer.nbytes for buffer in members(argument))


def _together(kernel: str, timings: Sequence[Timing]) -> Timing:
    return Timing(
        label=kernel,
        kernel=kernel,
        count=sum(t.count for t in timings),
        seconds=sum(t.seconds for t in timings),
        flops=sum(t.flops for t in timings),
        nbytes=sum(t.nbytes for t in timings),
        floor=sum(t.floor for t in timings),
    )


def _table(timings: Sequence[Timing], total: float) -> Table:
    columns = ("dispatch", "times", "ms", "share", "GFLOP/s", "GB/s", "of the roof")
    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for t in timings:
        table.add_row(
            t.label,
            str(t.count),
            f"{1e3 * t.seconds:.3f}",
            f"{t.seconds / total:.1%}",
            f"{t.flops / t.seconds / 1e9:,.0f}",
            f"{t.nbytes / t.seconds / 1e9:,.1f}",
            f"{t.floor / t.seconds:.0%}",
        )
    return table
