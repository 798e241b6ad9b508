"""How every op is launched on NVIDIA's GPUs. Each family's module says which kernel is chosen, and
why."""

from dataclasses import dataclass

from krnl.kernels.cuda import attention, gemm, rows
from krnl.kernels.cuda.target import Target
from krnl.plan.lower import Table


@dataclass(frozen=True)
class CudaTable(Table):
    """`target`: the kind of GPU that it is for."""

    target: Target


def table(target: Target) -> CudaTable:
    """The kernels for a kind of GPU."""
    hopper = [*gemm.hopper_rows(target), *attention.hopper_rows(target)] if target.hopper else []
    return CudaTable("cuda", [*hopper, *gemm.rows(target), *attention.ROWS, *rows.ROWS], target)
