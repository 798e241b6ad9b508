"""What is too large for a kernel is told in a sentence before anything is launched. No GPU, and no
memory for what is so large, is needed."""

import struct
from typing import Any

import pytest

from krnl.dtypes import F16, F32, I32, DType
from krnl.errors import PlanError
from krnl.kernels.cuda.table import table
from krnl.kernels.cuda.target import Target
from krnl.kernels.launch import GpuRow, Launch, launches, pack
from krnl.kernels.metal.table import TABLE
from krnl.ops.attention import attention
from krnl.ops.gemm import lora_down, lora_linear, lora_swiglu
from krnl.ops.pointwise import swiglu, zero
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.lower import Dispatch, Table, lower
from krnl.plan.step import Step

TABLES = {
    "metal": TABLE, **{str(c): table(Target(c)) for c in (80, 90, 120)},
}  # fmt: skip
HUGE = 2**32  # more than any kernel counts


def buffer(*shape: int, dtype: DType = F16) -> Buffer:
    return Buffer("x", shape, dtype, Kind.STATE)


def made(kernels: Table, op: Any, *inputs: Any, **keywords: Any) -> list[Launch]:
    step = Step("big", F16, buffer(1, dtype=I32))
    step(op, *inputs, **keywords)
    (dispatch,) = lower(step.calls, kernels)
    scratch = buffer(1, dtype=F32) if dispatch.row.workspace(dispatch.call) else None
    return launches(Dispatch(dispatch.call, dispatch.row, scratch))


# Rows beyond what any struct holds: of a product, of rows, of single elements.
BIG: dict[str, Any] = {
    "zero": lambda n: (zero, {"into": buffer(n, dtype=F32)}),
    "swiglu": lambda n: (swiglu, buffer(1, n), buffer(1, n)),
    "lora_down": lambda n: (lora_down, buffer(n, 64), buffer(16, 64), buffer(16, dtype=F32)),
    "lora_linear": lambda n: (
        lora_linear, buffer(n, 64), (buffer(64, 64),), None, None, None, None,
    ),
    "lora_swiglu": lambda n: (
        lora_swiglu, buffer(n, 64), buffer(64, 64), buffer(64, 64), None, None, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kernels", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("name", BIG)
def test_a_size_beyond_32_bits_is_told_with_the_call(name: str, kernels: Table) -> None:
    def launched(size: int) -> list[Launch]:
        op, *inputs = BIG[name](size)
        keywords = inputs.pop() if isinstance(inputs[-1], dict) else {}
        return made(kernels, op, *inputs, **keywords)

    assert launched(64)
    with pytest.raises(PlanError, match=rf"^{name}: [\d,]+ elements are more than a kernel counts"):
        launched(HUGE)


def test_more_groups_than_a_gpu_starts() -> None:
    """Though each size fits: a group for each of 2³² rows of heads."""
    q, k = buffer(2**27, 32, 6), buffer(8, 32, 6)
    ends = buffer(2**27, dtype=I32), buffer(2**27, dtype=I32)
    for target in (Target(80), Target(90)):
        with pytest.raises(PlanError, match=r"^attention: 4,294,967,296 groups of threads"):
            made(table(target), attention, q, k, k, *ends, scale=1.0)


def test_nothing_is_independent_of_what_a_launch_that_is_left_out_followed() -> None:
    step = Step("s", F16, buffer(1, dtype=I32))
    step(zero, into=buffer(1, dtype=F32))
    (call,) = step.calls

    def kept(*groups: int) -> list[tuple[int, bool]]:
        row = GpuRow(
            "zero",
            "x",
            launches=lambda call, scratch: [
                Launch("x", "x", (), (count, 1, 1), 32, independent=True) for count in groups
            ],
        )
        return [(x.groups[0], x.independent) for x in launches(Dispatch(call, row, None))]

    assert kept(1, 2, 3) == [(1, True), (2, True), (3, True)]
    assert kept(1, 0, 3, 4) == [(1, True), (3, False), (4, True)]
    assert kept(0, 2) == [(2, False)]
    assert kept(1, 0, 0, 4, 0) == [(1, True), (4, False)]


def test_numbers_lie_in_their_order_in_a_struct() -> None:
    assert pack("2if", 1, -2, 0.5) == struct.pack("<2if", 1, -2, 0.5)
    assert pack("I", HUGE - 1) == b"\xff" * 4
    with pytest.raises(PlanError, match=r"^4,294,967,296 elements are more than a kernel counts"):
        pack("3If", 7, HUGE, 8, 2.0**40)
    with pytest.raises(PlanError, match="2,147,483,648 elements"):
        pack("i", 2**31)
