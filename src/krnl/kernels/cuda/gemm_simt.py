"""Launches of the matrix products of any types, shapes and strides (gemm_simt.cu)."""

from krnl.kernels.cuda import gemm_chunks
from krnl.kernels.cuda.gemm_chunks import Tile
from krnl.kernels.cuda.target import Target
from krnl.kernels.launch import Launch
from krnl.kernels.products import LAYOUTS, PAIRS, Epilogue, Product, inputs
from krnl.plan.buffer import Buffer
from krnl.plan.step import Call

TILE = Tile(64, 64)
SWIGLU_TILE = Tile(64, 32)  # of gate and of up
THREADS = 256


def fits(product: Product) -> bool:
    """Whether this family of kernels can make the product."""
    return len(product.pairs) <= PAIRS


def workspace(product: Product, target: Target) -> int:
    """Bytes of the chunks' sums."""
    return gemm_chunks.workspace(product, TILE, target)


def launches(product: Product, target: Target, workspace: Buffer | None) -> list[Launch]:
    """The product's launch, and the sum of its chunks where there are several."""

    def multiply(epilogue: Epilogue, grid: tuple[int, int, int]) -> Launch:
        first = product.pairs[0]
        return Launch(
            "gemm_simt",
            "gemm_simt",
            gemm_chunks.arguments(product, epilogue, grid[2]),
            grid,
            THREADS,
            (first.a.dtype, first.b.dtype, epilogue.y.dtype),
            {0: LAYOUTS.index(product.layout), 1: bool(epilogue.swiglu)},
        )

    return gemm_chunks.launches(product, TILE, target, workspace, multiply)


def swiglu_launches(call: Call) -> list[Launch]:
    """Of lora_swiglu: gate, up and act. Its K loop is never cut: tiles are half as wide, so only
    narrow layers have few."""
    x, w_gate, _, _, _, _, _ = inputs(call)
    tiles = SWIGLU_TILE.count(x.shape[0], w_gate.shape[0])
    if tiles == 0:
        return []
    return [
        Launch(
            "gemm_simt",
            "gemm_simt_swiglu",
            gemm_chunks.swiglu_arguments(call),
            (tiles, 1, 1),
            THREADS,
            (x.dtype, w_gate.dtype),
        )
    ]
