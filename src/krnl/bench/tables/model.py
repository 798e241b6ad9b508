"""Whole training updates of models that people train: tokens a second, and memory."""

import math
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from krnl.bench.baselines import PRECISIONS, Worker, script, title, variants
from krnl.bench.command import Bench
from krnl.bench.control import machine
from krnl.bench.results import Entry, Result, timed
from krnl.bench.shapes import SHAPES, write
from krnl.bench.trainer import Trainer
from krnl.errors import BackendError

MODELS, ROWS, LENGTH = ("smollm2-135m", "qwen2.5-0.5b"), 4, 256
QUICK_SIZES = {"num_hidden_layers": 2, "vocab_size": 512}
SCRIPTS = {"torch": "peft_model.py", "mlx": "peers/work_mlx.py"}
NAMES = {"torch": "peft"}
# All train the same random weights, on random tokens of their own: the first loss is the logarithm
# of the vocabulary or a little more, whatever the tokens.
LOSS = 0.05


@dataclass
class Contestant:
    """`step` does one update: seconds, loss, peak bytes."""

    step: Callable[[], tuple[float, float, int]]
    peak: int = 0

    def run(self) -> float:
        seconds, _, self.peak = self.step()
        return seconds


def run(bench: Bench) -> Result:
    rows, length = (2, 32) if bench.quick else (ROWS, LENGTH)
    precision = PRECISIONS[bench.backend.limits.activations[0].name]
    taking_part: dict[str, Contestant] = {}
    krnls: dict[str, str] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="krnl-bench-")))
        for model in MODELS[:1] if bench.quick else MODELS:
            write(SHAPES[model] | (QUICK_SIZES if bench.quick else {}), model, folder / model)
            ours = f"{model}, krnl {precision}"
            started = {ours: _krnl(stack, bench, folder / model, precision, rows, length)}
            for peer, python in bench.against.items():
                given = ["--model", str(folder / model), "--rows", str(rows)]
                given += ["--length", str(length)]
                started |= {
                    f"{model}, {name}": contestant
                    for name, contestant in _peers(stack, bench, peer, python, given).items()
                }
            _check_losses({name: contestant.step()[1] for name, contestant in started.items()})
            taking_part |= started
            krnls |= dict.fromkeys(started, ours)
        measured = bench.gate.measure({n: c.run for n, c in taking_part.items()}, bench.rounds)
    tokens = rows * length
    entries = []
    for name, contestant in taking_part.items():
        ours = krnls[name]
        ratio = measured.median(ours) / measured.median(name)
        speed = timed(
            measured,
            name,
            "tokens/s",
            lambda s: tokens / s,
            note="" if name == ours else f"times as fast as {ours}",
            ratio=None if name == ours else ratio,
        )
        peak = Entry(f"{name}, memory", contestant.peak / 2**20, "MiB", note="of the process")
        entries += [speed, peak]
    shrunk = ", shrunk" if bench.quick else ""
    return Result(
        "model",
        f"Training updates of {rows} × {length} tokens, rank 16 on all linear layers{shrunk}",
        machine(bench.backend),
        measured,
        tuple(entries),
    )


def _krnl(
    stack: ExitStack, bench: Bench, folder: Path, precision: str, rows: int, length: int
) -> Contestant:
    trainer = stack.enter_context(Trainer(folder, bench.backend.name, precision, rows, length))

    def step() -> tuple[float, float, int]:
        update = trainer.ask()
        return update.seconds, update.loss, update.peak

    return Contestant(step)


def _peers(
    stack: ExitStack, bench: Bench, peer: str, python: str, given: list[str]
) -> dict[str, Contestant]:
    """A contestant for each precision in which the peer trains."""
    device = "cpu" if bench.backend.name == "cpu" else "gpu"
    started = {}
    for base, adapters in variants(peer, bench.backend, bench.backend.limits.activations[0]):
        options = [*given, "--precision", base, "--adapters", adapters, "--device", device]
        worker = stack.enter_context(Worker(python, script(SCRIPTS[peer]), options))
        started[title(NAMES.get(peer, peer), base, adapters)] = Contestant(worker.update)
    return started


def _check_losses(losses: dict[str, float]) -> None:
    """BackendError where one is not a number or away from the others: it trains something else."""
    first, *_ = losses.values()
    for name, loss in losses.items():
        if not math.isfinite(loss) or abs(loss / first - 1) > LOSS:
            raise BackendError(
                f"{name} has loss {loss:.4g} where the others have {first:.4g}, so it trains "
                "something else. They are not compared."
            )
