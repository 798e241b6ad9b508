"""The three programs of training: accumulate, evaluate, update. They run over one memory."""

from copy import copy
from dataclasses import dataclass
from typing import Literal

from krnl.dtypes import F32
from krnl.models.attention import Context
from krnl.models.decoder import Decoder, LayerSaved
from krnl.models.inputs import side_by_side, start_names
from krnl.models.lora import Dropout
from krnl.ops.loss import cross_entropy, cross_entropy_loss
from krnl.ops.norm import rms_norm, rms_norm_backward
from krnl.ops.optimizer import HYPER, adamw, gradient_norm
from krnl.ops.pointwise import cast, embedding, gather_rows, rope_table, zero
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.step import Step

# What the backward pass computes again: gate and up of this many of the lowest trained layers (all
# of them, if they are fewer), or everything inside every trained layer.
Recomputed = int | Literal["layer"]

# Logits exist for one chunk of labelled rows at a time: as many rows as fit these bytes, but enough
# of them that reading the head's weights is paid for (`head_rows`).
LOGITS_BYTES = 64 << 20


@dataclass(frozen=True)
class Inputs:
    """What the host writes before a pass, but for the last two. All have the pass's capacity n, but
    for the counts."""

    whole: Buffer  # of which all int32 are parts
    live: Buffer
    live_targets: Buffer
    live_chunk: Buffer  # labelled tokens in each chunk of the head
    tokens: Buffer
    position: Buffer
    start: dict[int | None, Buffer]  # the first key a token sees, by window
    stop: Buffer
    target_row: Buffer  # labelled tokens, in order
    target: Buffer  # what follows each
    # The inverse of target_row: a token's place among the labelled, or -1. None where no layer is
    # differentiated.
    slot: Buffer | None
    # Which row of the update a token belongs to; seed, update. None without dropout.
    document: Buffer | None
    dropout_key: Buffer | None
    loss_scale: Buffer  # written where it changes
    hyper: Buffer  # written before an update; see ops/optimizer.py


def _inputs(
    n: int, chunks: int, windows: set[int | None], differentiated: bool, dropped: bool
) -> Inputs:
    starts = start_names(windows)
    sizes = {"live": 1, "live_targets": 1, "live_chunk": chunks, "tokens": n, "position": n}
    sizes |= {name: n for name in [*starts.values(), "stop", "target_row", "target"]}
    if differentiated:
        sizes["slot"] = n
    if dropped:
        sizes |= {"document": n, "dropout_key": 2}
    parts = side_by_side("inputs", sizes)
    return Inputs(
        whole=parts["live"].root,
        live=parts["live"],
        live_targets=parts["live_targets"],
        live_chunk=parts["live_chunk"],
        tokens=parts["tokens"],
        position=parts["position"],
        start={window: parts[name] for window, name in starts.items()},
        stop=parts["stop"],
        target_row=parts["target_row"],
        target=parts["target"],
        slot=parts.get("slot"),
        document=parts.get("document"),
        dropout_key=parts.get("dropout_key"),
        loss_scale=Buffer("loss_scale", (1,), F32, Kind.INPUT),
        hyper=Buffer("hyper", (len(HYPER),), F32, Kind.INPUT),
    )


class TrainingPrograms:
    """Emits the programs that train a decoder's adapters in passes of up to `capacity` tokens."""

    def __init__(
        self,
        decoder: Decoder,
        capacity: int,
        head_rows: int,
        dropout: float = 0.0,
        recomputed: Recomputed = 0,
    ):
        self.decoder = decoder
        self.capacity = capacity
        self.recomputed = recomputed
        # Below the lowest adapter nothing is differentiated, and so nothing is kept.
        adapted = [i for i, layer in enumerate(decoder.layers) if layer.adapted]
        self.lowest = min(adapted, default=len(decoder.layers))
        row_bytes = decoder.config.vocab_size * decoder.activation.size
        self.chunk = min(capacity, max(head_rows, LOGITS_BYTES // row_bytes))
        self.inputs = i = _inputs(
            capacity,
            -(-capacity // self.chunk),
            set(decoder.config.windows),
            differentiated=self.trained > 0,
            dropped=dropout > 0,
        )
        self.noise = None
        if i.document is not None and i.dropout_key is not None:
            self.noise = Dropout(dropout, i.document, i.position, i.dropout_key)
        self.loss = Buffer(
            "loss", (1,), F32, Kind.STATE
        )  # summed over the targets of this update so far
        # Of the last update, to be read together: the sum of the loss that it ended with, and the
        # norm of its gradient before clipping.
        self.outcome = Buffer("outcome", (2,), F32, Kind.STATE)
        self.update_loss = self.outcome.part("update_loss", 0, (1,))
        self.grad_norm = self.outcome.part("grad_norm", 1, (1,))

    @property
    def trained(self) -> int:
        """Layers that are differentiated: the lowest adapted one, and those above it."""
        return len(self.decoder.layers) - self.lowest

    def recomputing(self, recomputed: Recomputed) -> "TrainingPrograms":
        """The same programs over the same buffers, of which other activations are kept."""
        other = copy(self)
        other.recomputed = recomputed
        return other

    def accumulate(self) -> Step:
        """Forward and backward of one pass: adds to the loss and to the gradients."""
        d = self.decoder
        step = Step("accumulate", d.activation, self.inputs.live)
        x, contexts = self._embed(step, self.noise)
        lowest, recomputed = self.lowest, self.recomputed
        entered: list[Buffer] = []
        saved: list[LayerSaved] = []
        for i, layer in enumerate(d.layers):
            entered.append(x)
            with step.scope(f"forward/layer{i}"):
                if i < lowest or recomputed == "layer":
                    if i >= lowest:
                        step.save(x)
                    with step.unsaved():
                        x, kept = layer.forward(step, x, contexts[layer.window])
                else:
                    # The lowest: their backward comes last, when what the layers above them kept is
                    # no longer needed, so gate and up find room then.
                    again = i < lowest + recomputed
                    x, kept = layer.forward(step, x, contexts[layer.window], recompute_mlp=again)
            saved.append(kept)
        dx = self._head(step, x, differentiate=True, wanted=lowest < len(d.layers))
        for i in range(len(d.layers) - 1, lowest - 1, -1):
            layer, kept, at = d.layers[i], saved[i], contexts[d.layers[i].window]
            with step.scope(f"backward/layer{i}"):
                if recomputed == "layer":
                    with step.unsaved():
                        _, kept = layer.forward(step, entered[i], at)
                assert dx is not None
                dx = layer.backward(step, dx, kept, at, wanted=i > lowest)
        return step

    def evaluate(self) -> Step:
        """Forward of one pass without dropout: adds to the loss."""
        step = Step("evaluate", self.decoder.activation, self.inputs.live)
        with step.unsaved():
            x, contexts = self._embed(step, None)
            for i, layer in enumerate(self.decoder.layers):
                with step.scope(f"forward/layer{i}"):
                    x, _ = layer.forward(step, x, contexts[layer.window])
            self._head(step, x, differentiate=False, wanted=False)
        return step

    def update(self) -> Step:
        """One optimizer update from the summed gradients; moves the loss to `update_loss` and
        clears the sums."""
        t = self.decoder.trainable
        step = Step("update", self.decoder.activation)
        step(gradient_norm, t.grad, self.loss, self.inputs.hyper, into=self.grad_norm)
        step(adamw, t.grad, self.grad_norm, self.inputs.hyper, into=(t.param, t.first, t.second))
        if t.compute is not t.param:
            step(cast, t.param, into=t.compute)
        step(cast, self.loss, into=self.update_loss)
        step(zero, into=self.loss)
        step(zero, into=t.grad)
        return step

    def _embed(self, step: Step, noise: Dropout | None) -> tuple[Buffer, dict[int | None, Context]]:
        d, i = self.decoder, self.inputs
        x = step(embedding, i.tokens, d.embedding)
        cos, sin = step(rope_table, i.position, d.inv_freq, scale=d.rope_scale)
        step.save(cos, sin)
        return x, {
            window: Context(cos, sin, start, i.stop, noise) for window, start in i.start.items()
        }

    def _head(self, step: Step, x: Buffer, differentiate: bool, wanted: bool) -> Buffer | None:
        """Loss over the labelled rows only, one chunk of logits at a time, whose gradient is formed
        at once. Returns the gradient at x, if wanted."""
        d, i = self.decoder, self.inputs
        with step.scope("head"):
            labelled = step(gather_rows, x, i.target_row, live=i.live_targets)
            h, rstd = step(
                rms_norm, labelled, d.norm, live=i.live_targets, eps=d.config.rms_norm_eps
            )
            dh = Buffer("head.dh", h.shape, h.dtype, Kind.TEMP)
            for index, start in enumerate(range(0, self.capacity, self.chunk)):
                stop = min(start + self.chunk, self.capacity)
                self._chunk(
                    step,
                    h.rows(start, stop),
                    i.target.rows(start, stop),
                    i.live_chunk.rows(index, index + 1),
                    dh.rows(start, stop) if wanted else None,
                    differentiate,
                )
            if not wanted:
                return None
            dlabelled = step(
                rms_norm_backward, dh, labelled, d.norm, rstd, None, live=i.live_targets
            )
            dx: Buffer = step(gather_rows, dlabelled, i.slot)
            return dx

    def _chunk(
        self,
        step: Step,
        h: Buffer,
        target: Buffer,
        live: Buffer,
        dh: Buffer | None,
        differentiate: bool,
    ) -> None:
        head = self.decoder.head
        (logits,), u = head.forward(step, h, None, live=live)
        if not differentiate:
            step(cross_entropy_loss, logits, target, into=self.loss, live=live)
            return
        step(cross_entropy, target, self.inputs.loss_scale, into=(self.loss, logits), live=live)
        v = head.up_backward(step, (logits,), u, live=live)
        if dh is not None:
            head.input_gradient(step, (logits,), v, None, live=live, into=dh)
        head.down_backward(step, v, h, None, live=live)
