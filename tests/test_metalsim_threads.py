"""What threads do together: simdgroups, quadgroups, simdgroup matrices and atomics."""

import numpy as np
import pytest

from metalsim import build
from metalsim.device import Buffer
from metalsim.snippets import DTYPES, START, run

# ---- Threads together ----


def lanes(source, *inputs, out, **options):
    """A kernel of one simdgroup in which `i` is the lane."""
    parameters = "device const float *x, device float *out, uint i [[thread_index_in_simdgroup]]"
    return run(f"kernel void test({parameters}) {{ {source} }}", *inputs, out=out, **options)


def test_simd_reductions():
    x = np.random.default_rng(0).standard_normal(32).astype(np.float32)
    k = np.random.default_rng(1).integers(0, 1 << 30, 32).astype(np.uint32)
    source = """kernel void test(device const float *x, device const uint *k, device float *out,
                                 uint i [[thread_index_in_simdgroup]]) {
        out[i] = simd_sum(x[i]); out[32 + i] = simd_product(x[i]);
        out[64 + i] = simd_min(x[i]); out[96 + i] = simd_max(x[i]);
        out[128 + i] = as_type<float>(simd_and(k[i])); out[160 + i] = as_type<float>(simd_or(k[i]));
        out[192 + i] = as_type<float>(simd_xor(k[i]));
        out[224 + i] = simd_prefix_inclusive_sum(x[i]);
        out[256 + i] = simd_prefix_exclusive_sum(x[i]);
        out[288 + i] = simd_prefix_inclusive_product(x[i]);
        out[320 + i] = simd_prefix_exclusive_product(x[i]);
        out[352 + i] = simd_sum(float4(x[i], 1, 2, 3)).z; out[384 + i] = simd_sum(half(i)); }"""
    for mode in ("fast", "checked"):
        out = run(source, x, k, out=np.zeros((13, 32), np.float32), threads=32, mode=mode)
        wide = x.astype(np.float64)
        ones = np.ones(32)
        exclusive = np.concatenate([[0], np.cumsum(wide)[:-1]])
        products = np.concatenate([[1], np.cumprod(wide)[:-1]])
        wanted = {0: wide.sum() * ones, 1: wide.prod() * ones, 2: wide.min() * ones,
                  3: wide.max() * ones, 7: np.cumsum(wide), 8: exclusive, 9: np.cumprod(wide),
                  10: products, 11: 64 * ones, 12: 496 * ones}  # fmt: skip
        for row, value in wanted.items():
            # 31 operations of half a unit each at most, relative to the sum of magnitudes.
            scale = np.abs(wide).sum() if row in (0, 7, 8) else np.abs(value)
            assert np.all(np.abs(out[row] - value) <= 31 * 2.0**-24 * scale + 1e-45), row
        bits = out.view(np.uint32)
        assert np.all(bits[4] == np.bitwise_and.reduce(k))
        assert np.all(bits[5] == np.bitwise_or.reduce(k))
        assert np.all(bits[6] == np.bitwise_xor.reduce(k))


def test_simd_shuffles():
    x = np.arange(100, 132, dtype=np.float32)
    out = lanes(
        """out[i] = simd_broadcast(x[i], 7); out[32 + i] = simd_broadcast_first(x[i]);
        out[64 + i] = simd_shuffle(x[i], (i * 5) % 32); out[96 + i] = simd_shuffle_up(x[i], 3);
        out[128 + i] = simd_shuffle_down(x[i], 3); out[160 + i] = simd_shuffle_xor(x[i], 5);
        out[192 + i] = simd_shuffle_rotate_up(x[i], 3);
        out[224 + i] = simd_shuffle_rotate_down(x[i], 3);
        out[256 + i] = simd_shuffle_and_fill_up(x[i], -x[i], 3);
        out[288 + i] = simd_shuffle_and_fill_down(x[i], -x[i], 3);
        out[320 + i] = simd_shuffle_and_fill_down(x[i], -x[i], 3, 8);
        out[352 + i] = simd_shuffle(half4(x[i]), 9).w;""",
        x, out=np.zeros((12, 32), np.float32), threads=32, mode="checked",
    )  # fmt: skip
    i = np.arange(32)
    up, down = np.roll(x, 3), np.roll(x, -3)
    eight = np.where(i % 8 < 5, down, -x[(i & ~7) + (i + 3) % 8])
    wanted = [np.full(32, 107), np.full(32, 100), x[i * 5 % 32], np.where(i < 3, x, up),
              np.where(i < 29, down, x), x[i ^ 5], up, down, np.where(i < 3, -up, up),
              np.where(i < 29, down, -down), eight, np.full(32, 109)]  # fmt: skip
    for row, value in zip(out, wanted, strict=True):
        assert np.array_equal(row, value)


def test_simd_votes_and_lanes_that_take_no_part():
    x = np.arange(32, dtype=np.float32)
    out = lanes(
        """out[i] = simd_all(x[i] < 32); out[32 + i] = simd_any(x[i] > 31);
        out[64 + i] = ulong(simd_ballot(x[i] < 5)); out[96 + i] = simd_is_first();
        out[128 + i] = simd_ballot(true).all(); out[160 + i] = simd_is_helper_thread();
        if (i >= 10) { out[192 + i] = simd_sum(1.0f) + 100 * simd_broadcast_first(x[i]);
                       out[224 + i] = simd_is_first() + 2 * simd_all(x[i] >= 10);
                       out[256 + i] = simd_prefix_inclusive_sum(1.0f); }""",
        x, out=np.zeros((9, 32), np.float32), threads=32,
    )  # fmt: skip
    assert np.all(out[0] == 1) and np.all(out[1] == 0) and np.all(out[2] == 31)
    assert out[3].tolist() == [1] + [0] * 31
    assert np.all(out[4] == 1) and np.all(out[5] == 0)
    assert np.all(out[6, 10:] == 1022) and np.all(out[6, :10] == 0)
    assert out[7, 10:].tolist() == [3] + [2] * 21
    assert out[8, 10:].tolist() == list(range(1, 23))


def test_quads():
    x = np.arange(1, 33, dtype=np.float32)
    out = lanes(
        """out[i] = quad_sum(x[i]); out[32 + i] = quad_max(x[i]); 
        out[64 + i] = quad_broadcast(x[i], 2);
        out[96 + i] = quad_shuffle_xor(x[i], 1); out[128 + i] = quad_shuffle_down(x[i], 1);
        out[160 + i] = quad_prefix_inclusive_sum(x[i]); out[192 + i] = quad_any(x[i] == 7);
        out[224 + i] = ulong(quad_vote::vote_t(quad_ballot(i % 2 == 1)));
        out[256 + i] = quad_is_first(); out[288 + i] = quad_product(x[i]);
        out[320 + i] = quad_shuffle_rotate_up(x[i], 1);""",
        x, out=np.zeros((11, 32), np.float32), threads=32, mode="checked",
    )  # fmt: skip
    q = x.reshape(8, 4)
    wide = [np.repeat(v, 4) for v in (q.sum(1), q.max(1), q[:, 2])]
    down = np.concatenate([q[:, 1:], q[:, 3:]], 1)
    has7 = np.repeat((q == 7).any(1), 4)
    wanted = [*wide, q[:, [1, 0, 3, 2]], down, np.cumsum(q, 1), has7, np.full(32, 10),
              np.arange(32) % 4 == 0, np.repeat(q.prod(1), 4), np.roll(q, 1, 1)]  # fmt: skip
    for row, value in zip(out, wanted, strict=True):
        assert np.array_equal(row, np.asarray(value, np.float32).reshape(-1))


@pytest.mark.parametrize("mode", ["fast", "checked"])
@pytest.mark.parametrize(("operand", "sum_"), [
    ("half", "float"), ("float", "float"), ("bfloat", "float"), ("half", "half"),
    ("bfloat", "bfloat")])  # fmt: skip
def test_simdgroup_matrices(mode, operand, sum_):
    """Loads with a stride, an origin and transposed; products, in place and not; stores."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(-3, 4, (2, 24, 40)).astype(DTYPES[operand])
    c = rng.integers(-3, 4, (8, 8)).astype(DTYPES[sum_])
    source = f"""kernel void test(device const {operand} *a, device const {operand} *b,
                                  device const {sum_} *c, device {sum_} *out) {{
        simdgroup_matrix<{operand}, 8, 8> x, y, z; simdgroup_matrix<{sum_}, 8, 8> s, t;
        simdgroup_load(x, a, 40, ulong2(8, 16));
        simdgroup_load(y, b + 3, 40, ulong2(0, 8), true);
        simdgroup_load(z, b, 40);
        simdgroup_load(s, c);
        simdgroup_multiply_accumulate(s, x, y, s);
        simdgroup_multiply_accumulate(t, y, z, s);
        simdgroup_store(s, out);
        simdgroup_store(t, out + 64, 16, ulong2(4, 0), true);
        simdgroup_multiply(t, x, z); x = x * simdgroup_matrix<{operand}, 8, 8>({operand}(2)) * z;
        simdgroup_store(t, out + 192, 8, ulong2(0), false);
        s = make_filled_simdgroup_matrix<{sum_}, 8, 8>({sum_}(3));
        t = simdgroup_matrix<{sum_}, 8, 8>({sum_}(2));
        s.thread_elements()[0] += t.thread_elements()[0];
        simdgroup_store(s, out + 256);
        s.thread_elements()[0] = x.thread_elements()[0];
        s.thread_elements()[1] = x.thread_elements()[1]; simdgroup_store(s, out + 320); }}"""
    out = run(source, a, b, c, out=np.zeros(384, DTYPES[sum_]), threads=32, mode=mode)
    a, b, c = (m.astype(np.float64) for m in (a, b, c))
    x, y, z = a[16:24, 8:16], b[8:16, 3:11].T, b[:8, :8]
    s = x @ y + c
    assert np.array_equal(out[:64].reshape(8, 8), s)
    t = (y @ z + s).astype(DTYPES[sum_])  # bfloat has eight bits
    assert np.array_equal(out[64:192].reshape(8, 16)[:, 4:12].T, t)
    assert np.array_equal(out[192:256].reshape(8, 8), (x @ z).astype(DTYPES[sum_]))
    even = np.zeros((8, 8))
    even[np.arange(0, 8, 2), np.arange(0, 8, 2)] = 2
    assert np.array_equal(out[256:320].reshape(8, 8), 3 + even)
    assert np.array_equal(out[320:].reshape(8, 8), 2 * x @ z)


def test_chains_of_products_wait_for_one_another():
    """A product's result as the next one's operand, copied, returned, overwritten and dropped."""
    source = """
        simdgroup_float8x8 twice(thread const simdgroup_float8x8 &m) {
            simdgroup_float8x8 two = simdgroup_float8x8(2.0f), r;
            simdgroup_multiply(r, two, m); return r; }
        __attribute__((noinline)) void dropped(thread const simdgroup_float8x8 &m) {
            simdgroup_float8x8 d[8]; for (int i = 0; i < 8; i++) simdgroup_multiply(d[i], m, m); }
        __attribute__((noinline)) float sum_of(volatile int n) {  // where d was
            volatile float a[64]; for (int i = 0; i < n; i++) a[i] = i;
            simdgroup_barrier(mem_flags::mem_none);
            float s = 0; for (int i = 0; i < n; i++) s += a[i]; return s; }
        kernel void test(device const float *x, device float *out) {
            simdgroup_float8x8 m, p = simdgroup_float8x8(0.0f), copies[2];
            simdgroup_load(m, x);
            simdgroup_multiply_accumulate(p, m, m, p);
            simdgroup_multiply_accumulate(p, p, m, p);
            copies[0] = p; copies[1] = twice(p);
            simdgroup_load(m, x, 8, ulong2(0), true);
            simdgroup_multiply_accumulate(copies[1], m, m, copies[0]);
            for (int i = 0; i < 40; i++) simdgroup_multiply_accumulate(p, m, m, p);
            p = twice(p);
            simdgroup_store(copies[1], out); simdgroup_store(p, out + 64);
            simdgroup_multiply_accumulate(p, m, m, p); simdgroup_load(p, x);
            simdgroup_store(p, out + 128);
            dropped(m); float s = sum_of(64); if (simd_is_first()) out[192] = s; }"""
    x = np.random.default_rng(0).integers(-2, 3, (8, 8)).astype(np.float32)
    p = x @ x
    p = p + p @ x
    for mode in ("fast", "checked"):
        out = run(source, x, out=np.zeros(193, np.float32), threads=32, mode=mode)
        assert np.array_equal(out[:64].reshape(8, 8), p + x.T @ x.T)
        assert np.array_equal(out[64:128].reshape(8, 8), 2 * (p + 40 * x.T @ x.T))
        assert np.array_equal(out[128:192].reshape(8, 8), x)
        assert out[192] == 64 * 63 / 2


def test_atomics():
    source = """kernel void test(device atomic_uint *counts, device atomic_int *signed_,
                    device atomic_float *sum, device uint *out,
                        uint i [[thread_position_in_grid]]) {
        threadgroup atomic_uint local;
        if (i == 0) atomic_store_explicit(&local, 0, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        atomic_fetch_add_explicit(&local, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&counts[0], i, memory_order_relaxed);
        atomic_fetch_sub_explicit(&counts[1], 1u, memory_order_relaxed);
        atomic_fetch_or_explicit(&counts[2], 1u << (i % 32), memory_order_relaxed);
        atomic_fetch_and_explicit(&counts[3], ~(1u << (i % 32)), memory_order_relaxed);
        atomic_fetch_xor_explicit(&counts[4], 1u << (i % 32), memory_order_relaxed);
        atomic_fetch_min_explicit(signed_, 5 - int(i), memory_order_relaxed);
        atomic_fetch_max_explicit(signed_ + 1, int(i) - 5, memory_order_relaxed);
        atomic_fetch_add_explicit(sum, 0.5f, memory_order_relaxed);
        uint expected = atomic_load_explicit(&counts[5], memory_order_relaxed);
        while (!atomic_compare_exchange_weak_explicit(&counts[5], &expected, expected + 2,
                   memory_order_relaxed, memory_order_relaxed)) {}
        out[i] = atomic_exchange_explicit(&counts[6], i + 1, memory_order_relaxed);
        atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (i == 0) out[64] = atomic_load_explicit(&local, memory_order_relaxed); }"""
    library = build.library(START + source, "checked")
    counts = Buffer(np.array([0, 100, 0, 2**32 - 1, 0, 0, 0], np.uint32))
    signed, total, out = Buffer(np.zeros(2, np.int32)), Buffer(np.zeros(1, np.float32)), Buffer(260)
    assert library.launch("test", [counts, signed, total, out], 1, 64).reports == []
    assert counts.view(np.uint32)[:6].tolist() == [2016, 36, 2**32 - 1, 0, 0, 128]
    assert signed.view(np.int32).tolist() == [-58, 58]
    assert total.view(np.float32)[0] == 32
    exchanged = {*out.view(np.uint32)[:64].tolist(), int(counts.view(np.uint32)[6])}
    assert exchanged == set(range(65))
    assert out.view(np.uint32)[64] == 64
