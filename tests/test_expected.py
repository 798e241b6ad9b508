"""Stored results of transformers and PEFT for small models, made by scripts/make_expectations.py.

They were computed in float64, and so is the reference backend: what differs is the order of sums.
A loss sums some thousand products in turn and errors of 2⁻⁵³ are amplified by attention and norms;
1e-11 is 10⁵ such errors, and a hundred-thousandth of what float32 could tell apart.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from krnl.backends.base import Backend
from krnl.backends.cpu import CpuBackend
from krnl.data.examples import Example
from krnl.data.packing import Pass, pack
from krnl.dtypes import BF16, F32, DType
from krnl.formats.peft import AdapterConfig
from krnl.model import Model, adapter_shapes
from krnl.models.decoder import Decoder
from krnl.models.generation_programs import GenerationPrograms
from krnl.plan.arena import plan
from tiny import REFERENCE, Run

FOLDER = Path(__file__).parent / "expected"
CASES = sorted(path.parent.name for path in FOLDER.glob("*/expected.npz"))
FLOAT64 = 1e-11
ADAM = (0.9, 0.999)

# float32 against float64. On its way to a logit a number passes some 30 roundings (norms,
# projections, attention, residuals of 2 or 3 layers), and the lively weights of these models let a
# layer amplify what it is given two- to threefold: 30 · 13 ulps of the largest logit. Half is used.
LOGIT_ULPS = 390


@cache
def expected(case: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / case / "expected.npz") as stored:
        return dict(stored)


@cache
def model(case: str) -> Model:
    return Model.open(str(FOLDER / case))


@cache
def adapter(case: str) -> tuple[AdapterConfig, dict[str, Any]]:
    """The case's own, or one that does nothing: B is zero."""
    if (FOLDER / case / "adapter").is_dir():
        return model(case).read_adapter(FOLDER / case / "adapter")
    config = AdapterConfig(rank=1, alpha=1.0, targets=("o_proj",))
    c = model(case).config
    zero = (np.ones((1, c.heads * c.head_dim)), np.zeros((c.hidden_size, 1)))
    return config, {f"model.layers.{i}.self_attn.o_proj": zero for i in range(c.layers)}


@cache
def run(case: str, backend: Backend) -> Run:
    config, modules = adapter(case)
    return Run(model(case), config, backend, modules, tokens=len(expected(case)["ids"]))


@cache
def cpu() -> CpuBackend:
    return CpuBackend()


def passes(case: str, targets: np.ndarray) -> list[Pass]:
    e = expected(case)
    bounds = np.cumsum(e["lengths"])[:-1]
    parts = zip(np.split(e["ids"], bounds), np.split(targets, bounds), strict=True)
    examples = [Example(ids, t, line, False) for line, (ids, t) in enumerate(parts, 1)]
    return pack(examples, len(e["ids"]))


@cache
def logits(case: str, backend: Backend, activation: DType = F32) -> np.ndarray:
    """The logits after every token, read into a cache in one go."""
    e = expected(case)
    n = len(e["ids"])
    config, modules = adapter(case)
    weights = model(case).weights(backend.limits.mapped_alignment)
    decoder = Decoder(
        model(case).config, weights, adapter_shapes(config, tuple(modules)), activation
    )
    step, inputs, result = GenerationPrograms(decoder, n).read("read", n, n)
    (planned,) = plan([step], backend.kernels)
    memory = backend.allocate(planned.layout)
    model(case).fill(weights, memory)
    memory.write(decoder.trainable.compute, decoder.trainable.pack(modules))
    rows = np.arange(n)
    first = np.repeat(np.cumsum(e["lengths"]) - e["lengths"], e["lengths"])
    values = {
        "live": n, "live_picks": n, "tokens": e["ids"], "position": rows - first,
        "row": rows, "stop": rows + 1, "pick": rows,
    }  # fmt: skip
    for name, value in values.items():
        memory.write(getattr(inputs, name), value)
    for window, buffer in inputs.start.items():
        memory.write(buffer, first if window is None else np.maximum(first, rows - window + 1))
    backend.compile(planned, memory).run()
    return memory.read(result).astype(np.float64)


def token_losses(case: str, values: np.ndarray) -> np.ndarray:
    """From logits: the loss of each target token, 0 for the others."""
    e = expected(case)
    top = values.max(axis=1)
    total = top + np.log(np.exp(values - top[:, None]).sum(axis=1))
    predicted = total[:-1] - values[np.arange(len(values) - 1), e["ids"][1:]]
    return np.where(e["targets"], np.concatenate([[0.0], predicted]), 0.0)


def hyper(update: int, targets: int) -> np.ndarray:
    """As make_expectations.py trains, in float64."""
    corrections = [1 - beta**update for beta in ADAM]
    return np.array([1e-2, *ADAM, 1e-8, 0.01, 1.0, *corrections, 1 / targets])


def test_all_cases_are_there() -> None:
    assert len(CASES) == 21


@pytest.mark.parametrize("case", CASES)
def test_rotary_frequencies(case: str) -> None:
    inv_freq, factor = model(case).config.rope.frequencies(model(case).config.head_dim)
    np.testing.assert_allclose(inv_freq, expected(case)["inv_freq"], rtol=1e-14)
    assert factor == pytest.approx(float(expected(case)["rope_factor"]), rel=1e-14)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_token_losses_in_float64(case: str) -> None:
    e, got = expected(case), logits(case, REFERENCE)
    # Stored logits were rounded to float32: half a spacing.
    allowance = 0.5 * np.spacing(np.abs(e["logits"])) + FLOAT64
    assert (np.abs(got - e["logits"]) <= allowance).all()
    np.testing.assert_allclose(token_losses(case, got), e["token_loss"], rtol=0, atol=FLOAT64)


@pytest.mark.parametrize("case", CASES)
def test_loss_of_the_training_programs_in_float64(case: str) -> None:
    """In full, and of single tokens: all targets but one are masked."""
    e, trained = expected(case), run(case, REFERENCE)
    total = trained.session.evaluate(passes(case, e["targets"]))
    assert total / e["targets"].sum() == pytest.approx(float(e["loss"]), abs=FLOAT64)
    accumulated, _ = trained.sums(passes(case, e["targets"]))
    assert accumulated == pytest.approx(total, abs=FLOAT64)
    for token in np.flatnonzero(e["targets"])[:: 1 + len(e["ids"]) // 5]:
        alone = trained.session.evaluate(passes(case, np.arange(len(e["ids"])) == token))
        assert alone == pytest.approx(e["token_loss"][token], abs=FLOAT64)


@pytest.mark.parametrize("case", CASES)
def test_cpu_in_fp32(case: str) -> None:
    e = expected(case)
    allowance = LOGIT_ULPS * F32.eps * float(np.abs(e["logits"]).max())
    np.testing.assert_allclose(logits(case, cpu()), e["logits"], rtol=0, atol=allowance)
    # A token's loss is a difference of two logit-like numbers.
    losses = token_losses(case, logits(case, cpu()))
    np.testing.assert_allclose(losses, e["token_loss"], rtol=0, atol=2 * allowance)
    trained = run(case, cpu())
    for total in (
        trained.session.evaluate(passes(case, e["targets"])),
        trained.sums(passes(case, e["targets"]))[0],
    ):
        assert total / e["targets"].sum() == pytest.approx(float(e["loss"]), abs=2 * allowance)


@pytest.mark.parametrize("case", CASES)
def test_logits_in_bf16(case: str) -> None:
    """Some 30 roundings add like a random walk to 6 ulps, which layers amplify as in fp32, but not
    all logits at once: threefold in the Euclidean norm."""
    off = np.linalg.norm(logits(case, cpu(), BF16) - expected(case)["logits"])
    assert off <= 3 * 6 * BF16.eps * np.linalg.norm(expected(case)["logits"])


def relative_errors(case: str, trained: Run, gradient: np.ndarray) -> dict[str, float]:
    """Of every adapter matrix' gradient, in the Euclidean norm."""
    e = expected(case)
    errors = {}
    for name, got in trained.modules(gradient / e["targets"].sum()).items():
        path, letter = name.rsplit(".", 1)
        want = e[f"grad/{path}.lora_{letter}"]
        errors[name] = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    return errors


def test_adapter_gradients() -> None:
    case = "lora-llama"
    work = passes(case, expected(case)["targets"])
    assert sum(key.startswith("grad/") for key in expected(case)) == 2 * len(adapter(case)[1])
    exact = run(case, REFERENCE)
    assert max(relative_errors(case, exact, exact.sums(work)[1]).values()) < FLOAT64
    # Backward is a second pass of the same depth over what forward left: twice the logits' error.
    single = run(case, cpu())
    errors = relative_errors(case, single, single.sums(work)[1])
    assert max(errors.values()) < 2 * LOGIT_ULPS * F32.eps


def updated(trained: Run, work: list[Pass], update: int, targets: int) -> tuple[float, float]:
    """One update: mean loss and gradient norm."""
    for part in work:
        trained.session.accumulate(trained.session.inputs_of(part, update))
    loss, norm = trained.session.update(hyper(update, targets))
    return loss / targets, norm


def fresh(case: str, backend: Backend) -> Run:
    config, modules = adapter(case)
    return Run(model(case), config, backend, modules, tokens=len(expected(case)["ids"]))


def test_ten_updates_in_float64() -> None:
    """Losses and gradient norms of AdamW with clipping. Where a gradient is close to zero, AdamW
    moves its parameter by the sign of it, so rounding errors grow from update to update: here up
    to fourfold each time, found by training in float32 and float64 side by side."""
    case = "lora-llama"
    e, trained = expected(case), fresh(case, REFERENCE)
    work, targets = passes(case, e["targets"]), int(e["targets"].sum())
    results = np.array([updated(trained, work, update, targets) for update in range(1, 11)])
    allowance = FLOAT64 * 4.0 ** np.arange(10)
    assert (np.abs(results[:, 0] / e["step_losses"] - 1) <= allowance).all()
    assert (np.abs(results[:, 1] / e["step_norms"] - 1) <= allowance).all()


def test_ten_updates_on_the_cpu() -> None:
    """In float32 that growth reaches everything within ten updates. So each update starts where the
    float64 one did, and must go where it went: loss, norm, and both moments."""
    case = "lora-llama"
    e, exact, single = expected(case), fresh(case, REFERENCE), fresh(case, cpu())
    work, targets = passes(case, e["targets"]), int(e["targets"].sum())
    allowance = 2 * LOGIT_ULPS * F32.eps  # as for gradients
    for update in range(1, 11):
        single.session.restore(**exact.session.state())
        want, got = (np.array(updated(r, work, update, targets)) for r in (exact, single))
        assert (np.abs(got / want - 1) <= allowance).all()
        for name in ("first", "second"):
            moment = exact.session.state()[name]
            difference = np.linalg.norm(single.session.state()[name] - moment)
            # The second moment holds squares, whose relative errors are twice as large.
            assert difference <= 2 * allowance * np.linalg.norm(moment)
