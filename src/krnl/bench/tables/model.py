"""Whole training updates of a model that people train: tokens a second, and memory. One model at a
time: all who are compared hold their memory until the end."""

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from krnl.bench.baselines import (
    NUMBER,
    Keys,
    Setting,
    Worker,
    check_agreement,
    script,
    settings,
    tools,
)
from krnl.bench.command import Bench
from krnl.bench.models import SHAPES, write
from krnl.bench.results import Result, memory, timed
from krnl.bench.trainer import Rows, Trainer, Update
from krnl.bench.workloads import warmed
from krnl.devices import precision_name
from krnl.dtypes import BF16, F16, F32, DType
from krnl.errors import BackendError, ConfigError
from krnl.formats.files import read_json, user_path
from krnl.models.config import parse
from krnl.training.memory import gib

MODEL, ROWS, LENGTH = "smollm2-135m", 4, 256
MOST_TOKENS = 2**24  # that a pass may have
QUICK_SIZES, QUICK_ROWS, QUICK_LENGTH = {"num_hidden_layers": 2, "vocab_size": 512}, 2, 32
SCRIPTS = {"torch": "peft_model.py", "mlx": "mlx_model.py"}
NAMES = {"torch": "peft", "mlx": "mlx-lm"}
SAID: Keys = {"loss": NUMBER, "norm": NUMBER}  # by these scripts, of every step


@dataclass
class Turns:
    """`turn` does an update that nobody times and one that counts; seconds and bytes of it. The
    most bytes are kept."""

    turn: Callable[[], tuple[float, int]]
    peak: int = 0

    def run(self) -> float:
        seconds, peak = self.turn()
        self.peak = max(self.peak, peak)
        return seconds


def run(bench: Bench) -> Result:
    rows = Rows(
        bench.rows or (QUICK_ROWS if bench.quick else ROWS),
        bench.length or (QUICK_LENGTH if bench.quick else LENGTH),
        bench.chat,
    )
    activation = bench.backend.limits.activations[0]
    # 16 bits of PyTorch and MLX are bf16: without a loss scale, gradients in fp16 vanish.
    theirs = BF16 if activation is F16 else activation
    wanted = {
        p: settings(p, bench.backend, theirs, bench.variants, bench.adapters) for p in bench.against
    }
    precision = precision_name(activation)
    ours = f"krnl {precision}"
    peers: list[tuple[str, Worker]] = []
    with ExitStack() as stack:
        model, folder = stack.enter_context(checkpoint(bench, rows))
        trainer = Trainer(folder, bench.backend.name, precision, rows, bench.memory_limit)
        stack.enter_context(trainer)
        updates = trainer.first, trainer.ask()
        check_finite(ours, updates)
        contestants = {ours: Turns(_krnl_turn(trainer))}
        for peer, python in bench.against.items():
            for setting in wanted[peer]:
                name = setting.title(NAMES[peer])
                path, given = script(SCRIPTS[peer]), arguments(folder, rows)
                worker = setting.start(python, path, given, bench.backend, SAID, SAID)
                stack.enter_context(worker)
                check_updates(name, setting, worker, updates, activation)
                contestants[name] = Turns(_peer_turn(worker))
                peers.append((NAMES[peer], worker))
        turns = {name: contestant.run for name, contestant in contestants.items()}
        measured = bench.gate.measure(turns, bench.rounds)
    tokens = rows.tokens
    where: Literal["host", "device"] = "host" if bench.backend.name == "cpu" else "device"
    entries = []
    kept = within(bench.memory_limit, trainer.first.recomputed)
    for name, contestant in contestants.items():
        speed = timed(
            measured,
            name,
            "tokens/s",
            lambda s: tokens / s,
            note=kept if name == ours else f"times as fast as {ours}",
            ratio=None if name == ours else measured.median(ours) / measured.median(name),
        )
        entries += [speed, memory(name, where, contestant.peak)]
    shrunk = ", shrunk" if bench.quick and (bench.model is None or bench.model in SHAPES) else ""
    limit = bench.memory_limit
    within_limit = "" if limit is None else f", krnl within {gib(limit * 2**30)}"
    title = f"Training updates of {model}: {rows}, rank 16 on all linear layers"
    title += within_limit + shrunk
    return bench.result("model", title, measured, entries, tools(peers))


@contextmanager
def checkpoint(bench: Bench, rows: Rows) -> Iterator[tuple[str, Path]]:
    """The name and the folder of what is trained. One with random weights is written here, and gone
    when the block ends. ConfigError for a model that is neither a shape nor a folder, and for rows
    that are too many or too long."""
    if bench.model is not None and bench.model not in SHAPES:
        folder = user_path(bench.model)
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"model is '{bench.model}', which is no folder with a config.json, and none of "
                f"{', '.join(SHAPES)}."
            )
        name = folder.resolve().name
        check_rows(rows, name, read_json(folder / "config.json"))
        yield name, folder
        return
    name = bench.model or MODEL
    check_rows(rows, name, SHAPES[name])
    try:
        temporary = tempfile.TemporaryDirectory(prefix="krnl-bench-")
    except OSError as error:
        raise ConfigError(
            f"There is no folder for random weights: {error.strerror or error}. Set TMPDIR to one "
            "that can be written."
        ) from error
    with temporary as made:
        folder = Path(made) / name
        write(SHAPES[name] | (QUICK_SIZES if bench.quick else {}), name, folder)
        yield name, folder


def check_rows(rows: Rows, name: str, config: dict[str, Any]) -> None:
    """ConfigError for rows that no pass holds, or that a model has no positions for."""
    if rows.count * rows.length >= MOST_TOKENS:
        raise ConfigError(
            f"rows is {rows.count:,} and length is {rows.length:,}, and a pass holds fewer than "
            f"{MOST_TOKENS:,} tokens."
        )
    positions = parse(config, name).max_positions
    if rows.length > positions:
        raise ConfigError(
            f"length is {rows.length:,}, and {name} has no more than {positions:,} positions."
        )


def arguments(folder: Path, rows: Rows) -> list[str]:
    """For bench/peft_model.py and bench/mlx_model.py."""
    given = ["--model", str(folder), "--rows", str(rows.count), "--length", str(rows.length)]
    return given + ["--chat"] * rows.chat


def within(memory_limit: float | None, recomputed: str) -> str:
    """What KRNL had to keep within, in GiB, and did to that end."""
    return recomputed or ("" if memory_limit is None else f"within {gib(memory_limit * 2**30)}")


def check_finite(name: str, updates: tuple[Update, ...]) -> None:
    """BackendError where a loss or a norm is no number."""
    for number, update in enumerate(updates, 1):
        if not (math.isfinite(update.loss) and math.isfinite(update.norm)):
            raise BackendError(
                f"{name}: update {number} has loss {update.loss} and a gradient of norm "
                f"{update.norm}. It is not measured."
            )


def check_updates(
    name: str,
    setting: Setting,
    worker: Worker,
    ours: tuple[Update, Update],
    activation: DType,
) -> None:
    """BackendError where a peer's first two updates are not KRNL's: same weights, rows and first
    adapters. Updates of 16-bit adapters are rounded away for the most part, so the second loss is
    then their own."""
    loss, norm = allowed(activation)
    first, second = ours
    check_agreement(name, "the loss of update 1", worker.hello["loss"], first.loss, loss)
    check_agreement(name, "the norm of its gradient", worker.hello["norm"], first.norm, norm)
    if setting.adapters == "fp32":
        theirs = worker.ask()["loss"]
        check_agreement(name, "the loss of update 2", theirs, second.loss, loss)


def allowed(activation: DType) -> tuple[float, float]:
    """How far losses, and norms of the gradient, may be apart for rounding: shares. In 16 bits
    layers round to different sides; the mean over all tokens evens most of it out, the norm less.
    In fp32 nothing but the order of sums differs."""
    if activation is F32:
        return 1e-4, 1e-3
    return BF16.eps / 2, 4 * BF16.eps


def _krnl_turn(trainer: Trainer) -> Callable[[], tuple[float, int]]:
    def turn() -> tuple[float, int]:
        update = warmed(trainer.ask)
        return update.seconds, update.peak

    return turn


def _peer_turn(worker: Worker) -> Callable[[], tuple[float, int]]:
    def turn() -> tuple[float, int]:
        answer = worker.turn()
        return float(answer["seconds"]), int(answer["peak"])

    return turn
