"""Launches of the matrix products of 16-bit elements on the tensor cores that every card from sm_80
on has (gemm_mma.cu)."""

from dataclasses import dataclass

from krnl.dtypes import BF16, F16
from krnl.kernels.cuda import gemm_chunks
from krnl.kernels.cuda.gemm_chunks import STEP, Tile
from krnl.kernels.cuda.target import Target
from krnl.kernels.launch import Launch
from krnl.kernels.products import LAYOUTS, PAIRS, Epilogue, Product, inputs
from krnl.plan.buffer import Buffer
from krnl.plan.step import Call

PIECE = 8  # elements that are fetched together: 16 bytes
# Steps in the ring. Two blocks of the large tile then have room on a card with 100 KiB of shared
# memory to a multiprocessor.
STAGES = 3


@dataclass(frozen=True)
class Warps:
    """A tile, and the warps along its rows and columns among which it is divided."""

    tile: Tile
    rows: int
    columns: int

    @property
    def threads(self) -> int:
        return 32 * self.rows * self.columns

    @property
    def shared(self) -> int:
        """Bytes of the ring."""
        return STAGES * 2 * STEP * (self.tile.rows + self.tile.columns)

    @property
    def constants(self) -> tuple[int, ...]:
        return self.tile.rows, self.tile.columns, self.rows, self.columns, STAGES


LARGE = Warps(Tile(128, 128), 2, 4)
SMALL = Warps(Tile(64, 64), 2, 2)


def fits(product: Product) -> bool:
    """Whether this family of kernels can make the product: elements have 16 bits, all of one type,
    and rows of operands begin and end at multiples of 16 bytes."""
    dtype = product.pairs[0].a.dtype
    return (
        len(product.pairs) <= PAIRS
        and dtype in (BF16, F16)
        and all(pair.a.dtype is pair.b.dtype is dtype for pair in product.all_pairs)
        and all(pair.aligned(PIECE) for pair in product.all_pairs)
    )


def workspace(product: Product, target: Target) -> int:
    """Bytes of the chunks' sums."""
    return gemm_chunks.workspace(product, _warps(product, target).tile, target)


def launches(product: Product, target: Target, workspace: Buffer | None) -> list[Launch]:
    """The product's launch, and the sum of its chunks where there are several."""
    warps = _warps(product, target)

    def multiply(epilogue: Epilogue, grid: tuple[int, int, int]) -> Launch:
        dtype, layout = product.pairs[0].a.dtype, LAYOUTS.index(product.layout)
        outputs = epilogue.y, epilogue.residual, *epilogue.swiglu
        paired = _paired(product.columns, epilogue.stride, *outputs)
        return Launch(
            "gemm_mma",
            "gemm_mma",
            gemm_chunks.arguments(product, epilogue, grid[2]),
            grid,
            warps.threads,
            (dtype, epilogue.y.dtype),
            dict(enumerate((layout, *warps.constants, paired, bool(epilogue.swiglu)))),
            shared=warps.shared,
        )

    return gemm_chunks.launches(product, warps.tile, target, workspace, multiply)


def _warps(product: Product, target: Target) -> Warps:
    """Large tiles do the most arithmetic for what they fetch, if they are full and there is one for
    each multiprocessor."""
    narrow = min(product.rows, product.columns) <= SMALL.tile.rows
    tiles = LARGE.tile.count(product.rows, product.columns)
    blocks = tiles * gemm_chunks.chunks(product, LARGE.tile, target)
    return SMALL if narrow or blocks < target.multiprocessors else LARGE


def _paired(*places: int | Buffer | None) -> bool:
    """Whether widths and starts are even, so that two elements can be written together."""
    numbers = [x.start if isinstance(x, Buffer) else x for x in places if x is not None]
    return all(number % 2 == 0 for number in numbers)


def swiglu_fits(call: Call) -> bool:
    """The same as `fits` for lora_swiglu."""
    x, w_gate, w_up, u, b_gate, b_up, _ = inputs(call)
    adapter = [u, b_gate, b_up] if u and u.size else []
    operands = [x, w_gate, w_up, *adapter]
    widths = [x.shape[1], *(b.shape[1] for b in adapter[1:])]
    return (
        x.dtype in (BF16, F16)
        and all(buffer.dtype is x.dtype and buffer.start % PIECE == 0 for buffer in operands)
        and all(width % PIECE == 0 for width in widths)
    )


def swiglu_launches(call: Call, target: Target) -> list[Launch]:
    """Of lora_swiglu: gate, up and act. Its K loop is never cut."""
    x, w_gate, _, _, _, _, _ = inputs(call)
    rows, columns = x.shape[0], w_gate.shape[0]
    # Half of a tile's columns are gate's, half up's.
    many = LARGE.tile.count(rows, 2 * columns) >= target.multiprocessors
    warps = LARGE if many else SMALL
    tiles = Tile(warps.tile.rows, warps.tile.columns // 2).count(rows, columns)
    if tiles == 0:
        return []
    return [
        Launch(
            "gemm_mma",
            "gemm_mma_swiglu",
            gemm_chunks.swiglu_arguments(call),
            (tiles, 1, 1),
            warps.threads,
            (x.dtype,),
            dict(enumerate((*warps.constants, _paired(columns, *call.writes())))),
            shared=warps.shared,
        )
    ]
