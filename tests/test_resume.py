"""A run that was stopped and resumed is the run that was not: same log, same bytes."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from krnl.data.examples import Example, Examples
from krnl.data.packing import pack
from krnl.errors import ConfigError, FormatError, TrainingError
from krnl.formats import resume
from krnl.formats.resume import newest, save
from krnl.model import Model
from krnl.training.config import TrainConfig
from krnl.training.folder import identity
from krnl.training.loop import Interrupted
from krnl.training.metrics import METRICS, Metrics
from krnl.training.session import Session
from runs import (
    adapter_bytes,
    checkpoints,
    run,
    settings,
    timeless,
    updates,
    validations,
)
from tiny import ALL

# Two epochs of five updates, with everything that has a state: shuffling, dropout, moments, a
# schedule with warmup, validation within epochs.
EVERYTHING: dict[str, Any] = {
    "epochs": 2, "batch_size": 2, "dropout": 0.3, "warmup": 3, "weight_decay": 0.01,
    "eval_every": 3, "save_every": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> Path:
    """The uninterrupted run's folder."""
    out = tmp_path_factory.mktemp("whole") / "out"
    run(settings(model, data, out, **EVERYTHING))
    return out


class Crash(BaseException):
    """Nothing in krnl catches this: after it, files are as a killed process leaves them."""


def crash_in_pass(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Crashes before training pass `number` (from 1) of the process."""
    accumulate, count = Session.accumulate, 0

    def counted(self: Session, *arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == number:
            raise Crash
        accumulate(self, *arguments)

    monkeypatch.setattr(Session, "accumulate", counted)


def interrupt_after(monkeypatch: pytest.MonkeyPatch, update: int, number: int) -> None:
    """Sends this process a signal when the log line of `update` is written."""
    write = Metrics.write

    def watched(self: Metrics, **values: Any) -> None:
        write(self, **values)
        if values["step"] == update and "loss" in values:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Metrics, "write", watched)


def same_run(a: Path, b: Path) -> None:
    assert timeless(a) == timeless(b)
    assert adapter_bytes(a) == adapter_bytes(b)
    assert checkpoints(a) == checkpoints(b)
    for name in checkpoints(a):
        parts = [p / "checkpoints" / name / "state.safetensors" for p in (a, b)]
        assert parts[0].read_bytes() == parts[1].read_bytes()


@pytest.mark.parametrize("number", [3, 4, 5, 7, 8, 10])
def test_after_a_crash(tmp_path, monkeypatch, model, data, whole, number):
    """Updates take one pass each here; checkpoints are at 2, 4, ..."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(Crash):
        crash_in_pass(patch, number)
        run(settings(model, data, out, **EVERYTHING))
    assert len(updates(out)) == number - 1
    run(settings(model, data, out, resume=True, **EVERYTHING))
    same_run(out, whole)


def test_after_a_crash_at_every_resumption(tmp_path, monkeypatch, model, data, whole):
    """Each process gets three passes further than the checkpoint that it began with, at most."""
    out, starts = tmp_path / "out", 0
    while True:
        starts += 1
        with monkeypatch.context() as patch:
            crash_in_pass(patch, 4)
            try:
                run(settings(model, data, out, resume=starts > 1, **EVERYTHING))
            except Crash:
                continue
        break
    assert starts == 5
    same_run(out, whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("update", [1, 5, 9])
def test_after_a_signal(tmp_path, monkeypatch, model, data, whole, update, number):
    """The run saves itself where it is, and says so."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(Interrupted) as stopped:
        interrupt_after(patch, update, number)
        run(settings(model, data, out, **EVERYTHING))
    assert str(stopped.value).startswith(f"Stopped after update {update} of 10; everything is sav")
    assert "--resume" in str(stopped.value)
    assert checkpoints(out)[-1] == f"step-{update:08d}"
    assert len(updates(out)) == update
    run(settings(model, data, out, resume=True, **EVERYTHING))
    shutil.rmtree(out / "checkpoints" / f"step-{update:08d}", ignore_errors=True)  # one more
    assert timeless(out) == timeless(whole)
    assert adapter_bytes(out) == adapter_bytes(whole)


def test_a_signal_during_the_last_update_changes_nothing(tmp_path, monkeypatch, model, data, whole):
    interrupt_after(monkeypatch, 10, signal.SIGINT)
    run(settings(model, data, tmp_path / "out", **EVERYTHING))
    same_run(tmp_path / "out", whole)


def test_signals_mean_what_they_did_before(tmp_path, model, data):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run(settings(model, data, tmp_path / "out", steps=1))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize(
    ("crash", "other"),
    [(4, {"device": "reference", "epochs": 1}), (6, {"precision": "bf16"})],
    ids=["float64", "bf16"],
)
def test_in_other_precisions_too(tmp_path, monkeypatch, model, data, crash, other):
    given = {**EVERYTHING, **other}
    run(settings(model, data, tmp_path / "whole", **given))
    with monkeypatch.context() as patch, pytest.raises(Crash):
        crash_in_pass(patch, crash)
        run(settings(model, data, tmp_path / "out", **given))
    run(settings(model, data, tmp_path / "out", resume=True, **given))
    same_run(tmp_path / "out", tmp_path / "whole")


def test_the_best_adapter_is_remembered(tmp_path, monkeypatch, model, data):
    """The best validation comes before the crash and is not beaten after it."""
    given: dict[str, Any] = {
        "epochs": 4, "lr": 0.3, "warmup": 20, "clip": 0.0, "batch_size": 2,
    }  # fmt: skip
    whole = run(settings(model, data, tmp_path / "whole", **given))
    losses = [line["val_loss"] for line in validations(tmp_path / "whole")]
    best = int(np.argmin(losses[1:])) + 1
    assert best < 4, "this test wants a run that gets worse"
    with monkeypatch.context() as patch, pytest.raises(Crash):
        crash_in_pass(patch, 5 * best + 3)
        run(settings(model, data, tmp_path / "out", **given))
    result = run(settings(model, data, tmp_path / "out", resume=True, **given))
    same_run(tmp_path / "out", tmp_path / "whole")
    assert result.best_val_loss == whole.best_val_loss == losses[best]
    assert result.first_val_loss == losses[0]


def test_a_finished_run_is_left_as_it_is(model, data, whole):
    before = {path: path.read_bytes() for path in whole.rglob("*.*") if path.suffix != ".png"}
    run(settings(model, data, whole, resume=True, **EVERYTHING))
    assert {path: path.read_bytes() for path in before} == before


def copied(whole: Path, folder: Path) -> Path:
    return Path(shutil.copytree(whole, folder / "out"))


@pytest.mark.parametrize(
    "changed",
    [
        {"lr": 2e-2}, {"rank": 4}, {"alpha": 1.0}, {"seed": 1}, {"epochs": 3}, {"batch_size": 3},
        {"tokens": 65}, {"dropout": 0.0}, {"warmup": 0}, {"schedule": "linear"}, {"clip": 0.5},
        {"shuffle": False}, {"train_on": "everything"}, {"targets": ("q_proj",)}, {"beta2": 0.9},
        {"precision": "bf16"}, {"device": "reference"}, {"max_length": 63}, {"eval_every": 2},
        {"weight_decay": 0.0},
    ],
    ids=lambda changed: next(iter(changed)),
)  # fmt: skip
def test_a_resumed_run_keeps_its_settings(tmp_path, model, data, whole, changed):
    out, name = copied(whole, tmp_path), next(iter(changed))
    with pytest.raises(ConfigError, match=f"^{name} is .*was started with .*keeps its settings"):
        run(settings(model, data, out, resume=True, **{**EVERYTHING, **changed}))
    same_run(out, whole)


def test_a_resumed_run_keeps_the_adapter_that_it_started_from(tmp_path, monkeypatch, model, data):
    """Its rank, alpha and layers, which are not those of the settings. It may lie elsewhere by
    now."""
    start = {"rank": 2, "alpha": 5.0, "targets": ("q_proj", "o_proj")}
    for name, other in (("a", {}), ("b", {"alpha": 4.0}), ("c", {"targets": ("q_proj",)})):
        run(settings(model, data, tmp_path / name, steps=1, **{**start, **other}))
    given: dict[str, Any] = {"steps": 4, "save_every": 1, "rank": 2}

    def go(name: str, adapter: str | None, **more: Any) -> None:
        folder = str(tmp_path / adapter) if adapter else None
        run(settings(model, data, tmp_path / name, init_adapter=folder, **given, **more))

    go("whole", "a")
    with monkeypatch.context() as patch, pytest.raises(Crash):
        crash_in_pass(patch, 3)
        go("out", "a")
    for adapter, name, here in (("b", "alpha", 4.0), (None, "alpha", 6.0), ("c", "targets", "")):
        with pytest.raises(ConfigError, match=rf"^{name} is .*{here}.* was started with .*keeps"):
            go("out", adapter, resume=True)
    shutil.move(tmp_path / "a", tmp_path / "moved")
    go("out", "moved", resume=True)
    same_run(tmp_path / "out", tmp_path / "whole")


def test_rows_that_are_divided_otherwise_are_other_rows(model):
    """Though the same tokens and targets follow one another."""
    ids = np.arange(1, 9, dtype=np.int32)
    targets = np.array([0, 1, 0, 0, 0, 0, 0, 1], bool)
    found = []
    for ends in ([8], [4, 8]):
        starts = [0, *ends[:-1]]
        rows = [
            Example(ids[a:b], targets[a:b], 1, cut=False) for a, b in zip(starts, ends, strict=True)
        ]
        data = Examples([Example(ids, targets, 1, cut=False)], None)  # type: ignore[arg-type]
        opened = Model.open(str(model))
        found.append(identity(TrainConfig(), ALL, opened, data, pack(rows, 8), "cpu", "fp32"))
    different = {name for name in found[0] if found[0][name] != found[1][name]}
    assert different == {"valid_sha256"}


def test_until_one_has_validated_the_latest_adapter_is_kept(tmp_path, monkeypatch, model, data):
    """Where the run stops, stops again, or diverges."""
    given: dict[str, Any] = {"schedule": "constant", "eval_every": 5, "save_every": 9}
    out = tmp_path / "out"

    def latest(update: int) -> tuple[bytes, bytes]:
        folder = tmp_path / f"first{update}"
        run(settings(model, data / "train.jsonl", folder, **{**given, "steps": update}))
        return adapter_bytes(folder)

    for update in (1, 2):
        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            interrupt_after(patch, update, signal.SIGINT)
            run(settings(model, data, out, steps=6, resume=update > 1, **given))
        assert adapter_bytes(out) == latest(update)
    update_once = Session.update

    def diverging(self: Session, hyper: np.ndarray) -> tuple[float, float]:
        done = len(updates(out))
        return update_once(self, hyper) if done < 3 else (np.nan, np.nan)

    with monkeypatch.context() as patch, pytest.raises(TrainingError, match=r"^Update 4 has loss"):
        patch.setattr(Session, "update", diverging)
        run(settings(model, data, out, steps=6, resume=True, **given))
    assert adapter_bytes(out) == latest(3)


def test_a_resumed_run_keeps_its_data(tmp_path, model, data, whole):
    out, other = copied(whole, tmp_path), Path(shutil.copytree(data, tmp_path / "data"))
    text = (other / "train.jsonl").read_text()
    given = {**EVERYTHING, "resume": True}
    run(settings(model, other, out, **given))  # the same rows in another place
    (other / "train.jsonl").write_text(text.replace("black", "silver"))
    with pytest.raises(ConfigError, match=r"^The training data is not what"):
        run(settings(model, other, out, **given))


def test_what_changes_no_number_may_change(tmp_path, monkeypatch, model, data, whole):
    """The folder may move; memory and the rhythm of checkpoints are nobody's business."""
    with monkeypatch.context() as patch, pytest.raises(Crash):
        crash_in_pass(patch, 6)
        run(settings(model, data, tmp_path / "out", **EVERYTHING))
    shutil.move(tmp_path / "out", tmp_path / "moved")
    free = {"recompute": "layer", "save_every": 5, "memory_limit": 8.0, "resume": True}
    run(settings(model, data, tmp_path / "moved", **{**EVERYTHING, **free}))
    assert timeless(tmp_path / "moved") == timeless(whole)
    assert adapter_bytes(tmp_path / "moved") == adapter_bytes(whole)


def test_there_has_to_be_a_checkpoint(tmp_path, model, data, whole):
    with pytest.raises(ConfigError, match=r"no checkpoint in .*; leave out --resume\.$"):
        run(settings(model, data, tmp_path / "none", resume=True))
    out = copied(whole, tmp_path)
    shutil.rmtree(out / "checkpoints")
    with pytest.raises(ConfigError, match=r"leave out --resume, and give --overwrite to start ag"):
        run(settings(model, data, out, resume=True))


def damage_arrays(folder: Path) -> None:
    path = folder / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def damage_numbers(folder: Path) -> None:
    (folder / "state.json").write_text('{"step": 10,')


def empty_numbers(folder: Path) -> None:
    (folder / "state.json").write_text("{}")


def forget_progress(folder: Path) -> None:
    path = folder / "state.json"
    path.write_text(path.read_text().replace('"metrics_position"', '"position"'))


@pytest.mark.parametrize("damage", [damage_arrays, damage_numbers, empty_numbers, forget_progress])
def test_a_damaged_checkpoint_is_named(tmp_path, model, data, whole, damage):
    out = copied(whole, tmp_path)
    damage(out / "checkpoints/step-00000010")
    with pytest.raises(FormatError, match=r"step-00000010|checkpoint of update 10"):
        run(settings(model, data, out, resume=True, **EVERYTHING))


def test_a_log_that_lost_its_end_is_noticed(tmp_path, model, data, whole):
    out = copied(whole, tmp_path)
    (out / METRICS).write_bytes((out / METRICS).read_bytes()[:-20])
    with pytest.raises(FormatError, match=r"metrics\.jsonl has \d+ bytes; the checkpoint"):
        run(settings(model, data, out, resume=True, **EVERYTHING))


def test_checkpoints_appear_whole_or_not_at_all(tmp_path, monkeypatch):
    """Every system call of writing one may be the last."""
    arrays = {name: np.arange(5, dtype=np.float32) for name in ("param", "first", "second")}
    save(tmp_path, 1, arrays, {"a": 1})
    calls = {"fsync": os.fsync, "replace": os.replace, "rename": os.rename}
    for name, original in calls.items():
        for last in range(1, 10):
            count = 0

            def failing(*arguments: Any, limit: int = last, call: Any = original) -> None:
                nonlocal count
                count += 1
                if count == limit:
                    raise OSError(28, "No space left on device")
                call(*arguments)

            with monkeypatch.context() as patch:
                patch.setattr(os, name, failing)
                try:
                    save(tmp_path, 2, arrays, {"a": 2})
                except FormatError as error:
                    assert "No space left on device" in str(error)
                    found = newest(tmp_path)
                    assert found is not None
                    # Once renamed it is there, though its folder may not have been flushed.
                    assert found.step in (1, 2)
                    assert found.numbers["a"] == found.step
                    assert all(np.array_equal(found.arrays[k], arrays[k]) for k in arrays)
                    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
                else:
                    break
            shutil.rmtree(tmp_path / "step-00000002", ignore_errors=True)
        else:
            pytest.fail(f"{name} is called without end")
        assert last > 1, f"{name} is never called"
        shutil.rmtree(tmp_path / "step-00000002")


def test_what_a_killed_process_left_is_no_checkpoint(tmp_path, model, data, whole):
    out = copied(whole, tmp_path)
    shutil.copytree(out / "checkpoints/step-00000010", out / "checkpoints/.step-00000012.tmp")
    (out / "checkpoints/.step-00000012.tmp/state.json").unlink()
    (out / ".adapter_model.safetensors.0badf00d.tmp").write_bytes(b"half")
    run(settings(model, data, out, resume=True, **EVERYTHING))
    assert timeless(out) == timeless(whole)
    assert adapter_bytes(out) == adapter_bytes(whole)


def test_only_the_newest_are_kept(tmp_path):
    arrays = {"param": np.zeros(3, np.float32)}
    for step in (1, 2, 9, 10, 100):
        save(tmp_path, step, arrays, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000010", "step-00000100"]
    found = newest(tmp_path)
    assert found is not None and found.step == 100


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_arrays_and_numbers_come_back_as_they_were(tmp_path, dtype):
    values = np.array([0.0, -0.0, 1 / 3, np.pi, 1e-40, 3e38, np.nan, np.inf], dtype)
    numbers = {"a": 0.1, "b": None, "c": {"d": [1, 2]}, "e": 1e-300}
    save(tmp_path, 7, {"values": values}, numbers)
    found = newest(tmp_path)
    assert found is not None
    assert found.step == 7
    assert found.arrays["values"].dtype == dtype
    assert found.arrays["values"].tobytes() == values.tobytes()
    assert resume.same_json(found.numbers, numbers)


def test_there_may_be_none(tmp_path):
    assert newest(tmp_path / "nowhere") is None
    assert newest(tmp_path) is None
