"""Whole training updates of a checkpoint, in a process of their own: its peak memory is then that
of training, and of nothing else. bench/training.py gives other tools the same rows, the same first
adapters and the same optimizer."""

import multiprocessing
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from krnl.data.examples import Example
from krnl.data.packing import Pass, pack
from krnl.devices import activation_type, open_backend
from krnl.errors import BackendError, KrnlError
from krnl.formats.peft import AdapterConfig
from krnl.model import Model
from krnl.models.config import ModelConfig, linear_paths
from krnl.training.budget import plan_within
from krnl.training.loss_scale import initial_scale
from krnl.training.schedule import hyper
from krnl.training.session import Session

ADAPTER = AdapterConfig(rank=16, alpha=32.0)  # on all linear layers but the head
RATE, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-4, (0.9, 0.999), 1e-8, 0.0, 1.0
NO_TARGET = -100  # the label of a token that nothing is learnt from


@dataclass(frozen=True)
class Rows:
    """What an update is over: `count` rows of `length` random tokens, all of them targets. `chat`:
    their lengths vary from a quarter of `length` to all of it, and the last third is trained."""

    count: int
    length: int
    chat: bool = False

    def __str__(self) -> str:
        if not self.chat:
            return f"{self.count} × {self.length} tokens"
        lengths = f"{self.length // 4} to {self.length} tokens"
        return f"{self.count} rows of {lengths}, a third labelled"

    @property
    def tokens(self) -> int:
        """In all rows, those that are not trained included."""
        return int(self._lengths(np.random.default_rng(1)).sum())

    def drawn(self, vocab_size: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """(ids, labels) of each row, the same each time. A label is the token itself, or
        NO_TARGET."""
        random = np.random.default_rng(1)
        rows = []
        for length in self._lengths(random):
            ids = random.integers(0, vocab_size, length)
            labels = ids.copy()
            if self.chat:
                labels[: length - length // 3] = NO_TARGET
            rows.append((ids, labels))
        return rows

    def packed(self, vocab_size: int) -> Pass:
        """One pass that holds them all."""
        examples = []
        for line, (ids, labels) in enumerate(self.drawn(vocab_size)):
            targets = labels != NO_TARGET
            targets[0] = False
            examples.append(Example(ids.astype(np.int32), targets, line, cut=False))
        (work,) = pack(examples, self.tokens)
        return work

    def _lengths(self, random: np.random.Generator) -> np.ndarray:
        if self.chat:
            return random.integers(self.length // 4, self.length + 1, self.count)
        return np.full(self.count, self.length)


def first_modules(config: ModelConfig) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Adapters to begin with: path -> (A, B), float32. B is not zero, or the gradients of A would
    be, and nobody could compare them."""
    shapes = linear_paths(config)
    modules = {}
    for path in ADAPTER.select(shapes):
        out_features, in_features = shapes[path]
        random = np.random.default_rng([0, *path.encode()])
        a = random.standard_normal((ADAPTER.rank, in_features), np.float32)
        b = random.standard_normal((out_features, ADAPTER.rank), np.float32)
        modules[path] = (a / np.float32(in_features**0.5), np.float32(0.02) * b)
    return modules


@dataclass(frozen=True)
class Update:
    """One update: seconds, mean loss, norm of the gradient before it is clipped, and bytes: on the
    CPU the most that the process had resident so far, on a GPU what was allocated there.
    `recomputed`: what its backward pass computed again to spare memory, for people."""

    seconds: float
    loss: float
    norm: float
    peak: int
    recomputed: str = ""


def training_step(
    model: Model,
    device: str,
    precision: str,
    passes: Sequence[Pass],
    memory_limit: float | None = None,
) -> Callable[[], Update]:
    """What does one update over `passes`, within `memory_limit` GiB, and returns how it went.
    PlanError where there is too little memory."""
    modules = first_modules(model.config)
    backend = open_backend(device)
    activation = activation_type(backend, precision)
    budgeted = plan_within(
        memory_limit,
        "auto",
        model.config,
        model.weights(backend.limits.mapped_alignment),
        ADAPTER,
        tuple(modules),
        backend,
        activation,
        max(work.capacity for work in passes),
    )
    budgeted.check(lower="--rows or --length")
    planned = budgeted.training
    session = Session(planned, model, modules, backend, 0)
    session.loss_scale = initial_scale(activation).value
    blocks = planned.accumulate.layout.blocks
    allocated = sum(block.nbytes for block in blocks if not block.host)
    targets = sum(len(work.target) for work in passes)
    updates = 0
    first = session.inputs_of(passes[0], 1)  # of the next update

    def step() -> Update:
        nonlocal updates, first
        updates += 1
        start = time.perf_counter()
        session.accumulate_all(passes, updates, first)
        # While the device computes, as in training.
        first = session.inputs_of(passes[0], updates + 1)
        mean = 1 / (targets * session.loss_scale)
        loss, norm = session.update(hyper(updates, RATE, BETAS, EPS, WEIGHT_DECAY, CLIP, mean))
        seconds = time.perf_counter() - start
        peak = peak_memory() if backend.name == "cpu" else allocated
        return Update(seconds, loss / targets, norm, peak, budgeted.recomputed)

    return step


class Trainer:
    """Trains the checkpoint in `folder` on `rows` within `memory_limit` GiB, an update for every
    `ask`. `first`: the first update, which touches all memory and is nobody's time."""

    def __init__(
        self,
        folder: Path,
        device: str,
        precision: str,
        rows: Rows,
        memory_limit: float | None = None,
    ):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(theirs, folder, device, precision, rows, memory_limit),
            daemon=True,
        )
        self._process.start()
        theirs.close()
        try:
            self.first = self.ask()
        except BaseException:
            self.close()
            raise

    def ask(self) -> Update:
        try:
            self._connection.send(True)
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join()
            raise BackendError(
                f"The training process ended with {self._process.exitcode}; was there enough "
                "memory?"
            ) from error
        if isinstance(answer, KrnlError):
            raise answer
        assert isinstance(answer, Update)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _serve(
    connection: Connection,
    folder: Path,
    device: str,
    precision: str,
    rows: Rows,
    memory_limit: float | None,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C too, and ends this
    try:
        model = Model.open(str(folder))
        work = rows.packed(model.config.vocab_size)
        step = training_step(model, device, precision, [work], memory_limit)
        while connection.recv():
            connection.send(step())
    except KrnlError as error:
        connection.send(error)
    except EOFError:
        pass  # nobody asks any more


def peak_memory() -> int:
    """The most memory that this process had so far, in bytes."""
    # Not ru_maxrss on Linux: a process begins with that of the one which started it.
    with suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
