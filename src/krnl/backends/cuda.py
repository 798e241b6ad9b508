"""The CUDA engine: kernels are compiled when a program is, and a replay is one graph."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from krnl.backends.base import Limits, Memory, Paper, Roof
from krnl.backends.cuda_driver import STEPWISE_VARIABLE, Gpu
from krnl.backends.cuda_launch import HOPPER, BoundLaunch, Launcher, naming
from krnl.backends.cuda_memory import CudaMemory, Staging
from krnl.backends.cuda_overlap import beside
from krnl.backends.cuda_roof import measure
from krnl.dtypes import BF16, F16, F32
from krnl.errors import ConfigError
from krnl.kernels.cuda.table import table
from krnl.kernels.cuda.target import Target
from krnl.kernels.launch import launches
from krnl.plan.arena import Layout, Plan
from krnl.plan.lower import Table

# Launches that are enqueued while the stream is held: with a mark each, far fewer than the driver's
# queue takes.
HELD_LAUNCHES = 128
# Of fewer rows the head's backward, whose K is the vocabulary, makes too few tiles for a large GPU.
HEAD_ROWS = 1024

# Bytes of the GPU's memory that a run takes beside its plan's blocks. What is free when the device
# is opened has no part of the driver's context any more. Afterwards come the code of the kernels,
# some dozens, each in pieces of up to 2 MiB; the graphs of three programs, 1,700 launches for 32
# layers, of which each takes up to 64 KiB; what blocks are rounded up to. The driver tells none of
# these, so all are given this much: an H200 took 14 MiB for an update of Llama 3.2 1B. Copies that
# wait for the GPU are in the host's memory.
RESERVE = 256 << 20

# How much memory there is, is not known; the kernels are those of an H100 or H200.
ON_PAPER = Paper(
    "cuda",
    Limits(
        memory=2**62,
        largest_block=2**62,
        scratch=RESERVE,
        activations=(BF16, F16, F32),
        threads=1,
        mapped_alignment=None,
        own_memory=True,
        head_rows=HEAD_ROWS,
    ),
    table(Target(HOPPER)),
)


class CudaBackend:
    """Computes on an NVIDIA GPU. `KRNL_CUDA_STEPWISE=1` runs dispatches one by one and waits for
    each, so that an error names the one that failed."""

    name = "cuda"

    def __init__(self, kernels: Table | None = None) -> None:
        self._stepwise = _chosen_stepwise()
        self._gpu = gpu = Gpu()
        self._launcher = Launcher(gpu)
        self._staging = Staging(gpu)
        self.kernels = kernels or table(Target(gpu.capability, gpu.multiprocessors))
        self.device_name = gpu.name
        self.driver = gpu.versions
        free, total = (int(nbytes) for nbytes in gpu("cuMemGetInfo"))
        self.limits = replace(ON_PAPER.limits, memory=free, largest_block=total)

    def measure_roof(self) -> Roof:
        """Takes some tenths of a second, and two GiB of the GPU's memory."""
        return measure(self, self._gpu)

    def allocate(self, layout: Layout) -> CudaMemory:
        return CudaMemory(self._gpu, self._staging, layout)

    def compile(self, plan: Plan, memory: Memory) -> "CudaProgram":
        assert isinstance(memory, CudaMemory)
        return CudaProgram(self._launcher, plan, memory, self._stepwise)


@dataclass(frozen=True)
class _BoundDispatch:
    label: str
    launches: list[BoundLaunch]


class CudaProgram:
    """Launches with everything looked up, and a graph of them. Keeps the memory that they use."""

    def __init__(self, launcher: Launcher, plan: Plan, memory: CudaMemory, stepwise: bool):
        self._launcher = launcher
        self._gpu = launcher.gpu
        self._memory = memory
        self._name = plan.name
        self._stepwise = stepwise
        self._dispatches = self._bind(plan)
        self._graph = None if stepwise else self._capture()

    def run(self) -> None:
        if self._graph is not None:
            self._gpu.running.append(self._name)
            self._gpu("cuGraphLaunch", self._graph, self._gpu.stream)
            return
        for dispatch in self._dispatches:
            self._gpu.running.append(dispatch.label)
            self._enqueue(dispatch)
            self._gpu.wait()

    def time(self) -> list[float]:
        """Many dispatches are enqueued before the first of them starts: a GPU that waits in between
        would be timed waiting."""
        return [
            seconds for portion in _portions(self._dispatches) for seconds in self._time(portion)
        ]

    def _time(self, dispatches: Sequence[_BoundDispatch]) -> list[float]:
        gpu = self._gpu
        marks = self._launcher.marks(len(dispatches) + 1)
        with gpu.held():
            gpu("cuEventRecord", marks[0], gpu.stream)
            for dispatch, mark in zip(dispatches, marks[1:], strict=True):
                gpu.running.append(dispatch.label)
                self._enqueue(dispatch)
                gpu("cuEventRecord", mark, gpu.stream)
        gpu.wait()
        return [
            gpu("cuEventElapsedTime", start, end) / 1e3 if dispatch.launches else 0.0
            for dispatch, start, end in zip(dispatches, marks[:-1], marks[1:], strict=True)
        ]

    def _enqueue(self, dispatch: _BoundDispatch) -> None:
        """Starts when everything before has ended."""
        for index, launch in enumerate(dispatch.launches):
            self._launcher.launch(launch, overlap=index > 0)

    def _bind(self, plan: Plan) -> list[_BoundDispatch]:
        wanted = [launches(dispatch) for dispatch in plan.dispatches]
        self._launcher.prepare([launch for made in wanted for launch in made])
        bound = []
        for dispatch, made, flags in zip(
            plan.dispatches, wanted, beside(plan, wanted), strict=True
        ):
            label = dispatch.call.label
            with naming(label):
                own = [
                    self._launcher.bind(launch, self._memory, flag)
                    for launch, flag in zip(made, flags, strict=True)
                ]
            bound.append(_BoundDispatch(label, own))
        return bound

    def _capture(self) -> Any:
        """The graph of all launches, on the GPU and ready to run."""
        launches = [launch for dispatch in self._dispatches for launch in dispatch.launches]
        graph = self._launcher.graph_of(launches)
        self._gpu.on_end(self, "cuGraphExecDestroy", graph)
        self._gpu("cuGraphUpload", graph, self._gpu.stream)
        return graph


def _portions(dispatches: Sequence[_BoundDispatch]) -> list[list[_BoundDispatch]]:
    """What is enqueued while the stream is held, each time."""
    portions: list[list[_BoundDispatch]] = []
    count = HELD_LAUNCHES
    for dispatch in dispatches:
        if count >= HELD_LAUNCHES:
            portions.append([])
            count = 0
        portions[-1].append(dispatch)
        count += len(dispatch.launches)
    return portions


def _chosen_stepwise() -> bool:
    text = os.environ.get(STEPWISE_VARIABLE, "0")
    if text not in ("0", "1"):
        raise ConfigError(f"{STEPWISE_VARIABLE} is '{text}'; it must be 0 or 1.")
    return text == "1"
