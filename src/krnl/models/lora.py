"""LoRA: the trainable region, and groups of linear layers that share their input."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from krnl.dtypes import F32, DType
from krnl.models.weights import Weights
from krnl.ops.gemm import (
    lora_a_grad,
    lora_b_grad,
    lora_down,
    lora_linear,
    lora_linear_backward,
    lora_up_backward,
)
from krnl.ops.pointwise import dropout, dropout_backward
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.step import Step


@dataclass(frozen=True)
class AdapterShape:
    """An adapter on one linear layer: y += scale · (x Aᵀ) Bᵀ with A [rank, in] and B [out,
    rank]."""

    rank: int
    scale: float


@dataclass(frozen=True)
class Linear:
    """A frozen linear layer by its path in the checkpoint."""

    path: str
    out_features: int
    bias: bool = False
    weight: str = ""  # tensor name, where it is not path + ".weight" (a tied head)


@dataclass(frozen=True)
class GroupShape:
    """Linear layers that share an input, as they are to be built."""

    in_features: int
    linears: tuple[Linear, ...]


class Dropout:
    """Dropout on what enters the adapters. Masks follow from (key, stream, document, position,
    column) alone."""

    def __init__(self, rate: float, document: Buffer, position: Buffer, key: Buffer):
        self.rate = rate
        self.document = document
        self.position = position
        self.key = key


class LoraGroup:
    """Frozen linear layers over one input, with adapters on any of them. Members share a dropout
    mask.

    The backward pass is `up_backward`, `input_gradient`, `down_backward`, in this order: dB needs
    nothing of v, nor dA of the gradient at the input, so a GPU may form each beside the other."""

    def __init__(
        self,
        shape: GroupShape,
        weights: Weights,
        adapters: Mapping[str, AdapterShape],
        trainable: "Trainable",
        stream: int,
    ):
        self.weight = tuple(
            weights.matrix(m.weight or f"{m.path}.weight", (m.out_features, shape.in_features))
            for m in shape.linears
        )
        biases = tuple(
            weights.vector(f"{m.path}.bias", m.out_features) for m in shape.linears if m.bias
        )
        self.bias = self._spread_bias(shape, weights, biases)
        ranks = [adapters[m.path].rank if m.path in adapters else 0 for m in shape.linears]
        self.rank = sum(ranks)
        self.stream = stream
        if self.rank:
            scales = [adapters[m.path].scale if m.path in adapters else 0.0 for m in shape.linears]
            name = shape.linears[0].path
            self.scale = weights.constant(f"{name}.scale", np.repeat(scales, ranks))
            self.trained = trainable.take(shape, ranks)

    @staticmethod
    def _spread_bias(
        shape: GroupShape, weights: Weights, biases: tuple[Buffer, ...]
    ) -> tuple[Buffer, ...] | None:
        if not biases:
            return None
        found = iter(biases)
        return tuple(
            next(found) if m.bias else weights.constant(f"{m.path}.bias", np.zeros(m.out_features))
            for m in shape.linears
        )

    @property
    def a(self) -> Buffer | None:
        return self.trained.a if self.rank else None

    @property
    def b(self) -> tuple[Buffer, ...] | None:
        return self.trained.b if self.rank else None

    def down(
        self, step: Step, x: Buffer, noise: Dropout | None, live: Buffer | None = None
    ) -> Buffer | None:
        """u = (dropout(x) Aᵀ) ∘ scale for all members, or None where nothing is adapted."""
        if not self.rank:
            return None
        u: Buffer = step(lora_down, self._dropped(step, x, noise), self.a, self.scale, live=live)
        step.save(u)
        return u

    def forward(
        self,
        step: Step,
        x: Buffer,
        noise: Dropout | None,
        residual: Buffer | None = None,
        live: Buffer | None = None,
        into: Buffer | None = None,
    ) -> tuple[tuple[Buffer, ...], Buffer | None]:
        """The members' outputs (residual added; `into` says where a single one goes), and u for the
        backward pass."""
        u = self.down(step, x, noise, live)
        target = None if into is None else (into,)
        y = step(
            lora_linear, x, self.weight, u, self.b, self.bias, residual, live=live, into=target
        )
        return y, u

    def up_backward(
        self, step: Step, dy: tuple[Buffer, ...], u: Buffer | None, live: Buffer | None = None
    ) -> Buffer | None:
        """v = (dy B) ∘ scale, or None where nothing is adapted. Adds to dB."""
        if not self.rank:
            return None
        v: Buffer = step(lora_up_backward, dy, self.b, self.scale, live=live)
        step(lora_b_grad, dy, u, into=self.trained.db, live=live)
        return v

    def down_backward(
        self,
        step: Step,
        v: Buffer | None,
        x: Buffer,
        noise: Dropout | None,
        live: Buffer | None = None,
    ) -> None:
        """Adds to dA."""
        if v is not None:
            step(lora_a_grad, v, self._dropped(step, x, noise), into=self.trained.da, live=live)

    def input_gradient(
        self,
        step: Step,
        dy: tuple[Buffer, ...],
        v: Buffer | None,
        noise: Dropout | None,
        live: Buffer | None = None,
        into: Buffer | None = None,
    ) -> Buffer:
        """dx = Σ dy_i W_i + v A, the adapters' share through the dropout mask."""
        if v is None or noise is None or self.a is None:
            dx: Buffer = step(
                lora_linear_backward, dy, self.weight, v, self.a, live=live, into=into
            )
            return dx
        frozen = step(lora_linear_backward, dy, self.weight, None, None, live=live)
        adapted = step(lora_linear_backward, (v,), (self.a,), None, None, live=live)
        dropped: Buffer = step(
            dropout_backward,
            adapted,
            noise.document,
            noise.position,
            noise.key,
            frozen,
            live=live,
            into=into,
            rate=noise.rate,
            stream=self.stream,
        )
        return dropped

    def _dropped(self, step: Step, x: Buffer, noise: Dropout | None) -> Buffer:
        if noise is None:
            return x
        dropped: Buffer = step(
            dropout,
            x,
            noise.document,
            noise.position,
            noise.key,
            rate=noise.rate,
            stream=self.stream,
        )
        return dropped


@dataclass(frozen=True)
class TrainedGroup:
    """The parts of the regions that belong to a group: compute copies of A (stacked) and B, and
    their gradients."""

    a: Buffer
    b: tuple[Buffer, ...]
    da: Buffer
    db: tuple[Buffer, ...]


@dataclass(frozen=True)
class Part:
    """Where an adapter's A [rank, in] and B [out, rank] lie in the regions: elements from their
    start."""

    rank: int
    in_features: int
    out_features: int
    a: int
    b: int


class Trainable:
    """Everything that is trained, as contiguous regions in one order: float32 parameters, gradients
    and moments, and the copy in the activation type with which the step computes (the parameters
    themselves where that is float32)."""

    def __init__(
        self, groups: Sequence[GroupShape], adapters: Mapping[str, AdapterShape], activation: DType
    ):
        self.size = sum(
            adapters[m.path].rank * (g.in_features + m.out_features)
            for g in groups
            for m in g.linears
            if m.path in adapters
        )
        region = (self.size,)
        self.param = Buffer("adapter", region, F32, Kind.STATE)
        self.grad = Buffer("adapter_grad", region, F32, Kind.GRAD)
        self.first = Buffer("adam_first", region, F32, Kind.STATE)
        self.second = Buffer("adam_second", region, F32, Kind.STATE)
        same = activation is F32
        self.compute = (
            self.param if same else Buffer("adapter_compute", region, activation, Kind.STATE)
        )
        self.parts: dict[str, Part] = {}
        self._taken = 0

    def take(self, shape: GroupShape, ranks: Sequence[int]) -> TrainedGroup:
        """Hands out the next parts of the regions: the members' A stacked, then each B."""
        name, c, total = shape.linears[0].path, shape.in_features, sum(ranks)
        start = a = self._taken
        b = start + total * c
        starts = []
        for linear, rank in zip(shape.linears, ranks, strict=True):
            starts.append(b)
            if rank:
                self.parts[linear.path] = Part(rank, c, linear.out_features, a, b)
            a, b = a + rank * c, b + rank * linear.out_features
        self._taken = b

        def each(region: Buffer, letter: str) -> tuple[Buffer, ...]:
            return tuple(
                region.part(f"{linear.path}.{letter}", at, (linear.out_features, rank))
                for linear, rank, at in zip(shape.linears, ranks, starts, strict=True)
            )

        return TrainedGroup(
            a=self.compute.part(f"{name}.A", start, (total, c)),
            b=each(self.compute, "B"),
            da=self.grad.part(f"{name}.dA", start, (total, c)),
            db=each(self.grad, "dB"),
        )

    def pack(self, modules: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        """Adapters by path, (A, B), as one float32 region."""
        region = np.zeros(self.size, np.float32)
        for path, part in self.parts.items():
            a, b = modules[path]
            region[part.a : part.a + a.size] = a.ravel()
            region[part.b : part.b + b.size] = b.ravel()
        return region

    def unpack(self, region: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The inverse of `pack`."""
        return {
            path: (
                region[p.a : p.a + p.rank * p.in_features].reshape(p.rank, p.in_features),
                region[p.b : p.b + p.out_features * p.rank].reshape(p.out_features, p.rank),
            )
            for path, p in self.parts.items()
        }
