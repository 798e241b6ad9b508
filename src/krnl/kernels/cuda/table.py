"""How every op is launched on NVIDIA's GPUs. Each family's module says which kernel is chosen, and
why."""

from krnl.kernels.cuda import attention, gemm, rows
from krnl.plan.lower import Table


def table(capability: int) -> Table:
    """The kernels for GPUs of a compute capability: 80, 86, 90, 120, …"""
    hopper = [*gemm.HOPPER_ROWS, *attention.HOPPER_ROWS] if capability == 90 else []
    return Table("cuda", [*hopper, *gemm.ROWS, *attention.ROWS, *rows.ROWS])
