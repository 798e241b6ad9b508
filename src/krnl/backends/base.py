"""What a device must be able to do: six methods."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from krnl.dtypes import DType
from krnl.plan.arena import Layout, Plan
from krnl.plan.buffer import Buffer
from krnl.plan.lower import Table


@dataclass(frozen=True)
class Limits:
    """What a device has. Bytes, except where said."""

    memory: int  # what may be used at all
    largest_block: int  # one allocation
    scratch: int  # what the engine itself holds beside the plan
    activations: tuple[DType, ...]  # types it computes in, the preferred one first
    threads: int  # host threads that it uses
    # Elements; a weight is mapped if it begins at a multiple in its file. None: none is mapped.
    mapped_alignment: int | None
    # All this is memory of the device's own, beside the host's. That it can read too: tables of
    # which it needs a few rows at a time are left there.
    own_memory: bool = False
    head_rows: int = 512  # labelled tokens whose logits exist at once: enough to be fast, at least


@dataclass(frozen=True)
class Roof:
    """The most that a device was seen to do: operations a second by type of activations, bytes read
    a second."""

    flops: dict[DType, float]
    nbytes: float


class Memory(Protocol):
    """The allocated blocks of a layout."""

    def write(self, buffer: Buffer, values: np.ndarray) -> None:
        """Copies values, rounded to the buffer's type, into a buffer or view."""

    def read(self, buffer: Buffer) -> np.ndarray:
        """A copy in the buffer's type, after everything enqueued has run: the only synchronisation
        point."""


class Program(Protocol):
    """A compiled plan."""

    def run(self) -> None:
        """Enqueues one replay."""

    def time(self) -> list[float]:
        """Runs the dispatches one by one; seconds of each. The profiler's only source."""


class Backend(Protocol):
    name: str
    limits: Limits
    kernels: Table

    def allocate(self, layout: Layout) -> Memory: ...

    def compile(self, plan: Plan, memory: Memory) -> Program: ...


@runtime_checkable
class MeasuresRoof(Protocol):
    """A backend that can make its device do the most that it can."""

    def measure_roof(self) -> Roof:
        """What it does at this moment, after at most a second or so."""


@dataclass(frozen=True)
class Paper:
    """A device on paper: enough to plan for one that is not here. How much memory it has is not
    known."""

    name: str
    limits: Limits
    kernels: Table
