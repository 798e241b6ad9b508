"""The report's experiments: each is right, and does what the report says it does.

How fast they are is for a Mac to say. What can be counted is counted here: accesses, matrix
instructions, threadgroup memory, accumulators.
"""

from functools import cache

import numpy as np
import pytest

from krnl.errors import PlanError
from krnl.kernels.metal.sources import source
from krnl.kernels.metal.variants import BY_NAME, VARIANTS, Variant, launch
from krnl.plan.buffer import Buffer, Kind
from metalsim import build, device

M, N, K = 64, 128, 192  # multiples of every tile, all different
STAGED = M // 32 * N * K  # elements of b that the tiles of 32 rows stage, each tile its own


@cache
def library(name: str) -> device.Library:
    return build.library(source(name), "checked")


class Product:
    """One run of a variant."""

    def __init__(self, variant: Variant, sizes: tuple[int, int, int] = (M, N, K), seed: int = 0):
        rng = np.random.default_rng(0)
        m, n, k = sizes
        a = rng.standard_normal((m, k)).astype(variant.operand.numpy)
        b = rng.standard_normal((k, n)).astype(variant.operand.numpy)
        stored_a = a.T if variant.layout[0] == "t" else a
        stored_b = b.T if variant.layout[1] == "t" else b
        memory = {
            "a": device.Buffer(np.ascontiguousarray(stored_a), "a", readonly=True),
            "b": device.Buffer(np.ascontiguousarray(stored_b), "b", readonly=True),
            "c": device.Buffer(np.full((m, n), np.nan, variant.output.numpy), "c"),
        }
        planned = [
            Buffer(name, shape, dtype, Kind.INPUT)
            for name, shape, dtype in (
                ("a", stored_a.shape, variant.operand),
                ("b", stored_b.shape, variant.operand),
                ("c", (m, n), variant.output),
            )
        ]
        planned_launch = launch(variant, planned[0], planned[1], planned[2], m, n, k)
        run = library(variant.library).launch(
            planned_launch.function,
            [memory[x.name] if isinstance(x, Buffer) else x for x in planned_launch.arguments],
            planned_launch.groups,
            planned_launch.threads,
            constants=planned_launch.constants,
            seed=seed,
        )
        self.counters, self.reports = run.counters, run.reports
        self.c = memory["c"].view(variant.output.numpy, (m, n)).astype(np.float64)
        a, b = a.astype(np.float64), b.astype(np.float64)
        # The result is rounded once to its type, and the sum at each of k steps to the
        # accumulator's: see op_cases.py.
        expected = a @ b
        inside = variant.accumulator.eps * (4 * np.sqrt(k) + 4)
        bound = variant.output.eps / 2 * np.abs(expected) + inside * (np.abs(a) @ np.abs(b))
        self.share = float((np.abs(self.c - expected) / bound).max())  # of the allowance


@cache
def product(name: str) -> Product:
    return Product(BY_NAME[name])


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_variants_multiply(variant: Variant) -> None:
    """In memory that ends where the matrices do. One tile is enough, and a step in k."""
    for ran in (product(variant.name), Product(variant, variant.tile)):
        assert not ran.reports
        assert ran.share <= 1.0


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_results_do_not_depend_on_the_order_of_threads(variant: Variant) -> None:
    np.testing.assert_array_equal(Product(variant, seed=5).c, product(variant.name).c)


@pytest.mark.parametrize("letter", "mnk")
def test_sizes_are_whole_tiles(letter: str) -> None:
    variant = BY_NAME["tile_64x64"]
    sizes = {"m": 64, "n": 64, "k": 16, letter: 24}
    buffer = Buffer("x", (64, 64), variant.operand, Kind.INPUT)
    with pytest.raises(PlanError, match=f"needs {letter} to be a multiple of .*, not 24"):
        launch(variant, buffer, buffer, buffer, **sizes)
    with pytest.raises(PlanError, match="not 0"):
        launch(variant, buffer, buffer, buffer, **{**sizes, letter: 0})


# The report's claims, as far as they are about what is executed.


def counters(name: str) -> dict[str, int]:
    return product(name).counters


def reads(name: str, operand_bytes: int) -> bool:
    """Whether this is what a variant reads from device memory, beside some of m, n and k, which
    every thread does once."""
    sizes = 3 * 4 * counters(name)["threadgroups"] * BY_NAME[name].threads
    return 0 <= counters(name)["device_bytes_read"] - operand_bytes <= sizes


def test_vectorised_staging_loads_a_quarter_as_often_and_as_many_bytes() -> None:
    """Section 3: the loads that go were not about memory, which sees the same bytes."""
    scalar, vector = counters("nt_scalar"), counters("nt_vector")
    assert scalar["device_loads"] - vector["device_loads"] == STAGED - STAGED // 4
    assert scalar["device_bytes_read"] == vector["device_bytes_read"]
    assert scalar["threadgroup_bytes_written"] == vector["threadgroup_bytes_written"]


def test_the_scatter_needs_no_transposing_load() -> None:
    """Section 3: one matrix of b in two is loaded transposed, from device or threadgroup memory,
    or none is."""
    loads = M // 32 * (N // 32) * (K // 8) * 4
    for name in ("nt_naive", "nt_natural"):
        assert counters(name)["matrix_transposed_loads"] == loads, name
        assert counters(name)["matrix_loads"] == loads, name
    for name in ("nt_scalar", "nt_vector"):
        assert counters(name)["matrix_transposed_loads"] == 0, name
        assert counters(name)["matrix_loads"] == 2 * loads, name


def test_natural_staging_writes_as_it_reads() -> None:
    """Section 3: by fours; the scatter writes one value at a time."""
    natural, vector = counters("nt_natural"), counters("nt_vector")
    assert vector["threadgroup_stores"] - natural["threadgroup_stores"] == STAGED - STAGED // 4
    assert natural["device_loads"] == vector["device_loads"]


@pytest.mark.parametrize("name", [v.name for v in VARIANTS if v.section == 1])
def test_other_types_leave_the_fast_products(name: str) -> None:
    """Section 1: half operands with float accumulators are one kind, every other mix another."""
    products = M // 8 * (N // 8) * (K // 8)
    fast = name == "types_f16_f32"
    assert counters(name)["matrix_multiplies"] == (products if fast else 0)
    assert counters(name)["matrix_multiplies_other"] == (0 if fast else products)


def test_a_larger_tile_halves_the_traffic() -> None:
    """Section 4: 64×64 reads half as much as 32×32 does for the same product."""
    small = M // 32 * (N // 32) * (32 + 32) * K * 2
    assert reads("tile_32x32", small)
    assert reads("tile_64x64", small // 2)
    assert reads("tile_64x64_small", small // 2)
    assert reads("tile_32x64", small * 3 // 4)


def test_a_wider_staging_has_half_the_barriers() -> None:
    assert (
        counters("staging_64")["threadgroup_barriers"] * 2
        == (counters("staging_32")["threadgroup_barriers"])
    )


def test_outputs() -> None:
    """Section 4: vector stores are a quarter as many; float ones move twice the bytes; those from
    registers pass no threadgroup memory."""
    staged = counters("nn")
    assert counters("vector_output")["device_stores"] == staged["device_stores"] // 4
    assert counters("vector_output")["device_bytes_written"] == staged["device_bytes_written"]
    assert counters("float_output")["device_bytes_written"] == 2 * staged["device_bytes_written"]
    assert counters("half_output")["device_bytes_written"] == staged["device_bytes_written"]
    for name in ("float_output", "half_output"):
        assert counters(name)["threadgroup_stores"] == 0, name


KIB = 1024
OUTPUT_TILE = 4 * KIB  # 32×32 floats

# Threadgroup memory, simdgroups, and accumulators in each.
RESOURCES = {
    "types_f16_f32": (OUTPUT_TILE, 1, 16),
    "types_f16_f16": (OUTPUT_TILE // 2, 1, 16),
    "types_f32_f32": (OUTPUT_TILE, 1, 16),
    "types_bf16_f32": (OUTPUT_TILE, 1, 16),
    "nn": (OUTPUT_TILE, 1, 16),
    "tn": (OUTPUT_TILE, 1, 16),
    "nt": (2 * KIB + OUTPUT_TILE, 1, 16),
    "nt_naive": (OUTPUT_TILE, 1, 16),
    "nt_scalar": (2 * KIB + OUTPUT_TILE, 1, 16),
    "nt_natural": (2 * KIB + OUTPUT_TILE, 1, 16),
    "nt_vector": (2 * KIB + OUTPUT_TILE, 1, 16),
    "tile_32x32": (4 * KIB, 1, 16),
    "tile_64x64": (20 * KIB, 4, 16),
    "tile_64x64_small": (5 * KIB, 4, 16),
    "staging_32": (2 * KIB + OUTPUT_TILE, 1, 16),
    "staging_64": (4 * KIB + OUTPUT_TILE, 1, 16),
    "tile_32x64": (4 * KIB, 1, 32),
    "vector_output": (OUTPUT_TILE, 1, 16),
    "float_output": (0, 1, 16),
    "half_output": (0, 1, 16),
}
# The column of section 4's table. It counts what the staging takes, "2 → 4 KB", without the output
# tile that such a kernel needs as well. Of the 32×64 tile it says "no shared memory" and 4 KB; both
# are true if the operands are not staged and the output is.
REPORTED = {
    "tile_32x32": 4 * KIB,
    "tile_64x64": 20 * KIB,
    "tile_64x64_small": 5 * KIB,
    "staging_32": 2 * KIB,
    "staging_64": 4 * KIB,
    "tile_32x64": 4 * KIB,
}
NOT_COUNTED = {"staging_32": OUTPUT_TILE, "staging_64": OUTPUT_TILE}


def test_resources_are_the_reports(capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for name, variant in BY_NAME.items():
        expected = RESOURCES[name]
        assert not product(name).reports  # resources are those of the launches so far
        used = library(variant.library).resources(variant.function)
        found = (used.threadgroup_bytes, variant.threads // 32, used.accumulators)
        assert found == expected, name
        assert found[0] - NOT_COUNTED.get(name, 0) == REPORTED.get(name, found[0]), name
        rows.append(f"{variant.title:60} {found[0] / KIB:4.0f} KB {found[1]:3} {found[2]:4}")
    with capsys.disabled():
        print("\n" + "\n".join(rows))
