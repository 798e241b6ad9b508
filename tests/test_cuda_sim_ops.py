"""Every op on the CUDA kernels, in the simulator, against its float64 reference: the cases and
allowances of the CPU. An access out of bounds, a missing barrier or a tile that is read too early
is a fault, or leaves NaN."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from cudasim.backend import HOPPER, OWN, SimulatedCudaBackend, enqueued
from cudasim.device import BACKWARD, FORWARD
from krnl.backends.cuda_compiler import Kernel
from krnl.dtypes import BF16, F16, F32, DType
from krnl.kernels.cuda import gemm_wgmma
from krnl.kernels.cuda.attention_wgmma import WIDTHS, key_splits
from krnl.kernels.cuda.sources import libraries
from krnl.kernels.cuda.table import table
from krnl.kernels.cuda.target import Target
from krnl.kernels.launch import GpuRow, Launch
from krnl.plan.arena import plan
from krnl.plan.buffer import Buffer
from krnl.plan.lower import Table
from krnl.plan.step import Call
from op_bench import (
    EXAMPLES,
    SIZES,
    Bench,
    Chosen,
    Draw,
    check_drawn,
    chosen,
    few_keys,
    forget_last_keys,
    hide_last_keys,
    keys_shared_by,
    of_every_type,
)
from op_cases import CASE

AMPERE = Target(80)
TARGETS = (AMPERE, HOPPER)
ACTIVATIONS = (BF16, F16, F32)
SHUFFLED = 2  # an order of threads
# Beside the small ones: what the kernels with whole tiles take, and more than one of those. Ranks
# are such that the adapters of gate and up do not begin with a step along K.
TILES: dict[str, dict[str, Any]] = {
    "tiles": {"n": 150, "c": 136, "f": 200, "v": 264, "t": 64, "m": 200, "d": 64, "p": 72, "q": 16}
    | {"o": (264, 72), "r": (8, 72), "elements": 4096},
    "wide heads": {"n": 140, "c": 64, "f": 64, "v": 64, "t": 64, "m": 300, "d": 128, "p": 8, "q": 8}
    | {"o": (64,), "r": (8,), "elements": 8},
    "other heads": {"n": 140, "c": 64, "f": 64, "v": 64, "t": 64, "m": 160, "d": 96, "p": 8, "q": 8}
    | {"o": (64,), "r": (8,), "elements": 8},
}
ALL_SIZES = {**SIZES, **TILES}

every_call = pytest.mark.parametrize(
    ("name", "activation"), list(product(CASE, ACTIVATIONS)), ids=str
)


@cache
def backend(target: Target, order: int = FORWARD, beside: bool = False) -> SimulatedCudaBackend:
    return SimulatedCudaBackend(target, order=order, beside=beside)


def benches(name: str, activation: DType) -> Iterator[Bench]:
    """Chosen sizes; the small ones with every type of weight and output."""
    yield from of_every_type(CASE[name], activation, SIZES.values())
    for sizes in TILES.values():
        yield chosen(CASE[name], sizes, activation)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """What the chosen calls take, compiled at once and in parallel."""
    OWN.prepare(kernel for call in product(CASE, ACTIVATIONS) for kernel in kernels_of(*call))


@cache
def kernels_of(name: str, activation: DType) -> frozenset[Kernel]:
    """Of all chosen calls."""
    planned = (
        plan([bench.emit()[0]], table(target))
        for bench in benches(name, activation)
        for target in TARGETS
    )
    return frozenset(Kernel.of(launch) for (made,) in planned for launch in enqueued(made))


@every_call
def test_op_matches_its_reference(name: str, activation: DType) -> None:
    """Drawn sizes, on aligned addresses and on others."""

    def check(bench: Bench, draw: Draw) -> float:
        bench.shift = draw(st.sampled_from([0, 0, 8, 1, 2, 4]))
        return bench.check(backend(draw(st.sampled_from(TARGETS)), SHUFFLED))

    used = check_drawn(CASE[name], activation, max(1, EXAMPLES // 10), check)
    print(f"{name} cuda {activation}: at most {used:.0%} of the allowance")


@every_call
def test_op_on_every_type_of_weight_and_output(name: str, activation: DType) -> None:
    used = [bench.check(backend(AMPERE)) for bench in benches(name, activation)]
    print(f"{name} cuda {activation}: at most {max(used):.0%} of the allowance")


HOPPER_ROWS = {row.name: row.op for row in table(HOPPER).rows}
HOPPER_OPS = sorted({op for name, op in HOPPER_ROWS.items() if name.endswith("_wgmma")})


@pytest.mark.parametrize("activation", [BF16, F16], ids=str)
@pytest.mark.parametrize("name", HOPPER_OPS)
def test_op_on_hopper(name: str, activation: DType) -> None:
    """Where it has kernels of its own: for 16-bit elements, in whole and in ragged tiles."""
    for sizes in (SIZES["whole"], *TILES.values()):
        chosen(CASE[name], sizes, activation).check(backend(HOPPER))


@every_call
def test_the_order_of_threads_changes_no_bit(name: str, activation: DType) -> None:
    """Nor does it whether launches are told to wait at their end."""
    for sizes in ALL_SIZES.values():
        bench = chosen(CASE[name], sizes, activation)
        first = bench.run(backend(HOPPER))
        np.testing.assert_equal(bench.run(backend(HOPPER, BACKWARD, beside=True)), first)


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("name", ["lora_linear", "lora_up_backward", "lora_b_grad"])
def test_members_of_a_group_may_have_kernels_of_their_own(name: str, target: Target) -> None:
    """A rank of 12 keeps its member from tensor cores, and no other. The same bits every time."""
    dims = {"n": 70, "c": 72, "o": (72, 64, 40), "r": (16, 12, 20), "s": 48}
    bench = Chosen(CASE[name], BF16, dims, live=65)
    (made,) = plan([bench.emit()[0]], table(target))
    assert len({launch.library for launch in enqueued(made)}) > 1
    bench.check(backend(target, SHUFFLED))
    np.testing.assert_equal(bench.run(backend(target)), bench.run(backend(target, BACKWARD)))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_keys_that_nobody_sees_may_be_anything(target: Target, activation: DType) -> None:
    for d in (26, 64, 96, 128):
        dims = {"n": 70, "m": 330, "h": 2, "g": 1, "d": d}
        bench = Chosen(CASE["attention"], activation, dims, live=67)
        hide_last_keys(bench, 30)
        results = bench.run(backend(target))
        forget_last_keys(bench, 30)
        np.testing.assert_equal(bench.run(backend(target)), results)


# A call for each layout and epilogue of gemm_wgmma.cu, with edges in all directions. A single
# member has bias and residual, and its results may be floats, without a residual.
PRODUCTS: list[tuple[str, dict[str, Any], DType, set[str]]] = [
    ("lora_swiglu", {"n": 150, "c": 136, "f": 200, "p": 8, "q": 72, "s": 80}, BF16, set()),
    ("lora_linear", {"n": 150, "c": 200, "o": (264, 72), "r": (8, 16), "s": 24}, BF16, set()),
    ("lora_linear", {"n": 150, "c": 200, "o": (264,), "r": (8,), "s": 8}, BF16, set()),
    ("lora_linear", {"n": 150, "c": 200, "o": (264,), "r": (8,), "s": 8}, F32, {"residual"}),
    ("lora_down", {"n": 150, "c": 200, "s": 72}, BF16, set()),
    (
        "lora_linear_backward",
        {"n": 150, "c": 200, "o": (264, 72), "r": (8, 16), "s": 24},
        BF16,
        set(),
    ),
    ("lora_swiglu_backward", {"n": 150, "c": 136, "f": 200, "r": (16,), "s": 16}, BF16, set()),
    ("lora_a_grad", {"n": 150, "c": 200, "s": 24}, BF16, set()),
    ("lora_b_grad", {"n": 150, "o": (264, 72), "r": (8, 16), "s": 24}, BF16, set()),
]


# Of others a block would write no whole matrices of 16 columns.
TILINGS = [t for t in gemm_wgmma.TILINGS if t.columns // t.split % 16 == 0]


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_every_tiling_of_products_on_hopper(tiling: gemm_wgmma.Tiling) -> None:
    def forced(call: Call, workspace: Buffer | None) -> list[Launch]:
        made = [job.launch(tiling, HOPPER) for job in gemm_wgmma.jobs(call)[0]]
        # So few blocks go from tile to tile; those of a cluster do not.
        return made if tiling.split > 1 else [replace(x, groups=(3, 1, 1)) for x in made]

    made = 0
    for name, dims, result, absent in PRODUCTS:
        bench = Chosen(CASE[name], BF16, dims, target=result, live=140)
        bench.absent |= absent
        jobs, others = gemm_wgmma.jobs(bench.emit()[0].calls[0])
        assert jobs and not others
        if not all(job.allows(tiling) for job in jobs):
            continue
        rows = Table("cuda", [GpuRow(name, kernel=f"{name}_wgmma", launches=forced)])
        bench.check(SimulatedCudaBackend(kernels=rows, order=SHUFFLED))
        made += 1
    assert made


@pytest.mark.parametrize(
    ("d", "split"), [(d, split) for d in WIDTHS for split in key_splits(d)], ids=str
)
def test_every_split_of_gradients_of_keys_on_hopper(d: int, split: int) -> None:
    """In two orders of threads the same bits."""
    kernels = keys_shared_by(split)
    for bench in few_keys(BF16, d):
        bench.check(SimulatedCudaBackend(kernels=kernels, order=SHUFFLED))
        first = bench.run(SimulatedCudaBackend(kernels=kernels))
        again = SimulatedCudaBackend(kernels=kernels, order=BACKWARD, beside=True)
        np.testing.assert_equal(bench.run(again), first)


def test_every_source_was_run() -> None:
    """By an op's tests above."""
    used = {kernel.library for call in product(CASE, ACTIVATIONS) for kernel in kernels_of(*call)}
    assert used == set(libraries())
