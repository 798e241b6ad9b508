"""What no engine uses and benchmarks compare with."""

from krnl.kernels.cuda.gemm import OPS, hopper_row
from krnl.kernels.cuda.gemm_wgmma import TILINGS
from krnl.kernels.cuda.table import CudaTable
from krnl.plan.lower import Table


def uncut(kernels: Table) -> Table | None:
    """Products whose K loop is never divided among blocks; None where the kernels divide none."""
    if not isinstance(kernels, CudaTable) or not kernels.target.hopper:
        return None
    whole = [tiling for tiling in TILINGS if tiling.split == 1]
    return Table("cuda", [hopper_row(op, kernels.target, whole) for op in OPS])
