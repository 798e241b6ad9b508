"""Sizes that the Metal kernels and their launches share."""

TILE = 32  # rows and columns of a product's tile, and the K of a step (gemm.h)
VECTOR = 4  # elements that a thread reads at once
