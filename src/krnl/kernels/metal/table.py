"""How every op is launched on Metal. Each family's module says which kernel is chosen, and why."""

from krnl.kernels.metal import attention, gemm, rows
from krnl.plan.lower import Table

TABLE = Table("metal", [*gemm.ROWS, *attention.ROWS, *rows.ROWS])
