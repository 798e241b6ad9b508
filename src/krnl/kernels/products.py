"""How the calls of ops/gemm.py become matrix products, for any GPU: one for each member of a group,
unless the members are summed.

lora_swiglu is none of them: its two sums meet in act, so it has kernels of its own."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from krnl.dtypes import F32, DType
from krnl.plan.buffer import Buffer
from krnl.plan.step import Call, members

PAIRS = 3  # q, k and v; an adapter's pair comes on top
# How operands lie, by their places in CUDA's enum Layout.
LAYOUTS = ("nn", "nt", "tn")


@dataclass(frozen=True)
class Pair:
    """Two matrices whose product is a term of the sum: `depth` values of K, and the elements from
    one row of each in memory to the next."""

    a: Buffer
    b: Buffer
    depth: int
    a_stride: int
    b_stride: int

    def aligned(self, elements: int) -> bool:
        """Whether all rows begin at multiples of so many elements."""
        places = self.a_stride, self.b_stride, self.a.start, self.b.start
        return all(place % elements == 0 for place in places)


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


@dataclass(frozen=True)
class Product:
    """[rows, columns] = Σ a b over the pairs, and its epilogue. `layout` says how the pairs lie in
    memory: nn, nt (b is [columns, depth]) or tn (a is [depth, rows]). Rows from `live` on are
    neither read nor written; those of tn's a and b are the depth."""

    layout: str
    rows: int
    columns: int
    pairs: Sequence[Pair]
    adapter: Pair | None
    live: Buffer
    epilogue: Epilogue

    @property
    def all_pairs(self) -> list[Pair]:
        """In the order of the K loop: the adapter's comes last."""
        return [*self.pairs, self.adapter] if self.adapter else [*self.pairs]


def products(call: Call) -> list[Product]:
    """The products of a call of any op in ops/gemm.py but lora_swiglu."""
    return _PRODUCTS[call.op.name](call)


WEIGHTS = {"w", "w_gate", "w_up"}  # may be of another type than the activations


def types_fit(call: Call, activations: Collection[DType]) -> bool:
    """Whether activations are all of one of these types, weights of one type too, and outputs that
    may have any type have that of the activations or are floats."""
    activation = next(iter(call.reads())).dtype
    weights: set[DType] = set()
    others = {activation}
    for parameter, argument in zip(call.op.inputs, call.inputs, strict=True):
        if parameter.dtype is None:
            types = weights if parameter.name in WEIGHTS else others
            types.update(buffer.dtype for buffer in members(argument))
    outputs = {buffer.dtype for buffer in call.writes()}
    return (
        activation in activations
        and len(others) == 1
        and len(weights) <= 1
        and outputs <= {activation, F32}
    )


def inputs(call: Call) -> list[Any]:
    """In the order of the signature: buffers, groups of them, or None."""
    return list(call.inputs)


def columns_from(buffer: Buffer, start: int) -> Buffer:
    """A matrix from column `start` on: the elements from there to its end."""
    return buffer.part(f"{buffer.name}[:,{start}:]", start, (max(buffer.size - start, 0),))


def _starts(b: Sequence[Buffer]) -> list[int]:
    """The first column of each member inside u or v; each of b is [out_features, rank]."""
    ranks = [member.shape[1] for member in b]
    return [sum(ranks[:i]) for i in range(len(ranks))]


def _down(call: Call) -> list[Product]:
    """u = (x Aᵀ) ∘ scale."""
    x, a, scale, live = inputs(call)
    (u,) = call.writes()
    (n, c), s = x.shape, a.shape[0]
    return [Product("nt", n, s, [Pair(x, a, c, c, c)], None, live, Epilogue(u, s, scale=scale))]


def _linear(call: Call) -> list[Product]:
    """y_i = x W_iᵀ + u_i B_iᵀ + bias_i + residual."""
    x, w, u, b, bias, residual, live = inputs(call)
    n, c = x.shape
    starts = _starts(b or ())
    products = []
    for i, y in enumerate(call.writes()):
        o, adapter = w[i].shape[0], None
        if b and b[i].shape[1]:
            adapter = Pair(
                columns_from(u, starts[i]), b[i], b[i].shape[1], u.shape[1], b[i].shape[1]
            )
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
    dy, b, scale, live = inputs(call)
    (v,) = call.writes()
    n, s = v.shape
    products = []
    for dy_i, b_i, start in zip(dy, b, _starts(b), strict=True):
        o, r = b_i.shape
        epilogue = Epilogue(columns_from(v, start), s, scale=columns_from(scale, start))
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
    dy, w, v, a, live = inputs(call)
    (dx,) = call.writes()
    n, c = dx.shape
    return [Product("nn", n, c, *_times(dy, w, v, a), live, Epilogue(dx, c))]


def _swiglu_backward(call: Call) -> list[Product]:
    """dact = dy W + v A, and from it dgate, dup and act."""
    dy, w, v, a, gate, up, live = inputs(call)
    dgate, dup, act = call.writes()
    n, f = act.shape
    epilogue = Epilogue(act, f, swiglu=(gate, up, dgate, dup))
    return [Product("nn", n, f, *_times([dy], [w], v, a), live, epilogue)]


def _a_grad(call: Call) -> list[Product]:
    """dA += vᵀ x."""
    v, x, live = inputs(call)
    (da,) = call.writes()
    (n, s), c = v.shape, x.shape[1]
    epilogue = Epilogue(da, c, to_floats=True, accumulates=True)
    return [Product("tn", s, c, [Pair(v, x, n, s, c)], None, live, epilogue)]


def _b_grad(call: Call) -> list[Product]:
    """dB_i += dy_iᵀ u_i."""
    dy, u, live = inputs(call)
    db = list(call.writes())
    n, s = u.shape
    products = []
    for dy_i, db_i, start in zip(dy, db, _starts(db), strict=True):
        o, r = db_i.shape
        epilogue = Epilogue(db_i, r, to_floats=True, accumulates=True)
        pair = Pair(dy_i, columns_from(u, start), n, o, s)
        products.append(Product("tn", o, r, [pair], None, live, epilogue))
    return products


_PRODUCTS: dict[str, Callable[[Call], list[Product]]] = {
    "lora_down": _down,
    "lora_linear": _linear,
    "lora_up_backward": _up_backward,
    "lora_linear_backward": _linear_backward,
    "lora_swiglu_backward": _swiglu_backward,
    "lora_a_grad": _a_grad,
    "lora_b_grad": _b_grad,
}
