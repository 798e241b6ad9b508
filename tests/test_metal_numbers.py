"""What the freedom that Metal's compiler and GPUs have with floats must not change: conversions,
random words, angles, and how an overflow is found."""

from typing import Any

import numpy as np
import pytest

from krnl.dtypes import BF16, F16, F32, DType
from krnl.kernels.rows import NORM_BLOCK
from krnl.ops import loss, optimizer, pointwise
from metal_call import backend, bits, drawn, run

# Fast math lets the compiler assume that infinities and NaNs do not occur; GPUs flush subnormal
# floats.
BUILDS: list[dict[str, Any]] = [
    {},
    {"flags": ("-ffast-math",)},
    {"flush_to_zero": True},
    {"flags": ("-ffast-math",), "flush_to_zero": True},
]
any_build = pytest.mark.parametrize("build", BUILDS, ids=["plain", "fast math", "flushed", "both"])
activations = pytest.mark.parametrize("activation", [F16, F32], ids=str)


def float_patterns() -> np.ndarray:
    """Every upper half of a float with lower halves around the places where rounding changes."""
    lower = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    upper = np.arange(2**16, dtype=np.uint32) << 16
    return (upper[:, None] | np.array(lower, np.uint32)).ravel().view(np.float32)


PATTERNS = {
    F32: float_patterns(),
    F16: np.arange(2**16, dtype=np.uint16).view(np.float16),
    BF16: np.arange(2**16, dtype=np.uint16).view(BF16.numpy),
}


@any_build
@pytest.mark.parametrize("target", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("source", [F32, F16, BF16], ids=str)
def test_cast_rounds_to_the_nearest_bit_by_bit(
    source: DType, target: DType, build: dict[str, Any]
) -> None:
    x = PATTERNS[source]
    with np.errstate(all="ignore"):
        exact = x.astype(np.float32).astype(target.numpy)
    (y,) = run(backend("fast", **build), pointwise.cast, [x], [np.empty_like(exact)])
    # A NaN stays one, of the same sign; which one is nobody's concern.
    nan = np.isnan(exact.astype(np.float32))
    sign = bits(exact) >> (8 * exact.itemsize - 1)
    assert np.isnan(y[nan].astype(np.float32)).all()
    assert (bits(y) >> (8 * y.itemsize - 1) == sign).all()
    np.testing.assert_array_equal(bits(y)[~nan], bits(exact)[~nan])


@any_build
def test_embedding_converts_as_cast_does(build: dict[str, Any]) -> None:
    table = PATTERNS[BF16].reshape(256, 256)
    ids = np.random.default_rng(0).integers(0, 256, 300).astype(np.int32)
    outputs = [np.empty((300, 256), np.float16)]
    device = backend("fast", **build)
    (x,) = run(device, pointwise.embedding, [ids, table], outputs, activation=F16, live=300)
    with np.errstate(all="ignore"):
        exact = table[ids].astype(np.float16)
    nan = np.isnan(exact)
    assert np.isnan(x[nan]).all()
    np.testing.assert_array_equal(bits(x)[~nan], bits(exact)[~nan])


@pytest.mark.parametrize("key", [(0, 0), (-1, 1), (2**31 - 1, -(2**31)), (123456789, -987654321)])
def test_dropout_draws_the_defined_random_words(key: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    position = np.array([0, 1, 2**31 - 1, *rng.integers(0, 2**20, 13)], np.int32)
    document = np.array([0, 2**31 - 1, 3, *rng.integers(0, 1000, 13)], np.int32)
    x = np.ones((16, 203), np.float32)
    stream = 31
    token = np.array([[0, position[3], document[3], stream]], np.uint32)
    (words,) = pointwise.philox(token, np.array(key))
    # Words are only seen through comparisons, here also with themselves: then the element is kept.
    for rate in (2.0**-10, 0.5, *(words / 2.0**32)):
        inputs = [x, document, position, np.array(key, np.int32)]
        attributes = {"rate": rate, "stream": stream}
        (y,) = run(backend(), pointwise.dropout, inputs, [np.empty_like(x)], live=16, **attributes)
        keep = pointwise._keep(document, position, key, 203, rate, stream)
        np.testing.assert_array_equal(y, np.where(keep, np.float32(1 / (1 - rate)), 0))


# ---- Rotary positions ----


@any_build
def test_rope_table_is_accurate_a_million_positions_out(build: dict[str, Any]) -> None:
    position = np.array([0, 1, 2, 4095, 131_071, 524_287, 999_999, 1_000_000, 2**20], np.int32)
    inv_freq = np.concatenate(
        [base ** -(np.arange(0, 128, 2) / 128) for base in (1e4, 5e5, 5e6)]
    ).astype(np.float32)
    outputs = [np.empty((len(position), len(inv_freq)), np.float32) for _ in range(2)]
    device = backend(**build)
    inputs = [position, inv_freq]
    got = run(device, pointwise.rope_table, inputs, outputs, live=len(position), scale=1.0)
    exact = pointwise.rope_table.reference(position, inv_freq.astype(np.float64), scale=1.0)
    for table, wanted in zip(got, exact, strict=True):
        # The angle, at most π, is rounded to a float twice, by half an ulp of π or 2^-23 each
        # time. The cosine's own error and its rounding are an ulp of 1.
        assert np.abs(table - wanted).max() <= 3 * F32.eps


# ---- Overflow ----


@any_build
@activations
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_an_infinite_logit_spoils_the_loss_and_its_row_of_gradients(
    bad: float, activation: DType, build: dict[str, Any]
) -> None:
    logits = drawn(1, 3, 300, dtype=activation)
    logits[1, 250] = bad
    target, scale = np.array([0, 1, 2], np.int32), np.array([8.0], np.float32)
    outputs = [np.zeros(1, np.float32), logits]
    device = backend("fast", **build)
    total, gradient = run(
        device, loss.cross_entropy, [target, scale], outputs, activation=activation, live=3
    )
    assert not np.isfinite(total[0])
    assert not np.isfinite(gradient[1]).any() and np.isfinite(gradient[[0, 2]]).all()


HYPER = np.array([1e-2, 0.9, 0.999, 1e-8, 0.01, 1.0, 0.271, 0.003, 0.125], np.float32)
LOSS = np.ones(1, np.float32)
NOT_FINITE = [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF]


@any_build
@pytest.mark.parametrize("count", [40_000, 40_001])
def test_the_norm_is_not_finite_when_any_gradient_is_not(count: int, build: dict[str, Any]) -> None:
    device = backend("fast", **build)
    clean = drawn(1, count)
    for at in (0, 4097, NORM_BLOCK - 1, NORM_BLOCK, count - 1):
        for pattern in NOT_FINITE:
            grad = clean.copy()
            grad.view(np.uint32)[at] = pattern
            (norm,) = run(device, optimizer.gradient_norm, [grad, LOSS, HYPER], [np.zeros(1, "f4")])
            assert not np.isfinite(norm[0]), (at, hex(pattern))
    (norm,) = run(device, optimizer.gradient_norm, [clean, LOSS, HYPER], [np.zeros(1, np.float32)])
    exact = np.linalg.norm(clean.astype(np.float64)) * 0.125
    np.testing.assert_allclose(norm[0], exact, rtol=F32.eps * np.sqrt(count))


def test_the_norm_of_gradients_whose_own_squares_overflow() -> None:
    grad, hyper = np.full(1000, 1e30, np.float32), HYPER.copy()
    hyper[8] = 1e-16
    (norm,) = run(
        backend(), optimizer.gradient_norm, [grad, LOSS, hyper], [np.zeros(1, np.float32)]
    )
    np.testing.assert_allclose(norm[0], 1e14 * np.sqrt(1000), rtol=1e-5)


@any_build
def test_adamw_does_nothing_when_the_norm_is_not_finite(build: dict[str, Any]) -> None:
    state = [drawn(seed, 1001) for seed in (1, 2, 3)]
    for pattern in NOT_FINITE:
        norm = np.array([pattern], np.uint32).view(np.float32)
        inputs = [drawn(4, 1001), norm, HYPER]
        after = run(backend("fast", **build), optimizer.adamw, inputs, state)
        assert all(np.array_equal(a, b) for a, b in zip(after, state, strict=True))
    inputs[1] = np.array([1.0], np.float32)
    after = run(backend("fast", **build), optimizer.adamw, inputs, state)
    assert not any(np.array_equal(a, b) for a, b in zip(after, state, strict=True))
