"""Every op on an NVIDIA GPU against its float64 reference: the cases and allowances of the CPU."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from cuda_device import cuda, missing
from krnl.dtypes import BF16, F16, F32, DType
from krnl.kernels.cuda.attention_wgmma import WIDTHS, key_splits
from krnl.kernels.cuda.table import CudaTable, table
from krnl.kernels.cuda.target import Target
from krnl.kernels.launch import launches
from krnl.plan.lower import Table, lower
from op_bench import (
    EXAMPLES,
    HANDS_OVER,
    SIZES,
    Bench,
    Draw,
    check_drawn,
    chosen,
    few_keys,
    keys_shared_by,
    of_every_type,
)
from op_cases import CASE

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a GPU")

ACTIVATIONS = (BF16, F16, F32)
# Beside the small ones: what large models are made of, so that kernels for them are chosen.
LAYERS: dict[str, dict[str, Any]] = {
    "wide": {"n": 300, "c": 1024, "f": 1408, "v": 4096, "t": 300, "m": 640, "d": 128, "p": 16}
    | {"h": 8, "g": 2, "q": 16, "o": (1024, 256, 256), "r": (16, 16, 16), "elements": 2**18},
    "deep": {"n": 512, "c": 2816, "f": 512, "v": 32000, "t": 64, "m": 512, "d": 64, "p": 64}
    | {"h": 6, "g": 3, "q": 64, "o": (512,), "r": (64,), "elements": 2**20},
    # More tiles than blocks, which hand their sums over where SwiGLU follows.
    "many": {"n": 2100, "c": 1032, "f": 4104, "v": 1000, "t": 300, "m": 2100, "d": 64, "p": 16}
    | {"h": 2, "g": 1, "q": 16, "o": (4104,), "r": (16,), "elements": 2**18},
}

every_call = pytest.mark.parametrize(
    ("name", "activation"), list(product(CASE, ACTIVATIONS)), ids=str
)


@every_call
def test_op_matches_its_reference(name: str, activation: DType) -> None:
    """Drawn sizes, on aligned addresses and on others."""

    def check(bench: Bench, draw: Draw) -> float:
        bench.shift = draw(st.sampled_from([0, 0, 8, 1, 2, 4]))
        return bench.check(cuda())

    used = check_drawn(CASE[name], activation, EXAMPLES, check)
    print(f"{name} cuda {activation}: at most {used:.0%} of the allowance")


def calls(name: str, activation: DType) -> list[Bench]:
    """Chosen sizes with every type of weight and output."""
    small = of_every_type(CASE[name], activation, SIZES.values())
    return [*small, *(chosen(CASE[name], sizes, activation) for sizes in LAYERS.values())]


@every_call
def test_op_on_every_type_of_weight_and_output(name: str, activation: DType) -> None:
    used = [bench.check(cuda()) for bench in calls(name, activation)]
    print(f"{name} cuda {activation}: at most {max(used):.0%} of the allowance")


@every_call
def test_every_kernel_for_an_op_is_right(name: str, activation: DType) -> None:
    """Not only the first row of the table that takes a call: each of them."""
    backend = cuda()
    table = backend.kernels
    try:
        for bench in calls(name, activation):
            (call,) = bench.emit()[0].calls
            rows = [row for row in table.rows if row.op == name and row.when(call)]
            for row in rows[1:]:
                backend.kernels = Table("cuda", [row])
                bench.check(backend)
    finally:
        backend.kernels = table


@every_call
def test_two_runs_are_the_same_bit_for_bit(name: str, activation: DType) -> None:
    """And with other work between them."""
    for sizes in (*SIZES.values(), *LAYERS.values()):
        bench = chosen(CASE[name], sizes, activation)
        first = bench.run(cuda())
        for _ in range(3):
            np.testing.assert_equal(bench.run(cuda()), first)


@every_call
def test_a_call_for_the_sanitizer(name: str, activation: DType) -> None:
    """One small call, for tools that watch every access."""
    chosen(CASE[name], SIZES["ragged"], activation).run(cuda())
    chosen(CASE[name], SIZES["whole"], activation).run(cuda())


@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("activation", [BF16, F16], ids=str)
def test_every_split_of_gradients_of_keys_is_right(activation: DType, d: int) -> None:
    """Twice the same bits."""
    backend = cuda()
    kernels = backend.kernels
    if not (isinstance(kernels, CudaTable) and kernels.target.hopper):
        pytest.skip("it is Hopper that has clusters")
    try:
        for bench, split in product(few_keys(activation, d), key_splits(d)):
            backend.kernels = keys_shared_by(split)
            bench.check(backend)
            np.testing.assert_equal(bench.run(backend), bench.run(backend))
    finally:
        backend.kernels = kernels


def test_every_op_has_a_row_and_every_row_an_op() -> None:
    assert {row.op for row in cuda().kernels.rows} == set(CASE)


def test_large_products_are_those_that_hand_over() -> None:
    """The last of the sizes above is there for them."""
    for name in ("lora_swiglu", "lora_swiglu_backward"):
        bench = chosen(CASE[name], LAYERS["many"], BF16)
        (found,) = lower(bench.emit()[0].calls, table(Target(90)))
        (launch,) = launches(found)
        assert launch.constants[HANDS_OVER]
