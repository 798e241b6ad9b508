"""Which kernels CUDA takes for matrix products, and how they are launched. No GPU is needed."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from krnl.dtypes import BF16, F16, F32, DType
from krnl.kernels.cuda import gemm_mma, gemm_simt
from krnl.kernels.cuda.gemm_chunks import BLOCKS, STEP, Tile, chunks
from krnl.kernels.cuda.table import table
from krnl.kernels.cuda.target import Target
from krnl.kernels.launch import Launch, TensorMap, launches
from krnl.kernels.products import PAIRS, Product, products
from krnl.plan.buffer import Buffer
from krnl.plan.lower import Dispatch, lower
from op_bench import chosen
from op_cases import CASES

GEMMS = [case for case in CASES if case.op.name.startswith("lora_")]
WHOLE: dict[str, Any] = {"n": 64, "c": 64, "f": 128, "p": 16, "q": 32, "o": (64, 96), "r": (16, 32)}
LARGE: dict[str, Any] = {**WHOLE, "n": 2048, "c": 2048, "f": 5632, "o": (2048, 512)}
AMPERE = Target(80)
SHARED = 96 << 10  # bytes that a block has on any card
# The constants of gemm_mma's kernels.
PAIRED = {"gemm_mma": 6, "gemm_mma_swiglu": 5}


def dispatch(
    name: str,
    sizes: dict[str, Any],
    activation: DType,
    weight: DType | None = None,
    shift: int = 0,
    target: Target = AMPERE,
) -> Dispatch:
    (case,) = (case for case in GEMMS if case.op.name == name)
    bench = chosen(case, sizes, activation, weight)
    bench.shift = shift
    (found,) = lower(bench.emit()[0].calls, table(target))
    return found


def libraries(found: Dispatch) -> set[str]:
    return {launch.library for launch in launches(found) if launch.function != "gemm_reduce"}


every_op = pytest.mark.parametrize("name", [case.op.name for case in GEMMS])


@every_op
@pytest.mark.parametrize("activation", [BF16, F16], ids=str)
def test_tensor_cores_take_aligned_rows_of_one_type(name: str, activation: DType) -> None:
    for sizes in (WHOLE, LARGE):
        assert libraries(dispatch(name, sizes, activation)) == {"gemm_mma"}
        assert libraries(dispatch(name, sizes, activation, shift=8)) == {"gemm_mma"}


@every_op
def test_whatever_they_cannot_take_is_taken_all_the_same(name: str) -> None:
    odd: dict[str, dict[str, Any]] = {
        "lora_down": {"c": 63},
        "lora_linear": {"r": (16, 20)},
        "lora_swiglu": {"q": 20},
        "lora_up_backward": {"r": (16, 20)},
        "lora_linear_backward": {"o": (64, 90)},
        "lora_swiglu_backward": {"f": 100},
        "lora_a_grad": {"p": 20},
        "lora_b_grad": {"r": (16, 20)},
    }
    assert libraries(dispatch(name, WHOLE, F32)) == {"gemm_simt"}
    assert libraries(dispatch(name, WHOLE, BF16, shift=4)) == {"gemm_simt"}
    mixed = {"gemm_simt", "gemm_mma"} if name == "lora_up_backward" else {"gemm_simt"}
    assert libraries(dispatch(name, {**WHOLE, **odd[name]}, BF16)) == mixed


ODD_RANKS: dict[str, Any] = {**WHOLE, "o": (64, 64, 64), "r": (16, 12, 20)}  # 48 together


@pytest.mark.parametrize("target", [AMPERE, Target(90)], ids=str)
@pytest.mark.parametrize("name", ["lora_linear", "lora_up_backward", "lora_b_grad"])
def test_a_member_of_odd_rank_does_not_slow_the_others(name: str, target: Target) -> None:
    """Each product is made once, by the fastest kernels that take it."""
    found = dispatch(name, ODD_RANKS, BF16, target=target)
    made = [x for x in launches(found) if x.function != "gemm_reduce"]
    fast = "gemm_wgmma" if target.hopper else "gemm_mma"
    assert found.row.name == f"{name}_{fast.removeprefix('gemm_')}"
    # B has rows of 12 and of 20 elements. Gradients of B are written by twos where tensor cores
    # of all cards make them, but what u has behind column 28 begins at no multiple of 8.
    second = "gemm_mma" if name == "lora_b_grad" else "gemm_simt"
    assert [launch.library for launch in made] == [fast, second, "gemm_simt"]
    taken = Counter(map(_place, _buffers(launches(found))))
    assert [taken[_place(x.epilogue.y)] for x in products(found.call)] == [1, 1, 1]
    needed = [_place(found.workspace)] if found.workspace else []
    assert set(needed) <= set(taken)


def _place(buffer: Buffer) -> tuple[Buffer, int]:
    return buffer.root, buffer.start


def _buffers(made: list[Launch]) -> Iterator[Buffer]:
    """All that they are given."""
    for launch in made:
        for argument in launch.arguments:
            for x in argument if isinstance(argument, tuple) else (argument,):
                if isinstance(x, TensorMap):
                    yield x.buffer
                elif isinstance(x, Buffer):
                    yield x


@pytest.mark.parametrize(
    "name", ["lora_linear", "lora_swiglu", "lora_linear_backward", "lora_swiglu_backward"]
)
def test_weights_of_another_type_are_converted(name: str) -> None:
    for weight in (F16, F32):
        found = dispatch(name, WHOLE, BF16, weight)
        assert libraries(found) == {"gemm_simt"}
        assert all(weight in x.types for x in launches(found) if x.function != "gemm_reduce")


@every_op
def test_nothing_is_launched_for_nothing(name: str) -> None:
    for activation in (BF16, F32):
        for letter in ("o", "c", "f", "r"):
            empty = {**WHOLE, letter: (0, 0) if letter in "or" else 0}
            found = launches(dispatch(name, empty, activation))
            assert all(min(launch.groups) > 0 for launch in found)


@pytest.mark.parametrize("family", [gemm_mma, gemm_simt])
@pytest.mark.parametrize("name", [c.op.name for c in GEMMS if c.op.name != "lora_swiglu"])
def test_chunks_fill_the_workspace(name: str, family: Any) -> None:
    """Partial sums have room, and every launch on them says the same number of chunks."""
    for sizes in (WHOLE, LARGE):
        for product in products(dispatch(name, sizes, BF16).call):
            nbytes = family.workspace(product, AMPERE)
            scratch = product.live.root if nbytes else None  # any buffer does on paper
            found = family.launches(product, AMPERE, scratch)
            cut = found[0].groups[2]
            assert len(found) == (1 if cut == 1 else 2)
            assert nbytes == (0 if cut == 1 else 4 * cut * product.rows * product.columns)
            counts = {_shape(launch)[3] for launch in found}
            assert counts == {cut}


def _shape(launch: Launch) -> memoryview:
    """struct Shape: rows, columns, stride, chunks, whether it accumulates, pairs."""
    shape = launch.arguments[-1]
    assert isinstance(shape, bytes)
    return memoryview(shape).cast("i")


def test_chunks_are_worth_their_sums() -> None:
    tile = Tile(64, 64)
    for c in (64, 512, 4096, 65536):
        (product,) = products(dispatch("lora_down", {**LARGE, "n": 128, "c": c}, BF16).call)
        cut, tiles = chunks(product, tile, AMPERE), tile.count(product.rows, product.columns)
        assert tiles < AMPERE.multiprocessors
        assert cut * tiles <= BLOCKS * AMPERE.multiprocessors
        assert cut == 1 or c // STEP // cut >= tile.least_steps
        # A chunk's operands, of 16 bits, and its sums, written and read.
        operands = tile.least_steps * STEP * (tile.rows + tile.columns) * 2
        assert operands >= 2 * 4 * tile.rows * tile.columns > operands - STEP * 256


def test_wide_products_take_large_tiles_and_narrow_ones_small_tiles() -> None:
    tiles = {
        name: {launch.constants[1] for launch in launches(dispatch(name, LARGE, BF16))[:1]}
        for name in ("lora_down", "lora_linear", "lora_linear_backward", "lora_a_grad")
    }
    assert tiles == {
        "lora_down": {64},
        "lora_linear": {128},
        "lora_linear_backward": {128},
        "lora_a_grad": {64},
    }


@every_op
def test_a_block_fits_on_every_card(name: str) -> None:
    for sizes in (WHOLE, LARGE):
        for activation in (BF16, F32):
            for launch in launches(dispatch(name, sizes, activation)):
                assert launch.shared <= SHARED
                assert launch.threads % 32 == 0 and launch.threads <= 256
                assert launch.groups[1] == 1 and launch.groups[2] <= BLOCKS * AMPERE.multiprocessors


@pytest.mark.parametrize(("name", "letter"), [("lora_linear", "o"), ("lora_swiglu", "f")])
def test_only_even_rows_are_written_by_twos(name: str, letter: str) -> None:
    for width, shift, paired in ((128, 0, True), (129, 0, False)):
        sizes = {**WHOLE, letter: (width, width) if letter == "o" else width}
        for launch in launches(dispatch(name, sizes, BF16, shift=shift)):
            if launch.function in PAIRED:
                assert launch.constants[PAIRED[launch.function]] is paired


def test_pairs_stand_where_the_kernels_look_for_them() -> None:
    """Three pairs and an adapter's; those that are not there are null and have no depth."""
    found = dispatch("lora_linear_backward", WHOLE, F32)
    (product,) = products(found.call)
    launch = launches(found)[0]
    operands, shape = launch.arguments[: 2 * (PAIRS + 1)], _shape(launch)
    assert len(product.pairs) == 2 and product.adapter is not None
    assert operands[4:6] == (None, None)
    for place, pair in ((0, product.pairs[0]), (1, product.pairs[1]), (3, product.adapter)):
        assert operands[2 * place : 2 * place + 2] == (pair.a, pair.b)
        assert list(shape[5 + 3 * place : 8 + 3 * place]) == [
            pair.depth,
            pair.a_stride,
            pair.b_stride,
        ]
    assert list(shape[11:14]) == [0, 0, 0]


def test_sums_over_more_pairs_than_there_are_places_are_refused() -> None:
    (product,) = products(dispatch("lora_linear_backward", WHOLE, BF16).call)
    first = product.pairs[0]
    many = Product("nn", 64, 64, [first] * (PAIRS + 1), None, product.live, product.epilogue)
    assert not gemm_mma.fits(many) and not gemm_simt.fits(many)
