"""Single matrix products on any backend: random operands, one check against float64, then timings.

A `Work` is something to time; prepared for a backend it is a contestant of the gate. A product that
is wrong is an error and gets no figure."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from krnl.backends.base import Backend, Memory, Program
from krnl.bench.blas import blas_name
from krnl.dtypes import F32, I32, DType
from krnl.errors import BackendError
from krnl.kernels.launch import GpuRow, Launch
from krnl.kernels.metal.variants import Variant, launch
from krnl.ops.gemm import (
    lora_a_grad,
    lora_b_grad,
    lora_down,
    lora_linear,
    lora_linear_backward,
    lora_up_backward,
)
from krnl.plan.arena import plan
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.lower import Table
from krnl.plan.op import LIVE, op
from krnl.plan.step import Call, Step, members

Contestant = Callable[[], float]  # seconds of one run
SEED = 0
# Runs that are started together, and how long a contestant goes on with them. Small products need
# many: one alone finds its operands in no cache, and a GPU that waits lowers its clock.
RUNS, STEADY_SECONDS = 4, 0.02


class Work(Protocol):
    @property
    def flops(self) -> int: ...

    def prepare(self, backend: Backend) -> Contestant:
        """Checked, and ready to be timed. BackendError if its result is wrong."""


@runtime_checkable
class TellsThreads(Protocol):
    """A backend that knows how many threads of a kernel a threadgroup may have."""

    def most_threads(self, launch: Launch) -> int: ...


@dataclass(frozen=True)
class Product:
    """c[m, n] = a b over k, by the op that makes such products in training. `layout`: nn, tn (a
    lies as [k, m]) or nt (b lies as [n, k]). `narrow`: by the ops of adapters, where n is a
    rank. `table`: kernels in place of the backend's."""

    layout: str
    m: int
    n: int
    k: int
    activation: DType
    weight: DType
    narrow: bool = False
    table: Table | None = None

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    def prepare(self, backend: Backend) -> Contestant:
        step = self.step()
        return _prepare(step, backend, self.table or backend.kernels, self.inside)

    def step(self) -> Step:
        """One call, on operands of its own."""
        step = Step(str(self), self.activation, Buffer(LIVE, (1,), I32, Kind.INPUT))
        self._emit(step)
        return step

    @property
    def inside(self) -> float:
        """What a sum may be off by, as a share of the sum of absolute values."""
        rounds_weights = self.activation is not F32 and self.weight is not self.activation
        return _bound(self.k, F32) + (self.activation.eps if rounds_weights else 0.0)

    def _emit(self, step: Step) -> None:
        m, n, k = self.m, self.n, self.k
        match self.layout, self.narrow:
            case "nt", False:
                step(lora_linear, self._a(m, k), (self._b(n, k),), None, None, None, None)
            case "nn", False:
                step(lora_linear_backward, (self._a(m, k),), (self._b(k, n),), None, None)
            case "tn", False:
                step(lora_a_grad, self._a(k, m), self._b(k, n), into=self._sum())
            case "nt", True:
                step(lora_down, self._a(m, k), self._b(n, k), self._scale())
            case "nn", True:
                step(lora_up_backward, (self._a(m, k),), (self._b(k, n),), self._scale())
            case "tn", True:
                step(lora_b_grad, (self._a(k, m),), self._b(k, n), into=(self._sum(),))
            case _:
                raise ValueError(f"layout is '{self.layout}'; it must be nn, tn or nt")

    def _a(self, *shape: int) -> Buffer:
        return Buffer("a", shape, self.activation, Kind.INPUT)

    def _b(self, *shape: int) -> Buffer:
        return Buffer("b", shape, self.weight, Kind.WEIGHT)

    def _sum(self) -> Buffer:
        return Buffer("c", (self.m, self.n), F32, Kind.GRAD)

    def _scale(self) -> Buffer:
        return Buffer("scale", (self.n,), F32, Kind.STATE)

    def __str__(self) -> str:
        types = f"{self.activation} × {self.weight}"
        return f"{self.layout} {self.m}×{self.n}×{self.k}, {types}"


# The products of the report's experiments, which have no op in training.


@op("a[m,k] b[k,n] -> c[m,n]")
def nn(a: np.ndarray, b: np.ndarray) -> Any:
    return a @ b


@op("a[k,m] b[k,n] -> c[m,n]")
def tn(a: np.ndarray, b: np.ndarray) -> Any:
    return a.T @ b


@op("a[m,k] b[n,k] -> c[m,n]")
def nt(a: np.ndarray, b: np.ndarray) -> Any:
    return a @ b.T


@dataclass(frozen=True)
class Experiment:
    """A product by one of the report's kernels, which the engine does not use."""

    variant: Variant
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    def prepare(self, backend: Backend) -> Contestant:
        step = Step(str(self), self.variant.output)
        a, b = self._operands()
        product = {"nn": nn, "tn": tn, "nt": nt}[self.variant.layout]
        step(product, a, b)
        row = GpuRow(product.name, launches=lambda call, workspace: [self._launch(call)])
        table = Table(backend.kernels.backend, [row])
        return _prepare(step, backend, table, _bound(self.k, self.variant.accumulator))

    def most_threads(self, backend: Backend) -> int | None:
        """What the backend allows in a threadgroup of this kernel: fewer than usual if it takes
        many registers. None where the backend does not tell."""
        if not isinstance(backend, TellsThreads):
            return None
        a, b = self._operands()
        c = Buffer("c", (self.m, self.n), self.variant.output, Kind.TEMP)
        return backend.most_threads(launch(self.variant, a, b, c, self.m, self.n, self.k))

    def _operands(self) -> tuple[Buffer, Buffer]:
        m, n, k, layout = self.m, self.n, self.k, self.variant.layout
        shapes = (k, m) if layout[0] == "t" else (m, k), (n, k) if layout[1] == "t" else (k, n)
        a, b = (
            Buffer(name, shape, self.variant.operand, Kind.INPUT)
            for name, shape in zip("ab", shapes, strict=True)
        )
        return a, b

    def _launch(self, call: Call) -> Launch:
        a, b = call.reads()
        (c,) = call.writes()
        return launch(self.variant, a, b, c, self.m, self.n, self.k)

    def __str__(self) -> str:
        return f"{self.variant.name} {self.m}×{self.n}×{self.k}"


@dataclass(frozen=True)
class BlasProduct:
    """The same product by NumPy's library, in float32."""

    layout: str
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    def prepare(self, backend: Backend) -> Contestant:
        random = np.random.default_rng(SEED)
        m, n, k = self.m, self.n, self.k
        a = random.standard_normal((k, m) if self.layout[0] == "t" else (m, k), np.float32)
        b = random.standard_normal((n, k) if self.layout[1] == "t" else (k, n), np.float32)
        a, b = a.T if self.layout[0] == "t" else a, b.T if self.layout[1] == "t" else b
        c = np.empty((m, n), np.float32)

        def run() -> float:
            start = time.perf_counter()
            np.matmul(a, b, out=c)
            return time.perf_counter() - start

        run()
        wide = a.astype(np.float64), b.astype(np.float64)
        bound = F32.eps / 2 * np.abs(wide[0] @ wide[1]) + _bound(k, F32) * (
            np.abs(wide[0]) @ np.abs(wide[1])
        )
        _compare(f"{blas_name()}'s {self.layout}", c, wide[0] @ wide[1], bound)
        return _steady(lambda: [run() for _ in range(RUNS)])


def _bound(k: int, accumulator: DType) -> float:
    """What sums of k values may be off by, as a share of the sum of absolute values: see
    docs/tolerances.md."""
    return float(accumulator.eps * (4 * np.sqrt(k) + 4))


def drawn(buffer: Buffer, tokens: int) -> np.ndarray:
    """What is put into an operand of a product: always the same for a name and a shape, and what
    bench/products.py draws, so that what other tools compute can be compared."""
    if buffer.name == LIVE:
        values = np.full((1,), tokens)
    elif buffer.kind is Kind.GRAD:  # gradients are added to
        values = np.zeros(buffer.shape, np.float32)
    else:
        random = np.random.default_rng([SEED, *buffer.name.encode()])
        values = random.standard_normal(buffer.shape, np.float32)
    return values.astype(buffer.dtype.numpy)


def _prepare(step: Step, backend: Backend, table: Table, inside: float) -> Contestant:
    program, _, _ = checked(step, step.calls * RUNS, backend, table, inside)
    return _steady(program.time)


def checked(
    step: Step, calls: Sequence[Call], backend: Backend, table: Table, inside: float
) -> tuple[Program, Memory, np.ndarray]:
    """A program of `calls`, which are all like the one call of `step` and have one result. It is
    run once on random operands. The error may be half an ulp of the result and the share `inside`
    of the same product of absolute values. Returns the program, its memory, and the result of one
    call."""
    (call,) = step.calls
    repeated = Step(step.name, step.activation)
    repeated.calls = list(calls)
    (planned,) = plan([repeated], table, backend.limits.largest_block)
    memory = backend.allocate(planned.layout)
    tokens = call.dims["n"]
    assert isinstance(tokens, int)
    written = {buffer: drawn(buffer, tokens) for buffer in dict.fromkeys(call.reads())}
    named = {buffer.name: values for buffer, values in written.items()}
    for buffer in dict.fromkeys(buffer for each in calls for buffer in each.reads()):
        memory.write(buffer, named[buffer.name])
    (output,) = call.writes()
    memory.write(output, np.zeros(output.shape))
    program = backend.compile(planned, memory)
    program.run()
    # What is added to a sum is rounded each time; the mean is compared.
    added = len(calls) if call.op.outputs[0].updated else 1
    result = memory.read(output).astype(np.float64) / added
    exact = _evaluate(call, written, lambda values: values)
    bound = added * output.dtype.eps / 2 * np.abs(exact) + inside * _evaluate(call, written, np.abs)
    _compare(f"{step.name} on {backend.name}", result, exact, bound)
    return program, memory, result


def _steady(runs: Callable[[], list[float]]) -> Contestant:
    """The median of runs that follow one another. The first is not counted: those before it left
    the caches to it as they pleased."""

    def contestant() -> float:
        seconds = runs()[1:]
        while sum(seconds) < STEADY_SECONDS:
            seconds += runs()
        return statistics.median(seconds)

    return contestant


def _evaluate(
    call: Call,
    written: Mapping[Buffer, np.ndarray],
    change: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """The definition's result, in float64, on operands that were changed first."""

    def wide(argument: Any) -> Any:
        values = [change(written[buffer].astype(np.float64)) for buffer in members(argument)]
        return None if argument is None else values if isinstance(argument, tuple) else values[0]

    inputs = [
        wide(argument)
        for parameter, argument in zip(call.op.inputs, call.inputs, strict=True)
        if parameter.name != LIVE
    ]
    outputs = zip(call.op.outputs, call.outputs, strict=True)
    old = [wide(argument) for parameter, argument in outputs if parameter.updated]
    (result,) = call.op.evaluate(inputs, old, call.attributes)
    return np.asarray(result[0] if call.op.outputs[0].group else result)


def _compare(name: str, got: np.ndarray, exact: np.ndarray, bound: np.ndarray) -> None:
    error = np.abs(got.astype(np.float64) - exact)
    wrong = ~(error <= bound)  # NaN is wrong too
    if wrong.any():
        where = np.unravel_index(np.argmax(wrong), wrong.shape)
        place = ", ".join(str(int(i)) for i in where)
        raise BackendError(
            f"{name}: {int(wrong.sum()):,} of {wrong.size:,} elements are wrong. The first, "
            f"[{place}], is {float(got[where]):.6g} and should be {exact[where]:.6g}, give or take "
            f"{bound[where]:.2g}. A wrong product is not timed. `krnl doctor` tells more."
        )
