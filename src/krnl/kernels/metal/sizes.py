"""Sizes that the Metal kernels and their launches share."""

TILE = 32  # rows and columns of a product's tile, and the K of a step (gemm.h)
LANES = 32  # threads of a simdgroup
VECTOR = 4  # elements that a thread reads at once


def pieces(size: int, piece: int) -> int:
    """How many pieces of at most `piece` make `size`."""
    return -(-size // piece)
