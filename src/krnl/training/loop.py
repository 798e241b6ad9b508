"""The training run: data in, adapter out, and everything in between that can be resumed."""

import math
import threading
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from rich.console import Console

from krnl.data.examples import show
from krnl.data.packing import Pass, batches, live_share, pack
from krnl.devices import activation_type, open_backend
from krnl.errors import FormatError, TrainingError
from krnl.formats import resume
from krnl.formats.files import user_path, write_json_atomic
from krnl.formats.peft import CONFIG as ADAPTER_CONFIG
from krnl.formats.peft import Modules, write_adapter
from krnl.model import Model
from krnl.training import folder
from krnl.training.budget import plan_within
from krnl.training.config import TrainConfig
from krnl.training.loss_scale import LossScale, initial_scale
from krnl.training.memory import gib
from krnl.training.metrics import METRICS, PICTURE, Display, Metrics, draw
from krnl.training.prepare import ADAPTERS_OWN, Data, counted, load_data, starting_adapter
from krnl.training.schedule import hyper, learning_rate
from krnl.training.session import Session
from krnl.training.signals import stop_signals


@dataclass(frozen=True)
class Result:
    """What a finished run amounts to. Losses are means per target token; None without validation
    data."""

    out: Path
    updates: int
    first_val_loss: float | None
    best_val_loss: float | None
    last_val_loss: float | None
    last_loss: float | None
    seconds: float  # in updates, validation and saving left out
    tokens: int
    skipped: int  # updates that were not applied, as their gradients overflowed fp16

    def describe(self) -> str:
        """The lines that end a run."""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        took = f"{self.seconds:.1f} s, {rate:,.0f} tokens/s"
        lines = [f"{counted(self.updates, 'update')} in {took}"]
        if self.skipped:
            lines.append(f"{self.skipped:,} of them skipped, as their gradients overflowed fp16")
        if None not in (self.first_val_loss, self.best_val_loss, self.last_val_loss):
            lines.append(
                f"validation loss {self.first_val_loss:.4f} before, {self.last_val_loss:.4f} after "
                f"(best {self.best_val_loss:.4f})"
            )
        elif self.last_loss is not None:
            lines.append(f"training loss {self.last_loss:.4f} at the end")
        lines.append(f"adapter, {METRICS} and {PICTURE} are in {self.out}")
        return "\n".join(lines)


@dataclass
class Progress:
    """What a run has to remember besides the arrays; it goes into every checkpoint."""

    step: int = 0
    metrics_position: int = 0
    first_val_loss: float | None = None
    best_val_loss: float | None = None
    last_val_loss: float | None = None
    last_loss: float | None = None
    seconds: float = 0.0
    tokens: int = 0


class Interrupted(Exception):  # noqa: N818 (it is no error)
    """The run was asked to stop, and has saved itself."""


def train(config: TrainConfig, console: Console | None = None) -> Result | None:
    """Runs a whole training, or shows rows and returns None. Raises a KrnlError for anything that
    is wrong with settings, data or model, and Interrupted after Ctrl-C."""
    console = console or Console(stderr=True, markup=False)
    config.check()
    folder.check_apart(config)
    model = Model.open(config.model)
    data = load_data(config, model)
    if config.show:
        for example in data.train.examples[: config.show]:
            console.print(show(example, model.tokenizer), end="\n\n")
        return None
    with folder.held(user_path(config.out)):
        run = Run(config, model, data, console)
        with closing(run.metrics), stop_signals() as stop:
            result = run.go(stop)
        del run  # drawing takes memory of its own, which the plan knows nothing of
        draw(result.out)
    return result


@dataclass(frozen=True)
class Batch:
    """What an update is over: how many rows, the passes that they are packed into, and what the
    device is given of the first."""

    rows: int
    passes: list[Pass]
    first: np.ndarray


class Run:
    """One training run and its folder."""

    def __init__(self, config: TrainConfig, model: Model, data: Data, console: Console):
        self.config = config
        self.out = user_path(config.out)
        self.console = console
        self.data = data
        self.order = batches(
            len(data.train),
            config.batch_size,
            epochs=None if config.steps else config.epochs,
            steps=config.steps,
            shuffle=config.shuffle,
            seed=config.seed,
        )
        self.adapter, modules = starting_adapter(config, model)
        self.backend = open_backend(config.device)
        self.activation = activation_type(self.backend, config.precision)
        self.plan = plan_within(
            config.memory_limit,
            config.recompute,
            model.config,
            model.weights(self.backend.limits.mapped_alignment),
            self.adapter,
            tuple(modules),
            self.backend,
            self.activation,
            config.tokens,
        )
        self.plan.check()
        self.identity = folder.identity(
            config,
            self.adapter,
            model,
            data.train,
            data.valid,
            self.backend.name,
            str(self.activation),
        )
        saved = folder.claim(self.out, config, self.identity)
        self._describe(model, modules)
        self.session = Session(self.plan.training, model, modules, self.backend, config.seed)
        self.progress = Progress()
        self.scale = initial_scale(self.activation)
        if saved is not None:
            self.progress = self._restore(saved)
            console.print(f"going on after update {self.progress.step} of {len(self.order)}")
        self.metrics = Metrics(self.out, self.progress.metrics_position)
        self.ahead: Batch | None = None  # of the next update

    def go(self, stop: threading.Event) -> Result:
        """Trains to the end, or until `stop` is set."""
        write_json_atomic(self.out / folder.SAVED_CONFIG, folder.settings(self.config))
        if self.progress.step == 0 and self.data.valid and self.progress.first_val_loss is None:
            self._validate()
        with Display(self.console, self.progress.step, len(self.order)) as display:
            while self.progress.step < len(self.order):
                self._update(display)
                last = self.progress.step == len(self.order)
                if self.data.valid and (last or self._due(self.config.eval_every)):
                    self._validate()
                if last or self._due(self.config.save_every) or stop.is_set():
                    self._save()
                if stop.is_set() and not last:
                    raise Interrupted(
                        f"Stopped after update {self.progress.step} of {len(self.order)}; "
                        "everything is saved. Give the same command with --resume to go on."
                    )
        return self._finish()

    def _update(self, display: Display) -> None:
        """One update: its rows in as many passes as they need, then the optimizer."""
        start = time.perf_counter()
        step = self.progress.step + 1
        batch, self.ahead = self.ahead or self._batch(step), None
        rows, passes = batch.rows, batch.passes
        tokens, targets = sum(w.live for w in passes), sum(len(w.target) for w in passes)
        scale = self.session.loss_scale = self.scale.value
        self.session.accumulate_all(passes, step, batch.first)
        del batch, passes  # before as much is made again
        # While a GPU computes the last pass.
        self.ahead = self._batch(step + 1) if step < len(self.order) else None
        c = self.config
        lr = learning_rate(step, len(self.order), c.lr, c.warmup, c.schedule)
        # AdamW corrects the bias of its moments, in which skipped updates have no part.
        applied = step - self.scale.skipped
        gradient_scale = 1.0 / (targets * scale)
        loss, norm = self.session.update(
            hyper(applied, lr, (c.beta1, c.beta2), c.eps, c.weight_decay, c.clip, gradient_scale)
        )
        loss /= targets
        seconds = time.perf_counter() - start
        if math.isfinite(loss):
            skipped = not math.isfinite(norm) and self.scale.shrink()
        else:
            skipped = self.scale.skip()
        scaling = {"loss_scale": scale, "skipped": self.scale.skipped} if self.scale.dynamic else {}
        self.metrics.write(
            step=step,
            epoch=step / self.order.per_epoch,
            loss=loss,
            lr=lr,
            grad_norm=norm,
            **scaling,
            rows=rows,
            tokens=tokens,
            target_tokens=targets,
            tokens_per_s=tokens / seconds,
            seconds=seconds,
        )
        p = self.progress
        if skipped:
            reason = (
                f"gradients overflowed at loss scale {scale:g}; it is {self.scale.value:g} now"
                if math.isfinite(loss)
                else f"loss is {loss}: fp16 did not hold the activations"
            )
            self.console.print(f"update {step}: skipped, as its {reason}", highlight=False)
        elif math.isfinite(loss) and math.isfinite(norm):
            self.scale.grow()
            p.last_loss = loss
        else:
            self._diverged(step, loss, norm)
        p.step = step
        p.seconds += seconds
        p.tokens += tokens
        display.update(step, loss, lr, tokens / seconds)

    def _batch(self, step: int) -> Batch:
        """The rows of an update, ready for the device."""
        rows = self.order[step - 1]
        passes = pack([self.data.train[row] for row in rows], self.config.tokens)
        return Batch(len(rows), passes, self.session.inputs_of(passes[0], step))

    def _diverged(self, step: int, loss: float, norm: float) -> NoReturn:
        """The update was not applied, so the adapter is still the last good one."""
        if not self._best_is_kept:
            self._write_adapter()
        fp16 = self.scale.dynamic
        raise TrainingError(
            f"Update {step} has loss {loss} and gradient norm {norm}"
            + (f" at a loss scale of {self.scale.value:g}" if fp16 else "")
            + f", and was not applied. The last good adapter is in {self.out}. A lower --lr, a "
            "--warmup or --clip usually helps"
            + (", or --precision fp32, whose range is wider." if fp16 else ".")
        )

    def _validate(self) -> None:
        p = self.progress
        loss = self.session.evaluate(self.data.valid) / self.data.valid_targets
        self.metrics.write(step=p.step, val_loss=loss, val_perplexity=_perplexity(loss))
        self.console.print(
            f"update {p.step}: validation loss {loss:.4f}, perplexity {_perplexity(loss):.4g}"
        )
        if not math.isfinite(loss):
            return  # compares with nothing
        p.last_val_loss = loss
        if p.step == 0:
            p.first_val_loss = loss
        if p.step and (p.best_val_loss is None or loss < p.best_val_loss):
            p.best_val_loss = loss
            self._write_adapter()

    @property
    def _best_is_kept(self) -> bool:
        """Whether the folder holds the adapter that validated best. Until one has, it is to hold
        the latest."""
        return self.progress.best_val_loss is not None and (self.out / ADAPTER_CONFIG).exists()

    def _save(self) -> None:
        """The adapter before the checkpoint: a run that is resumed after its last has both."""
        if not self._best_is_kept:
            self._write_adapter()
        self.progress.metrics_position = self.metrics.sync()
        numbers = {
            "progress": asdict(self.progress),
            "loss_scale": asdict(self.scale),
            "run": self.identity,
        }
        resume.save(
            self.out / folder.CHECKPOINTS, self.progress.step, self.session.state(), numbers
        )

    def _finish(self) -> Result:
        p = self.progress
        return Result(
            self.out,
            p.step,
            p.first_val_loss,
            p.best_val_loss,
            p.last_val_loss,
            p.last_loss,
            p.seconds,
            p.tokens,
            self.scale.skipped,
        )

    def _write_adapter(self) -> None:
        write_adapter(self.out, self.adapter, self.session.modules())

    def _due(self, every: int | None) -> bool:
        return self.progress.step % (every or self.order.per_epoch) == 0

    def _restore(self, saved: resume.Saved) -> Progress:
        """Puts a checkpoint's arrays in place; returns where the run was."""
        try:
            progress = Progress(**saved.numbers["progress"])
            if self.scale.dynamic:
                self.scale = LossScale(**saved.numbers["loss_scale"])
            self.session.restore(**saved.arrays)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(
                f"The checkpoint of update {saved.step} in {self.out} is not one that this version "
                f"of KRNL can go on from ({error})."
            ) from error
        return progress

    def _describe(self, model: Model, modules: Modules) -> None:
        """What the run is going to do, before it does it."""
        updates = [self.order[u] for u in range(min(len(self.order), self.order.per_epoch))]
        # One update at a time: packed, an epoch takes several times the memory of its rows.
        epoch = (pack([self.data.train[r] for r in rows], self.config.tokens) for rows in updates)
        trained = sum(a.size + b.size for a, b in modules.values())
        self.console.print(
            f"{model.config.name} on {self.backend.name} in {self.activation}: adapters on "
            f"{counted(len(modules), 'linear layer')}, {trained:,} trained parameters, at most "
            f"{gib(self.plan.use.total)} of memory\n"
            + (f"{again}\n" if (again := self.plan.recomputed) else "")
            + f"{counted(len(self.order), 'update')} of up to "
            + f"{counted(max(len(rows) for rows in updates), 'row')}\n"
            + self.data.train.report.describe(
                live_share(work for passes in epoch for work in passes)
            ),
            highlight=False,
            soft_wrap=True,
        )
        c = self.config
        for ignored, names, reason in (
            (c.init_adapter is not None, ADAPTERS_OWN, f"{c.init_adapter} has its own"),
            (c.steps is not None, ("epochs",), "steps are given"),
            (not self.data.valid, ("eval_every",), "there is no validation data"),
        ):
            if ignored and (unused := c.changed(names)):
                self.console.print(f"not used, as {reason}: {unused}", soft_wrap=True)
        longest = min(self.data.train.report.longest, c.max_length or c.tokens)
        if longest > (known := model.config.max_positions):
            self.console.print(
                f"note: rows have up to {longest:,} tokens, and this model was made for {known:,}; "
                f"--max-length {known} would cut them",
                soft_wrap=True,
            )
        if c.warmup > len(self.order):
            self.console.print(
                f"note: the learning rate rises over {counted(c.warmup, 'update')}, so it never "
                f"comes to {c.lr:g}",
                soft_wrap=True,
            )
        if not self.adapter.uniform(modules):
            self.console.print(
                "note: vLLM reads rank and alpha alone; with rank_pattern or alpha_pattern it "
                "would scale this adapter wrongly",
                soft_wrap=True,
            )


def _perplexity(loss: float) -> float:
    return math.inf if loss > 700 else math.exp(loss)
