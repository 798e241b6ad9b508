"""Learning rates against the formula and against those of the stored PEFT run."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from krnl.ops.optimizer import HYPER
from krnl.training.schedule import hyper, learning_rate
from runs import EXPECTED

SCHEDULES = ("constant", "linear", "cosine")
# A rate is a handful of operations in double.
ROUNDINGS = 8 * np.finfo(np.float64).eps


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, float]:
    """Updates, warmup (which may be longer than the run), peak."""
    count = draw(st.integers(1, 400))
    return count, draw(st.integers(0, count + 50)), draw(st.floats(1e-7, 10))


@given(runs(), st.sampled_from(SCHEDULES))
def test_warmup_is_a_straight_line_to_the_peak(drawn, schedule):
    count, warmup, peak = drawn
    for k in range(1, min(count, warmup) + 1):
        want = peak * k / warmup
        assert learning_rate(k, count, peak, warmup, schedule) == pytest.approx(want, rel=ROUNDINGS)


@given(runs())
def test_after_warmup_the_rate_runs_to_zero_over_the_remaining_updates(drawn):
    count, warmup, peak = drawn
    for k in range(warmup + 1, count + 1):
        done = (k - 1 - warmup) / (count - warmup)
        wants = {
            "constant": peak,
            "linear": peak * (count - k + 1) / (count - warmup),
            "cosine": peak * math.cos(math.pi * done / 2) ** 2,
        }
        for schedule, want in wants.items():
            got = learning_rate(k, count, peak, warmup, schedule)
            # 1 + cos cancels near the end: the error is one of the peak, not of the result.
            assert got == pytest.approx(want, rel=ROUNDINGS, abs=ROUNDINGS * peak)


@given(runs(), st.sampled_from(SCHEDULES))
def test_the_rate_rises_once_falls_once_and_is_never_zero(drawn, schedule):
    count, warmup, peak = drawn
    rates = [learning_rate(k, count, peak, warmup, schedule) for k in range(1, count + 1)]
    assert all(0 < rate <= peak * (1 + ROUNDINGS) for rate in rates)
    top = min(warmup, count)
    assert all(a < b for a, b in pairwise(rates[:top]))
    assert all(a >= b for a, b in pairwise(rates[top:]))
    if warmup < count:
        assert rates[warmup] == peak


def test_the_rates_of_the_stored_run():
    stored = json.loads((EXPECTED / "peft_fp32.json").read_text())
    lines = stored["steps"]
    assert len(lines) == 375
    for line in lines:
        got = learning_rate(line["step"], len(lines), stored["lr"], stored["warmup"], "cosine")
        # Stored with as many digits as a double has, computed there in another order.
        assert got == pytest.approx(line["lr"], rel=1e-12)


@given(st.integers(1, 100_000), st.floats(0, 0.999), st.floats(0, 0.9999))
def test_the_numbers_of_an_update(update, beta1, beta2):
    got = dict(zip(HYPER, hyper(update, 1e-3, (beta1, beta2), 1e-8, 0.1, 1.0, 0.25), strict=True))
    want = {
        "lr": 1e-3, "beta1": beta1, "beta2": beta2, "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0,
        "correction1": 1 - beta1**update, "correction2": 1 - beta2**update, "gradient_scale": 0.25,
    }  # fmt: skip
    assert got == {name: np.float32(value) for name, value in want.items()}
