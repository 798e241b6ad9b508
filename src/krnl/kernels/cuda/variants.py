"""What no engine uses and benchmarks compare with."""

from krnl.kernels.cuda.gemm import HOPPER_ROWS, OPS, hopper_row
from krnl.plan.lower import Table


def uncut(kernels: Table) -> Table | None:
    """Products whose K loop is never divided among the blocks of a cluster; None where the kernels
    divide none."""
    if HOPPER_ROWS[0] not in kernels.rows:
        return None
    return Table(kernels.backend, [hopper_row(op, splits=(1,)) for op in OPS])
