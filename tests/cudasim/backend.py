"""Runs plans on the simulated device, as krnl.backends.cuda does on a GPU.

backend = SimulatedCudaBackend(HOPPER)
… allocate, compile, run …        # a KernelError if something is wrong
backend.executed                  # the kernels, and how often each ran
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from krnl.backends.base import Limits, Memory
from krnl.backends.cuda import ON_PAPER
from krnl.backends.cuda_compiler import Kernel
from krnl.backends.cuda_launch import parameters
from krnl.backends.cuda_overlap import beside
from krnl.errors import BackendError
from krnl.kernels.cuda.table import table
from krnl.kernels.cuda.target import Target
from krnl.kernels.launch import Launch, launches
from krnl.plan.arena import Layout, Plan
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.lower import Table

from . import build, device

HOPPER = Target(90)


class SimulatedMemory:
    """Every buffer in memory of its own, so that what leaves it is found out. Temps hold NaN at
    first, all else zeros."""

    def __init__(self, layout: Layout) -> None:
        self._arrays = {
            root: device.Memory(build.engine(), root.nbytes, root.name) for root in layout.places
        }
        for root, memory in self._arrays.items():
            if root.kind is not Kind.TEMP:
                memory.bytes[:] = 0

    def address(self, buffer: Buffer) -> int:
        return self._arrays[buffer.root].address + buffer.start * buffer.dtype.size

    def _view(self, buffer: Buffer) -> np.ndarray:
        start = buffer.start * buffer.dtype.size
        whole = self._arrays[buffer.root].bytes
        return whole[start : start + buffer.nbytes].view(buffer.dtype.numpy).reshape(buffer.shape)

    def write(self, buffer: Buffer, values: np.ndarray) -> None:
        self._view(buffer)[...] = values

    def read(self, buffer: Buffer) -> np.ndarray:
        return self._view(buffer).copy()


class SimulatedProgram:
    def __init__(self, backend: "SimulatedCudaBackend", plan: Plan, memory: SimulatedMemory):
        self._backend, self._memory = backend, memory
        made = [launches(dispatch) for dispatch in plan.dispatches]
        flags = [flag for own in beside(plan, made) for flag in own]
        every = [launch for own in made for launch in own]
        backwards = backend.order == device.BACKWARD
        order = swapped(flags) if backwards else range(len(flags))
        # With what each is told.
        self._launches = [(every[i], backend.beside or flags[i]) for i in order]
        backend.functions.prepare(map(Kernel.of, every))

    def run(self) -> None:
        for launch, flag in self._launches:
            kernel = Kernel.of(launch)
            self._backend.executed[kernel] += 1
            try:
                self._backend.functions[kernel].launch(
                    self._parameters(launch, flag),
                    launch.groups,
                    launch.threads,
                    launch.shared,
                    launch.cluster,
                    self._backend.order,
                    beside=flag,
                )
            except device.KernelError as fault:
                fault.add_note(f"in {kernel}")
                raise

    def time(self) -> list[float]:
        raise BackendError("A simulator's times say nothing of a GPU's.")

    def _parameters(self, launch: Launch, flag: bool) -> list[bytes]:
        address = self._memory.address
        return parameters(
            launch, flag, address, lambda map: device.encoded(map, address(map.buffer))
        )


def swapped(flags: Sequence[bool]) -> list[int]:
    """Launches in an order in which they may work: each that runs beside the one before it comes
    first, unless that one has changed places already."""
    order = list(range(len(flags)))
    for i, flag in enumerate(flags):
        if flag and order[i - 1] == i - 1:
            order[i - 1 : i + 1] = i, i - 1
    return order


class SimulatedCudaBackend:
    """`order`: of threads and blocks, see device.py; backwards, launches that run beside one
    another change places too. `beside`: all are told that they run beside the one before."""

    name = "cuda"
    limits: Limits = ON_PAPER.limits

    def __init__(
        self,
        target: Target = HOPPER,
        kernels: Table | None = None,
        functions: build.Kernels | None = None,
        order: int = device.FORWARD,
        beside: bool = False,
    ) -> None:
        self.kernels = kernels or table(target)
        self.functions = functions or OWN
        self.order = order
        self.beside = beside
        self.executed: Counter[Kernel] = Counter()

    def allocate(self, layout: Layout) -> SimulatedMemory:
        return SimulatedMemory(layout)

    def compile(self, plan: Plan, memory: Memory) -> SimulatedProgram:
        assert isinstance(memory, SimulatedMemory)
        return SimulatedProgram(self, plan, memory)


OWN = build.Kernels()


def enqueued(plan: Plan) -> list[Launch]:
    """What a plan launches, in its order."""
    return [launch for dispatch in plan.dispatches for launch in launches(dispatch)]
