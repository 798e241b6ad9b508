"""Launches of the matrix products in ops/gemm.py: one for each product, and one more where the K
loop is cut into chunks."""

from collections.abc import Callable

from krnl.dtypes import F16, F32
from krnl.kernels.launch import LANES, GpuRow, Launch, pack, pieces
from krnl.kernels.metal.sizes import TILE, VECTOR
from krnl.kernels.products import PAIRS, Epilogue, Pair, Product, inputs, products, types_fit
from krnl.plan.buffer import Buffer
from krnl.plan.step import Call

REDUCE_THREADS = 256

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


def _tiles(product: Product) -> tuple[int, int]:
    return pieces(product.columns, TILE), pieces(product.rows, TILE)


def chunks(product: Product) -> int:
    """Into how many parts the K loop is cut."""
    columns, rows = _tiles(product)
    tiles = columns * rows
    if not 0 < tiles < FEW_TILES:
        return 1
    steps = sum(pieces(pair.depth, TILE) for pair in product.all_pairs)
    return max(1, min(ENOUGH_GROUPS // tiles, steps // CHUNK_STEPS))


def _workspace(product: Product) -> int:
    """Bytes of the chunks' sums."""
    count = chunks(product)
    return 4 * count * product.rows * product.columns if count > 1 else 0


def launches(product: Product, workspace: Buffer | None) -> list[Launch]:
    """The product's launch, and the sum of its chunks where there are several."""
    if product.rows * product.columns == 0:
        return []
    if chunks(product) == 1:
        return [_multiply(product, product.epilogue)]
    assert workspace is not None
    partial = Epilogue(workspace, product.columns, to_floats=True)
    return [_multiply(product, partial), _reduce(product, workspace)]


def _multiply(product: Product, epilogue: Epilogue) -> Launch:
    first, adapter = product.pairs[0], product.adapter
    operands = [x for p in _places(product) for x in ((p.a, p.b) if p else (None, None))]
    return Launch(
        "gemm",
        f"gemm_{product.layout}",
        (*operands, *_outputs(epilogue), product.live, _shape(product, epilogue)),
        (*_tiles(product), chunks(product)),
        LANES,
        (first.a.dtype,) if product.layout == "tn" else (first.a.dtype, first.b.dtype),
        _constants(
            aligned=all(pair.aligned(VECTOR) for pair in product.pairs),
            pairs=len(product.pairs),
            has_adapter=adapter is not None,
            adapter_aligned=adapter is not None and adapter.aligned(VECTOR),
            **_switches(epilogue),
        ),
    )


def _reduce(product: Product, partials: Buffer) -> Launch:
    operands = (partials, *[None] * (2 * PAIRS + 1))
    epilogue = product.epilogue
    return Launch(
        "gemm",
        "gemm_reduce",
        (*operands, *_outputs(epilogue), product.live, _shape(product, epilogue)),
        (pieces(product.rows * product.columns, REDUCE_THREADS), 1, 1),
        REDUCE_THREADS,
        (product.pairs[0].a.dtype,),
        _constants(**_switches(epilogue)),
    )


def _outputs(epilogue: Epilogue) -> tuple[Buffer | None, ...]:
    """The epilogue's buffers in the order of the kernels' arguments."""
    y, floats = (None, epilogue.y) if epilogue.to_floats else (epilogue.y, None)
    swiglu = epilogue.swiglu or (None,) * 4
    return y, floats, epilogue.scale, epilogue.bias, epilogue.residual, *swiglu


def _switches(epilogue: Epilogue) -> dict[str, bool]:
    return {
        "to_floats": epilogue.to_floats,
        "has_scale": epilogue.scale is not None,
        "has_bias": epilogue.bias is not None,
        "has_residual": epilogue.residual is not None,
        "accumulates": epilogue.accumulates,
        "is_dact": bool(epilogue.swiglu),
    }


def _places(product: Product) -> list[Pair | None]:
    """Three pairs, and the adapter's."""
    return [*product.pairs, *[None] * (PAIRS - len(product.pairs)), product.adapter]


def _shape(product: Product, epilogue: Epilogue) -> bytes:
    """struct Shape."""
    numbers = [product.rows, product.columns, epilogue.stride, chunks(product)]
    for pair in _places(product):
        numbers += [pair.depth, pair.a_stride, pair.b_stride] if pair else [0, 0, 0]
    return pack(f"{len(numbers)}I", *numbers)


def _swiglu(call: Call, workspace: Buffer | None) -> list[Launch]:
    """gate, up and act, by a kernel of its own because gate and up must meet before they are
    rounded. Its K loop is never cut: tiles are half as wide, so only narrow layers have few."""
    x, w_gate, w_up, u, b_gate, b_up, live = inputs(call)
    (n, c), f = x.shape, w_gate.shape[0]
    if n * f == 0:
        return []
    ranks = [b.shape[1] if b else 0 for b in (b_gate, b_up)]
    adapter = [u, b_gate if ranks[0] else b_up, b_up if ranks[1] else b_gate]
    if not any(ranks):
        adapter = [None, None, None]
    adapter_starts = [buffer.start for buffer in adapter if buffer]
    shape = pack("5I", n, f, c, *ranks)
    return [
        Launch(
            "gemm",
            "gemm_swiglu",
            (x, w_gate, w_up, *adapter, *call.writes(), live, shape),
            (pieces(f, TILE // 2), pieces(n, TILE), 1),
            LANES,
            (x.dtype, w_gate.dtype),
            _constants(
                aligned=all(m % VECTOR == 0 for m in (c, x.start, w_gate.start, w_up.start)),
                has_adapter=any(ranks),
                adapter_aligned=all(m % VECTOR == 0 for m in (*ranks, *adapter_starts)),
            ),
        )
    ]


def _types_fit(call: Call) -> bool:
    return types_fit(call, (F16, F32))


def _summable(call: Call) -> bool:
    return _types_fit(call) and call.group <= PAIRS


def _row(op: str, why: str, when: Callable[[Call], bool] = _types_fit) -> GpuRow:
    return GpuRow(
        op,
        when=when,
        workspace=lambda call: max(map(_workspace, products(call)), default=0),
        launches=lambda call, scratch: [x for p in products(call) for x in launches(p, scratch)],
        why=why,
    )


ROWS = [
    _row("lora_down", "narrow: the K loop is cut, except where rows are many"),
    _row("lora_linear", "the K loop runs on over the adapter"),
    GpuRow("lora_swiglu", when=_types_fit, launches=_swiglu, why="gate and up in one product"),
    _row("lora_up_backward", "narrow: the K loop is cut, except where rows are many"),
    _row("lora_linear_backward", "one K loop over all pairs", when=_summable),
    _row("lora_swiglu_backward", "SwiGLU's backward in the epilogue"),
    _row("lora_a_grad", "tn, added to the gradient as it leaves"),
    _row("lora_b_grad", "tn, added to the gradient as it leaves"),
]
