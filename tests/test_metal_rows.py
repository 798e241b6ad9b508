"""What Metal's kernels on rows read, write and promise beside what every op must compute, which is
in test_metal_ops.py."""

from typing import Any

import numpy as np
import pytest

from krnl.dtypes import BF16, F16, F32, DType
from krnl.errors import PlanError
from krnl.kernels.launch import LANES, GpuRow, Launch
from krnl.kernels.metal.rows import DIALECT
from krnl.kernels.rows import norm as norm_launches
from krnl.kernels.rows import operands
from krnl.ops import loss, norm, optimizer
from krnl.plan.buffer import Buffer
from krnl.plan.lower import Table
from krnl.plan.op import op
from krnl.plan.step import Call
from metal_call import TYPES, backend, drawn, run
from metalsim.install import SimulatedBackend

activations = pytest.mark.parametrize("activation", [F16, F32], ids=str)


# ---- Norms ----


def normed(
    device: SimulatedBackend, x: np.ndarray, w: np.ndarray, start: int = 0
) -> list[np.ndarray]:
    outputs = [np.empty_like(x), np.empty(len(x), np.float32)]
    return run(
        device,
        norm.rms_norm,
        [x, w],
        outputs,
        activation=TYPES[x.dtype],
        live=len(x),
        start=start,
        eps=1e-5,
    )


@activations
@pytest.mark.parametrize("width, times", [(64, 1), (1000, 1), (DIALECT.held_width, 1), (8200, 2)])
def test_rms_norm_reads_a_row_once_up_to_a_stated_width(
    width: int, times: int, activation: DType
) -> None:
    device = backend()
    x, w = drawn(1, 3, width, dtype=activation), drawn(2, width)
    y, rstd = normed(device, x, w)
    wide = x.astype(np.float64)
    exact = 1 / np.sqrt((wide**2).mean(axis=1) + 1e-5)
    # A sum of that many squares in float, the root and two products, rounded to the output's type.
    off = F32.eps * (np.sqrt(width) + 4) + activation.eps / 2
    np.testing.assert_allclose(rstd, exact, rtol=F32.eps * (np.sqrt(width) + 4))
    np.testing.assert_allclose(y, wide * exact[:, None] * w, rtol=off, atol=2.0**-25)

    read = device.simulation.counters["device_bytes_read"]
    wanted = times * x.nbytes + len(x) * w.nbytes
    threads = len(x) * DIALECT.threads(width, DIALECT.held * DIALECT.vector)
    assert wanted <= read <= wanted + 16 * threads  # and `live` and three sizes for each thread


@pytest.mark.parametrize("width, times", [(1000, 1), (8200, 2)])
def test_rms_norm_backward_reads_its_inputs_once_too(width: int, times: int) -> None:
    device = backend()
    dy, x, residual = (drawn(seed, 3, width, dtype=F16) for seed in (1, 2, 3))
    w, rstd = drawn(4, width), drawn(5, 3)
    inputs = [dy, x, w, rstd, residual]
    (dx,) = run(device, norm.rms_norm_backward, inputs, [np.empty_like(x)], activation=F16, live=3)
    exact = norm.rms_norm_backward.reference(*(a.astype(np.float64) for a in inputs))
    np.testing.assert_allclose(dx, exact, rtol=F16.eps / 2, atol=F32.eps * np.sqrt(width) * 8)

    read = device.simulation.counters["device_bytes_read"]
    once = dy.nbytes + x.nbytes + 3 * w.nbytes
    threads = 3 * DIALECT.threads(width, DIALECT.held * DIALECT.vector)
    wanted = times * once + residual.nbytes
    assert wanted <= read <= wanted + 20 * threads  # and rstd


def test_aligned_rows_take_a_quarter_of_the_loads() -> None:
    x, w = drawn(1, 3, 512, dtype=F16), drawn(2, 512)
    loads, stores, results = [], [], []
    for start in (0, 3):
        device = backend()
        results.append(normed(device, x, w, start)[0])
        loads.append(device.simulation.counters["device_loads"])
        stores.append(device.simulation.counters["device_stores"])
    assert loads[1] - loads[0] == 3 * (2 * 512 - 2 * 512 // 4)
    assert stores[1] - stores[0] == 3 * (512 - 512 // 4)
    assert np.array_equal(*results)


@op("x[n,c] w[c]:f32 live -> y[n,c] rstd[n]:f32 twin[n,c]:any")
def rms_norm_twins(x: Any, w: Any, *, eps: float) -> Any:
    """rms_norm with its output in a second type."""
    y, rstd = norm.rms_norm.reference(x, w, eps=eps)
    return y, rstd, y


def _twins(call: Call, workspace: Buffer | None) -> list[Launch]:
    x, w, live, y, rstd, twin = operands(call)
    return norm_launches(DIALECT, x, w, live, y, rstd, twin, call.attributes["eps"])


@activations
@pytest.mark.parametrize("width", [100, 101])
def test_rms_norm_writes_its_twin_in_the_same_pass(activation: DType, width: int) -> None:
    other = F32 if activation is F16 else F16
    x, w = drawn(1, 5, width, dtype=activation), drawn(2, width)
    device = backend()
    y, rstd = normed(device, x, w)
    alone = device.simulation.counters["device_bytes_read"]

    table = Table("metal", (GpuRow("rms_norm_twins", launches=_twins),))
    device = backend(table=table)
    outputs = [np.empty_like(y), np.empty_like(rstd), np.empty(x.shape, other.numpy)]
    first, again, twin = run(
        device, rms_norm_twins, [x, w], outputs, activation=activation, live=5, eps=1e-5
    )
    assert device.simulation.counters["device_bytes_read"] == alone
    assert np.array_equal(first, y) and np.array_equal(again, rstd)
    half, single = (first, twin) if activation is F16 else (twin, first)
    assert np.array_equal(half, single.astype(np.float16))
    assert not np.array_equal(half.astype(np.float32), single)


# ---- Loss ----


@activations
def test_cross_entropy_over_a_large_vocabulary(activation: DType) -> None:
    classes, scale = 151_936, 1024.0
    logits = 4 * drawn(1, 3, classes)
    logits[1, 77] = 30.0  # nearly all of the probability
    logits = logits.astype(activation.numpy)
    target = np.array([0, 77, classes - 1], np.int32)
    inputs = [target, np.array([scale], np.float32)]
    start = np.array([2.5], np.float32)
    device = backend("fast")
    total, gradient = run(
        device, loss.cross_entropy, inputs, [start, logits], activation=activation, live=3
    )
    wide = logits.astype(np.float64)
    exact_total, exact = loss.cross_entropy.reference(target, scale, 2.5, wide)
    np.testing.assert_allclose(total, exact_total, rtol=F32.eps * np.sqrt(classes))
    probability = np.exp(wide - loss._log_sum_exp(wide))
    # The sum's roundings, and those of the exponents.
    inside = F32.eps * (np.sqrt(classes) + np.abs(wide).max()) * scale
    bound = activation.eps / 2 * np.abs(exact) + inside * (probability + F32.eps)
    floor = 2.0**-25 if activation is F16 else 0.0  # half of the smallest half
    assert (np.abs(gradient - exact) <= bound + floor).all()

    (alone,) = run(device, loss.cross_entropy_loss, [logits, target], [start], live=3)
    assert np.array_equal(alone, total)


# ---- For all ----


def test_results_do_not_depend_on_the_order_of_threads() -> None:
    x, w, residual = drawn(1, 4, 1100, dtype=F16), drawn(2, 1100), drawn(3, 4, 1100, dtype=F16)
    target, scale = np.array([0, 9, 700, 1099], np.int32), np.array([64.0], np.float32)
    grad, hyper = drawn(4, 20_000), np.ones(9, np.float32)
    seen = set()
    for seed in range(6):
        device = backend(seed=seed)
        y, rstd = normed(device, x, w)
        inputs = [y, x, w, rstd, residual]
        (dx,) = run(
            device, norm.rms_norm_backward, inputs, [np.empty_like(x)], activation=F16, live=4
        )
        total, gradient = run(
            device,
            loss.cross_entropy,
            [target, scale],
            [np.zeros(1, np.float32), x],
            activation=F16,
            live=4,
        )
        (size,) = run(
            device, optimizer.gradient_norm, [grad, scale, hyper], [np.zeros(1, np.float32)]
        )
        seen.add(b"".join(a.tobytes() for a in (y, rstd, dx, total, gradient, size)))
    assert len(seen) == 1


def test_rows_beyond_the_live_ones_cost_a_look_at_live() -> None:
    """They hold NaN; test_metal_ops.py sees that no op writes them."""
    costs = []
    for capacity in (3, 64):
        x = np.full((capacity, 128), np.nan, np.float16)
        x[:3] = drawn(1, 3, 128, dtype=F16)
        device = backend()
        outputs = [np.full_like(x, 7), np.full(capacity, 7, np.float32)]
        y, rstd = run(
            device, norm.rms_norm, [x, drawn(2, 128)], outputs, activation=F16, live=3, eps=1e-5
        )
        assert (y[3:] == 7).all() and (rstd[3:] == 7).all() and np.isfinite(y[:3]).all()
        counters = device.simulation.counters
        costs.append((counters["device_bytes_read"], counters["device_bytes_written"]))
    assert costs[0][1] == costs[1][1]
    assert 0 < costs[1][0] - costs[0][0] <= 8 * 61 * LANES  # `live`, and heads to a token


def test_an_op_on_bf16_activations_is_refused() -> None:
    x, w = drawn(1, 2, 8, dtype=BF16), drawn(2, 8)
    outputs = [np.empty_like(x), np.empty(2, np.float32)]
    with pytest.raises(PlanError, match="metal backend has no kernel for rms_norm"):
        run(backend(), norm.rms_norm, [x, w], outputs, activation=BF16, live=2, eps=1e-5)
