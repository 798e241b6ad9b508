"""What the number of a GPU's multiprocessors changes: grids, clusters, and how sums are cut."""

from itertools import product
from typing import Any

import pytest

from fake_cuda import FakeDriver, installed
from krnl.backends.cuda import ON_PAPER, CudaBackend
from krnl.dtypes import BF16
from krnl.kernels.cuda.attention_wgmma import key_split
from krnl.kernels.cuda.table import CudaTable, table
from krnl.kernels.cuda.target import CLUSTER_SIZES, USUAL, Target
from krnl.kernels.cuda.variants import uncut
from krnl.kernels.launch import Launch, launches
from krnl.plan.lower import Table, lower
from op_bench import Chosen, chosen
from op_cases import CASE, CASES

# A slice of an H100, H20, H100 PCIe, H200, and a larger one.
COUNTS = (16, 78, 114, USUAL, 148)
SIZES: dict[str, Any] = {
    "n": 512, "c": 2048, "f": 5632, "p": 16, "q": 16, "o": (2048, 512), "r": (16, 16), "s": 32,
}  # fmt: skip
PRODUCTS = [case for case in CASES if case.op.name.startswith("lora_")]


def made(kernels: Table, name: str) -> list[Launch]:
    (case,) = (case for case in PRODUCTS if case.op.name == name)
    (found,) = lower(chosen(case, SIZES, BF16).emit()[0].calls, kernels)
    return launches(found)


every_product = pytest.mark.parametrize("name", [case.op.name for case in PRODUCTS])


def test_clusters_are_those_that_were_seen_or_fewer_than_there_is_room_for() -> None:
    assert [Target(90).clusters(size) for size in CLUSTER_SIZES] == [132, 66, 30, 15]
    for count, size in product(range(1, 200), CLUSTER_SIZES):
        clusters = Target(90, count).clusters(size)
        assert clusters == 1 or clusters * size <= count
        if size <= 2:
            assert clusters == max(1, count // size)
        elif count >= 20 * size and count != USUAL:
            assert clusters * size < count


@every_product
def test_blocks_that_go_from_tile_to_tile_are_one_for_each_multiprocessor(name: str) -> None:
    for count in COUNTS:
        for launch in made(table(Target(90, count)), name):
            if launch.library == "gemm_wgmma" and launch.cluster == 1:
                assert launch.groups[0] <= count
            assert launch.groups[0] % launch.cluster == 0


def test_few_keys_have_their_sums_shared() -> None:
    """With a block for each multiprocessor and more, nobody waits long for the first keys."""
    for count, tokens, heads, key_heads, split in (
        (USUAL, 512, 32, 8, 4),
        (USUAL, 2048, 14, 2, 8),
        (USUAL, 8192, 14, 2, 2),
        (USUAL, 8192, 32, 8, 1),
        (16, 512, 32, 8, 1),
        (4, 2048, 32, 8, 1),  # no cluster that would not fit
    ):
        dims = {"n": tokens, "h": heads, "g": key_heads, "d": 64}
        call = Chosen(CASE["attention_backward"], BF16, dims).emit()[0].calls[0]
        assert key_split(call, Target(90, count)) == split


def test_fewer_multiprocessors_cut_sums_less() -> None:
    """And need no more scratch."""
    (case,) = (case for case in PRODUCTS if case.op.name == "lora_down")
    calls = chosen(case, SIZES, BF16).emit()[0].calls
    cuts, scratch = [], []
    for count in COUNTS:
        (found,) = lower(calls, table(Target(80, count)))
        cuts.append(launches(found)[0].groups[2])
        scratch.append(found.workspace.nbytes if found.workspace else 0)
    assert cuts == sorted(cuts) and cuts[0] < cuts[-1]
    assert scratch == sorted(scratch)


def test_a_backend_takes_the_kernels_for_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDriver, "multiprocessors", 78)
    with installed(FakeDriver()):
        kernels = CudaBackend().kernels
    assert isinstance(kernels, CudaTable) and kernels.target == Target(90, 78)
    paper = ON_PAPER.kernels
    assert isinstance(paper, CudaTable) and paper.target == Target(90)


def test_sums_that_are_not_cut_for_comparison() -> None:
    for count in COUNTS:
        kernels = uncut(table(Target(90, count)))
        assert kernels is not None
        whole, cut = (made(x, "lora_down") for x in (kernels, table(Target(90, count))))
        assert {launch.cluster for launch in whole} == {1}
        assert {launch.cluster for launch in cut} != {1}
        assert all(launch.groups[0] <= count for launch in whole)
    assert uncut(table(Target(80))) is None
    assert uncut(Table("metal", [])) is None
