"""The reference backend replays any plan in float64, one NumPy function per call. Slow, and
right."""

import time
from typing import Any

import numpy as np

from krnl.backends.base import Limits, Memory
from krnl.dtypes import BF16, F16, F32
from krnl.plan.arena import Layout, Plan
from krnl.plan.buffer import Buffer
from krnl.plan.lower import Row, Table
from krnl.plan.op import LIVE, Op, Parameter
from krnl.plan.step import Argument, Call


class _EveryOp(Table):
    """Takes every op as it is: the op's own function is the kernel."""

    def choose(self, call: Call) -> Row:
        return Row(call.op.name, why="the definition")


class ReferenceMemory:
    """One float64 (or int64) array per root buffer; types narrower than that are not modelled."""

    def __init__(self) -> None:
        self._arrays: dict[Buffer, np.ndarray] = {}

    def view(self, buffer: Buffer) -> np.ndarray:
        """The buffer's own memory, shaped."""
        root = buffer.root
        if root not in self._arrays:
            wide = np.float64 if root.dtype.is_float else np.int64
            if root.file:
                raw = np.fromfile(
                    root.file.path, root.dtype.numpy, root.size, offset=root.file.offset
                )
                self._arrays[root] = raw.astype(wide)
            else:
                self._arrays[root] = np.zeros(root.size, wide)
        return self._arrays[root][buffer.start : buffer.start + buffer.size].reshape(buffer.shape)

    def write(self, buffer: Buffer, values: np.ndarray) -> None:
        self.view(buffer)[...] = values

    def read(self, buffer: Buffer) -> np.ndarray:
        return self.view(buffer).copy()


class ReferenceProgram:
    def __init__(self, calls: list[Call], memory: ReferenceMemory):
        self._calls = calls
        self._memory = memory

    def run(self) -> None:
        for call in self._calls:
            evaluate(call, self._memory)

    def time(self) -> list[float]:
        seconds = []
        for call in self._calls:
            start = time.perf_counter()
            evaluate(call, self._memory)
            seconds.append(time.perf_counter() - start)
        return seconds


def evaluate(call: Call, memory: ReferenceMemory) -> None:
    """One call: hands the reference the live rows only, and stores what it returns."""
    op = call.op
    live = _live(op, call, memory)

    def values(parameter: Parameter, argument: Argument) -> Any:
        if argument is None:
            return None
        if isinstance(argument, tuple):
            return [_rows(memory.view(b), parameter, live) for b in argument]
        return _rows(memory.view(argument), parameter, live)

    inputs = [values(p, a) for p, a in zip(op.inputs, call.inputs, strict=True) if p.name != LIVE]
    outputs = list(zip(op.outputs, call.outputs, strict=True))
    old = [values(p, a) for p, a in outputs if p.updated]
    for (parameter, argument), result in zip(
        outputs, op.evaluate(inputs, old, call.attributes), strict=True
    ):
        target = values(parameter, argument)
        if parameter.group:
            for array, part in zip(target, result, strict=True):
                array[...] = part
        else:
            target[...] = result


def _live(op: Op, call: Call, memory: ReferenceMemory) -> int | None:
    for parameter, argument in zip(op.inputs, call.inputs, strict=True):
        if parameter.name == LIVE:
            assert isinstance(argument, Buffer)
            return int(memory.view(argument)[0])
    return None


def _rows(array: np.ndarray, parameter: Parameter, live: int | None) -> np.ndarray:
    return array if live is None or parameter.letters[0] != "n" else array[:live]


class ReferenceBackend:
    name = "reference"
    limits = Limits(
        memory=2**62, largest_block=2**62, scratch=0, activations=(F32, BF16, F16), threads=1
    )
    kernels: Table = _EveryOp("reference", ())

    def allocate(self, layout: Layout) -> ReferenceMemory:
        return ReferenceMemory()

    def compile(self, plan: Plan, memory: Memory) -> ReferenceProgram:
        assert isinstance(memory, ReferenceMemory)
        return ReferenceProgram([d.call for d in plan.dispatches], memory)
