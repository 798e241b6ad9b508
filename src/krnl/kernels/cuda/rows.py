"""The ops on rows and on single elements, as CUDA launches them."""

from krnl.dtypes import BF16, F16, F32
from krnl.kernels.rows import Dialect, rows

# Numbers of rows.h and norm.cu.
DIALECT = Dialect(
    activations=(BF16, F16, F32),
    vector=8,  # sixteen bytes of 16-bit elements; floats take two accesses
    held=2,
    most_threads=1024,
    short_rows=8,
    most_groups=65_535,
)

ROWS = rows(DIALECT)
