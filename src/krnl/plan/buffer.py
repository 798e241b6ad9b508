"""Buffers: named, typed pieces of device memory that exist only on paper until a backend allocates
them."""

from dataclasses import dataclass
from enum import Enum
from math import prod
from pathlib import Path

from krnl.dtypes import DType
from krnl.errors import PlanError


class Kind(Enum):
    """What a buffer is for. Only temps share memory with one another."""

    WEIGHT = "weight"  # frozen; may lie in a mapped file
    STATE = "state"  # lives across updates: adapters, moments, sums
    GRAD = "grad"
    INPUT = "input"  # written by the host before a run
    TEMP = "temp"  # means something between its first write and its last read


@dataclass(frozen=True)
class FileRegion:
    """Where a weight lies in a file: bytes from its start."""

    path: Path
    offset: int


@dataclass(frozen=True, eq=False)
class Buffer:
    """`shape` elements of `dtype`, row-major and contiguous. A view shares the memory of `base`
    from element `start` on. Buffers are compared by identity."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    kind: Kind
    base: "Buffer | None" = None
    start: int = 0
    file: FileRegion | None = None

    @property
    def root(self) -> "Buffer":
        """The buffer that owns the memory."""
        return self.base or self

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.size

    def part(self, name: str, start: int, shape: tuple[int, ...]) -> "Buffer":
        """A view of prod(shape) elements from element `start` of this buffer."""
        if start < 0 or start + prod(shape) > self.size:
            raise PlanError(
                f"A part of {prod(shape)} elements from {start} does not lie inside {self}."
            )
        return Buffer(name, shape, self.dtype, self.kind, self.root, self.start + start)

    def rows(self, start: int, stop: int) -> "Buffer":
        """Rows start ≤ i < stop of the first axis."""
        width = prod(self.shape[1:])
        return self.part(
            f"{self.name}[{start}:{stop}]", start * width, (stop - start, *self.shape[1:])
        )

    def heads(self, count: int) -> "Buffer":
        """[n, h·d] seen as [n, h, d]."""
        n, width = self.shape
        return self.part(self.name, 0, (n, count, width // count))

    def flat(self) -> "Buffer":
        """[n, h, d] seen as [n, h·d]."""
        n, *rest = self.shape
        return self.part(self.name, 0, (n, prod(rest)))

    def __repr__(self) -> str:
        return f"{self.name}[{','.join(map(str, self.shape))}]:{self.dtype}"
