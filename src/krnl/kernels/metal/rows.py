"""The ops on rows and on single elements, as Metal launches them."""

from krnl.dtypes import F16, F32
from krnl.kernels.metal.sizes import VECTOR
from krnl.kernels.rows import Dialect, rows

DIALECT = Dialect(
    activations=(F16, F32),
    vector=VECTOR,
    held=4,  # kHeld in norm.metal
    # Half of what a threadgroup may have, since a kernel with many registers could not be launched
    # with more.
    most_threads=512,
    short_rows=1,
    most_groups=2**32 - 1,
)

ROWS = rows(DIALECT)
