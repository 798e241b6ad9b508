"""A product over and over, each time on the next copy of its operands: between two turns of a copy
so much else is read that no cache still holds it, as in training, where every layer has its own."""

import math
from dataclasses import replace

import numpy as np

from krnl.backends.base import Backend
from krnl.bench.products import Product, checked
from krnl.bench.workloads import enough, replayed, warmed

ROTATED_BYTES = 200_000_000  # of all copies together; the largest cache of a GPU has 50 to 130 MB
LEAST_COPIES, MOST_COPIES = 2, 20
LEAST_CALLS = 20  # in a program


class Rotation:
    """A program of `calls` products over `copies` copies of the operands, all of them the same
    numbers and all with one result. `norm` and `row`: of the result, and the first of its rows."""

    def __init__(self, product: Product, backend: Backend):
        """BackendError if the product is wrong."""
        operands = product.k * (
            product.m * product.activation.size + product.n * product.weight.size
        )
        copies = math.ceil(ROTATED_BYTES / operands)
        self.copies = min(max(copies, LEAST_COPIES), MOST_COPIES)
        self.calls = self.copies * math.ceil(LEAST_CALLS / self.copies)
        first = product.step()
        (call,) = first.calls
        others = [product.step().calls[0] for _ in range(1, self.copies)]
        calls = [call, *(replace(other, outputs=call.outputs) for other in others)]
        assert first.live is not None
        self._live = first.live
        self._program, self._memory, result = checked(
            first,
            calls * (self.calls // self.copies),
            backend,
            product.table or backend.kernels,
            product.inside,
        )
        self.norm = float(np.linalg.norm(result))
        self.row = [float(value) for value in result[0]]
        self.repeats = enough(backend, lambda: self._seconds(1))

    def turn(self) -> float:
        """Seconds of a product."""
        return warmed(lambda: self._seconds(self.repeats)) / self.calls

    def _seconds(self, count: int) -> float:
        """Of the program."""
        return replayed(self._program, self._memory, self._live, count)
