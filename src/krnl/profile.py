"""`krnl profile`: where the time of a training pass goes, against what the machine can do."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from krnl.backends.base import Roof
from krnl.backends.cpu import CpuBackend
from krnl.bench.control import machine, open_gate
from krnl.bench.gate import Gate, Measurement
from krnl.bench.results import Machine
from krnl.data.packing import random_pass
from krnl.devices import activation_type, open_backend
from krnl.dtypes import DType
from krnl.errors import ConfigError
from krnl.model import Model
from krnl.plan.lower import Dispatch
from krnl.plan.step import Call, members
from krnl.profile_names import direction, names, place
from krnl.training.config import TrainConfig
from krnl.training.loop import starting_adapter
from krnl.training.session import Session, plan_training

ROUNDS = 7  # medians are taken of these

By = Literal["kernel", "label", "layer"]


@dataclass(frozen=True)
class Timing:
    """One dispatch, or several put together: how often, how long (seconds in all), and how much
    work."""

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

    tokens: int
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
    machine is quiet; `gate` decides, the device's own unless one is given."""
    if config.device == "reference":
        raise ConfigError(
            "device is 'reference', whose times say nothing of training: it computes definitions. "
            "Give cpu or metal."
        )
    backend = open_backend(config.device)
    gate = gate or open_gate(backend, force)
    model = Model.open(config.model)
    adapter, modules = starting_adapter(config, model)
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
    work = random_pass(model.config.vocab_size, config.tokens, documents, labelled)
    session = Session(planned, model, modules, backend, config.seed)
    dispatches = planned.accumulate.dispatches
    counted = next(d.call for d in dispatches if d.call.op.has_live)
    runs: list[list[float]] = []

    def replay() -> float:
        start = time.perf_counter()
        session.accumulate(work, 1)
        session.live_rows(counted)  # reading waits for what was enqueued
        return time.perf_counter() - start

    def one_by_one() -> float:
        runs.append(session.time_accumulate(work))
        return sum(runs[-1])

    replay()  # touches all memory for the first time
    roof = backend.measure_roof() if isinstance(backend, CpuBackend) else None
    measurement = gate.measure({"replay": replay, "dispatches": one_by_one}, ROUNDS)
    work_of = _Work(session, int((work.position + 1).sum()), roof, activation)
    return Profile(
        work.live,
        measurement.median("replay"),
        work_of.timings(dispatches, np.median(runs, axis=0).tolist()),
        activation,
        roof,
        machine(backend),
        measurement,
    )


@dataclass(frozen=True)
class _Work:
    """What the dispatches of a pass had to do, counted over the rows that were live."""

    session: Session
    visible: int  # pairs of a query and a key that it sees
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
        dims = {**call.dims, "visible": self.visible}
        live, share = self.session.live_rows(call), 1.0
        if live is not None:
            share = live / max(1, int(call.dims["n"]))  # type: ignore[arg-type]
            dims["n"] = live
        flops = float(call.op.flops(dims))
        nbytes = sum(_bytes(call, share))
        layer = f"{direction(call)} {place(call)}"
        timing = Timing(label, dispatch.row.name, layer, 1, seconds, flops, nbytes, None, None)
        if self.roof is None:
            return timing
        compute, memory = flops / self.roof.flops[self.activation], nbytes / self.roof.nbytes
        bound: Literal["compute", "memory"] = "compute" if compute > memory else "memory"
        return replace(timing, floor=max(compute, memory), bound=bound)


def _bytes(call: Call, share: float) -> Iterable[float]:
    """Bytes read and written, rows that are not live left out. An updated output counts twice."""
    for parameter, argument in zip(
        call.op.inputs + call.op.outputs, call.inputs + call.outputs, strict=True
    ):
        rows = share if parameter.letters[0] == "n" else 1.0
        times = 2 if parameter.updated else 1
        yield from (times * rows * buffer.nbytes for buffer in members(argument))


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
