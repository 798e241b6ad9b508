"""Launches of the matrix products in ops/gemm.py: one for each member of a group, and one more
where the K loop is cut into chunks."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from krnl.dtypes import F16, F32, DType
from krnl.kernels.launch import GpuRow, Launch
from krnl.kernels.metal.sizes import LANES, TILE, pieces
from krnl.plan.buffer import Buffer
from krnl.plan.step import Call, members

REDUCE_THREADS = 256
PAIRS = 3  # q, k and v; an adapter's pair comes on top

# Section 5 of the report: fewer tiles leave most of the GPU without work; eight chunks, which made
# 128 threadgroups out of 16, were five times as fast.
FEW_TILES, ENOUGH_GROUPS = 32, 128
# A chunk's steps, at least: writing and reading its partial sums then moves fewer bytes than its
# operands do.
CHUNK_STEPS = 4

# gemm.metal's function constants, in the order of their indices.
CONSTANTS = (
    "aligned",
    "pairs",
    "has_adapter",
    "adapter_aligned",
    "to_floats",
    "has_scale",
    "has_bias",
    "has_residual",
    "accumulates",
    "is_dact",
)


def _constants(**values: bool | int) -> dict[int, bool | int | float]:
    """All of them by index; those that are not given are false."""
    assert values.keys() <= set(CONSTANTS)
    return {index: values.get(name, False) for index, name in enumerate(CONSTANTS)}


@dataclass(frozen=True)
class Pair:
    """Two matrices whose product is a term of the sum: `depth` values of K, and the elements from
    one row of each in memory to the next."""

    a: Buffer
    b: Buffer
    depth: int
    a_stride: int
    b_stride: int

    @property
    def aligned(self) -> bool:
        """Whether all rows begin at multiples of four elements and can be read by fours."""
        return all(x % 4 == 0 for x in (self.a_stride, self.b_stride, self.a.start, self.b.start))


@dataclass(frozen=True)
class Epilogue:
    """What becomes of the sum: y = sum · scale + bias + residual, or y += sum if it `accumulates`,
    or SwiGLU's gradients (`swiglu`: gate, up, dgate, dup) and act for y. `stride`: elements from a
    row of any of these to the next."""

    y: Buffer
    stride: int
    to_floats: bool = False  # y is made of floats, whatever the activations are
    scale: Buffer | None = None
    bias: Buffer | None = None
    residual: Buffer | None = None
    accumulates: bool = False
    swiglu: tuple[Buffer, ...] = ()

    @property
    def arguments(self) -> tuple[Buffer | None, ...]:
        y, floats = (None, self.y) if self.to_floats else (self.y, None)
        return y, floats, self.scale, self.bias, self.residual, *(self.swiglu or (None,) * 4)

    @property
    def constants(self) -> dict[str, bool]:
        return {
            "to_floats": self.to_floats,
            "has_scale": self.scale is not None,
            "has_bias": self.bias is not None,
            "has_residual": self.residual is not None,
            "accumulates": self.accumulates,
            "is_dact": bool(self.swiglu),
        }


@dataclass(frozen=True)
class Product:
    """[rows, columns] = Σ a b over the pairs, and its epilogue. `layout` says how the pairs lie in
    memory: nn, nt (b is [columns, depth]) or tn (a is [depth, rows])."""

    layout: str
    rows: int
    columns: int
    pairs: Sequence[Pair]
    adapter: Pair | None
    live: Buffer
    epilogue: Epilogue

    @property
    def tiles(self) -> tuple[int, int]:
        return pieces(self.columns, TILE), pieces(self.rows, TILE)

    @property
    def chunks(self) -> int:
        """Into how many parts the K loop is cut."""
        tiles = self.tiles[0] * self.tiles[1]
        if not 0 < tiles < FEW_TILES:
            return 1
        pairs = [*self.pairs, self.adapter] if self.adapter else self.pairs
        steps = sum(pieces(pair.depth, TILE) for pair in pairs)
        return max(1, min(ENOUGH_GROUPS // tiles, steps // CHUNK_STEPS))

    @property
    def workspace(self) -> int:
        """Bytes of the chunks' sums."""
        return 4 * self.chunks * self.rows * self.columns if self.chunks > 1 else 0

    def launches(self, workspace: Buffer | None) -> list[Launch]:
        if self.rows * self.columns == 0:
            return []
        if self.chunks == 1:
            return [self._multiply(self.epilogue)]
        assert workspace is not None
        partial = Epilogue(workspace, self.columns, to_floats=True)
        return [self._multiply(partial), self._reduce(workspace)]

    def _multiply(self, epilogue: Epilogue) -> Launch:
        first = self.pairs[0]
        types = [first.a.dtype] if self.layout == "tn" else [first.a.dtype, first.b.dtype]
        operands = [x for p in self._places() for x in ((p.a, p.b) if p else (None, None))]
        return Launch(
            "gemm",
            "_".join(["gemm", self.layout, *map(str, types)]),
            (*operands, *epilogue.arguments, self.live, self._shape(epilogue)),
            (*self.tiles, self.chunks),
            LANES,
            _constants(
                aligned=all(pair.aligned for pair in self.pairs),
                pairs=len(self.pairs),
                has_adapter=self.adapter is not None,
                adapter_aligned=self.adapter is not None and self.adapter.aligned,
                **epilogue.constants,
            ),
        )

    def _reduce(self, partials: Buffer) -> Launch:
        operands = (partials, *[None] * (2 * PAIRS + 1))
        return Launch(
            "gemm",
            f"gemm_reduce_{self.pairs[0].a.dtype}",
            (*operands, *self.epilogue.arguments, self.live, self._shape(self.epilogue)),
            (pieces(self.rows * self.columns, REDUCE_THREADS), 1, 1),
            REDUCE_THREADS,
            _constants(**self.epilogue.constants),
        )

    def _places(self) -> list[Pair | None]:
        """Three pairs, and the adapter's."""
        return [*self.pairs, *[None] * (PAIRS - len(self.pairs)), self.adapter]

    def _shape(self, epilogue: Epilogue) -> bytes:
        """struct Shape."""
        numbers = [self.rows, self.columns, epilogue.stride, self.chunks]
        for pair in self._places():
            numbers += [pair.depth, pair.a_stride, pair.b_stride] if pair else [0, 0, 0]
        return struct.pack(f"<{len(numbers)}I", *numbers)


# How calls become products. A group's members are products of their own, unless they are summed.


def _inputs(call: Call) -> list[Any]:
    """In the order of the signature: buffers, groups of them, or None."""
    return list(call.inputs)


def _columns(buffer: Buffer, start: int) -> Buffer:
    """A matrix from column `start` on: the elements from there to its end."""
    return buffer.part(f"{buffer.name}[:,{start}:]", start, (max(buffer.size - start, 0),))


def _starts(b: Sequence[Buffer]) -> list[int]:
    """The first column of each member inside u or v; each of b is [out_features, rank]."""
    ranks = [member.shape[1] for member in b]
    return [sum(ranks[:i]) for i in range(len(ranks))]


def _down(call: Call) -> list[Product]:
    """u = (x Aᵀ) ∘ scale."""
    x, a, scale, live = _inputs(call)
    (u,) = call.writes()
    (n, c), s = x.shape, a.shape[0]
    return [Product("nt", n, s, [Pair(x, a, c, c, c)], None, live, Epilogue(u, s, scale=scale))]


def _linear(call: Call) -> list[Product]:
    """y_i = x W_iᵀ + u_i B_iᵀ + bias_i + residual."""
    x, w, u, b, bias, residual, live = _inputs(call)
    n, c = x.shape
    starts = _starts(b or ())
    products = []
    for i, y in enumerate(call.writes()):
        o, adapter = w[i].shape[0], None
        if b and b[i].shape[1]:
            adapter = Pair(_columns(u, starts[i]), b[i], b[i].shape[1], u.shape[1], b[i].shape[1])
        epilogue = Epilogue(
            y,
            o,
            to_floats=y.dtype is not x.dtype,
            bias=bias[i] if bias else None,
            residual=residual,
        )
        products.append(Product("nt", n, o, [Pair(x, w[i], c, c, c)], adapter, live, epilogue))
    return products


def _up_backward(call: Call) -> list[Product]:
    """v = (dy_i B_i, side by side) ∘ scale."""
    dy, b, scale, live = _inputs(call)
    (v,) = call.writes()
    n, s = v.shape
    products = []
    for dy_i, b_i, start in zip(dy, b, _starts(b), strict=True):
        o, r = b_i.shape
        epilogue = Epilogue(_columns(v, start), s, scale=_columns(scale, start))
        products.append(Product("nn", n, r, [Pair(dy_i, b_i, o, o, r)], None, live, epilogue))
    return products


def _times(
    dy: Sequence[Buffer], w: Sequence[Buffer], v: Buffer | None, a: Buffer | None
) -> tuple[list[Pair], Pair | None]:
    """The pairs of Σ dy_i W_i, and that of v A."""
    pairs = [Pair(dy_i, w_i, *_strides(w_i)) for dy_i, w_i in zip(dy, w, strict=True)]
    return pairs, Pair(v, a, *_strides(a)) if v and a and a.size else None


def _strides(b: Buffer) -> tuple[int, int, int]:
    """Depth and strides of a b where b is [k, columns] and a is [rows, k]."""
    k, columns = b.shape
    return k, k, columns


def _linear_backward(call: Call) -> list[Product]:
    """dx = Σ dy_i W_i + v A."""
    dy, w, v, a, live = _inputs(call)
    (dx,) = call.writes()
    n, c = dx.shape
    return [Product("nn", n, c, *_times(dy, w, v, a), live, Epilogue(dx, c))]


def _swiglu_backward(call: Call) -> list[Product]:
    """dact = dy W + v A, and from it dgate, dup and act."""
    dy, w, v, a, gate, up, live = _inputs(call)
    dgate, dup, act = call.writes()
    n, f = act.shape
    epilogue = Epilogue(act, f, swiglu=(gate, up, dgate, dup))
    return [Product("nn", n, f, *_times([dy], [w], v, a), live, epilogue)]


def _a_grad(call: Call) -> list[Product]:
    """dA += vᵀ x."""
    v, x, live = _inputs(call)
    (da,) = call.writes()
    (n, s), c = v.shape, x.shape[1]
    epilogue = Epilogue(da, c, to_floats=True, accumulates=True)
    return [Product("tn", s, c, [Pair(v, x, n, s, c)], None, live, epilogue)]


def _b_grad(call: Call) -> list[Product]:
    """dB_i += dy_iᵀ u_i."""
    dy, u, live = _inputs(call)
    db = list(call.writes())
    n, s = u.shape
    products = []
    for dy_i, db_i, start in zip(dy, db, _starts(db), strict=True):
        o, r = db_i.shape
        epilogue = Epilogue(db_i, r, to_floats=True, accumulates=True)
        pair = Pair(dy_i, _columns(u, start), n, o, s)
        products.append(Product("tn", o, r, [pair], None, live, epilogue))
    return products


def _swiglu(call: Call, workspace: Buffer | None) -> list[Launch]:
    """gate, up and act, by a kernel of its own because gate and up must meet before they are
    rounded. Its K loop is never cut: tiles are half as wide, so only narrow layers have few."""
    x, w_gate, w_up, u, b_gate, b_up, live = _inputs(call)
    (n, c), f = x.shape, w_gate.shape[0]
    if n * f == 0:
        return []
    ranks = [b.shape[1] if b else 0 for b in (b_gate, b_up)]
    adapter = [u, b_gate if ranks[0] else b_up, b_up if ranks[1] else b_gate]
    if not any(ranks):
        adapter = [None, None, None]
    adapter_starts = [buffer.start for buffer in adapter if buffer]
    shape = struct.pack("<5I", n, f, c, *ranks)
    return [
        Launch(
            "gemm",
            f"gemm_swiglu_{x.dtype}_{w_gate.dtype}",
            (x, w_gate, w_up, *adapter, *call.writes(), live, shape),
            (pieces(f, TILE // 2), pieces(n, TILE), 1),
            LANES,
            _constants(
                aligned=all(m % 4 == 0 for m in (c, x.start, w_gate.start, w_up.start)),
                has_adapter=any(ranks),
                adapter_aligned=all(m % 4 == 0 for m in (*ranks, *adapter_starts)),
            ),
        )
    ]


WEIGHTS = {"w", "w_gate", "w_up"}  # may be of another type than the activations


def _types_fit(call: Call) -> bool:
    """Whether activations are halves or floats, all of one type, weights of one type too, and
    outputs that may have any type have that of the activations or are floats."""
    activation = next(iter(call.reads())).dtype
    weights: set[DType] = set()
    others = {activation}
    for parameter, argument in zip(call.op.inputs, call.inputs, strict=True):
        if parameter.dtype is None:
            types = weights if parameter.name in WEIGHTS else others
            types.update(buffer.dtype for buffer in members(argument))
    outputs = {buffer.dtype for buffer in call.writes()}
    return (
        activation in (F16, F32)
        and len(others) == 1
        and len(weights) <= 1
        and outputs <= {activation, F32}
    )


def _summable(call: Call) -> bool:
    return _types_fit(call) and call.group <= PAIRS


def _row(
    op: str,
    products: Callable[[Call], list[Product]],
    why: str,
    when: Callable[[Call], bool] = _types_fit,
) -> GpuRow:
    return GpuRow(
        op,
        when=when,
        workspace=lambda call: max((p.workspace for p in products(call)), default=0),
        launches=lambda call, scratch: [x for p in products(call) for x in p.launches(scratch)],
        why=why,
    )


ROWS = [
    _row("lora_down", _down, "narrow: the K loop is cut, except where rows are many"),
    _row("lora_linear", _linear, "the K loop runs on over the adapter"),
    GpuRow("lora_swiglu", when=_types_fit, launches=_swiglu, why="gate and up in one product"),
    _row("lora_up_backward", _up_backward, "narrow: the K loop is cut, except where rows are many"),
    _row("lora_linear_backward", _linear_backward, "one K loop over all pairs", when=_summable),
    _row("lora_swiglu_backward", _swiglu_backward, "SwiGLU's backward in the epilogue"),
    _row("lora_a_grad", _a_grad, "tn, added to the gradient as it leaves"),
    _row("lora_b_grad", _b_grad, "tn, added to the gradient as it leaves"),
]
