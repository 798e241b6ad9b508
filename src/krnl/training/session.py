"""A training session: programs planned and compiled for a device, passes fed in, sums read out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from krnl.backends.base import Backend, Memory, Paper
from krnl.data.packing import Pass
from krnl.dtypes import DType
from krnl.errors import PlanError
from krnl.formats.peft import AdapterConfig, Modules
from krnl.model import Model, adapter_shapes
from krnl.models.config import ModelConfig
from krnl.models.decoder import Decoder
from krnl.models.inputs import fill
from krnl.models.training_programs import Recomputed, TrainingPrograms
from krnl.models.weights import Weights
from krnl.plan.arena import Plan, check_gradients, plan
from krnl.plan.buffer import Buffer


@dataclass(frozen=True)
class TrainingPlan:
    """The programs of a training run with their common layout, before anything is allocated."""

    decoder: Decoder
    programs: TrainingPrograms
    accumulate: Plan
    evaluate: Plan
    update: Plan


def plan_training(
    config: ModelConfig,
    weights: Weights,
    adapter: AdapterConfig,
    paths: tuple[str, ...],
    backend: Backend | Paper,
    activation: DType,
    tokens: int,
    recomputed: Recomputed = 0,
) -> TrainingPlan:
    """Emits, lowers and lays out the programs for passes of up to `tokens` tokens, adapters on
    `paths`."""
    if adapter.dropout and "lm_head" in paths:
        raise PlanError(
            "Dropout with an adapter on lm_head is not supported; set dropout to 0 or leave "
            "lm_head out."
        )
    decoder = Decoder(config, weights, adapter_shapes(adapter, paths), activation)
    programs = TrainingPrograms(
        decoder, tokens, backend.limits.head_rows, adapter.dropout, recomputed
    )
    return plan_programs(programs, backend)


def plan_programs(programs: TrainingPrograms, backend: Backend | Paper) -> TrainingPlan:
    """Emits, lowers and lays out the programs."""
    accumulate, evaluate, update = plan(
        [programs.accumulate(), programs.evaluate(), programs.update()],
        backend.kernels,
        backend.limits.largest_block,
        backend.limits.own_memory,
    )
    check_gradients(accumulate, programs.decoder.trainable.grad)
    return TrainingPlan(programs.decoder, programs, accumulate, evaluate, update)


class Session:
    """Allocated and compiled: adapters in place, moments zero.

    `loss_scale` multiplies what passes add to the gradients, and nothing else. It may be changed
    between updates, when no gradients are summed."""

    def __init__(
        self, planned: TrainingPlan, model: Model, modules: Modules, backend: Backend, seed: int
    ):
        self._planned = planned
        self._trainable = planned.decoder.trainable
        self._inputs = planned.programs.inputs
        self._chunk = planned.programs.chunk
        self._seed = seed
        self._memory: Memory = backend.allocate(planned.accumulate.layout)
        # What inputs hold where a pass puts nothing.
        self._blank = np.zeros(self._inputs.whole.size, np.int32)
        self._loss_scale = 0.0  # never written yet
        self.loss_scale = 1.0
        model.fill(planned.decoder.weights, self._memory)
        self.restore(
            self._trainable.pack(modules),
            np.zeros(self._trainable.size),
            np.zeros(self._trainable.size),
        )
        self._accumulate = backend.compile(planned.accumulate, self._memory)
        self._evaluate = backend.compile(planned.evaluate, self._memory)
        self._update = backend.compile(planned.update, self._memory)

    @property
    def loss_scale(self) -> float:
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if value != self._loss_scale:
            self._loss_scale = value
            self._memory.write(self._inputs.loss_scale, np.array([value]))

    def accumulate(self, inputs: np.ndarray) -> None:
        """Adds a pass to the sums; `inputs` are what `inputs_of` made of it."""
        assert inputs.shape == self._inputs.whole.shape
        self._memory.write(self._inputs.whole, inputs)
        self._accumulate.run()

    def accumulate_all(self, passes: Sequence[Pass], update: int, first: np.ndarray) -> None:
        """Adds the passes of an update, `first` being the inputs of the first. Those of each other
        are made while a GPU computes the one before."""
        self.accumulate(first)
        for work in passes[1:]:
            self.accumulate(self.inputs_of(work, update))

    def time_accumulate(self, inputs: np.ndarray) -> list[float]:
        """Seconds of every dispatch of `accumulate`, run one by one."""
        self._memory.write(self._inputs.whole, inputs)
        return self._accumulate.time()

    def read(self, buffer: Buffer) -> np.ndarray:
        """A copy of what a buffer holds, after everything that was enqueued has run."""
        return self._memory.read(buffer)

    def update(self, hyper: np.ndarray) -> tuple[float, float]:
        """Applies the summed gradients, which the last number of `hyper` makes means of: it undoes
        the loss scale too. Returns the summed loss and the norm of the mean gradient; where that is
        not finite, nothing was changed."""
        self._memory.write(self._inputs.hyper, hyper)
        self._update.run()
        loss, norm = self._memory.read(self._planned.programs.outcome)
        return float(loss), float(norm)

    def evaluate(self, passes: list[Pass]) -> float:
        """The loss summed over all targets of `passes`. To be called between updates."""
        loss = self._planned.programs.loss
        total = 0.0
        for work in passes:
            self._memory.write(self._inputs.whole, self.inputs_of(work, 0))
            self._evaluate.run()
            total += float(self._memory.read(loss)[0])
            self._memory.write(loss, np.zeros(1))
        return total

    def modules(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The adapters as they are now: path -> (A, B), float32."""
        return self._trainable.unpack(
            self._memory.read(self._trainable.param).astype(np.float32, copy=False)
        )

    def gradients(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The gradients summed since the last update, without the loss scale: path -> (dA, dB)."""
        return self._trainable.unpack(self._memory.read(self._trainable.grad) / self.loss_scale)

    def state(self) -> dict[str, np.ndarray]:
        """Everything that an update changes: parameters and moments, float32 [p] each."""
        t = self._trainable
        buffers = {"param": t.param, "first": t.first, "second": t.second}
        return {name: self._memory.read(buffer) for name, buffer in buffers.items()}

    def restore(self, param: np.ndarray, first: np.ndarray, second: np.ndarray) -> None:
        """Puts back what `state` returned."""
        t = self._trainable
        for buffer, values in (
            (t.param, param),
            (t.compute, param),
            (t.first, first),
            (t.second, second),
        ):
            self._memory.write(buffer, values)

    def inputs_of(self, work: Pass, update: int) -> np.ndarray:
        """What the device is given of a pass, int32 [size of Inputs.whole]: each value where its
        buffer lies. To be made while the device computes. `update` counts from 1 and seeds dropout,
        of which evaluation has none. Beyond live rows no kernel looks."""
        i, live, targets = self._inputs, work.live, len(work.target)
        rows = np.arange(live)
        slot = np.full(live, -1)
        slot[work.target_row] = np.arange(targets)
        chunks = np.arange(i.live_chunk.size) * self._chunk
        values: list[tuple[Buffer | None, Any]] = [
            (i.live, [live]),
            (i.live_targets, [targets]),
            (i.live_chunk, np.clip(targets - chunks, 0, self._chunk)),
            (i.tokens, work.tokens),
            (i.position, work.position),
            (i.stop, rows + 1),
            (i.target_row, work.target_row),
            (i.target, work.target),
            (i.slot, slot),
            (i.document, work.document),
            (i.dropout_key, [self._seed, update]),
        ]
        for window, start in i.start.items():
            reach = 0 if window is None else rows - window + 1
            values.append((start, np.maximum(work.doc_start, reach)))
        content = self._blank.copy()
        fill(content, [(part, array) for part, array in values if part is not None])
        return content
