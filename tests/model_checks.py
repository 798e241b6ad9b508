"""What holds of a model in training, whatever runs it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from krnl.backends.base import Backend
from krnl.backends.reference import ReferenceBackend
from krnl.dtypes import BF16, F16, F32, I32, DType
from krnl.formats.peft import AdapterConfig
from krnl.model import Model
from krnl.ops.pointwise import rope, rope_table
from krnl.plan.arena import plan
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.step import Step
from krnl.training import loss_scale
from tiny import (
    ALL,
    LENGTHS,
    REFERENCE,
    Run,
    make_documents,
    make_modules,
    one_pass,
    perturbed,
    with_targets,
)

Sums = tuple[float, np.ndarray]  # a loss and gradients


def assert_same(got: Sums, want: Sums) -> None:
    """Loss and gradients equal bit for bit."""
    for values, wanted in zip(got, want, strict=True):
        np.testing.assert_array_equal(values, wanted)
    assert np.isfinite(got[0]) and np.isfinite(got[1]).all() and got[1].any()


def assert_close(got: Sums, want: Sums, part: float) -> None:
    """Loss and gradient equal up to a part of themselves."""
    assert got[0] == pytest.approx(want[0], rel=part), f"loss {got[0]} instead of {want[0]}"
    assert np.linalg.norm(got[1] - want[1]) <= part * np.linalg.norm(want[1])


def derivative(f: Callable[[float], float], h: float) -> float:
    """f'(0) from four values: off by h⁴ f⁽⁵⁾ / 30 and by the rounding of f over h."""
    return (8 * (f(h) - f(-h)) - (f(2 * h) - f(-2 * h))) / (12 * h)


def hyper(step: int, divisor: float) -> np.ndarray:
    """`hyper` of an AdamW step with a rate of 0.01 that clips at 1."""
    corrections = (1 - 0.9**step, 1 - 0.999**step)
    return np.array([1e-2, 0.9, 0.999, 1e-8, 0.01, 1.0, *corrections, 1 / divisor])


def scaled_run(backend: Backend, model: Model, activation: DType, **options: Any) -> Run:
    """With the loss scale that a training run begins with."""
    run = Run(model, options.pop("adapter", ALL), backend, activation=activation, **options)
    run.session.loss_scale = loss_scale.initial_scale(activation).value
    return run


# Of a whole adapter matrix' gradient, half of what test_layers allows: some 60 roundings add like
# a random walk to 10 ulps, and cancellation loses a bit; in float32 30 ulps more for angles.
ULPS = {F32: 2 * (10 + 30), F16: 2 * 10, BF16: 2 * 10}


def check_against_the_reference(
    backend: Backend, model: Model, adapter: AdapterConfig, activation: DType, roundings: float
) -> float:
    """Compares the sums of a pass with the float64 reference; the largest share of the allowance
    that an adapter matrix' gradient takes. On top of the ulps above, it may be off by `roundings`
    times what storing in the activation type costs a device that is exact otherwise, which models
    amplify differently."""
    work, modules = one_pass(make_documents(LENGTHS)), make_modules(model, adapter, activation)
    exact = Run(model, adapter, REFERENCE, modules)
    stored = Run(model, adapter, ReferenceBackend(rounds=True), modules, activation)
    run = scaled_run(backend, model, activation, adapter=adapter, modules=modules)
    (want_loss, want), (loss, got) = exact.sums(work), run.sums(work)
    part, used = ULPS[activation] * activation.eps, 0.0
    assert loss == pytest.approx(want_loss, rel=part / 2), f"loss {loss} instead of {want_loss}"
    wanted, rounded = exact.modules(want), stored.modules(stored.sums(work)[1])
    for name, values in run.modules(got / run.session.loss_scale).items():
        off, unavoidable = (
            float(np.linalg.norm(x - wanted[name]) / np.linalg.norm(wanted[name]))
            for x in (values, rounded[name])
        )
        share = off / (part + roundings * unavoidable)
        used = max(used, share)
        assert share <= 1, f"{name} is off by {share:.2f} of its allowance"
    return used


def check_no_token_sees_later_ones(run: Run, length: int, last: int) -> None:
    """Targets up to token `last`; the tokens after it change, then token `last` itself, a
    target."""
    (example,) = make_documents((length,), share=1.0)
    example = with_targets(example, range(1, last + 1))
    before, later = run.sums(one_pass([example])), one_pass([perturbed(example, last + 1)])
    assert_same(run.sums(later), before)
    assert run.session.evaluate(later) == run.session.evaluate(one_pass([example]))
    assert run.sums(one_pass([perturbed(example, last)]))[0] != before[0]


def check_documents_do_not_see_one_another(run: Run, lengths: Sequence[int], changed: int) -> None:
    """Only the middle document of three has targets; the tokens of one beside it change."""
    examples = make_documents(lengths)
    examples = [e if i == 1 else with_targets(e, ()) for i, e in enumerate(examples)]
    before = run.sums(one_pass(examples))
    examples[changed] = perturbed(examples[changed], 0)
    assert_same(run.sums(one_pass(examples)), before)
    examples[1] = perturbed(examples[1], 0)
    assert run.sums(one_pass(examples))[0] != before[0]


def check_a_window_hides_what_lies_before_it(run: Run, length: int, target: int) -> None:
    """Through two layers with windows of 5, a token is predicted from the nine before it."""
    (example,) = make_documents((length,))
    example, first = with_targets(example, (target,)), target - 9
    before = run.sums(one_pass([example]))
    assert_same(run.sums(one_pass([perturbed(example, 0, first)])), before)
    assert run.sums(one_pass([perturbed(example, first, first + 1)]))[0] != before[0]


def check_rope_there_and_back(backend: Backend, activation: DType, eps: float) -> None:
    n, h, d = 37, 3, 10
    position, live = (
        Buffer(name, (size,), I32, Kind.INPUT) for name, size in (("position", n), ("live", 1))
    )
    inv_freq = Buffer("inv_freq", (d // 2,), F32, Kind.WEIGHT)
    x, there, back = (
        Buffer(name, (n, h, d), activation, Kind.STATE) for name in ("x", "there", "back")
    )
    step = Step("turn", activation, live)
    cos, sin = step(rope_table, position, inv_freq, scale=1.0)
    step(rope, x, cos, sin, into=there, sign=1.0)
    step(rope, there, cos, sin, into=back, sign=-1.0)
    (planned,) = plan([step], backend.kernels)
    memory = backend.allocate(planned.layout)
    memory.write(position, np.arange(n) * 97)
    memory.write(live, np.array([n]))
    memory.write(inv_freq, 100.0 ** -np.arange(d // 2))
    memory.write(x, np.random.default_rng(0).normal(size=(n, h, d)))
    backend.compile(planned, memory).run()
    # Each element is twice a sum of two products with numbers up to 1: eight roundings of a pair.
    before, turned, after = (memory.read(b).astype(np.float64) for b in (x, there, back))
    assert np.abs(after - before).max() <= 8 * eps * np.abs(before).max()
    assert not np.allclose(turned[1:], before[1:], rtol=0.1)
