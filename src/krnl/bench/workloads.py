"""What is timed as a whole: an MLP block, a decoder layer, attention alone. Inputs are random and
the same each time; the results are checked against float64 before anybody asks for seconds."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from krnl.backends.base import Backend, Memory, Program
from krnl.backends.reference import ReferenceBackend
from krnl.dtypes import F32, I32, DType
from krnl.errors import BackendError
from krnl.models.attention import Context
from krnl.models.config import ModelConfig, linear_paths, rope_frequencies
from krnl.models.decoder import Decoder
from krnl.models.lora import AdapterShape, GroupShape, Linear, LoraGroup, Trainable
from krnl.models.mlp import Mlp
from krnl.models.weights import Weights
from krnl.ops.attention import attention, attention_backward
from krnl.ops.pointwise import rope_table
from krnl.plan.arena import Plan, plan
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.step import Step

# A result is a sum of sums, each rounded to the activation type on its way: an error of one such
# rounding each, a few of which add up. The products themselves are summed in float32 over thousands
# of terms.
ROUNDINGS, SUMMED = 4, 64
# How long a GPU is kept busy before it is waited for, and the way there and back is 20 µs at most.
BUSY_SECONDS = 0.02

T = TypeVar("T")


def warmed(run: Callable[[], T]) -> T:
    """A contestant's turn: what the second of two runs returns. The first finds caches, clocks and
    threads as others left them, and is nobody's time."""
    run()
    return run()


def replayed(program: Program, memory: Memory, live: Buffer, count: int) -> float:
    """Seconds of one of `count` replays that are enqueued one behind the other and waited for
    together, by the clock on the wall. `live`: something small to read."""
    start = time.perf_counter()
    for _ in range(count):
        program.run()
    memory.read(live)  # returns when everything has run
    return (time.perf_counter() - start) / count


def enough(backend: Backend, run: Callable[[], float]) -> int:
    """How many runs a turn is made of, for KRNL and for who is compared with it. `run`: seconds of
    one. On the CPU one will do; a GPU needs so many that enqueueing and waiting is no part of what
    is measured."""
    if backend.name == "cpu":
        return 1
    return math.ceil(BUSY_SECONDS / warmed(run))


@dataclass(frozen=True)
class BlockShape:
    """The MLP block of the report: RMSNorm, SwiGLU, adapters on gate and up, frozen weights."""

    tokens: int = 512
    width: int = 2048
    ffn: int = 5632
    rank: int = 32

    @property
    def flops(self) -> int:
        """Of the products forward and backward, the gradient at the input included."""
        frozen = 2 * 3 * self.width * self.ffn
        # uᵀ, its share of the output, dB, v, dA, v's share of dx: twice, for gate and for up.
        adapters = 2 * (3 * self.width * self.rank + 3 * self.rank * self.ffn)
        return 2 * self.tokens * (frozen + adapters)


class ResidentWeights(Weights):
    """Matrices of one type that no file holds."""

    def __init__(self, dtype: DType):
        super().__init__({})
        self._dtype = dtype

    def matrix(self, name: str, shape: tuple[int, int]) -> Buffer:
        return self.held.setdefault(name, Buffer(name, shape, self._dtype, Kind.WEIGHT))


class Workload:
    """A compiled step of `tokens` rows with its inputs in place. `results` are what it leaves
    behind, by name."""

    def __init__(
        self,
        step: Step,
        backend: Backend,
        tokens: int,
        inputs: dict[Buffer, np.ndarray],
        results: dict[str, Buffer],
    ):
        self._step = step
        self._backend = backend
        inputs = {**inputs, self._live: np.array([tokens])}
        self.inputs = {b: values.astype(b.dtype.numpy) for b, values in inputs.items()}
        self._outputs = results
        self.plan, self.memory, self._program = self._compiled(backend)

    @property
    def flops(self) -> int:
        return self.plan.flops

    @cached_property
    def repeats(self) -> int:
        """Replays of a run."""
        return enough(self._backend, lambda: self._seconds(1))

    def run(self) -> float:
        """Seconds of a replay, of `repeats` that are waited for together."""
        return self._seconds(self.repeats)

    def turn(self) -> float:
        """Seconds of a replay in a run that follows another."""
        return warmed(self.run)

    def results(self) -> dict[str, np.ndarray]:
        """What one replay leaves, gradients counted from zero."""
        return self._replayed(self.memory, self._program)

    def norms(self) -> dict[str, float]:
        """The Euclidean norm of each result."""
        return {
            name: float(np.linalg.norm(values.astype(np.float64)))
            for name, values in self.results().items()
        }

    def check(self) -> None:
        """BackendError where a result is not what the step defines, computed in float64."""
        _, memory, program = self._compiled(ReferenceBackend())
        wanted = self._replayed(memory, program)
        allowed = ROUNDINGS * self._step.activation.eps + SUMMED * F32.eps
        for name, values in self.results().items():
            difference = np.linalg.norm(values.astype(np.float64) - wanted[name])
            share = difference / np.linalg.norm(wanted[name])
            if not share <= allowed:
                raise BackendError(
                    f"{self._step.name}: {name} is off by {share:.2g} of its norm where rounding "
                    f"explains {allowed:.2g}. A wrong step is not timed; krnl doctor says more."
                )

    def _seconds(self, count: int) -> float:
        return replayed(self._program, self.memory, self._live, count)

    @property
    def _live(self) -> Buffer:
        assert self._step.live is not None
        return self._step.live

    def _compiled(self, backend: Backend) -> tuple[Plan, Memory, Program]:
        (planned,) = plan([self._step], backend.kernels, backend.limits.largest_block)
        memory = backend.allocate(planned.layout)
        for buffer, values in self.inputs.items():
            if buffer in planned.layout.places:
                memory.write(buffer, values)
        return planned, memory, backend.compile(planned, memory)

    def _replayed(self, memory: Memory, program: Program) -> dict[str, np.ndarray]:
        for buffer in {b.root for b in self._outputs.values() if b.kind is Kind.GRAD}:
            memory.write(buffer, np.zeros(buffer.shape))
        program.run()
        return {name: memory.read(buffer) for name, buffer in self._outputs.items()}


def mlp_block(backend: Backend, activation: DType, shape: BlockShape) -> Workload:
    """Forward and backward. The numbers are those of bench/block.py, drawn in its order, so
    that what other tools compute can be compared."""
    weights = ResidentWeights(activation)
    gate_up = GroupShape(
        shape.width, (Linear("gate_proj", shape.ffn), Linear("up_proj", shape.ffn))
    )
    down = GroupShape(shape.ffn, (Linear("down_proj", shape.width),))
    adapters = {name: AdapterShape(shape.rank, 1.0) for name in ("gate_proj", "up_proj")}
    trainable = Trainable([gate_up, down], adapters, activation)
    block = Mlp(
        weights.vector("norm", shape.width),
        LoraGroup(gate_up, weights, adapters, trainable, 0),
        LoraGroup(down, weights, adapters, trainable, 1),
        eps=1e-5,
    )
    x, dy, step = _ends("the MLP block", shape.tokens, shape.width, activation)
    _, saved = block.forward(step, x, None)
    dx = block.backward(step, dy, saved, None)
    inputs = _drawn_inputs(weights, trainable, (x, dy))
    return Workload(step, backend, shape.tokens, inputs, {"dx": dx, **_gradients(trainable)})


def decoder_layer(
    backend: Backend, activation: DType, config: ModelConfig, tokens: int, rank: int
) -> Workload:
    """The first layer of a model, forward and backward with the gradient at its input, adapters on
    every linear layer; one document."""
    weights = ResidentWeights(activation)
    paths = [path for path in linear_paths(config) if path.startswith("model.layers.0.")]
    adapters = {path: AdapterShape(rank, 1.0) for path in paths}
    decoder = Decoder(config, weights, adapters, activation)
    layer, trainable = decoder.layers[0], decoder.trainable
    x, dy, step = _ends("the decoder layer", tokens, config.hidden_size, activation)
    position, start, stop = (
        Buffer(name, (tokens,), I32, Kind.INPUT) for name in ("position", "start", "stop")
    )
    cos, sin = step(rope_table, position, decoder.inv_freq, scale=rope_frequencies(config)[1])
    step.save(cos, sin)
    at = Context(cos, sin, start, stop, None)
    _, saved = layer.forward(step, x, at)
    dx = layer.backward(step, dy, saved, at, wanted=True)
    assert dx is not None
    inputs = _drawn_inputs(weights, trainable, (x, dy)) | _one_document(start, stop)
    inputs[position] = np.arange(tokens)
    return Workload(step, backend, tokens, inputs, {"dx": dx, **_gradients(trainable)})


@dataclass(frozen=True)
class HeadShape:
    """Heads of attention, and how many of keys and values."""

    heads: int = 32
    kv_heads: int = 8
    size: int = 64


def attention_alone(
    backend: Backend, activation: DType, shape: HeadShape, tokens: int, backward: bool
) -> Workload:
    """Causal attention over one document, without its projections."""
    q, k, v, do = (
        Buffer(name, (tokens, heads, shape.size), activation, Kind.INPUT)
        for name, heads in (
            ("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads), ("do", shape.heads),
        )
    )  # fmt: skip
    start, stop = (Buffer(name, (tokens,), I32, Kind.INPUT) for name in ("start", "stop"))
    step = Step("attention", activation, Buffer("live", (1,), I32, Kind.INPUT))
    scale = shape.size**-0.5
    o, lse = step(attention, q, k, v, start, stop, scale=scale)
    results = {"o": o}
    if backward:
        dq, dk, dv = step(attention_backward, do, q, k, v, o, lse, start, scale=scale)
        results = {"dq": dq, "dk": dk, "dv": dv}
    random = np.random.default_rng(0)
    inputs = {b: random.standard_normal(b.shape, np.float32) for b in (q, k, v, do)}
    return Workload(step, backend, tokens, inputs | _one_document(start, stop), results)


def _ends(name: str, tokens: int, width: int, activation: DType) -> tuple[Buffer, Buffer, Step]:
    """What comes in from both sides of a block, and the step it goes into."""
    x, dy = (Buffer(end, (tokens, width), activation, Kind.INPUT) for end in ("x", "dy"))
    return x, dy, Step(name, activation, Buffer("live", (1,), I32, Kind.INPUT))


def _drawn_inputs(
    weights: Weights, trainable: Trainable, ends: tuple[Buffer, Buffer]
) -> dict[Buffer, np.ndarray]:
    """Norms are one. Matrices keep the size of what they multiply, so that every part of a block
    has a say in its results."""
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return random.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)

    inputs = {
        b: matrix(*b.shape) if len(b.shape) == 2 else np.ones(b.shape)
        for b in weights.held.values()
    }
    modules = {
        path: (matrix(part.rank, part.in_features), matrix(part.out_features, part.rank))
        for path, part in trainable.parts.items()
    }
    inputs |= {**weights.constants, trainable.compute: trainable.pack(modules)}
    return inputs | {end: random.standard_normal(end.shape, np.float32) for end in ends}


def _one_document(start: Buffer, stop: Buffer) -> dict[Buffer, np.ndarray]:
    """Each token sees itself and all before it."""
    return {start: np.zeros(start.size), stop: np.arange(stop.size) + 1}


def _gradients(trainable: Trainable) -> dict[str, Buffer]:
    """Parts of the gradient region: path.dA and path.dB."""
    named = {}
    for path, part in trainable.parts.items():
        a, b = (part.rank, part.in_features), (part.out_features, part.rank)
        named[f"{path}.dA"] = trainable.grad.part(f"{path}.dA", part.a, a)
        named[f"{path}.dB"] = trainable.grad.part(f"{path}.dB", part.b, b)
    return named
