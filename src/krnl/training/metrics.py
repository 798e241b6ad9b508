"""What a run writes down: metrics.jsonl, loss.png, and lines for the person who watches."""

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from krnl.errors import FormatError
from krnl.formats.files import open_atomic

METRICS = "metrics.jsonl"
PICTURE = "loss.png"


class Metrics:
    """An append-only log. `position` is its length in bytes; a resumed run cuts it back to a
    checkpoint's."""

    def __init__(self, folder: Path, position: int = 0):
        self.path = folder / METRICS
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab")  # noqa: SIM115 (open for the whole run)
            length = self._file.seek(0, os.SEEK_END)
            self._file.truncate(min(position, length))
        except OSError as error:
            raise FormatError(
                f"{self.path} cannot be written: {error.strerror or error}."
            ) from error
        if length < position:
            self.close()
            raise FormatError(
                f"{self.path} has {length} bytes; the checkpoint to go on from was written when it "
                f"had {position}. Put it back, or start again with --overwrite."
            )

    def sync(self) -> int:
        """Makes what was written survive a power cut; returns its length in bytes."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise FormatError(
                f"{self.path} cannot be written: {error.strerror or error}."
            ) from error
        return self._file.tell()

    def write(self, **values: Any) -> None:
        """One line. Numbers that JSON has no word for are written as null."""
        clean = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in values.items()
        }
        try:
            self._file.write(json.dumps(clean).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise FormatError(
                f"{self.path} cannot be written: {error.strerror or error}."
            ) from error

    def close(self) -> None:
        """Every line has been flushed; one that a full disk refused is not tried again."""
        with suppress(OSError):
            self._file.close()


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics file, one at a time."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def draw(folder: Path) -> Path:
    """Draws loss.png from metrics.jsonl: training loss per update, its running mean, validation
    loss, rate."""
    from matplotlib.figure import Figure

    train, valid = [], []
    for m in read(folder / METRICS):
        if m.get("loss") is not None:
            train.append((m["step"], m["loss"], m["lr"]))
        if m.get("val_loss") is not None:
            valid.append((m["step"], m["val_loss"]))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    if train:
        steps, losses, rates = zip(*train, strict=True)
        axes.plot(steps, losses, color="#b8c4d6", linewidth=1, label="loss of each update")
        axes.plot(steps, _smooth(losses), color="#1f4e8c", linewidth=2, label="running mean")
        rate = axes.twinx()
        rate.plot(steps, rates, color="#999999", linewidth=1, linestyle=":")
        rate.set_ylabel("learning rate (dotted)", color="#777777")
        rate.set_ylim(bottom=0)
    if valid:
        axes.plot(
            *zip(*valid, strict=True),
            color="#c8502c",
            marker="o",
            linewidth=1.5,
            label="validation loss",
        )
    axes.set_xlabel("update")
    axes.set_ylabel("mean loss per target token")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    with open_atomic(folder / PICTURE) as file:
        figure.savefig(file, dpi=150)
    return folder / PICTURE


def _smooth(values: Sequence[float]) -> np.ndarray:
    """Centred running mean over a fortieth of the run, narrower at the ends."""
    reach = len(values) // 80
    total = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    first, last = np.maximum(at - reach, 0), np.minimum(at + reach + 1, len(values))
    return np.asarray((total[last] - total[first]) / (last - first))


class Display:
    """The live line of a run: bar, loss, rate, tokens a second, time left."""

    def __init__(self, console: Console, done: int, total: int):
        self.console = console
        self._progress = Progress(
            TextColumn("update"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  lr {task.fields[lr]}  {task.fields[rate]} tok/s"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task(
            "", total=total, completed=done, loss="–", lr="–", rate="–"
        )
        self._shown = 0.0
        self._every = max(1, total // 20)

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._progress.stop()

    def update(self, step: int, loss: float, lr: float, rate: float) -> None:
        """Shows an update; where the output is no terminal, every twentieth of the run gets a
        line."""
        self._progress.update(
            self._task, completed=step, loss=f"{loss:.4f}", lr=f"{lr:.2e}", rate=f"{rate:,.0f}"
        )
        if not self.console.is_terminal and step % self._every == 0:
            self.console.print(f"update {step}: loss {loss:.4f}, lr {lr:.2e}, {rate:,.0f} tok/s")
