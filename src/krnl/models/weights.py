"""Weight buffers, made as model code asks for them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from krnl.dtypes import F32, DType
from krnl.plan.buffer import Buffer, FileRegion, Kind


@dataclass(frozen=True)
class Stored:
    """Where a tensor of the checkpoint can be mapped (None: it lies askew there), and its type."""

    region: FileRegion | None
    dtype: DType


class Weights:
    """Matrices stay where they lie in the checkpoint's files, in their own type; one that cannot be
    mapped is held in it. Vectors (norms, biases) and constants are small: they are held in float32.
    What is held is written once after allocation."""

    def __init__(self, stored: Mapping[str, Stored]):
        self._stored = stored
        self._made: dict[str, Buffer] = {}
        self.held: dict[str, Buffer] = {}  # to be filled from the checkpoint, by tensor name
        self.constants: dict[Buffer, np.ndarray] = {}  # to be filled with these values

    def matrix(self, name: str, shape: tuple[int, int]) -> Buffer:
        """The tensor `name` as it is stored. The same buffer each time (a tied head is the
        embedding)."""
        if name not in self._made:
            stored = self._stored[name]
            buffer = Buffer(name, shape, stored.dtype, Kind.WEIGHT, file=stored.region)
            self._made[name] = buffer
            if stored.region is None:
                self.held[name] = buffer
        return self._made[name]

    def vector(self, name: str, size: int) -> Buffer:
        """The tensor `name` as float32."""
        return self.held.setdefault(name, Buffer(name, (size,), F32, Kind.WEIGHT))

    def constant(self, name: str, values: np.ndarray) -> Buffer:
        """A float32 buffer holding `values`."""
        buffer = Buffer(name, values.shape, F32, Kind.WEIGHT)
        self.constants[buffer] = values
        return buffer
