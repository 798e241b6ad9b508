"""The simulator's engine: sound kernels give no reports and the same bits in any order of threads,
counters are exact, and the race check agrees with the definition of a race."""

import ctypes
import mmap
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from metalsim import build
from metalsim.device import Buffer, Library, Run

SOURCE = Path(build.__file__).parent / "samples" / "sound.metal"


@cache
def sound(mode: str) -> Library:
    return build.library(SOURCE, mode)


def clean(run: Run) -> Run:
    assert not run.reports, [str(r) for r in run.reports]
    return run


SCHEDULES = [(0, 1), (1, 1), (2, 2), (3, 1), (11, 2), (12, 1)]  # seed, workers


@pytest.mark.parametrize("mode", ["checked", "fast"])
def test_sound_kernels_are_clean_and_the_same_bits_in_every_order(mode: str) -> None:
    random = np.random.default_rng(0)
    library = sound(mode)
    for threads in (32, 40, 256):  # 40: the second simdgroup has eight threads
        x = random.standard_normal((6, threads)).astype(np.float32)
        seen = set()
        for seed, workers in SCHEDULES:
            y = Buffer(24)
            clean(library.launch("total", [Buffer(x), y], 6, threads, seed=seed, workers=workers))
            seen.add(y.contents.tobytes())
        assert len(seen) == 1
        # A sum of `threads` floats, each added at most `threads` times.
        allowance = threads * np.finfo(np.float32).eps * np.abs(x).sum(axis=1, dtype=np.float64)
        assert (np.abs(y.view(np.float32) - x.sum(axis=1, dtype=np.float64)) <= allowance).all()
    turned = random.integers(-9, 9, 256).astype(np.int32)
    for seed, workers in SCHEDULES:
        y = Buffer(1024)
        clean(library.launch("reverse", [Buffer(turned), y], 2, 128, seed=seed, workers=workers))
        assert (y.view(np.int32) == turned).all()


def test_seeds_shuffle_threads_and_threadgroups() -> None:
    """`order` says as which one each of 5 threadgroups of 64 threads ran."""
    orders = []
    for seed in range(6):
        order = Buffer(4 * 5 * 64)
        arguments = [Buffer(4), order]
        clean(sound("fast").launch("arrives", arguments, 5, 64, seed=seed, workers=1))
        orders.append(order.view(np.uint32, (5, 64)))
    in_order = np.arange(5 * 64).reshape(5, 64)
    assert (orders[0] == in_order).all()
    assert (orders[1].min(axis=1) == in_order[::-1, 0]).all()
    for order in orders:
        assert (np.sort(order, axis=1) - order.min(axis=1, keepdims=True) == np.arange(64)).all()
    within = {tuple((order[0] - order[0].min()).tolist()) for order in orders}
    assert len(within) == len(orders)
    assert len({tuple(order.min(axis=1).tolist()) for order in orders}) > 3


READS, WRITES = (1, 3), (2, 4)  # of the kernel `steps`: threadgroup and device memory
BARRIERS = [0, 4 + 1, 4 + 2, 4 + 3, 8 + 0, 8 + 1, 8 + 2, 8 + 3]  # scope * 4 + mem_flags


def has_race(program: np.ndarray, barriers: np.ndarray) -> bool:
    """By definition: two accesses by two threads, one a write, and no barrier between them that
    orders this memory for these threads."""
    done = [
        (step, thread, action >> 2, action & 3)
        for step, row in enumerate(program.tolist())
        for thread, action in enumerate(row)
        if action
    ]
    for one_step, one, one_kind, one_cell in done:
        for two_step, two, two_kind, two_cell in done:
            in_device = one_kind in (3, 4)
            if one_step > two_step or one == two or one_cell != two_cell:
                continue
            if in_device != (two_kind in (3, 4)) or not {one_kind, two_kind} & set(WRITES):
                continue
            flag = 1 if in_device else 2
            between = barriers[one_step:two_step].tolist()
            ordered = (
                b & flag and (b >> 2 == 2 or (b >> 2 == 1 and one // 32 == two // 32))
                for b in between
            )
            if not any(ordered):
                return True
    return False


def test_races_are_found_exactly_where_they_are() -> None:
    """Random programs of 70 threads: the shadow, which forgets most of what it saw, agrees with the
    definition, in any order of threads."""
    random = np.random.default_rng(3)
    library, threads, found = sound("checked"), 70, 0
    for seed in range(300):
        count = int(random.integers(2, 7))
        program = random.choice([4, 8, 12, 16], (count, threads)) + random.integers(
            0, 4, (count, threads)
        )
        program[random.random((count, threads)) > 0.02] = 0
        barriers = random.choice(BARRIERS, count)
        arguments = [
            Buffer(program.astype(np.uint8)),
            Buffer(barriers.astype(np.uint8)),
            np.uint32(count),
            Buffer(16),
            Buffer(4 * threads),
        ]
        run = library.launch("steps", arguments, 1, threads, seed=seed)
        assert {r.kind for r in run.reports} <= {"race"}
        assert bool(run.reports) == has_race(program, barriers), (seed, program, barriers)
        found += bool(run.reports)
    assert 100 < found < 200  # the programs are of both kinds


def products(mode: str, **settings: int) -> tuple[np.ndarray, np.ndarray, Run]:
    """c = a bᵀ of [16, 64] and [24, 64], as computed and in float64."""
    random = np.random.default_rng(1)
    a = random.standard_normal((16, 64)).astype(np.float16)
    b = random.standard_normal((24, 64)).astype(np.float16)
    c = Buffer(4 * 16 * 24)
    arguments = [Buffer(a, "a"), Buffer(b, "b"), c, np.uint32(64)]
    run = clean(
        sound(mode).launch("product", arguments, (3, 2), 32, {"has_bias": False}, **settings)
    )
    return c.view(np.float32, (16, 24)).copy(), a.astype(np.float64) @ b.T.astype(np.float64), run


def test_matrix_products_agree_between_builds_and_schedules() -> None:
    seen = set()
    for mode in ("checked", "fast"):
        for seed, workers in SCHEDULES:
            c, exact, _ = products(mode, seed=seed, workers=workers)
            seen.add(c.tobytes())
    assert len(seen) == 1  # queued products have the bits of blocking ones
    # 64 products and additions of values of about 1, each rounded to float.
    assert np.abs(c - exact).max() <= 64 * np.finfo(np.float32).eps * np.abs(exact).max()


def test_another_order_of_sums_changes_bits_and_little_else() -> None:
    c, exact, _ = products("fast")
    other, _, _ = products("fast", sum_order=5)
    assert (c != other).any()
    assert np.abs(other - exact).max() <= 64 * np.finfo(np.float32).eps * np.abs(exact).max()


def test_counters_of_a_product() -> None:
    _, _, run = products("checked")
    tiles, steps = 6, 8
    expected = {
        "threadgroups": tiles,
        "matrix_multiplies": tiles * steps,
        "matrix_loads": tiles * steps * 2,
        "matrix_stores": tiles,
        "threadgroup_barriers": tiles * steps * 2,
        "threadgroup_stores": tiles * steps * 64,
        "threadgroup_bytes_written": tiles * steps * 128,
        "threadgroup_bytes_read": tiles * steps * 128,
        "device_bytes_written": tiles * 64 * 4,
        "threadgroup_memory": 128,
        "matrix_multiplies_other": 0,
        "matrix_transposed_loads": 0,
        "simdgroup_barriers": 0,
        "simd_operations": 0,
    }
    assert {name: run.counters[name] for name in expected} == expected
    resources = sound("checked").resources("product", {"has_bias": False})
    assert (resources.accumulators, resources.threadgroup_bytes) == (1, 128)


def test_counters_of_a_reduction() -> None:
    x = np.ones(4 * 128, np.float32)
    run = clean(sound("checked").launch("total", [Buffer(x), Buffer(16)], 4, 128))
    expected = {
        "device_loads": 3 * 512,
        "device_bytes_read": 3 * 512 * 4,
        "device_stores": 3 * 4,
        "threadgroup_stores": 3 * 4 * 4,
        "threadgroup_loads": 3 * 4 * 4,
        "simd_operations": 3 * 4 * 4,
        "threadgroup_barriers": 3 * 4 * 2,
    }
    assert {name: run.counters[name] for name in expected} == expected
    fast = clean(sound("fast").launch("total", [Buffer(x), Buffer(16)], 4, 128))
    for name in ("simd_operations", "threadgroup_barriers", "threadgroups"):
        assert fast.counters[name] == run.counters[name]


def test_function_constants_choose_arguments() -> None:
    library = sound("checked")
    a, b = np.ones((8, 8), np.float16), np.eye(8, dtype=np.float16)
    assert library.missing("product", {"has_bias": True}, [0, 1, 2]) == ["k", "bias"]
    assert library.missing("product", {"has_bias": False}, [0, 1, 2, 3]) == []
    for constants, expected in (
        ({"has_bias": False}, 1),
        ({0: True}, 3),
        ({0: True, "scale": 5}, 7),
        ({}, 1),
    ):
        c = Buffer(256)
        arguments = [Buffer(a), Buffer(b), c, np.uint32(8), Buffer(np.full(1, 2, np.float32))]
        clean(library.launch("product", arguments, 1, 32, constants))
        assert (c.view(np.float32) == expected).all(), constants
    run = library.launch("product", [Buffer(a), Buffer(b), Buffer(256), None], 1, 32, {0: True})
    assert [r.kind for r in run.reports] == ["unbound buffer"] * 2
    with pytest.raises(ValueError, match="no function constant 7; it has has_bias"):
        library.launch("product", [], 1, 32, {7: 1})


def test_threads_that_return_do_not_take_part() -> None:
    x = np.arange(64, dtype=np.float32)
    y = Buffer(np.full(64, np.nan, np.float32))
    clean(sound("checked").launch("leaves_early", [Buffer(x), y, np.uint32(40)], 2, 32))
    expected = np.repeat(np.float32([31, 39, np.nan]), [32, 8, 24])
    np.testing.assert_array_equal(y.view(np.float32), expected)


def test_atomic_operations_are_no_races() -> None:
    x = np.random.default_rng(0).integers(0, 100, 256).astype(np.uint32)
    for seed, workers in SCHEDULES:
        n = Buffer(np.zeros(1, np.uint32))
        arguments = [n, Buffer(x)]
        clean(sound("checked").launch("counts", arguments, 4, 64, seed=seed, workers=workers))
        assert n.view(np.uint32)[0] == (x & 1).sum()


def test_denormals_are_flushed_when_asked_for() -> None:
    x = np.array([1e-38, 1.5e-38, 3e-38, 1.0], np.float32)
    for flush, expected in ((False, x * np.float32(0.5)), (True, np.float32([0, 0, 1.5e-38, 0.5]))):
        y = Buffer(16)
        clean(sound("fast").launch("halves", [Buffer(x), y], 1, 4, flush_to_zero=flush))
        assert (y.view(np.float32) == expected).all()
    assert np.float32(1e-38) * np.float32(0.5) > 0  # only kernels see it


def test_dispatched_threads_fill_the_edge_with_smaller_threadgroups() -> None:
    y = Buffer(4 * 35)
    clean(sound("checked").launch("where", [y], (7, 5), (4, 3), threads_total=True))
    got = y.view(np.uint32, (5, 7))
    assert got[0, 0] == 3400 and got[0, 6] == 3302 and got[4, 0] == 2404 and got[4, 6] == 2305


def test_adopted_memory_is_not_copied() -> None:
    memory = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.float32)
    memory[:] = np.arange(memory.size)
    adopted = Buffer.adopt(memory, "mapped")
    y = Buffer(memory.nbytes)
    clean(sound("checked").launch("halves", [adopted, y], memory.size // 32, 32))
    assert (y.view(np.float32) == memory / 2).all()
    clean(sound("checked").launch("halves", [y, adopted], memory.size // 32, 32))
    assert (memory == y.view(np.float32) / 2).all()
    beyond = sound("checked").launch("halves", [adopted, y], memory.size // 32 + 1, 32).reports
    assert [r.kind for r in beyond] == ["out of bounds"]
    assert "in no buffer" in beyond[0].message


def test_a_library_loaded_where_adopted_memory_was_is_no_buffer() -> None:
    library = sound("checked")
    globals_at = ctypes.addressof(library._table) // mmap.PAGESIZE * mmap.PAGESIZE
    pages = (ctypes.c_ubyte * (16 * mmap.PAGESIZE)).from_address(globals_at - 8 * mmap.PAGESIZE)
    stale = Buffer.adopt(np.frombuffer(pages, np.uint8), "given back")
    a, c = np.eye(8, dtype=np.float16), Buffer(256)
    arguments = [Buffer(a), Buffer(a), c, np.uint32(8), Buffer(np.full(1, 2, np.float32))]
    clean(library.launch("product", arguments, 1, 32, {"has_bias": True}))
    assert stale.size == len(pages)


def test_buffers_outlive_their_object_while_arrays_look_at_them() -> None:
    values = Buffer(np.arange(5, dtype=np.int32)).view(np.int32)
    assert [Buffer(64).size for _ in range(3000)] == [64] * 3000  # more than there are slots
    assert values.tolist() == [0, 1, 2, 3, 4]


def test_launches_are_refused_with_a_sentence() -> None:
    library = sound("fast")
    with pytest.raises(ValueError, match=r"takes 1 to 1024 threads in a threadgroup, got \[1025"):
        library.launch("halves", [], 1, 1025)
    with pytest.raises(ValueError, match="has no kernel 'twice'; it has total, reverse"):
        library.launch("twice", [], 1, 1)
    with pytest.raises(ValueError, match="offset 17 is not in a buffer of 16 bytes"):
        library.launch("halves", [(Buffer(16), 17)], 1, 1)
    with pytest.raises(MemoryError, match="No buffer 'big' of"):
        Buffer(1 << 62, "big")
