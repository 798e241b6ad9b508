"""Training on the Metal backend, in the simulator: tiny models against the float64 reference, and
whole runs against the CPU's."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from krnl.backends.reference import ReferenceBackend
from krnl.dtypes import BF16, F16, F32, I32, DType
from krnl.model import Model
from krnl.ops.pointwise import rope, rope_table
from krnl.plan.arena import plan
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.step import Step
from krnl.training import loss_scale
from krnl.training.memory import memory_use
from metalsim.install import SimulatedBackend, installed, metal_backend
from metalsim.resources import Simulation
from runs import follow, run, settings, updates, validations, write_data
from test_layers import (
    DROPOUT,
    LENGTHS,
    assert_same,
    derivative,
    one_pass,
    perturbed,
    with_targets,
)
from test_storyteller import config as storyteller
from tiny import (
    ALL,
    MODELS,
    REFERENCE,
    Run,
    make_documents,
    make_modules,
    with_longer_header,
    write_model,
)

Write = Callable[..., Model]
ACTIVATIONS = (F32, F16)


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    @cache
    def write(kind: str = "llama", dtype: DType = F32, **sizes: Any) -> Model:
        return write_model(tmp_path_factory.mktemp(kind), kind, dtype, **sizes)

    return write


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


def scaled(run: Run, work: Any) -> tuple[float, np.ndarray]:
    """The sums of a pass; gradients without the loss scale."""
    loss, gradient = run.sums(work)
    return loss, gradient / run.session.loss_scale


def metal_run(backend: SimulatedBackend, model: Model, activation: DType, **options: Any) -> Run:
    run = Run(model, options.pop("adapter", ALL), backend, activation=activation, **options)
    run.session.loss_scale = loss_scale.initial_scale(activation).value
    return run


# Of a whole adapter matrix' gradient, half of what test_layers allows: some 60 roundings add like
# a random walk to 10 ulps, and cancellation loses a bit; in float32 30 ulps more for angles. On top
# of that comes what storing in the activation type costs a device that is exact otherwise, which
# models amplify differently; twice, as Metal rounds inside attention too.
ULPS = {F32: 2 * (10 + 30), F16: 2 * 10}


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_metal_agrees_with_the_reference(
    kind: str, activation: DType, write: Write, metal: SimulatedBackend
) -> None:
    model, work = write(kind, BF16), one_pass(make_documents(LENGTHS))
    adapter = replace(DROPOUT, rank=4)
    modules = make_modules(model, adapter, activation)
    exact = Run(model, adapter, REFERENCE, modules)
    stored = Run(model, adapter, ReferenceBackend(rounds=True), modules, activation)
    run = metal_run(metal, model, activation, adapter=adapter, modules=modules)
    (want_loss, want), (loss, got) = exact.sums(work), scaled(run, work)
    part, used = ULPS[activation] * activation.eps, 0.0
    assert loss == pytest.approx(want_loss, rel=part / 2)
    wanted, rounded = exact.modules(want), stored.modules(stored.sums(work)[1])
    for name, values in run.modules(got).items():
        off, unavoidable = (
            float(np.linalg.norm(x - wanted[name]) / np.linalg.norm(wanted[name]))
            for x in (values, rounded[name])
        )
        share = off / (part + 2 * unavoidable)
        used = max(used, share)
        assert share <= 1, f"{name} is off by {share:.2f} of its allowance"
    print(f"{kind} {activation}: at most {used:.0%} of the allowance")


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_a_step_is_clean(activation: DType, write: Write) -> None:
    """A pass and an update in a checked build, which reports races, reads of what was never written
    and accesses out of bounds. All memory but what is live holds NaN."""
    backend = metal_backend("checked", eager=True)
    run, work = metal_run(backend, write("qwen3"), activation), one_pass(make_documents((19, 18)))
    run.poison()
    run.session.accumulate(work[0], 1)
    loss, norm = run.session.update(update(1, run.session.loss_scale * len(work[0].target)))
    assert np.isfinite([loss, norm]).all() and norm > 0
    backend.simulation.expect_clean()


def update(step: int, divisor: float) -> np.ndarray:
    """`hyper` of an AdamW step with a rate of 0.01 that clips at 1."""
    corrections = (1 - 0.9**step, 1 - 0.999**step)
    return np.array([1e-2, 0.9, 0.999, 1e-8, 0.01, 1.0, *corrections, 1 / divisor])


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
        run = metal_run(metal, model, F16, adapter=DROPOUT)
        results.append(run.sums(work))
        use = memory_use(run.planned, metal)
        uses.append(use)
        assert sum(granted) == use.total - use.mapped - use.saving - use.process
    assert_same(*results)
    assert not any(block.file for block in run.planned.accumulate.layout.blocks)
    aligned, askew = uses
    assert askew.held >= aligned.held + aligned.mapped and askew.mapped == 0 < aligned.mapped


def test_gradients_are_those_of_the_loss(write: Write, metal: SimulatedBackend) -> None:
    """Central differences in float32, along the gradient itself, where the loss changes most."""
    run, work = metal_run(metal, write(), F32), one_pass(make_documents(LENGTHS))
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
    """Targets up to token 40; the tokens after it change, then token 40 itself, a target."""
    (example,) = make_documents((50,), share=1.0)
    example = with_targets(example, range(1, 41))
    run = metal_run(metal, write(), activation, adapter=DROPOUT)
    before = run.sums(one_pass([example]))
    assert_same(run.sums(one_pass([perturbed(example, 41)])), before)
    assert run.sums(one_pass([perturbed(example, 40)]))[0] != before[0]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("changed", [0, 2])
def test_documents_do_not_see_one_another(
    changed: int, activation: DType, write: Write, metal: SimulatedBackend
) -> None:
    """Only the middle document has targets; the tokens of one beside it change."""
    examples = make_documents((9, 34, 11))
    examples = [e if i == 1 else with_targets(e, ()) for i, e in enumerate(examples)]
    run = metal_run(metal, write("qwen3"), activation, adapter=DROPOUT)
    before = run.sums(one_pass(examples))
    examples[changed] = perturbed(examples[changed], 0)
    assert_same(run.sums(one_pass(examples)), before)
    examples[1] = perturbed(examples[1], 0)
    assert run.sums(one_pass(examples))[0] != before[0]


def test_a_window_hides_what_lies_before_it(write: Write, metal: SimulatedBackend) -> None:
    """Through two layers with windows of 5, token 40 is predicted from tokens 31 to 39."""
    (example,) = make_documents((50,))
    example = with_targets(example, (40,))
    run = metal_run(metal, write("window"), F16)
    before = run.sums(one_pass([example]))
    assert_same(run.sums(one_pass([perturbed(example, 0, 31)])), before)
    assert run.sums(one_pass([perturbed(example, 31, 32)]))[0] != before[0]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_capacity_and_what_memory_held_play_no_part(
    activation: DType, write: Write, metal: SimulatedBackend
) -> None:
    """45 live tokens in 45 and in 96, the rest NaN and indices that point nowhere."""
    work, results = one_pass(make_documents(LENGTHS)), []
    for tokens in (sum(LENGTHS), 96):
        run = metal_run(metal, write("qwen3"), activation, tokens=tokens)
        for _ in range(2):
            run.poison()
            results.append(run.sums(work))
    for result in results[1:]:
        assert_same(result, results[0])


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_rope_there_and_back(activation: DType, metal: SimulatedBackend) -> None:
    n, h, d = 37, 3, 10
    position, live = (
        Buffer(name, (size,), I32, Kind.INPUT) for name, size in (("position", n), ("live", 1))
    )
    inv_freq = Buffer("inv_freq", (d // 2,), F32, Kind.WEIGHT)
    x, back = (Buffer(name, (n, h, d), activation, Kind.STATE) for name in ("x", "back"))
    step = Step("turn", activation, live)
    cos, sin = step(rope_table, position, inv_freq, scale=1.0)
    there = step(rope, x, cos, sin, sign=1.0)
    step(rope, there, cos, sin, into=back, sign=-1.0)
    (planned,) = plan([step], metal.kernels)
    memory = metal.allocate(planned.layout)
    memory.write(position, np.arange(n) * 97)
    memory.write(live, np.array([n]))
    memory.write(inv_freq, 100.0 ** -np.arange(d // 2))
    memory.write(x, np.random.default_rng(0).normal(size=(n, h, d)))
    metal.compile(planned, memory).run()
    # Each element is twice a sum of two products with numbers up to 1: eight roundings of a pair.
    before, after = (memory.read(b).astype(np.float64) for b in (x, back))
    assert np.abs(after - before).max() <= 8 * activation.eps * np.abs(before).max()
    assert not np.allclose(memory.read(there)[1:], memory.read(x)[1:], rtol=0.1)


def test_an_update_that_overflowed_changes_nothing(write: Write, metal: SimulatedBackend) -> None:
    run, work = metal_run(metal, write(), F16), one_pass(make_documents(LENGTHS))
    before = run.session.state()
    run.session.loss_scale = 2.0**20  # times p - 1 at a logit: beyond the largest half, 65,504
    run.session.accumulate(work[0], 1)
    loss, norm = run.session.update(update(1, run.session.loss_scale))
    assert np.isfinite(loss) and not np.isfinite(norm)
    for name, values in run.session.state().items():
        np.testing.assert_array_equal(values, before[name])
    run.session.loss_scale = 2.0**8
    run.session.accumulate(work[0], 2)
    again, norm = run.session.update(update(1, run.session.loss_scale))
    assert again == loss and np.isfinite(norm)
    assert (run.session.state()["param"] != before["param"]).any()


@pytest.fixture(scope="module")
def validated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("validated"), 10, 5)


# Relative. In float32 sums are formed in another order; test_training allows as much between the
# CPU and float64. In fp16 each of some 60 roundings moves an activation by up to half an ulp, 2⁻¹¹:
# like a random walk they add to four, and the mean over dozens of targets takes that down to one.
# Updates add less in a few steps, as they see gradients that are about as far off. A norm is a
# length of differences, more easily moved: it gets ten times as much, as in test_storyteller.
ALLOWED = {
    "fp32": {"loss": 1e-4, "grad_norm": 1e-2},
    "fp16": {"loss": 2 * 2.0**-11, "grad_norm": 20 * 2.0**-11},
}


@pytest.mark.parametrize("precision", ALLOWED)
def test_a_run_follows_the_cpu(tmp_path, model, validated, device, precision):
    """Two epochs with dropout, warm-up, clipping and validation."""
    given: dict[str, Any] = {"epochs": 2, "warmup": 2, "dropout": 0.1}
    cpu, metal = tmp_path / "cpu", tmp_path / "metal"
    run(settings(model, validated, cpu, device="cpu", **given))
    run(settings(model, validated, metal, device="metal", **{**given, "precision": precision}))
    allowed = ALLOWED[precision]
    follow(metal, cpu, allowed)
    for got, want in zip(validations(metal), validations(cpu), strict=True):
        assert got["val_loss"] == pytest.approx(want["val_loss"], rel=allowed["loss"])


def test_ten_steps_of_the_storyteller(tmp_path, device):
    """In fp16 with loss scaling, from a checkpoint in bf16, against the CPU in float32. Four rows
    an update, in short passes: every threadgroup takes time here, also where no token is live."""
    given: dict[str, Any] = {"steps": 10, "batch_size": 4, "tokens": 512, "shuffle": False}
    for name, precision in (("cpu", "fp32"), ("metal", "fp16")):
        out = tmp_path / name
        run(storyteller(out, device=name, precision=precision, **given))
    follow(tmp_path / "metal", tmp_path / "cpu", ALLOWED["fp16"])
    assert len(updates(tmp_path / "metal")) == 10


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
