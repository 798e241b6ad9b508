"""Which kernels make the matrix products of ops/gemm.py: of the families that take a product, the
fastest."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from krnl.dtypes import BF16, F16, F32
from krnl.kernels.cuda import gemm_mma, gemm_simt, gemm_wgmma
from krnl.kernels.cuda.gemm_wgmma import TILINGS, Tiling
from krnl.kernels.cuda.target import Target
from krnl.kernels.launch import GpuRow, Launch
from krnl.kernels.products import Product, products, types_fit
from krnl.plan.buffer import Buffer
from krnl.plan.step import Call


class Family(Protocol):
    """A module of kernels that make products."""

    def workspace(self, product: Product, target: Target) -> int: ...
    def launches(
        self, product: Product, target: Target, workspace: Buffer | None
    ) -> Sequence[Launch]: ...


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


def _family(product: Product) -> Family:
    return gemm_mma if gemm_mma.fits(product) else gemm_simt


def _workspace(made: Sequence[Product], target: Target) -> int:
    return max((_family(product).workspace(product, target) for product in made), default=0)


def _launches(made: Sequence[Product], target: Target, scratch: Buffer | None) -> list[Launch]:
    """Of each product by itself."""
    return [
        launch for product in made for launch in _family(product).launches(product, target, scratch)
    ]


def _overlapping(launches: Sequence[Launch], scratch: Buffer | None) -> list[Launch]:
    """Each writes a result of its own, but for the sums of chunks: those of all products lie in the
    same scratch."""
    return [
        replace(launch, independent=scratch is None or scratch not in launch.arguments)
        for launch in launches
    ]


def hopper_row(op: str, target: Target, tilings: Sequence[Tiling] = TILINGS) -> GpuRow:
    """By gemm_wgmma, cut in one of these ways; members of a group that it cannot take, by the
    others."""

    def launches(call: Call, scratch: Buffer | None) -> list[Launch]:
        jobs, others = gemm_wgmma.jobs(call)
        tiled = [job.launch(job.tiling(target, tilings), target) for job in jobs]
        return _overlapping(tiled + _launches(others, target, scratch), scratch)

    return GpuRow(
        op,
        kernel=f"{op}_wgmma",
        when=lambda call: _types_fit(call) and bool(gemm_wgmma.jobs(call)[0]),
        workspace=lambda call: _workspace(gemm_wgmma.jobs(call)[1], target),
        launches=launches,
        why="whole warpgroups multiply, the copy engine fetches",
    )


def hopper_rows(target: Target) -> list[GpuRow]:
    return [hopper_row(op, target) for op in (*OPS, "lora_swiglu")]


def rows(target: Target) -> list[GpuRow]:
    """On all GPUs. A row has the name of the fastest family that takes a member of the group."""

    def launches(call: Call, scratch: Buffer | None) -> list[Launch]:
        return _overlapping(_launches(products(call), target, scratch), scratch)

    def row(op: str, family: str, when: Callable[[Sequence[Product]], bool], why: str) -> GpuRow:
        return GpuRow(
            op,
            kernel=f"{op}_{family}",
            when=lambda call: _types_fit(call) and when(products(call)),
            workspace=lambda call: _workspace(products(call), target),
            launches=launches,
            why=why,
        )

    def on_tensor_cores(made: Sequence[Product]) -> bool:
        return any(map(gemm_mma.fits, made))

    def at_all(made: Sequence[Product]) -> bool:
        return all(map(gemm_simt.fits, made))

    return [
        *(row(op, "mma", on_tensor_cores, "tensor cores") for op in OPS),
        *(row(op, "simt", at_all, "any types, shapes and starts") for op in OPS),
        GpuRow(
            "lora_swiglu",
            kernel="lora_swiglu_mma",
            when=lambda call: _types_fit(call) and gemm_mma.swiglu_fits(call),
            launches=lambda call, scratch: gemm_mma.swiglu_launches(call, target),
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
