"""How the ops on rows are launched on CUDA, as far as it needs no GPU: what host and kernels must
agree on, and what a grid may be."""

import re

import pytest

from krnl.dtypes import BF16, F16, F32, I32, DType
from krnl.kernels.cuda.rows import DIALECT, ROWS
from krnl.kernels.cuda.sources import FOLDER
from krnl.kernels.launch import LANES, Launch
from krnl.kernels.rows import POINTWISE_THREADS
from krnl.ops import norm, optimizer, pointwise
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.lower import Table
from krnl.plan.op import LIVE, Op
from krnl.plan.step import Step

TABLE = Table("cuda", ROWS)


def constant(file: str, name: str) -> int:
    found = re.search(rf"constexpr int {name} = (\d+);", (FOLDER / file).read_text("utf-8"))
    assert found, f"{file} has no {name}"
    return int(found[1])


def test_host_and_kernels_agree_on_numbers() -> None:
    assert DIALECT.vector == constant("rows.h", "kVector")
    assert DIALECT.most_threads == constant("rows.h", "kMostThreads")
    assert constant("rows.h", "kPointwiseThreads") == POINTWISE_THREADS
    assert DIALECT.held == constant("norm.cu", "kHeld")


def test_hyper_has_the_order_of_the_op() -> None:
    text = (FOLDER / "optimizer.cu").read_text("utf-8")
    found = re.search(r"struct Hyper \{\s*float ([^;]+);", text)
    assert found and tuple(found[1].split(", ")) == optimizer.HYPER


def launch(op: Op, *inputs: Buffer, activation: DType = BF16, **attributes: float) -> Launch:
    """The only one of a call."""
    step = Step("test", activation, Buffer(LIVE, (1,), I32, Kind.INPUT))
    step(op, *inputs, **attributes)
    (call,) = step.calls
    (made,) = TABLE.choose(call).launches(call, None)
    return made


def filled(*shape: int, dtype: DType = BF16) -> Buffer:
    return Buffer("x", shape, dtype, Kind.INPUT)


@pytest.mark.parametrize("rows, groups", [(1, 1), (65_535, 65_535), (70_000, 65_535)])
def test_more_rows_than_a_grid_has_are_left_to_its_blocks(rows: int, groups: int) -> None:
    """CUDA allows so many blocks along the second axis."""
    made = launch(pointwise.swiglu, filled(rows, 64), filled(rows, 64))
    assert made.groups == (1, groups, 1)


@pytest.mark.parametrize(
    "width, rows, groups, threads",
    [
        (128, 24, 3, 8 * LANES),  # a warp each, eight to a block
        (512, 25, 4, 8 * LANES),
        (513, 25, 25, 2 * LANES),
        (2048, 25, 25, 4 * LANES),
        (DIALECT.held_width, 25, 25, DIALECT.most_threads),
        (2 * DIALECT.held_width, 25, 25, DIALECT.most_threads),
    ],
)
def test_short_rows_of_a_norm_share_a_block(
    width: int, rows: int, groups: int, threads: int
) -> None:
    made = launch(norm.rms_norm, filled(rows, width), filled(width, dtype=F32), eps=1e-5)
    assert (made.groups, made.threads) == ((groups, 1, 1), threads)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_rows_are_vectorised_where_all_buffers_allow_it(dtype: DType) -> None:
    def constants(width: int, start: int) -> dict[int, bool | int | float]:
        whole = filled(4 * width + start, dtype=dtype)
        made = launch(
            pointwise.swiglu,
            whole.part("gate", start, (4, width)),
            filled(4, width, dtype=dtype),
            activation=dtype,
        )
        assert made.types == (dtype,)
        return dict(made.constants)

    assert constants(64, 0) == constants(8, 16) == {0: True}
    assert constants(64, 4) == constants(60, 0) == constants(65, 0) == {0: False}
