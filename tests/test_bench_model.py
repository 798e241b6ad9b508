"""The table of whole training updates, and the process that trains."""

import math
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from bench_worker import write_worker
from krnl.backends.cpu import CpuBackend
from krnl.bench import trainer
from krnl.bench.baselines import PEERS, Setting, script
from krnl.bench.command import Bench
from krnl.bench.models import SHAPES, write
from krnl.bench.tables import model, shapes, step
from krnl.bench.trainer import Rows, Trainer, Update, training_step
from krnl.devices import PRECISIONS
from krnl.dtypes import BF16, F32, DType
from krnl.errors import BackendError, ConfigError, PlanError
from krnl.formats.peft import AdapterConfig
from krnl.model import Model
from krnl.training.session import Session, plan_training
from open_gate import OpenGate
from timed_gate import TimedGate


def bench(gate: Any = None, **against: str) -> Bench:
    return Bench(CpuBackend(), gate or OpenGate(), 2, True, against)


@pytest.mark.parametrize("peer", ["torch", "mlx"])
@pytest.mark.parametrize("table", [step, model, shapes])
def test_real_peers(table: ModuleType, peer: str) -> None:
    variable = f"KRNL_{peer.upper()}_PYTHON"
    if variable not in os.environ:
        pytest.skip(f"{variable} names no interpreter that has {peer}")
    if peer not in PEERS[table.__name__.rpartition(".")[2]]:
        pytest.skip(f"{peer} takes no part")
    result = table.run(bench(**{peer: os.environ[variable]}))
    assert len({entry.name for entry in result.entries if entry.ratio}) > 0


@pytest.mark.parametrize("rows", [Rows(1, 32), Rows(3, 41, chat=True)])
@pytest.mark.parametrize("peer", ["torch", "mlx"])
def test_real_peers_add_up_what_is_small_in_16_bits(tmp_path: Path, peer: str, rows: Rows) -> None:
    """The norm of the gradient is a sum over the adapters of many layers."""
    variable = f"KRNL_{peer.upper()}_PYTHON"
    if variable not in os.environ:
        pytest.skip(f"{variable} names no interpreter that has {peer}")
    sizes = {"hidden_size": 72, "intermediate_size": 96, "vocab_size": 256}
    deep = SHAPES["smollm2-135m"] | sizes | {"num_hidden_layers": 64}
    write(deep, "deep", tmp_path)
    setting, path = Setting(peer, "bf16", "16"), script(model.SCRIPTS[peer])
    given = model.arguments(tmp_path, rows)
    with (
        Trainer(tmp_path, "cpu", "bf16", rows) as ours,
        setting.start(
            os.environ[variable], path, given, CpuBackend(), model.SAID, model.SAID
        ) as worker,
    ):
        model.check_updates(peer, setting, worker, (ours.first, ours.ask()), BF16)


def test_model_tells_speed_and_memory() -> None:
    result = model.run(bench())
    speed, memory = result.entries
    assert result.title.startswith("Training updates of smollm2-135m: 2 × 32 tokens")
    assert speed.name.startswith("krnl ")
    assert (speed.unit, memory.unit) == ("tokens/s", "MiB")
    assert memory.name.endswith("host memory")
    assert memory.value is not None
    assert 20 < memory.value < 2000


def test_tokens_a_second_are_those_of_the_seconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """2 rows of 32 tokens; KRNL takes a millisecond, the peer two and, in another setting, three.
    The peer's memory is what it says."""
    body = "serve(options, lambda: {'loss': 1.0, 'norm': 1.0}, peak=lambda: 3 * 2**20)"
    monkeypatch.setattr(model, "script", lambda name: write_worker(tmp_path, body))
    monkeypatch.setattr(model, "check_updates", lambda *given: None)
    ours, _, *theirs = model.run(bench(TimedGate(), torch=sys.executable)).entries
    assert (ours.value, ours.ratio) == (pytest.approx(64 / 1e-3), None)
    assert len(theirs) >= 2
    for ms, speed, memory in zip((2, 3), theirs[::2], theirs[1::2], strict=False):
        assert speed.unit == "tokens/s" and speed.value == pytest.approx(64 / (1e-3 * ms))
        assert speed.spread == pytest.approx((speed.value, speed.value))
        assert speed.ratio == pytest.approx(1 / ms)
        assert (memory.value, memory.unit) == (3.0, "MiB")


@pytest.mark.parametrize("named", [None, "qwen2.5-0.5b"])
def test_models_of_small_sizes_are_called_shrunk(named: str | None) -> None:
    assert model.run(replace(bench(), model=named)).title.endswith(", shrunk")


def test_model_takes_rows_and_a_checkpoint(tmp_path: Path) -> None:
    write(SHAPES["smollm2-135m"] | model.QUICK_SIZES, "tiny", tmp_path / "mine")
    asked = replace(bench(), model=str(tmp_path / "mine"), rows=3, length=40, chat=True)
    result = model.run(asked)
    assert result.title.startswith("Training updates of mine: 3 rows of 10 to 40 tokens, a third")
    assert "shrunk" not in result.title
    with pytest.raises(ConfigError, match=r"no folder with a config\.json, and none of smollm2"):
        model.run(replace(asked, model=str(tmp_path)))


@pytest.mark.parametrize("ending", [None, KeyboardInterrupt, BackendError("lost")])
def test_random_weights_are_gone_at_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ending: Any
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[Path] = []

    def measure(contestants: object, rounds: int) -> None:
        seen.extend(tmp_path.rglob("model.safetensors"))
        raise ending

    asked = bench()
    if ending is None:
        model.run(asked)
    else:
        monkeypatch.setattr(asked.gate, "measure", measure)
        with pytest.raises(KeyboardInterrupt if ending is KeyboardInterrupt else BackendError):
            model.run(asked)
        assert len(seen) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    usage = type("Usage", (), {"free": 1 << 20})
    monkeypatch.setattr("krnl.bench.models.shutil.disk_usage", lambda folder: usage)
    wanted = r"take 14 MiB, and where .* is, 1 MiB are free\. Set TMPDIR"
    with pytest.raises(ConfigError, match=wanted):
        model.run(bench())
    assert list(tmp_path.iterdir()) == []


FIRST, SECOND = Update(0.1, 10.0, 5.0, 0), Update(0.1, 9.5, 4.0, 0)


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ({"loss": 10.0, "norm": 5.0, "second": 9.5}, None),
        ({"loss": 10.002, "norm": 5.0, "second": 9.5}, "the loss of update 1"),
        ({"loss": float("nan"), "norm": 5.0, "second": 9.5}, "the loss of update 1"),
        ({"loss": 10.0, "norm": 5.01, "second": 9.5}, "the norm of its gradient"),
        ({"loss": 10.0, "norm": 5.0, "second": 9.0}, "the loss of update 2"),
    ],
)
@pytest.mark.parametrize("adapters", ["16", "fp32"])
def test_a_model_that_trains_something_else_is_not_compared(
    said: dict[str, float], complaint: str | None, adapters: str
) -> None:
    asked = {"loss": said["second"]}
    worker: Any = type("W", (), {"hello": said, "ask": lambda self: asked})()
    setting = Setting("torch", "fp32", adapters)
    if complaint is None or (adapters == "16" and complaint.endswith("2")):
        model.check_updates("peft", setting, worker, (FIRST, SECOND), F32)
        return
    with pytest.raises(BackendError, match=f"peft computes something else than KRNL: {complaint}"):
        model.check_updates("peft", setting, worker, (FIRST, SECOND), F32)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"RATE": 3e-4}, "the loss of update 2"),
        ({"ADAPTER": AdapterConfig(rank=16, alpha=30.0)}, "the loss of update 1|the norm of its"),
    ],
)
@pytest.mark.parametrize("activation", [F32, BF16])
def test_another_update_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    change: dict[str, Any],
    complaint: str,
    activation: DType,
) -> None:
    """KRNL with other settings, in a peer's place."""
    write(SHAPES["smollm2-135m"] | model.QUICK_SIZES, "tiny", tmp_path)
    opened, precision = Model.open(str(tmp_path)), {F32: "fp32", BF16: "bf16"}[activation]

    def updates() -> tuple[Update, Update]:
        work = Rows(2, 32).packed(opened.config.vocab_size)
        run = training_step(opened, "cpu", precision, [work])
        return run(), run()

    ours = updates()
    for name, value in change.items():
        monkeypatch.setattr(trainer, name, value)
    first, second = updates()
    said = {"loss": first.loss, "norm": first.norm}
    worker: Any = type("W", (), {"hello": said, "ask": lambda self: {"loss": second.loss}})()
    with pytest.raises(BackendError, match=complaint):
        model.check_updates("peft", Setting("torch", "x", "fp32"), worker, ours, activation)


def test_a_loss_that_is_no_number_is_not_measured() -> None:
    model.check_finite("krnl", (FIRST, SECOND))
    for wrong in (replace(SECOND, loss=float("nan")), replace(SECOND, norm=float("inf"))):
        with pytest.raises(BackendError, match="krnl: update 2 has loss"):
            model.check_finite("krnl", (FIRST, wrong))


def test_what_a_trainer_cannot_do_is_said_by_the_parent(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        Trainer(tmp_path, "cpu", "auto", Rows(2, 32))


def test_krnl_keeps_within_a_limit_and_says_so() -> None:
    """Roomy, and too little for anything."""
    result = model.run(replace(bench(), memory_limit=23.5))
    assert result.title.endswith(", krnl within 23.50 GiB, shrunk")
    assert result.entries[0].note == "within 23.50 GiB"
    with pytest.raises(PlanError, match=r"more than --memory-limit .* a smaller model or rank\.$"):
        model.run(replace(bench(), memory_limit=0.001))


@pytest.fixture
def update(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Callable[[], Update]]:
    """`training_step` of a tiny model; the process itself takes as much memory at any time."""
    monkeypatch.setattr("krnl.training.memory._resident", lambda: 2**26)
    monkeypatch.setattr("krnl.training.memory.DRAWING", 0)
    write(SHAPES["smollm2-135m"] | model.QUICK_SIZES, "tiny", tmp_path)
    opened = Model.open(str(tmp_path))
    work = [Rows(2, 32).packed(opened.config.vocab_size)]
    return partial(training_step, opened, "cpu", "fp32", work)


def refused(update: Callable[..., object], pattern: str) -> list[float]:
    """GiB that an update says it needs, where it may take next to nothing."""
    with pytest.raises(PlanError) as error:
        update(1e-9)
    found = re.search(pattern, str(error.value))
    assert found
    return [float(mib) / 1024 for mib in found.groups()]


def test_an_update_within_a_limit_is_the_same_and_tells_what_it_computed_again(
    update: Callable[..., Callable[[], Update]],
) -> None:
    (least,) = refused(update, r"needs ([\d.]+) MiB")
    kept = update()()
    again = update(least + 2**-14)()
    assert (kept.loss, kept.norm, kept.recomputed) == (again.loss, again.norm, "")
    assert "2 trained decoder layers" in again.recomputed and " to stay within " in again.recomputed
    assert model.within(None, again.recomputed) == model.within(23.0, again.recomputed)
    assert model.within(23.0, again.recomputed) == again.recomputed
    assert model.within(None, "") == ""


def test_an_update_that_takes_too_much_names_what_to_lower(
    update: Callable[..., Callable[[], Update]],
) -> None:
    """What `krnl bench model` calls it. The limit lies between what is no activation and all."""
    between = sum(refused(update, r"needs ([\d.]+) MiB.* alone take ([\d.]+) MiB")) / 2
    with pytest.raises(PlanError, match=r"are activations: lower --rows or --length\.$"):
        update(between)


def test_a_trainer_that_dies_says_so(tmp_path: Path) -> None:
    write(SHAPES["smollm2-135m"] | model.QUICK_SIZES, "tiny", tmp_path)
    with Trainer(tmp_path, "cpu", "auto", Rows(2, 32)) as trainer:
        trainer._process.kill()
        with pytest.raises(BackendError, match="ended with -9"):
            trainer.ask()


def test_the_first_update_of_a_trainers_turn_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = Trainer.ask
    asked = {"updates": 0}

    def ask(trainer: Trainer) -> Update:
        asked["updates"] += 1
        return right(trainer)

    monkeypatch.setattr(Trainer, "ask", ask)
    model.run(bench())
    assert asked["updates"] == 2 + 2 * 2  # two that are compared, two turns


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("chat", [False, True])
def test_an_update_tells_the_mean_loss_and_the_norm_of_its_gradient(
    tmp_path: Path, precision: str, chat: bool
) -> None:
    """As sums over all targets, divided by their number, are."""
    write(SHAPES["smollm2-135m"] | model.QUICK_SIZES, "tiny", tmp_path)
    opened, rows = Model.open(str(tmp_path)), Rows(3, 40, chat)
    work, modules = rows.packed(512), trainer.first_modules(opened.config)
    update = training_step(opened, "cpu", precision, [work])()
    backend = CpuBackend()
    planned = plan_training(
        opened.config,
        opened.weights(backend.limits.mapped_alignment),
        trainer.ADAPTER,
        tuple(modules),
        backend,
        PRECISIONS[precision],
        work.capacity,
    )
    session = Session(planned, opened, modules, backend, 0)
    loss = session.evaluate([work])
    session.accumulate(session.inputs_of(work, 1))
    gradients = np.concatenate([g.ravel() for pair in session.gradients().values() for g in pair])
    targets = sum((labels[1:] >= 0).sum() for _, labels in rows.drawn(512))
    # Sums of as many terms in fp32, in other orders.
    assert update.loss == pytest.approx(loss / targets, rel=targets * F32.eps)
    assert update.loss == pytest.approx(math.log(512), rel=0.1)  # weights are small and random
    norm = np.linalg.norm(gradients.astype(np.float64)) / targets
    assert update.norm == pytest.approx(norm, rel=math.sqrt(gradients.size) * F32.eps)
