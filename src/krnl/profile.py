"""`krnl profile`: where the time of a training pass goes, against what the machine can do."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from krnl.backends.base import MeasuresRoof, Roof
from krnl.bench.control import machine, open_gate
from krnl.bench.gate import Gate, Measurement
from krnl.bench.results import Machine
from krnl.data.packing import random_pass
from krnl.devices import activation_type, open_backend
from krnl.dtypes import I32, DType
from krnl.model import Model
from krnl.plan.buffer import Buffer
from krnl.plan.lower import Dispatch
from krnl.plan.op import LIVE
from krnl.plan.step import Call
from krnl.profile_names import direction, names, place
from krnl.training.budget import plan_within
from krnl.training.config import TrainConfig
from krnl.training.prepare import starting_adapter
from krnl.training.session import Session

ROUNDS = 7  # medians are taken of these

By = Literal["kernel", "label", "layer"]


@dataclass(frozen=True)
class Timing:
    """One dispatch, or several put together: how often, how long (seconds in all), and how much
    work. Bytes are those that have to be moved, each operand once: no kernel moves fewer, but one
    that reads again or uses scratch moves more."""

    label: str  # what it computes, as a formula
    kernel: str
    layer: str
    count: int
    seconds: float
    flops: float
    nbytes: float
    floor: float | None  # seconds that the machine would need at least, if that is known
    bound: Literal["compute", "memory"] | None  # what sets the floor

    @property
    def gap(self) -> float:
        return self.seconds - (self.floor or 0.0)


@dataclass(frozen=True)
class Profile:
    """A pass taken apart. `replay` is the time of the whole, run at once."""

    model: str
    tokens: int
    documents: int
    targets: int
    recomputed: str  # what the backward pass computes again, for people
    replay: float
    timings: list[Timing]
    activation: DType
    roof: Roof | None  # None: nothing measures that of this device yet
    machine: Machine
    measurement: Measurement

    @property
    def total(self) -> float:
        return sum(timing.seconds for timing in self.timings)

    def grouped(self, by: By = "kernel") -> list[Timing]:
        """Dispatches that are alike put together: the longest first, layers as they come."""
        groups: dict[str, list[Timing]] = {}
        for timing in self.timings:
            groups.setdefault(str(getattr(timing, by)), []).append(timing)
        together = [_together(name, group) for name, group in groups.items()]
        return together if by == "layer" else sorted(together, key=lambda group: -group.seconds)


def profile_run(
    config: TrainConfig,
    documents: int = 1,
    labelled: float = 1.0,
    force: bool = False,
    gate: Gate | None = None,
) -> Profile:
    """Times a pass of `accumulate` at full capacity: random tokens in `documents` equal rows, of
    which the share `labelled` are targets. The data of `config` is not read. Refused unless the
    machine is quiet; `gate` decides, the device's own unless one is given. A whole replay, its
    dispatches one by one and what the device can do at most take turns, so that what disturbs
    them disturbs them alike, and medians are compared."""
    backend = open_backend(config.device)
    gate = gate or open_gate(backend, force)
    model = Model.open(config.model)
    adapter, modules = starting_adapter(config, model)
    activation = activation_type(backend, config.precision)
    budgeted = plan_within(
        config.memory_limit,
        config.recompute,
        model.config,
        model.weights(backend.limits.mapped_alignment),
        adapter,
        tuple(modules),
        backend,
        activation,
        config.tokens,
    )
    budgeted.check()
    planned = budgeted.training
    work = random_pass(model.config.vocab_size, config.tokens, documents, labelled)
    session = Session(planned, model, modules, backend, config.seed)
    inputs = session.inputs_of(work, 1)
    dispatches = planned.accumulate.dispatches
    runs: list[list[float]] = []
    roofs: list[Roof] = []

    def whole() -> None:
        session.accumulate(inputs)
        session.read(planned.programs.inputs.live)  # waits for what was enqueued

    # A turn begins with a run that is not counted: the one before left caches and clocks as it
    # pleased.

    def replay() -> float:
        whole()
        return _seconds(whole)

    def one_by_one() -> float:
        whole()
        runs.append(session.time_accumulate(inputs))
        return sum(runs[-1])

    contestants = {"replay": replay, "dispatches": one_by_one}
    if isinstance(backend, MeasuresRoof):
        contestants["roof"] = lambda: _seconds(lambda: roofs.append(backend.measure_roof()))
    measurement = gate.measure(contestants, ROUNDS)
    roof = _median(roofs) if roofs else None
    work_of = _Work(session, roof, activation)
    return Profile(
        config.model,
        work.live,
        documents,
        len(work.target),
        budgeted.recomputed,
        measurement.median("replay"),
        work_of.timings(dispatches, np.median(runs, axis=0).tolist()),
        activation,
        roof,
        machine(backend),
        measurement,
    )


@dataclass(frozen=True)
class _Work:
    """What the dispatches of a pass had to do, counted in the data that they ran on."""

    session: Session
    roof: Roof | None
    activation: DType

    def timings(self, dispatches: Sequence[Dispatch], seconds: Sequence[float]) -> list[Timing]:
        labels = names([d.call for d in dispatches])
        return [
            self._timing(d, label, s)
            for d, label, s in zip(dispatches, labels, seconds, strict=True)
        ]

    def _timing(self, dispatch: Dispatch, label: str, seconds: float) -> Timing:
        call = dispatch.call
        dims = {**call.dims, **_counts(call, self.session.read)}
        flops, nbytes = float(call.op.flops(dims)), float(call.bytes_moved(dims))
        layer = f"{direction(call)} {place(call)}"
        timing = Timing(label, dispatch.row.name, layer, 1, seconds, flops, nbytes, None, None)
        if self.roof is None:
            return timing
        compute, memory = flops / self.roof.flops[self.activation], nbytes / self.roof.nbytes
        bound: Literal["compute", "memory"] = "compute" if compute > memory else "memory"
        return replace(timing, floor=max(compute, memory), bound=bound)


def _counts(call: Call, read: Callable[[Buffer], np.ndarray]) -> dict[str, int]:
    """What the inputs of a call's last run tell of its sizes: the rows that were live, and the
    words of `Dims`."""
    integers = {
        name: read(argument)
        for name, argument in call.arguments.items()
        if isinstance(argument, Buffer) and argument.dtype is I32
    }
    if LIVE not in integers:
        return {}
    n = int(integers[LIVE][0])
    counts = {"n": n}
    if "start" in integers:
        stop = integers.get("stop", np.arange(n) + 1)
        counts["visible"] = int((stop[:n] - integers["start"][:n]).sum())
    for name in integers.keys() & {"ids", "index"}:
        rows = integers[name][:n]
        counts["taken"] = len(np.unique(rows[rows >= 0]))
    return counts


def _seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def _median(roofs: Sequence[Roof]) -> Roof:
    """What was seen again and again: a single moment may be a fault of the clock."""
    flops = {dtype: statistics.median(r.flops[dtype] for r in roofs) for dtype in roofs[0].flops}
    return Roof(flops, statistics.median(r.nbytes for r in roofs))


def _together(name: str, timings: Sequence[Timing]) -> Timing:
    """`timings` as one. The bound is the one that most of their floor comes from."""
    floors = [(t.floor, t.bound) for t in timings if t.floor is not None]
    compute = sum(floor for floor, bound in floors if bound == "compute")
    floor = sum(floor for floor, _ in floors)
    return Timing(
        label=name,
        kernel=timings[0].kernel,
        layer=timings[0].layer,
        count=sum(t.count for t in timings),
        seconds=sum(t.seconds for t in timings),
        flops=sum(t.flops for t in timings),
        nbytes=sum(t.nbytes for t in timings),
        floor=floor if floors else None,
        bound=None if not floors else "compute" if compute > floor / 2 else "memory",
    )
