"""Matrix products on Metal, in the simulator: whole tiles and others, operands of every type and
alignment, K loops cut into chunks, and what the report claims of them, as counts.

tests/test_metal_ops.py has the same ops at sizes drawn by chance."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from krnl.backends.metal import kernel_name
from krnl.dtypes import BF16, F16, F32, I32, DType
from krnl.kernels.launch import Launch
from krnl.kernels.metal import gemm
from krnl.kernels.metal.sources import source
from krnl.kernels.products import Epilogue, Pair, Product
from krnl.ops.gemm import lora_a_grad, lora_down, lora_linear, lora_linear_backward, lora_swiglu
from krnl.plan.arena import plan
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.lower import Table
from krnl.plan.step import Step
from metalsim import build
from metalsim.device import Buffer as DeviceBuffer
from metalsim.device import Library, Resources
from metalsim.install import SimulatedBackend, metal_backend
from op_bench import Chosen
from op_cases import CASE

TABLE = Table("metal", gemm.ROWS)
OPS = [row.op for row in gemm.ROWS]
WEIGHTED = ["lora_linear", "lora_swiglu", "lora_linear_backward", "lora_swiglu_backward"]

# Every side is a multiple of the tile, so that nothing is checked; and the opposite.
WHOLE = {"n": 64, "c": 96, "o": (64,), "r": (32,), "s": 32, "f": 32, "p": 32, "q": 32}
EDGES = {"n": 37, "c": 45, "o": (35,), "r": (5,), "s": 5, "f": 19, "p": 3, "q": 2}
# More than a tile of everything, and as aligned as tiles are when only their number is odd.
RAGGED = {"n": 36, "c": 84, "o": (44,), "r": (12,), "s": 12, "f": 52, "p": 8, "q": 4}


@cache
def backend(mode: str = "checked", seed: int = 0) -> SimulatedBackend:
    return metal_backend(mode, kernels=TABLE, eager=True, seed=seed)


def counted(device: SimulatedBackend) -> dict[str, int]:
    """What was counted since the last call."""
    counters = dict(device.simulation.counters)
    device.simulation.counters.clear()
    return counters


def fitting(op: str, dims: dict[str, Any]) -> dict[str, Any]:
    """`s` is the sum of the ranks, and of p and q where gate and up are one op."""
    return {**dims, "s": dims["p"] + dims["q"]} if op == "lora_swiglu" else dims


def check(
    op: str, dims: dict[str, Any], activation: DType, device: SimulatedBackend, **options: Any
) -> None:
    Chosen(CASE[op], activation, fitting(op, dims), **options).check(device)
    device.simulation.expect_clean()


@pytest.mark.parametrize("dims", [WHOLE, RAGGED, EDGES], ids=["whole", "ragged", "edges"])
@pytest.mark.parametrize("activation", [F16, F32], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_products_follow_their_definition(op: str, activation: DType, dims: dict[str, Any]) -> None:
    for weight in (F16, BF16, F32) if op in WEIGHTED else (activation,):
        check(op, dims, activation, backend(), weight=weight)


@pytest.mark.parametrize("op", ["lora_linear", "lora_up_backward", "lora_b_grad"])
def test_members_of_a_group_have_their_own_columns(op: str) -> None:
    """Ranks of nothing, and ranks after which the next member's columns are not aligned."""
    ranks: tuple[int, ...]
    for ranks in [(8, 0, 16), (5, 4, 0), (0, 0, 3)]:
        dims = {"n": 34, "c": 40, "o": (64, 8, 33), "r": ranks, "s": sum(ranks)}
        check(op, dims, F16, backend())


def test_up_to_three_outputs_give_one_gradient() -> None:
    for count in (1, 2, 3):
        dims = {"n": 33, "c": 64, "o": (64, 32, 40)[:count], "r": (8,) * count, "s": 8 * count}
        check("lora_linear_backward", dims, F16, backend(), weight=BF16)


@pytest.mark.parametrize("ranks", [(0, 0), (8, 0), (0, 5)])
def test_gate_and_up_may_lack_adapters(ranks: tuple[int, int]) -> None:
    dims = {"n": 33, "c": 36, "f": 40, "p": ranks[0], "q": ranks[1], "s": sum(ranks)}
    check("lora_swiglu", dims, F16, backend())


@pytest.mark.parametrize("live", [0, 1, 31, 32, 50])
@pytest.mark.parametrize("op", OPS)
def test_rows_beyond_the_live_ones_do_not_exist(op: str, live: int) -> None:
    """They hold NaN; of gradients they are the end of K."""
    check(op, WHOLE, F16, backend(), live=live)


@pytest.mark.parametrize("op", OPS)
def test_one_row(op: str) -> None:
    check(op, {**WHOLE, "n": 1}, F16, backend(), weight=BF16)


def test_outputs_may_be_floats() -> None:
    check("lora_linear", RAGGED, F16, backend(), target=F32)
    check("lora_linear", {**RAGGED, "n": 3, "c": 1000}, F16, backend(), target=F32)  # in chunks


@pytest.mark.parametrize("offset", [1, 2, 4])
def test_matrices_may_begin_anywhere_in_their_region(offset: int) -> None:
    """Adapters are parts of one region: their rows need not begin where vectors may."""
    n, c, s = 33, 64, 40
    rng = np.random.default_rng(offset)
    region = Buffer("adapters", (offset + s * c,), F16, Kind.STATE)
    x, scale = Buffer("x", (n, c), F16, Kind.INPUT), Buffer("scale", (s,), F32, Kind.INPUT)
    u, live = Buffer("u", (n, s), F16, Kind.STATE), Buffer("live", (1,), I32, Kind.INPUT)
    step = Step("test", F16)
    step(lora_down, x, region.part("a", offset, (s, c)), scale, live=live, into=u)
    (planned,) = plan([step], TABLE)
    device = backend()
    memory = device.allocate(planned.layout)
    values = {b: rng.normal(size=b.shape).astype(b.dtype.numpy) for b in (region, x, scale)}
    for buffer, value in {**values, live: np.array([n])}.items():
        memory.write(buffer, value)
    device.compile(planned, memory).run()
    a = values[region][offset:].reshape(s, c).astype(np.float64)
    expected = (values[x].astype(np.float64) @ a.T) * values[scale]
    # Half an ulp of what is stored; the sum's own errors are those of floats.
    tolerance = F16.eps / 2 * np.abs(expected) + F32.eps * 40 * c
    assert (np.abs(memory.read(u) - expected) <= tolerance).all()
    device.simulation.expect_clean()


# ---- Chunks ----


def product(n: int, columns: int, k: int) -> Product:
    """y[n, columns] = x[n, k] Wᵀ."""
    x, w = Buffer("x", (n, k), F16, Kind.INPUT), Buffer("w", (columns, k), F16, Kind.WEIGHT)
    y, live = Buffer("y", (n, columns), F16, Kind.STATE), Buffer("live", (1,), I32, Kind.INPUT)
    return Product("nt", n, columns, [Pair(x, w, k, k, k)], None, live, Epilogue(y, columns))


@pytest.mark.parametrize(
    ("n", "columns", "k", "chunks"),
    [
        (512, 32, 5632, 8),  # the report's dGa: 16 threadgroups become 128
        (512, 32, 2048, 8),  # and h Agᵀ
        (512, 64, 2048, 1),  # 32 tiles are enough
        (512, 5632, 2048, 1),
        (1, 32, 5632, 44),  # a token: no more chunks than steps of K to share, four each
        (1, 32, 224, 1),
        (1, 32, 225, 2),
        (0, 32, 5632, 1),
    ],
)
def test_narrow_products_are_cut_into_chunks(n: int, columns: int, k: int, chunks: int) -> None:
    assert gemm.chunks(product(n, columns, k)) == chunks


@pytest.mark.parametrize("op", OPS)
def test_chunks_add_up(op: str) -> None:
    """A K of many steps and a rest, cut where tiles are few; gradients are cut along their rows, of
    which only some are live."""
    wide = {"lora_a_grad": "n", "lora_b_grad": "n", "lora_linear": "c", "lora_down": "c"}
    long = {wide.get(op, "c"): 1000}
    if op in ("lora_up_backward", "lora_linear_backward"):
        long = {"o": (1000,)}
    check(op, {**EDGES, **long}, F16, backend(), live=EDGES["n"] - 3)
    check(op, {**EDGES, **long}, F32, backend())


def test_the_report_s_narrow_product_fills_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """[512, 32] = [512, 5632] @ [5632, 32] has 16 tiles, of which eight chunks make 128."""
    dims = {"n": 512, "o": (5632,), "r": (32,), "s": 32}
    device = backend("fast")
    counted(device)
    check("lora_up_backward", dims, F16, device)
    reduce = 512 * 32 // gemm.REDUCE_THREADS
    assert counted(device)["threadgroups"] == 128 + reduce
    monkeypatch.setattr(gemm, "FEW_TILES", 0)
    check("lora_up_backward", dims, F16, device)
    assert counted(device)["threadgroups"] == 16


def results(op: str, dims: dict[str, Any], device: SimulatedBackend) -> list[bytes]:
    outputs = Chosen(CASE[op], F16, fitting(op, dims)).run(device)
    return [array.tobytes() for group in outputs for array in group]


@pytest.mark.parametrize("op", OPS)
def test_results_do_not_depend_on_the_order_of_threads(op: str) -> None:
    dims = {**RAGGED, "c": 600}
    first = results(op, dims, backend("fast"))
    assert all(results(op, dims, backend("fast", seed)) == first for seed in (1, 2, 3))


# ---- Claims of the report, as counts ----


@cache
def library() -> Library:
    return build.library(source("gemm"), "checked")


def launched(work: Launch, **changed: bool) -> tuple[dict[str, int], Resources]:
    """What a launch on zeros did and used, some of its function constants changed."""

    def filled(buffer: Buffer) -> DeviceBuffer:
        value = 64 if buffer.name == "live" else 0
        return DeviceBuffer(np.full(buffer.size, value, buffer.dtype.numpy), buffer.name)

    constants = dict(work.constants)
    constants |= {gemm.CONSTANTS.index(name): value for name, value in changed.items()}
    run = library().launch(
        kernel_name(work),
        [filled(a) if isinstance(a, Buffer) else a for a in work.arguments],
        work.groups,
        work.threads,
        constants=constants,
    )
    assert not run.reports
    return run.counters, library().resources(kernel_name(work), constants)


def test_staging_by_fours_takes_a_quarter_of_the_loads() -> None:
    """Section 3: each of two rows of tiles stages the weight, by fours or one by one."""
    (work,) = gemm.launches(product(64, 64, 128), None)
    fours, _ = launched(work, aligned=True)
    ones, _ = launched(work, aligned=False)
    staged = 2 * 64 * 128
    assert ones["device_loads"] - fours["device_loads"] == staged - staged // 4
    assert ones["device_bytes_read"] == fours["device_bytes_read"]
    # Scattered on its way in, the tile is read without transposing.
    assert fours["matrix_transposed_loads"] == ones["matrix_transposed_loads"] == 0


@pytest.mark.parametrize("activation", [F16, F32], ids=str)
def test_what_a_threadgroup_takes(activation: DType) -> None:
    """Sections 2 and 4: one simdgroup, sixteen accumulators, and as little memory as can be: a tile
    of a step's weights for nt, an element that nothing touches for nn and tn."""
    x = Buffer("x", (64, 64), activation, Kind.INPUT)
    live = Buffer("live", (1,), I32, Kind.INPUT)
    step = Step("test", activation, live)
    step(lora_linear, x, (x,), None, None, None, None)
    step(lora_swiglu, x, x, x, None, None, None)
    step(lora_linear_backward, (x,), (x,), None, None)
    step(lora_a_grad, x, x, into=Buffer("da", (64, 64), F32, Kind.GRAD))
    tile = gemm.TILE * gemm.TILE
    for call, elements in zip(step.calls, (tile, tile, 1, 1), strict=True):
        (work,) = TABLE.choose(call).launches(call, None)
        counters, used = launched(work)
        assert work.threads == 32
        assert used.accumulators == 16
        assert used.threadgroup_bytes == max(16, elements * activation.size)  # given by sixteens
        fast = counters["matrix_multiplies" if activation is F16 else "matrix_multiplies_other"]
        slow = counters["matrix_multiplies_other" if activation is F16 else "matrix_multiplies"]
        # 64³ in blocks of 8, twice for gate and up; with half operands all of the fast type.
        assert (fast, slow) == ((2 if call.op is lora_swiglu else 1) * 8**3, 0)
        print(
            f"{kernel_name(work)}: {work.threads} threads, {used.accumulators} accumulators, "
            f"{used.threadgroup_bytes} bytes of threadgroup memory"
        )
