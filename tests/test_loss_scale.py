"""Dynamic loss scaling, on the reference device: in float64 with overflows made by hand, and with
values rounded to fp16, where they come by themselves."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from krnl.backends.cpu import CpuBackend
from krnl.backends.reference import ReferenceBackend
from krnl.data.packing import pack
from krnl.dtypes import BF16, F16, F32, DType
from krnl.errors import TrainingError
from krnl.formats.resume import newest
from krnl.formats.safetensors import read_tensors, write_safetensors
from krnl.model import Model
from krnl.training import loop, loss_scale
from krnl.training.loop import train
from krnl.training.loss_scale import INTERVAL, LARGEST, PATIENCE, START, LossScale, initial_scale
from krnl.training.prepare import load_data, starting_adapter
from krnl.training.schedule import hyper, learning_rate
from krnl.training.session import Session
from runs import (
    adapter_bytes,
    checkpoints,
    run,
    settings,
    timeless,
    updates,
    validations,
    write_chat_model,
    write_data,
    write_rows,
)
from tiny import ALL, Run, make_documents, make_modules, write_model

FP16: dict[str, Any] = {"device": "reference", "precision": "fp16"}


# The scale alone


def test_the_scale_doubles_after_an_interval_and_halves_at_an_overflow():
    scale = initial_scale(F16)
    assert (scale.value, scale.skipped, scale.dynamic) == (START, 0, True)
    for _ in range(INTERVAL - 1):
        scale.grow()
    assert scale.value == START
    scale.grow()
    assert scale.value == 2 * START
    for _ in range(INTERVAL - 1):
        scale.grow()
    assert scale.shrink()  # good updates must come in a row
    assert (scale.value, scale.skipped) == (START, 1)
    for _ in range(INTERVAL - 1):
        scale.grow()
    assert scale.value == START


def test_the_scale_has_a_largest_and_a_smallest_value():
    scale = initial_scale(F16)
    for _ in range(10 * INTERVAL):
        scale.grow()
    # -LARGEST, the gradient of a target without any probability, is a number of fp16; twice is not.
    assert scale.value == LARGEST == -float(np.float16(-LARGEST))
    with np.errstate(over="ignore"):
        assert np.isinf(np.float16(2 * LARGEST))
    for count in range(15):
        assert scale.shrink()
        assert scale.skipped == count + 1
    assert scale.value == 1.0
    assert not scale.shrink()
    assert (scale.value, scale.skipped) == (1.0, 15)


@pytest.mark.parametrize("activation", [F32, BF16], ids=str)
def test_other_types_keep_the_scale_1(activation: DType):
    scale = initial_scale(activation)
    for _ in range(INTERVAL):
        scale.grow()
    assert (scale.value, scale.dynamic, scale.shrink(), scale.skipped) == (1.0, False, False, 0)


# What the scale does to a session


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return write_model(tmp_path_factory.mktemp("tiny"), dtype=F16)


def one_update(run: Run, scale: float) -> tuple[float, float, dict[str, Any], dict[str, Any]]:
    """Loss, gradient norm, gradients as the session tells them, and its state afterwards."""
    session = run.session
    session.loss_scale = scale
    work = pack(make_documents([12, 7, 20]), 64)
    for part in work:
        session.accumulate(session.inputs_of(part, 1))
    gradients = session.gradients()
    targets = sum(len(part.target) for part in work)
    numbers = hyper(1, 1e-2, (0.9, 0.999), 1e-8, 0.1, 0.5, 1.0 / (targets * scale))
    loss, norm = session.update(numbers)
    return loss, norm, gradients, session.state()


def test_a_scale_changes_no_bit_where_nothing_overflows(tiny):
    """A power of two moves exponents only, and is undone: in losses, in the gradients that a
    session tells, in their norm, in what is clipped, in parameters and moments."""
    plain, scaled = (one_update(Run(tiny, backend=CpuBackend()), s) for s in (1.0, 2.0**10))
    assert plain[:2] == scaled[:2]
    assert plain[1] > 0.5, "nothing was clipped"
    for path, pair in plain[2].items():
        assert all(np.array_equal(a, b) for a, b in zip(pair, scaled[2][path], strict=True))
    for name, values in plain[3].items():
        assert np.array_equal(values, scaled[3][name])


def test_fp16_gradients_vanish_or_overflow_without_the_right_scale(tiny):
    """And with the first one they are as near as fp16 can be."""
    modules = make_modules(tiny, ALL, F16)
    exact = one_update(Run(tiny, modules=modules), 1.0)[2]

    def error(scale: float) -> float:
        rounding = Run(tiny, ALL, ReferenceBackend(rounds=True), modules, F16)
        got = one_update(rounding, scale)[2]
        off, size = 0.0, 0.0
        for path, pair in exact.items():
            for a, b in zip(pair, got[path], strict=True):
                off, size = off + float(np.sum((a - b) ** 2)), size + float(np.sum(a**2))
        return (off / size) ** 0.5

    # As in test_layers.py: sixty roundings add like a random walk, cancellation loses two bits.
    allowed = 4 * 60**0.5 * F16.eps
    print(f"share of the allowance: {error(START) / allowed:.3f}")
    assert error(START) <= allowed
    assert error(2.0**-22) > 10 * allowed
    assert np.isnan(error(2.0**20))


def test_the_reference_rounds_what_it_stores_when_told(tiny):
    for rounds in (False, True):
        run = Run(tiny, backend=ReferenceBackend(rounds), activation=F16)
        one_update(run, 1.0)
        layout = run.planned.accumulate.layout
        for dtype in (F16, F32):
            with np.errstate(over="ignore"):
                same = [
                    np.array_equal(values, values.astype(dtype.numpy), equal_nan=True)
                    for values in (run.memory.read(b) for b in layout.places if b.dtype is dtype)
                ]
            assert all(same) == rounds


# Whole runs


def overflow(
    monkeypatch: pytest.MonkeyPatch, when: Callable[[int, float], bool] = lambda update, scale: True
) -> None:
    """Makes a gradient of the updates infinite for which `when`(number, scale) is true."""
    make, accumulate = Session.inputs_of, Session.accumulate
    updates: dict[int, int] = {}  # by the identity of what was made

    def numbered(self: Session, work: Any, update: int) -> np.ndarray:
        inputs = make(self, work, update)
        updates[id(inputs)] = update
        return inputs

    def overflowing(self: Session, inputs: np.ndarray) -> None:
        accumulate(self, inputs)
        if when(updates[id(inputs)], self.loss_scale):
            grad = self._trainable.grad
            self._memory.write(grad.part("first", 0, (1,)), np.array([np.inf]))

    monkeypatch.setattr(Session, "inputs_of", numbered)
    monkeypatch.setattr(Session, "accumulate", overflowing)


def round_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference device stores fp16 as fp16 from here on."""
    monkeypatch.setattr(loop, "open_backend", lambda device: ReferenceBackend(rounds=True))


def own_training(config: Any, skipped: set[int]) -> tuple[list[float], list[float], np.ndarray]:
    """Losses, gradient norms (of skipped updates too) and parameters of a run in which AdamW is
    written out here. Skipped updates change nothing; the rate follows the number of the update, the
    corrections of the moments only those that were applied."""
    model = Model.open(config.model)
    examples = load_data(config, model).train
    adapter, modules = starting_adapter(config, model)
    session = Run(model, adapter, modules=modules, tokens=64)
    param = session.trainable.pack(modules).astype(np.float64)
    first, second = np.zeros_like(param), np.zeros_like(param)
    losses, norms, applied = [], [], 0
    batches = [range(start, min(start + 4, 10)) for start in (0, 4, 8)] * config.epochs
    for k, rows in enumerate(batches, 1):
        session.place(param)
        work = pack([examples[row] for row in rows], 64)
        count = sum(len(p.target) for p in work)
        loss, gradient = session.sums(work)
        gradient = gradient / count
        losses.append(loss / count)
        norms.append(float(np.linalg.norm(gradient)))
        if k in skipped:
            continue
        applied += 1
        gradient *= min(1.0, config.clip / (norms[-1] + 1e-6))
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        root = np.sqrt(second / (1 - 0.999**applied)) + 1e-8
        lr = learning_rate(k, len(batches), config.lr, config.warmup, config.schedule)
        param = param - lr * (first / (1 - 0.9**applied) / root)
    return losses, norms, param


def test_what_a_skipped_update_changes(tmp_path, monkeypatch, model):
    """Nothing, but for the scale and the count; the next one goes on with the next rows. In
    float64, against a run written out here."""
    data = write_data(tmp_path / "rows", 10)
    config = settings(
        model, data, tmp_path / "out", epochs=3, lr=1e-3, warmup=2, clip=0.5, shuffle=False, **FP16
    )
    skipped = {1, 4, 5}
    with monkeypatch.context() as patch:
        overflow(patch, lambda update, scale: update in skipped)
        result = run(config)
    losses, norms, param = own_training(config, skipped)
    lines = updates(tmp_path / "out")
    # As in test_training.py: float32 numbers of an update, of which 1 - beta2 feels most.
    step_error = 2.0**-25 / 0.001
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=step_error)
    assert [line["lr"] for line in lines] == [
        learning_rate(k, 9, 1e-3, 2, "cosine") for k in range(1, 10)
    ]
    scales = [START / 2 ** (sum(k < step for k in skipped)) for step in range(1, 10)]
    assert [line["loss_scale"] for line in lines] == scales
    assert [line["skipped"] for line in lines] == [
        sum(k <= s for k in skipped) for s in range(1, 10)
    ]
    for line, norm in zip(lines, norms, strict=True):
        if line["step"] in skipped:
            assert line["grad_norm"] is None
        else:
            assert line["grad_norm"] == pytest.approx(norm, rel=step_error)
    saved = newest(tmp_path / "out/checkpoints")
    assert saved is not None
    share = np.abs(saved.arrays["param"] - param).max() / (6 * config.lr * step_error)
    print(f"share of the allowance: {share:.3f}")
    assert share <= 1
    assert (result.updates, result.skipped) == (9, 3)


def test_fp16_overflows_until_the_scale_fits_and_follows_float64(
    tmp_path, monkeypatch, model, data
):
    """Values are rounded; the first scale is far too large."""
    monkeypatch.setattr(loss_scale, "START", 2.0**22)
    given = {"epochs": 4, "schedule": "constant", "shuffle": False, "lr": 1e-3, **FP16}
    round_values(monkeypatch)
    result = run(settings(model, data, tmp_path / "out", **given))
    monkeypatch.undo()
    lines = updates(tmp_path / "out")
    assert 7 <= result.skipped < 12  # at 2¹⁵ the gradient at the logits fits, not before
    assert lines[-1]["grad_norm"] is not None
    skipped = 0
    for line in lines:
        assert line["loss"] is not None
        assert line["loss_scale"] == 2.0 ** (22 - skipped)
        skipped += line["grad_norm"] is None
        assert line["skipped"] == skipped
    skipping = {line["step"] for line in lines if line["grad_norm"] is None}
    overflow(monkeypatch, lambda update, scale: update in skipping)
    run(settings(model, data, tmp_path / "exact", **given))
    for got, want in zip(lines, updates(tmp_path / "exact"), strict=True):
        # A loss is a mean of log-probabilities whose logits went through some twenty roundings.
        assert got["loss"] == pytest.approx(want["loss"], rel=20**0.5 * F16.eps)


def test_the_console_and_the_result_tell_of_skipped_updates(
    tmp_path, monkeypatch, model, data, capsys
):
    overflow(monkeypatch, lambda update, scale: scale > START / 4)
    config = settings(model, data, tmp_path / "out", **FP16)
    result = train(config, Console(width=200, markup=False))
    said = capsys.readouterr().out
    assert (
        "update 1: skipped, as its gradients overflowed at loss scale 1024; it is 512 now" in said
    )
    assert "update 2: skipped, as its gradients overflowed at loss scale 512; it is 256 now" in said
    assert said.count("skipped, as its") == 2
    assert result is not None
    assert "3 updates in" in result.describe()
    assert "2 of them skipped, as their gradients overflowed fp16" in result.describe()


def test_the_scale_grows_in_a_run(tmp_path, monkeypatch, model, data):
    monkeypatch.setattr(loss_scale, "INTERVAL", 2)
    overflow(monkeypatch, lambda update, scale: scale > 4 * START)
    run(settings(model, data, tmp_path / "out", epochs=4, **FP16))
    factors = [line["loss_scale"] / START for line in updates(tmp_path / "out")]
    assert factors == [1, 1, 2, 2, 4, 4, 8, 4, 4, 8, 4, 4]
    assert [line["skipped"] for line in updates(tmp_path / "out")] == [0] * 6 + [1] * 3 + [2] * 3


@pytest.mark.parametrize("number", [3, 5, 8, 11])
def test_a_resumed_run_keeps_the_scale_and_its_counts(tmp_path, monkeypatch, model, data, number):
    """With overflows and growth on either side of where it was stopped."""
    monkeypatch.setattr(loss_scale, "INTERVAL", 3)
    given = {"epochs": 4, "save_every": 2, "dropout": 0.2, **FP16}

    def when(update: int, scale: float) -> bool:
        return update == 2 or scale > START

    with monkeypatch.context() as patch:
        overflow(patch, when)
        run(settings(model, data, tmp_path / "whole", **given))
    factors = [line["loss_scale"] / START for line in updates(tmp_path / "whole")]
    assert factors == [1, 1, 0.5, 0.5, 0.5, 1, 1, 1, 2, 1, 1, 1]

    class Crash(BaseException):
        """Nothing in krnl catches this."""

    def crashing(update: int, scale: float) -> bool:
        if update == number:
            raise Crash
        return when(update, scale)

    with monkeypatch.context() as patch, pytest.raises(Crash):
        overflow(patch, crashing)
        run(settings(model, data, tmp_path / "out", **given))
    with monkeypatch.context() as patch:
        overflow(patch, when)
        run(settings(model, data, tmp_path / "out", resume=True, **given))
    assert timeless(tmp_path / "out") == timeless(tmp_path / "whole")
    assert adapter_bytes(tmp_path / "out") == adapter_bytes(tmp_path / "whole")
    assert checkpoints(tmp_path / "out") == checkpoints(tmp_path / "whole")
    for name in checkpoints(tmp_path / "whole"):
        out, whole = (tmp_path / folder / "checkpoints" / name for folder in ("out", "whole"))
        arrays = "state.safetensors"
        assert (out / arrays).read_bytes() == (whole / arrays).read_bytes()
        a, b = (json.loads((p / "state.json").read_text())["loss_scale"] for p in (out, whole))
        assert LossScale(**a) == LossScale(**b)


def test_no_scale_helps_a_run_that_diverges(tmp_path, monkeypatch, model, data):
    """It ends where scale 1 has failed, and leaves the adapter that it began with."""
    overflow(monkeypatch)
    out = tmp_path / "out"
    said = (
        r"^Update 11 has loss \d+\.\d+ and gradient norm (inf|nan) at a loss scale of 1, and was "
        r"not applied\. The last good adapter is in .*--precision fp32"
    )
    with pytest.raises(TrainingError, match=said):
        run(settings(model, data, out, epochs=5, **FP16))
    assert [line["loss_scale"] for line in updates(out)] == [START / 2**i for i in range(11)]
    assert updates(out)[-1]["skipped"] == 10
    tensors = read_tensors(out / "adapter_model.safetensors")[0]
    assert not any(np.any(values) for name, values in tensors.items() if "lora_B" in name)


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which the embedding of ' owl' is infinite; untied, as a head it harms no row."""
    folder = write_chat_model(tmp_path_factory.mktemp("poisoned"), "untied")
    token = int(Model.open(str(folder)).tokenizer.encode("the owl").ids[-1])
    tensors = {k: np.array(v) for k, v in read_tensors(folder / "model.safetensors")[0].items()}
    tensors["model.embed_tokens.weight"][token] = np.inf
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    return folder


def rows(*asked: str) -> list[dict[str, Any]]:
    answer = {"role": "assistant", "content": "Cora was happy"}
    return [{"messages": [{"role": "user", "content": text}, answer]} for text in asked]


def test_rows_that_overflow_on_the_way_forward_are_left_behind(tmp_path, monkeypatch, poisoned):
    path = write_rows(tmp_path / "rows.jsonl", rows("the bear", "the bear", "the owl", "the bear"))
    round_values(monkeypatch)
    result = run(settings(poisoned, path, tmp_path / "out", batch_size=1, shuffle=False, **FP16))
    lines = updates(tmp_path / "out")
    assert [line["loss"] is None for line in lines] == [False, False, True, False]
    assert [line["skipped"] for line in lines] == [0, 0, 1, 1]
    assert {line["loss_scale"] for line in lines} == {START}  # which is not to blame
    assert result.last_loss == lines[-1]["loss"]


def test_a_model_that_fp16_cannot_hold_ends_the_run(tmp_path, monkeypatch, poisoned):
    path = write_rows(tmp_path / "rows.jsonl", rows(*["the owl"] * (PATIENCE + 3)))
    round_values(monkeypatch)
    with pytest.raises(TrainingError, match=f"Update {PATIENCE + 1} .* --precision fp32"):
        run(settings(poisoned, path, tmp_path / "out", batch_size=1, shuffle=False, **FP16))
    lines = updates(tmp_path / "out")
    assert [line["skipped"] for line in lines] == [*range(1, PATIENCE + 1), PATIENCE]


def test_an_update_without_a_loss_is_not_applied(tiny):
    run = Run(tiny, backend=CpuBackend())
    for work in pack(make_documents([12, 7, 20]), 64):
        run.session.accumulate(run.session.inputs_of(work, 1))
    before = run.session.state()
    run.memory.write(run.planned.programs.loss, np.array([np.inf]))
    _, norm = run.session.update(hyper(1, 1e-3, (0.9, 0.999), 1e-8, 0.0, 1.0, 1.0))
    assert not np.isfinite(norm)
    for name, values in run.session.state().items():
        np.testing.assert_array_equal(values, before[name])


@pytest.mark.parametrize("asked", ["the owl", "the bear"])
def test_a_validation_loss_that_is_no_number_is_never_the_best(
    tmp_path, monkeypatch, poisoned, asked
):
    """Nor does it keep the run from being saved."""
    train_rows = write_rows(tmp_path / "train.jsonl", rows("the bear", "the bear"))
    valid = write_rows(tmp_path / "valid.jsonl", rows(asked))
    round_values(monkeypatch)
    out = tmp_path / "out"
    result = run(settings(poisoned, train_rows, out, valid=str(valid), batch_size=1, **FP16))
    owl = asked == "the owl"
    assert [line["val_loss"] is None for line in validations(out)] == [owl, owl]
    assert (result.best_val_loss is None, result.first_val_loss is None) == (owl, owl)
    assert "adapter" in result.describe()
    assert len(adapter_bytes(out)[1]) > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_types_end_a_run_at_the_first_overflow(tmp_path, monkeypatch, model, data, precision):
    overflow(monkeypatch, lambda update, scale: update == 2)
    out = tmp_path / "out"
    given = {"device": "reference", "precision": precision}
    with pytest.raises(
        TrainingError, match=r"^Update 2 has loss \S+ and gradient norm inf, and was"
    ):
        run(settings(model, data, out, **given))
    assert not any("loss_scale" in line or "skipped" in line for line in updates(out))
