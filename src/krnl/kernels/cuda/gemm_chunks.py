"""What launches of gemm_simt.cu and gemm_mma.cu have in common (gemm.h): a block makes a tile of
the result; where tiles are few the K loop is cut into chunks, and one more launch adds up their
sums."""

from collections.abc import Callable
from dataclasses import dataclass

from krnl.kernels.cuda.target import Target
from krnl.kernels.launch import Launch, pack, pieces
from krnl.kernels.products import LAYOUTS, PAIRS, Epilogue, Product, inputs
from krnl.plan.buffer import Buffer
from krnl.plan.step import Call

STEP = 32  # values of K that are staged together
REDUCE_THREADS = 256
BLOCKS = 2  # that run on a multiprocessor, at the least


@dataclass(frozen=True)
class Tile:
    """Rows and columns of the result that are a block's."""

    rows: int
    columns: int

    def count(self, rows: int, columns: int) -> int:
        """Tiles of a result."""
        return pieces(rows, self.rows) * pieces(columns, self.columns)

    @property
    def least_steps(self) -> int:
        """Of a chunk: its sums, which are written and read as floats, are then no more bytes than
        its operands."""
        return pieces(8 * self.rows * self.columns, 2 * STEP * (self.rows + self.columns))


def chunks(product: Product, tile: Tile, target: Target) -> int:
    """Into how many parts the K loop is cut: tiles may be too few to give each multiprocessor
    one."""
    tiles = tile.count(product.rows, product.columns)
    if not 0 < tiles < target.multiprocessors:
        return 1
    steps = sum(pieces(pair.depth, STEP) for pair in product.all_pairs)
    return max(1, min(BLOCKS * target.multiprocessors // tiles, steps // tile.least_steps))


def workspace(product: Product, tile: Tile, target: Target) -> int:
    """Bytes of the chunks' sums."""
    count = chunks(product, tile, target)
    return 4 * count * product.rows * product.columns if count > 1 else 0


def launches(
    product: Product,
    tile: Tile,
    target: Target,
    workspace: Buffer | None,
    multiply: Callable[[Epilogue, tuple[int, int, int]], Launch],
) -> list[Launch]:
    """What `multiply` launches for an epilogue on a grid, and the sum of the chunks where there are
    several. Nothing for a result without elements."""
    count = chunks(product, tile, target)
    grid = (tile.count(product.rows, product.columns), 1, count)
    if grid[0] == 0:
        return []
    if count == 1:
        return [multiply(product.epilogue, grid)]
    assert workspace is not None
    partials = Epilogue(workspace, product.columns, to_floats=True)
    return [multiply(partials, grid), _reduce(product, workspace, count)]


def arguments(
    product: Product, epilogue: Epilogue, count: int
) -> tuple[Buffer | bytes | None, ...]:
    """Of a kernel that multiplies, where the K loop is cut into `count` chunks."""
    places = [*product.pairs, *[None] * (PAIRS - len(product.pairs)), product.adapter]
    operands = [x for p in places for x in ((p.a, p.b) if p else (None, None))]
    return (*operands, *_outputs(epilogue), product.live, _shape(product, epilogue, count))


def swiglu_arguments(call: Call) -> tuple[Buffer | bytes | None, ...]:
    """Of a kernel that makes gate, up and act."""
    x, w_gate, w_up, u, b_gate, b_up, live = inputs(call)
    ranks = [b.shape[1] if b else 0 for b in (b_gate, b_up)]
    shape = pack("5i", x.shape[0], w_gate.shape[0], x.shape[1], *ranks)
    return (x, w_gate, w_up, u, b_gate, b_up, *call.writes(), live, shape)


def _reduce(product: Product, partials: Buffer, count: int) -> Launch:
    epilogue = product.epilogue
    return Launch(
        "gemm_simt",
        "gemm_reduce",
        (partials, *_outputs(epilogue), product.live, _shape(product, epilogue, count)),
        (pieces(product.rows * product.columns, REDUCE_THREADS), 1, 1),
        REDUCE_THREADS,
        (product.pairs[0].a.dtype, epilogue.y.dtype),
        {0: LAYOUTS.index(product.layout), 1: bool(epilogue.swiglu)},
    )


def _outputs(epilogue: Epilogue) -> tuple[Buffer | None, ...]:
    swiglu = epilogue.swiglu or (None,) * 4
    return epilogue.y, epilogue.scale, epilogue.bias, epilogue.residual, *swiglu


def _shape(product: Product, epilogue: Epilogue, count: int) -> bytes:
    """struct Shape. Pairs that are not there have no depth."""
    numbers = [product.rows, product.columns, epilogue.stride, count, int(epilogue.accumulates)]
    for pair in [*product.pairs, *[None] * (PAIRS - len(product.pairs)), product.adapter]:
        numbers += [pair.depth, pair.a_stride, pair.b_stride] if pair else [0, 0, 0]
    return pack(f"{len(numbers)}i", *numbers)
