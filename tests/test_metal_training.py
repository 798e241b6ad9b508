"""Training on the Metal backend, in the simulator: tiny models against the float64 reference, and
whole runs against the CPU's."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from krnl.dtypes import BF16, F16, F32, DType
from krnl.training import loss_scale
from krnl.training.memory import memory_use
from metalsim.install import SimulatedBackend, installed, metal_backend
from metalsim.resources import Simulation
from model_checks import (
    assert_same,
    check_a_window_hides_what_lies_before_it,
    check_against_the_reference,
    check_documents_do_not_see_one_another,
    check_no_token_sees_later_ones,
    check_rope_there_and_back,
    derivative,
    hyper,
    scaled_run,
)
from runs import (
    check_a_run_follows_the_cpu,
    check_the_storyteller_follows_the_cpu,
    run,
    settings,
    updates,
    validations,
    write_data,
)
from tiny import DROPOUT, LENGTHS, MODELS, Write, make_documents, one_pass, with_longer_header

ACTIVATIONS = (F32, F16)


@pytest.fixture(scope="module")
def shared() -> SimulatedBackend:
    return metal_backend("fast", eager=True)


@pytest.fixture
def metal(shared: SimulatedBackend) -> Iterator[SimulatedBackend]:
    """The backend, on which nothing may go wrong."""
    yield shared
    shared.simulation.expect_clean()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulation]:
    """Lets `device: metal` open the simulator."""
    simulation = Simulation(mode="fast", eager=True)
    with installed(simulation):
        yield simulation
    simulation.expect_clean()
    assert simulation.executed


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_metal_agrees_with_the_reference(
    kind: str, activation: DType, write: Write, metal: SimulatedBackend
) -> None:
    adapter = replace(DROPOUT, rank=4)
    # Twice, as Metal rounds inside attention too.
    used = check_against_the_reference(metal, write(kind, BF16), adapter, activation, roundings=2.0)
    print(f"{kind} {activation}: at most {used:.0%} of the allowance")


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_a_step_is_clean(activation: DType, write: Write) -> None:
    """A pass and an update in a checked build, which reports races, reads of what was never written
    and accesses out of bounds. All memory but what is live holds NaN."""
    backend = metal_backend("checked", eager=True)
    run, work = scaled_run(backend, write("qwen3"), activation), one_pass(make_documents((19, 18)))
    run.poison()
    run.session.accumulate(run.session.inputs_of(work[0], 1))
    loss, norm = run.session.update(hyper(1, run.session.loss_scale * len(work[0].target)))
    assert np.isfinite([loss, norm]).all() and norm > 0
    backend.simulation.expect_clean()


def test_weights_that_lie_askew_are_held(
    tmp_path: Path, write: Write, metal: SimulatedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header that is two bytes longer: the same sums, in the memory that the plan says."""
    device, granted = type(metal._gpu.device), []
    grant = device.newBufferWithLength_options_

    def counted(self: Any, nbytes: int, options: int) -> Any:
        granted.append(nbytes)
        return grant(self, nbytes, options)

    monkeypatch.setattr(device, "newBufferWithLength_options_", counted)
    given, work = write("llama", BF16), one_pass(make_documents(LENGTHS))
    results, uses = [], []
    for model in (given, with_longer_header(given, tmp_path / "askew", 2)):
        granted.clear()
        run = scaled_run(metal, model, F16, adapter=DROPOUT)
        results.append(run.sums(work))
        use = memory_use(run.planned, metal)
        uses.append(use)
        beside = use.mapped + use.saving + use.process + use.drawing
        assert sum(granted) == use.total - beside
    assert_same(*results)
    assert not any(block.file for block in run.planned.accumulate.layout.blocks)
    aligned, askew = uses
    assert askew.held >= aligned.held + aligned.mapped and askew.mapped == 0 < aligned.mapped


def test_gradients_are_those_of_the_loss(write: Write, metal: SimulatedBackend) -> None:
    """Central differences in float32, along the gradient itself, where the loss changes most."""
    run, work = scaled_run(metal, write(), F32), one_pass(make_documents(LENGTHS))
    param = run.session.state()["param"]
    total, gradient = run.sums(work)
    direction = gradient / np.linalg.norm(gradient)

    def loss(h: float) -> float:
        run.place(param + h * direction)
        return run.sums(work)[0]

    # A loss is off by some four roundings of the sum, and the formula adds such errors up 1.5-fold.
    step, slope = 2e-3, float(np.linalg.norm(gradient))
    noise = 1.5 * 4 * F32.eps * total / step
    off = abs(derivative(loss, step) - slope)
    print(f"off by {off / slope:.1e} of {slope:.1f}, {off / noise:.0%} of the allowance")
    assert off <= noise < 0.01 * slope


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_no_token_sees_later_ones(activation: DType, write: Write, metal: SimulatedBackend) -> None:
    run = scaled_run(metal, write(), activation, adapter=DROPOUT)
    check_no_token_sees_later_ones(run, 50, 40)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("changed", [0, 2])
def test_documents_do_not_see_one_another(
    changed: int, activation: DType, write: Write, metal: SimulatedBackend
) -> None:
    run = scaled_run(metal, write("qwen3"), activation, adapter=DROPOUT)
    check_documents_do_not_see_one_another(run, (9, 34, 11), changed)


def test_a_window_hides_what_lies_before_it(write: Write, metal: SimulatedBackend) -> None:
    check_a_window_hides_what_lies_before_it(scaled_run(metal, write("window"), F16), 50, 40)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_capacity_and_what_memory_held_play_no_part(
    activation: DType, write: Write, metal: SimulatedBackend
) -> None:
    """45 live tokens in 45 and in 96, the rest NaN and indices that point nowhere."""
    work, results = one_pass(make_documents(LENGTHS)), []
    for tokens in (sum(LENGTHS), 96):
        run = scaled_run(metal, write("qwen3"), activation, tokens=tokens)
        for _ in range(2):
            run.poison()
            results.append(run.sums(work))
    for result in results[1:]:
        assert_same(result, results[0])


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_rope_there_and_back(activation: DType, metal: SimulatedBackend) -> None:
    check_rope_there_and_back(metal, activation, activation.eps)


def test_an_update_that_overflowed_changes_nothing(write: Write, metal: SimulatedBackend) -> None:
    run, work = scaled_run(metal, write(), F16), one_pass(make_documents(LENGTHS))
    before = run.session.state()
    run.session.loss_scale = 2.0**20  # times p - 1 at a logit: beyond the largest half, 65,504
    run.session.accumulate(run.session.inputs_of(work[0], 1))
    loss, norm = run.session.update(hyper(1, run.session.loss_scale))
    assert np.isfinite(loss) and not np.isfinite(norm)
    for name, values in run.session.state().items():
        np.testing.assert_array_equal(values, before[name])
    run.session.loss_scale = 2.0**8
    run.session.accumulate(run.session.inputs_of(work[0], 2))
    again, norm = run.session.update(hyper(1, run.session.loss_scale))
    assert again == loss and np.isfinite(norm)
    assert (run.session.state()["param"] != before["param"]).any()


@pytest.fixture(scope="module")
def validated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("validated"), 10, 5)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_run_follows_the_cpu(tmp_path, model, validated, device, precision):
    check_a_run_follows_the_cpu(tmp_path, model, validated, "metal", precision)


def test_ten_steps_of_the_storyteller(tmp_path, device):
    """In fp16 with loss scaling. Four rows an update, in short passes: every threadgroup takes time
    here, also where no token is live."""
    given = {"batch_size": 4, "tokens": 512}
    check_the_storyteller_follows_the_cpu(tmp_path, 10, "metal", "fp16", **given)


def test_an_overflow_is_skipped_halved_and_recovered_from(
    tmp_path, model, validated, device, monkeypatch
):
    """A run whose scale begins so high that the gradients at the logits overflow."""
    monkeypatch.setattr(loss_scale, "START", 2.0**19)
    out = tmp_path / "out"
    result = run(settings(model, validated, out, device="metal", precision="fp16", epochs=5))
    scale, skipped = 2.0**19, 0
    for line in updates(out):
        assert line["loss_scale"] == scale
        if line["grad_norm"] is None:  # JSON has no word for infinity
            scale, skipped = scale / 2, skipped + 1
        assert line["skipped"] == skipped
    assert result.skipped == skipped
    assert 3 <= skipped < 10
    # Nothing moved before the first good update; then the run learns.
    first, *_, last = validations(out)
    assert last["val_loss"] < first["val_loss"] - 0.1
    assert device.executed["adamw"] == len(updates(out))
