"""Whole training updates of a checkpoint, in a process of their own: its peak memory is then that
of training, and of nothing else."""

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from krnl.data.packing import Pass, random_pass
from krnl.devices import activation_type, open_backend
from krnl.errors import BackendError, KrnlError
from krnl.formats.peft import AdapterConfig
from krnl.model import Model, initial_modules
from krnl.training.schedule import hyper
from krnl.training.session import Session, plan_training

ADAPTER = AdapterConfig(rank=16, alpha=32.0)
RATE = 1e-4


def training_step(
    model: Model, device: str, precision: str, passes: Sequence[Pass]
) -> Callable[[], float]:
    """What does one update over `passes`, adapters of rank 16 on all linear layers, and returns its
    mean loss."""
    modules = initial_modules(ADAPTER, model.config, 0)
    backend = open_backend(device)
    planned = plan_training(
        model.config,
        model.weights(backend.limits.mapped_alignment),
        ADAPTER,
        tuple(modules),
        backend,
        activation_type(backend, precision),
        max(work.capacity for work in passes),
    )
    session = Session(planned, model, modules, backend, 0)
    targets = sum(len(work.target) for work in passes)
    updates = 0

    def step() -> float:
        nonlocal updates
        updates += 1
        for work in passes:
            session.accumulate(work, updates)
        rates = hyper(updates, RATE, (0.9, 0.999), 1e-8, 0.0, 1.0, 1 / targets)
        loss, _ = session.update(rates)
        return loss / targets

    return step


@dataclass(frozen=True)
class Update:
    """One update: seconds, mean loss, and the most memory that the process had so far."""

    seconds: float
    loss: float
    peak: int


class Trainer:
    """Trains the checkpoint in `folder` on `rows` random rows of `length` tokens, all of them
    labelled, an update for every `ask`."""

    def __init__(self, folder: Path, device: str, precision: str, rows: int, length: int):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, folder, device, precision, rows, length), daemon=True
        )
        self._process.start()
        theirs.close()
        try:
            self.ask()
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
    connection: Connection, folder: Path, device: str, precision: str, rows: int, length: int
) -> None:
    try:
        model = Model.open(str(folder))
        work = random_pass(model.config.vocab_size, rows * length, rows, 1.0)
        step = training_step(model, device, precision, [work])
        while connection.recv():
            start = time.perf_counter()
            loss = step()
            connection.send(Update(time.perf_counter() - start, loss, _peak_memory()))
    except KrnlError as error:
        connection.send(error)
    except EOFError:
        pass  # nobody asks any more


def _peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
