"""A whole training run: what it computes, what it logs, what it leaves behind."""

import json
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import krnl
import krnl.api
from krnl.data.packing import pack
from krnl.errors import ConfigError, DataError, PlanError, TrainingError
from krnl.formats.peft import read_adapter
from krnl.formats.resume import newest
from krnl.formats.safetensors import read_tensors, write_safetensors
from krnl.model import Model
from krnl.training import loop
from krnl.training.config import TrainConfig
from krnl.training.loop import train
from krnl.training.prepare import load_data, starting_adapter
from krnl.training.schedule import learning_rate
from krnl.training.session import Session
from runs import (
    ALLOWED,
    CLOCK,
    adapter_bytes,
    checkpoints,
    follow,
    run,
    settings,
    timeless,
    updates,
    validations,
    write_chat_model,
    write_data,
    write_rows,
)
from tiny import Run

UPDATE_KEYS = [
    "step", "epoch", "loss", "lr", "grad_norm", "rows", "tokens", "target_tokens", "tokens_per_s",
    "seconds",
]  # fmt: skip
VALIDATION_KEYS = ["step", "val_loss", "val_perplexity"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten rows and no validation."""
    return write_data(tmp_path_factory.mktemp("data"), 10)


@pytest.fixture(scope="module")
def validated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten rows and five for validation."""
    return write_data(tmp_path_factory.mktemp("validated"), 10, 5)


def modules_of(out: Path) -> dict[str, np.ndarray]:
    return {
        name: np.array(values)
        for name, values in read_tensors(out / "adapter_model.safetensors")[0].items()
    }


def test_the_log_has_a_line_per_update_and_per_validation(tmp_path, model, validated):
    config = settings(model, validated, tmp_path / "out", epochs=2, warmup=2)
    result = run(config)
    text = (tmp_path / "out/metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert all(list(line) in (UPDATE_KEYS, VALIDATION_KEYS) for line in lines)
    assert [line["step"] for line in updates(tmp_path / "out")] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in validations(tmp_path / "out")] == [0, 3, 6]
    for line in validations(tmp_path / "out"):
        assert line["val_perplexity"] == pytest.approx(math.exp(line["val_loss"]), rel=1e-12)
    examples = load_data(config, Model.open(str(model))).train.examples
    for epoch in (0, 1):
        part = updates(tmp_path / "out")[3 * epoch : 3 * epoch + 3]
        # Ten rows by four: the last update of an epoch has the two that are left.
        assert [line["rows"] for line in part] == [4, 4, 2]
        assert sum(line["tokens"] for line in part) == sum(len(e.ids) for e in examples)
        assert sum(line["target_tokens"] for line in part) == sum(e.targets.sum() for e in examples)
        assert [line["epoch"] for line in part] == [(3 * epoch + i) / 3 for i in (1, 2, 3)]
    for line in updates(tmp_path / "out"):
        assert line["lr"] == learning_rate(line["step"], 6, 1e-2, 2, "cosine")
        assert line["tokens_per_s"] == pytest.approx(line["tokens"] / line["seconds"])
    assert result.updates == 6
    assert result.tokens == sum(line["tokens"] for line in updates(tmp_path / "out"))
    assert result.last_loss == updates(tmp_path / "out")[-1]["loss"]


def test_what_the_folder_holds(tmp_path, model, validated):
    run(settings(model, validated, tmp_path / "out", epochs=3))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "adapter_config.json", "adapter_model.safetensors", "metrics.jsonl", "loss.png",
        "train.json", "checkpoints",
    }  # fmt: skip
    assert (tmp_path / "out/loss.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert checkpoints(tmp_path / "out") == ["step-00000006", "step-00000009"]
    content = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (content["r"], content["lora_alpha"], content["peft_type"]) == (3, 6.0, "LORA")
    assert content["base_model_name_or_path"] == str(model)
    assert json.loads((tmp_path / "out/train.json").read_text())["epochs"] == 3


def test_rows_are_packed_while_the_device_computes(tmp_path, model, data, monkeypatch):
    """Those of the next update, before the loss of this one is waited for; each once."""
    run(settings(model, data, tmp_path / "before", steps=7))
    happened: list[str] = []

    def noted(owner: Any, function: str) -> None:
        original = getattr(owner, function)

        def call(*arguments: Any) -> Any:
            happened.append(function)
            return original(*arguments)

        monkeypatch.setattr(owner, function, call)

    noted(Session, "accumulate")
    noted(Session, "update")
    noted(loop.Run, "_batch")
    run(settings(model, data, tmp_path / "out", steps=7))
    a, u, b = "accumulate", "update", "_batch"
    kept = [x for i, x in enumerate(happened) if x != a or happened[i - 1] != a]
    assert kept == [b, *[a, b, u] * 6, a, u]
    assert timeless(tmp_path / "out") == timeless(tmp_path / "before")


def test_inputs_of_two_passes_at_most_are_there_at_once(tmp_path, model, data, monkeypatch):
    """However many passes an update has: no plan counts them."""
    made: list[weakref.ref[np.ndarray]] = []
    most = 0
    original = Session.inputs_of

    def counted(*arguments: Any) -> np.ndarray:
        nonlocal most
        inputs = original(*arguments)
        made.append(weakref.ref(inputs))
        most = max(most, sum(there() is not None for there in made))
        return inputs

    monkeypatch.setattr(Session, "inputs_of", counted)
    run(settings(model, data, tmp_path / "out", steps=3, batch_size=10, tokens=20, max_length=20))
    assert len(made) >= 15 and most <= 2


def test_steps_may_end_in_the_middle_of_an_epoch(tmp_path, model, data):
    run(settings(model, data, tmp_path / "out", steps=4))
    assert [line["rows"] for line in updates(tmp_path / "out")] == [4, 4, 2, 4]
    assert checkpoints(tmp_path / "out") == ["step-00000003", "step-00000004"]


def test_rows_are_shuffled_anew_each_epoch_unless_told_otherwise(tmp_path, model, data):
    def targets(**given: Any) -> list[int]:
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        run(settings(model, data, out, epochs=2, **given))
        return [line["target_tokens"] for line in updates(out)]

    plain = targets(shuffle=False)
    assert plain[:3] == plain[3:]
    shuffled = targets()
    assert shuffled[:3] != shuffled[3:]
    assert shuffled == targets()
    assert shuffled != targets(seed=1)


def own_training(config: TrainConfig) -> tuple[list[float], list[float], np.ndarray]:
    """The losses, gradient norms and final parameters of a run without clipping, where AdamW is
    written out here and only the gradients are KRNL's, in float64."""
    model = Model.open(config.model)
    examples = load_data(config, model).train
    adapter, modules = starting_adapter(config, model)
    session = Run(model, adapter, modules=modules, tokens=256, seed=config.seed)
    param = session.trainable.pack(modules).astype(np.float64)
    first, second = np.zeros_like(param), np.zeros_like(param)
    losses, norms = [], []
    batches = [range(start, min(start + 4, 10)) for start in (0, 4, 8)] * config.epochs
    for k, rows in enumerate(batches, 1):
        session.place(param)
        work = pack([examples[row] for row in rows], 256)
        count = sum(len(p.target) for p in work)
        loss, gradient = session.sums(work)
        losses.append(loss / count)
        gradient = gradient / count
        norms.append(float(np.sqrt(np.sum(gradient**2))))
        lr = config.lr * 0.5 * (1 + math.cos(math.pi * (k - 1) / len(batches)))
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        root = np.sqrt(second / (1 - 0.999**k)) + 1e-8
        param = param - lr * (first / (1 - 0.9**k) / root + config.weight_decay * param)
    return losses, norms, param


@pytest.mark.parametrize("tokens", [64, 256])
def test_a_whole_run_in_float64(tmp_path, model, data, tokens):
    """On the reference device, in passes that hold two rows or all of them."""
    config = settings(
        model, data, tmp_path / "out", device="reference", tokens=tokens, epochs=2, clip=0.0,
        shuffle=False, weight_decay=0.1, lr=1e-3,
    )  # fmt: skip
    run(config)
    losses, norms, param = own_training(config)
    lines = updates(tmp_path / "out")
    # The numbers of an update are rounded to float32, of which 1 - beta2 feels most: 0.999 moves by
    # up to 2⁻²⁵, and 1 - 0.999 by that. A step is lr at most (its root takes half of the error),
    # and there are six. The loss follows by the length of the gradient.
    step_error = 2.0**-25 / 0.001
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=step_error)
    assert [line["grad_norm"] for line in lines] == pytest.approx(norms, rel=step_error)
    saved = newest(tmp_path / "out/checkpoints")
    assert saved is not None
    assert saved.arrays["param"].dtype == np.float64
    share = np.abs(saved.arrays["param"] - param).max() / (6 * config.lr * step_error)
    print(f"share of the allowance: {share:.3f}")
    assert share <= 1


def test_float32_follows_float64(tmp_path, model, data):
    for device in ("cpu", "reference"):
        config = settings(model, data, tmp_path / device, device=device, epochs=5)
        run(config)
    assert len(updates(tmp_path / "cpu")) == 15
    follow(tmp_path / "cpu", tmp_path / "reference", ALLOWED["fp32"])


def test_one_row_is_learnt_by_heart(tmp_path, model):
    rows = [
        {
            "messages": [
                {"role": "user", "content": "Cora"},
                {"role": "assistant", "content": "was happy"},
            ]
        }
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    out = tmp_path / "out"
    run(
        settings(model, path, out, steps=60, batch_size=1, targets=("q_proj", "up_proj", "lm_head"))
    )
    losses = [line["loss"] for line in updates(out)]
    assert losses[0] > 4
    assert losses[-1] < 0.05
    assert krnl.generate(str(model), "Cora", adapter=out, precision="fp32") == "was happy"


@pytest.mark.parametrize("recompute", ["mlp", "layer"])
def test_recomputing_changes_no_number(tmp_path, model, data, recompute):
    for name, choice in (("kept", "none"), ("again", recompute)):
        run(settings(model, data, tmp_path / name, recompute=choice, dropout=0.2))
    assert timeless(tmp_path / "kept") == timeless(tmp_path / "again")
    assert adapter_bytes(tmp_path / "kept") == adapter_bytes(tmp_path / "again")


def test_dropout_is_drawn_from_the_seed(tmp_path, model, data):
    def losses(name: str, **given: Any) -> list[float]:
        run(settings(model, data, tmp_path / name, shuffle=False, epochs=2, **given))
        return [line["loss"] for line in updates(tmp_path / name)]

    plain, dropped = losses("a"), losses("b", dropout=0.5)
    assert dropped != plain
    assert dropped == losses("c", dropout=0.5)


def test_the_best_adapter_by_validation_stays(tmp_path, model, validated):
    """With a rate that soon does harm, the best adapter is not the last one."""
    out = tmp_path / "out"
    result = run(settings(model, validated, out, epochs=3, lr=0.1, schedule="constant", clip=0.0))
    losses = [line["val_loss"] for line in validations(out)]
    assert result.best_val_loss == min(losses[1:]) < losses[-1] == result.last_val_loss
    assert result.first_val_loss == losses[0]
    # What lies in the folder validates as the best one did.
    run(settings(model, validated, tmp_path / "again", steps=1, init_adapter=str(out)))
    assert validations(tmp_path / "again")[0]["val_loss"] == result.best_val_loss


def test_without_validation_the_last_adapter_stays(tmp_path, model, data):
    out = tmp_path / "out"
    run(settings(model, data, out, steps=5))
    state, _ = read_tensors(out / "checkpoints/step-00000005/state.safetensors")
    stored = np.concatenate([values.ravel() for values in modules_of(out).values()])
    assert np.array_equal(np.sort(stored), np.sort(state["param"]))


def test_validation_may_be_another_file_and_another_rhythm(tmp_path, model, data, validated):
    path = validated / "valid.jsonl"
    run(settings(model, data, tmp_path / "out", steps=5, valid=str(path), eval_every=2))
    assert [line["step"] for line in validations(tmp_path / "out")] == [0, 2, 4, 5]


def test_an_adapter_to_start_from_brings_its_own_rank(tmp_path, model, data):
    run(settings(model, data, tmp_path / "a", rank=2, targets=("q_proj",)))
    config = settings(
        model, data, tmp_path / "b", init_adapter=str(tmp_path / "a"), rank=9, steps=1
    )
    run(config)
    adapter, modules = read_adapter(tmp_path / "b")
    assert adapter.rank == 2
    assert {path.rsplit(".", 1)[1] for path in modules} == {"q_proj"}


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Writes a model whose embedding of ' owl' is infinite."""

    def write(source: Path) -> Path:
        folder = tmp_path_factory.mktemp("poisoned")
        for path in source.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        token = int(Model.open(str(source)).tokenizer.encode("the owl").ids[-1])
        tensors = {k: np.array(v) for k, v in read_tensors(source / "model.safetensors")[0].items()}
        tensors["model.embed_tokens.weight"][token] = np.inf
        write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
        return folder

    return write


def rows_with_an_owl_at(place: int, count: int) -> list[dict[str, Any]]:
    def row(ask: str) -> dict[str, Any]:
        roles = (("user", ask), ("assistant", "Cora was happy"))
        return {"messages": [{"role": role, "content": text} for role, text in roles]}

    return [row("the owl" if i == place else "the bear") for i in range(count)]


@pytest.mark.parametrize("place", [0, 5, 11])
def test_a_loss_that_is_no_number_stops_the_run(tmp_path, model, poisoned, place):
    """It names the update, and keeps the adapter as the update before it left it."""
    # Untied, so that an infinite embedding does no harm before its token is read.
    untied = write_chat_model(tmp_path / "untied", "untied")
    bad = poisoned(untied)
    path = write_rows(tmp_path / "rows.jsonl", rows_with_an_owl_at(place, 12))
    given: dict[str, Any] = {"shuffle": False, "schedule": "constant", "batch_size": 2}
    stopped = place // 2 + 1
    with pytest.raises(TrainingError, match=rf"^Update {stopped} has loss nan .*not applied"):
        run(settings(bad, path, tmp_path / "out", **given))
    lines = updates(tmp_path / "out")
    assert [line["step"] for line in lines] == list(range(1, stopped + 1))
    assert lines[-1]["loss"] is None  # JSON has no word for it
    _, weights = adapter_bytes(tmp_path / "out")
    if place == 0:
        assert not any(
            np.any(b) for name, b in modules_of(tmp_path / "out").items() if "_B" in name
        )
    else:
        run(settings(bad, path, tmp_path / "good", steps=stopped - 1, **given))
        assert weights == adapter_bytes(tmp_path / "good")[1]


def test_more_memory_than_allowed_is_refused_before_anything_is_written(tmp_path, model, data):
    with pytest.raises(PlanError, match=r"needs .* more than --memory-limit \(1\.0 MiB\).*raise"):
        run(settings(model, data, tmp_path / "out", memory_limit=1 / 1024))
    assert not (tmp_path / "out").exists()


def test_an_earlier_run_is_not_mixed_with_this_one(tmp_path, model, data):
    out = tmp_path / "out"
    run(settings(model, data, out, steps=2))
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds an earlier run.*--resume.*--overwrite.*--out"):
        run(settings(model, data, out, steps=1))
    assert len(updates(out)) == 2
    run(settings(model, data, out, steps=1, overwrite=True))
    assert len(updates(out)) == 1
    assert checkpoints(out) == ["step-00000001"]
    assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "loss.png", "metrics.jsonl"])
def test_no_file_is_replaced_unasked(tmp_path, model, data, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"holds an earlier run .{name}"):
        run(settings(model, data, tmp_path, steps=1))
    assert (tmp_path / name).read_text() == "mine"


def test_what_is_read_is_never_written_over(tmp_path, model, data):
    """Nor is a folder written into that is read: its next reader would find other files there."""
    rows = json.dumps(
        [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    )
    out = tmp_path / "out"
    out.mkdir()
    for name in ("train.json", "metrics.jsonl"):
        (out / name).write_text(rows)
        for given in (out / name, out, Path(f"{out}/../out")):
            for more in ({}, {"overwrite": True}):
                with pytest.raises(ConfigError, match=r"^data is .*, and out is .* write over"):
                    run(settings(model, given, out, steps=1, **more))
        assert (out / name).read_text() == rows
        with pytest.raises(ConfigError, match=r"^valid is "):
            run(settings(model, data, out, steps=1, valid=str(out / name), overwrite=True))
        (out / name).unlink()
    (out / "rows.json").write_text(rows)
    run(settings(model, out / "rows.json", out, steps=1))
    adapter = adapter_bytes(out)
    for more in ({"overwrite": True}, {"resume": True}):
        with pytest.raises(ConfigError, match=r"^init_adapter is "):
            run(settings(model, data, out, steps=1, init_adapter=str(out), **more))
    assert adapter_bytes(out) == adapter
    assert (out / "rows.json").read_text() == rows


def test_an_empty_log_is_no_earlier_run(tmp_path, model, data):
    """A full disk leaves one."""
    (tmp_path / "metrics.jsonl").touch()
    run(settings(model, data, tmp_path, steps=1))
    assert len(updates(tmp_path)) == 1


@pytest.mark.parametrize(("warmup", "noted"), [(1, False), (2, False), (3, True)])
def test_a_rate_that_never_comes_to_its_peak_is_told(tmp_path, model, data, capsys, warmup, noted):
    train(settings(model, data, tmp_path / "out", steps=2, warmup=warmup), Console(width=200))
    assert ("note: the learning rate rises over" in capsys.readouterr().out) == noted


def test_one_is_no_plural(tmp_path, model, data, capsys):
    config = settings(model, data, tmp_path / "out", steps=1, batch_size=1)
    result = train(config, Console(width=200))
    assert "1 update of up to 1 row\n" in capsys.readouterr().out
    assert result is not None and result.describe().startswith("1 update in ")


def test_rows_without_targets_are_left_out_and_counted(tmp_path, model, capsys):
    long = " ".join(["kitchen"] * 40)
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "calm"}]}
        for text in ("Cora", long, "Omar")
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    console = Console(width=200)
    config = settings(model, path, tmp_path / "out", max_length=20, batch_size=3)
    train(config, console)
    said = capsys.readouterr().out
    assert "rows without target   1" in said
    assert updates(tmp_path / "out")[0]["rows"] == 2


def test_a_row_longer_than_a_pass_is_cut_or_refused(tmp_path, model, data):
    with pytest.raises(ConfigError, match="max_length is 65"):
        run(settings(model, data, tmp_path / "out", max_length=65))
    with pytest.raises(DataError, match="none of its 10 rows has a token to train on"):
        run(settings(model, data, tmp_path / "out", max_length=2))


def test_show_prints_rows_and_trains_nothing(tmp_path, model, data, capsys):
    config = settings(model, data, tmp_path / "out", show=2)
    assert train(config, Console(width=200, force_terminal=True, color_system="standard")) is None
    said = capsys.readouterr().out
    assert said.count("<|im_start|>assistant") == 2
    assert "\x1b[" in said
    assert not (tmp_path / "out").exists()


def test_the_python_interface_does_the_same(tmp_path, model, validated):
    config = settings(model, validated, tmp_path / "a", targets=("q_proj", "v_proj"))
    run(config)
    lora = krnl.Lora(rank=3, alpha=6.0, targets=("q_proj", "v_proj"))
    given = {"tokens": 64, "batch_size": 4, "lr": 1e-2, "precision": "fp32"}
    loaded = krnl.load(model)
    result = krnl.train(loaded, validated, lora, out=tmp_path / "b", quiet=True, **given)
    assert timeless(tmp_path / "a") == timeless(tmp_path / "b")
    assert adapter_bytes(tmp_path / "a") == adapter_bytes(tmp_path / "b")
    assert result.best_val_loss == min(line["val_loss"] for line in validations(tmp_path / "b")[1:])
    one = krnl.generate(loaded, "Cora", adapter=tmp_path / "b", max_tokens=4)
    chat = [{"role": "user", "content": "Cora"}]
    assert one == krnl.generate(str(model), chat, adapter=str(tmp_path / "b"), max_tokens=4)
    with pytest.raises(ConfigError, match=r"there is no setting 'epoch'.*Did you mean 'epochs'"):
        krnl.train(loaded, validated, out=tmp_path / "c", epoch=3)


def test_one_name_may_stand_for_the_targets(tmp_path, model, data):
    krnl.train(model, data, krnl.Lora(rank=1, targets="o_proj"), out=tmp_path, quiet=True, steps=1)
    _, modules = read_adapter(tmp_path)
    assert {path.rsplit(".", 1)[1] for path in modules} == {"o_proj"}


def test_the_clock_is_all_that_may_differ(tmp_path, model, data):
    for name in "ab":
        run(settings(model, data, tmp_path / name))
    assert timeless(tmp_path / "a") == timeless(tmp_path / "b")
    assert adapter_bytes(tmp_path / "a") == adapter_bytes(tmp_path / "b")
    assert set(UPDATE_KEYS) > CLOCK
