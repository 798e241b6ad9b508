"""The reference backend replays any plan in float64, one NumPy function per call. Slow, and
right."""

import time
from typing import Any

import numpy as np

from krnl.backends.base import Limits, Memory
from krnl.dtypes import BF16, F16, F32, DType
from krnl.plan.arena import Layout, Plan
from krnl.plan.buffer import Buffer
from krnl.plan.lower import Row, Table
from krnl.plan.op import LIVE, Op, Parameter
from krnl.plan.step import Argument, Call, members


class _EveryOp(Table):
    """Takes every op as it is: the op's own function is the kernel."""

    def choose(self, call: Call) -> Row:
        return Row(call.op.name, why="the definition")


class ReferenceMemory:
    """One float64 (or int64) array per root buffer. Types narrower than that are not modelled,
    unless it `rounds`: then a buffer's values are those of its type, as they are on a device."""

    def __init__(self, rounds: bool = False) -> None:
        self._arrays: dict[Buffer, np.ndarray] = {}
        self.rounds = rounds

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

    def rounded(self, values: np.ndarray, dtype: DType) -> np.ndarray:
        """The values that a buffer of `dtype` keeps of these."""
        if self.rounds and dtype.is_float:
            return np.asarray(values).astype(dtype.numpy)
        return values

    def write(self, buffer: Buffer, values: np.ndarray) -> None:
        self.view(buffer)[...] = self.rounded(values, buffer.dtype)

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
    # Rounding makes infinities on purpose; NumPy need not warn of what comes of them.
    quiet: Any = "ignore" if memory.rounds else None
    with np.errstate(over=quiet, invalid=quiet, divide=quiet):
        results = op.evaluate(inputs, old, call.attributes)
        for (parameter, argument), result in zip(outputs, results, strict=True):
            parts = result if parameter.group else (result,)
            for buffer, part in zip(members(argument), parts, strict=True):
                target = _rows(memory.view(buffer), parameter, live)
                target[...] = memory.rounded(part, buffer.dtype)


def _live(op: Op, call: Call, memory: ReferenceMemory) -> int | None:
    for parameter, argument in zip(op.inputs, call.inputs, strict=True):
        if parameter.name == LIVE:
            assert isinstance(argument, Buffer)
            return int(memory.view(argument)[0])
    return None


def _rows(array: np.ndarray, parameter: Parameter, live: int | None) -> np.ndarray:
    return array if live is None or parameter.letters[0] != "n" else array[:live]


class ReferenceBackend:
    """Computes in float64. With `rounds`, what is stored is rounded to its buffer's type: fp16 then
    overflows and vanishes as on a device that computes in it."""

    name = "reference"
    limits = Limits(
        memory=2**62,
        largest_block=2**62,
        scratch=0,
        activations=(F32, BF16, F16),
        threads=1,
        mapped_alignment=1,
    )
    kernels: Table = _EveryOp("reference", ())

    def __init__(self, rounds: bool = False) -> None:
        self._rounds = rounds

    def allocate(self, layout: Layout) -> ReferenceMemory:
        return ReferenceMemory(self._rounds)

    def compile(self, plan: Plan, memory: Memory) -> ReferenceProgram:
        assert isinstance(memory, ReferenceMemory)
        return ReferenceProgram([d.call for d in plan.dispatches], memory)
