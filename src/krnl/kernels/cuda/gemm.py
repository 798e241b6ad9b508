"""Which kernels make the matrix products of ops/gemm.py: of the families that take a call, the
fastest."""

from collections.abc import Collection, Sequence
from typing import Protocol

from krnl.dtypes import BF16, F16, F32
from krnl.kernels.cuda import gemm_mma, gemm_simt, gemm_wgmma
from krnl.kernels.launch import GpuRow, Launch
from krnl.kernels.products import Product, products, types_fit
from krnl.plan.buffer import Buffer
from krnl.plan.step import Call


class Family(Protocol):
    """A module of kernels that make products."""

    def fits(self, product: Product) -> bool: ...
    def workspace(self, product: Product) -> int: ...
    def launches(self, product: Product, workspace: Buffer | None) -> Sequence[Launch]: ...


OPS = (
    "lora_down",
    "lora_linear",
    "lora_up_backward",
    "lora_linear_backward",
    "lora_swiglu_backward",
    "lora_a_grad",
    "lora_b_grad",
)


def _types_fit(call: Call) -> bool:
    return types_fit(call, (BF16, F16, F32))


def _row(op: str, family: Family, suffix: str, why: str) -> GpuRow:
    return GpuRow(
        op,
        kernel=f"{op}_{suffix}",
        when=lambda call: _types_fit(call) and all(map(family.fits, products(call))),
        workspace=lambda call: max(map(family.workspace, products(call)), default=0),
        launches=lambda call, scratch: [
            launch for product in products(call) for launch in family.launches(product, scratch)
        ],
        why=why,
    )


def hopper_row(op: str, splits: Collection[int] = gemm_wgmma.CLUSTERS) -> GpuRow:
    """By gemm_wgmma, with tiles that so many blocks may share."""
    return GpuRow(
        op,
        kernel=f"{op}_wgmma",
        when=lambda call: _types_fit(call) and all(job.fits for job in gemm_wgmma.jobs(call)),
        launches=lambda call, scratch: [
            job.launch(job.tiling(splits)) for job in gemm_wgmma.jobs(call)
        ],
        why="whole warpgroups multiply, the copy engine fetches",
    )


HOPPER_ROWS = [hopper_row(op) for op in (*OPS, "lora_swiglu")]

ROWS = [
    *(_row(op, gemm_mma, "mma", "tensor cores") for op in OPS),
    *(_row(op, gemm_simt, "simt", "any types, shapes and starts") for op in OPS),
    GpuRow(
        "lora_swiglu",
        kernel="lora_swiglu_mma",
        when=lambda call: _types_fit(call) and gemm_mma.swiglu_fits(call),
        launches=lambda call, scratch: gemm_mma.swiglu_launches(call),
        why="tensor cores, gate and up in one product",
    ),
    GpuRow(
        "lora_swiglu",
        kernel="lora_swiglu_simt",
        when=_types_fit,
        launches=lambda call, scratch: gemm_simt.swiglu_launches(call),
        why="gate and up in one product, of any types, shapes and starts",
    ),
]
