"""Training updates with mlx-lm: its own layers, loss and compiled step. In any environment that has
mlx and mlx-lm, on a checkpoint folder:

    python bench/mlx_model.py --model FOLDER --steps 10

On a CPU its 16-bit products are slower than float32."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx_worker
import numpy as np
import training
from mlx.utils import tree_flatten, tree_map
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.trainer import default_loss
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model, maybe_set_recommended_wired_limit
from mlx_worker import DEVICES, PRECISIONS
from protocol import serve

PADDED_TO = 32  # inputs of a row, by mlx_lm.tuner.trainer.iterate_batches

options = training.arguments(__doc__.splitlines()[0], tuple(PRECISIONS), DEVICES).parse_args()
mlx_worker.use_device(options.device)
maybe_set_recommended_wired_limit()  # as mlx-lm's own training does
base = PRECISIONS[options.precision]
trained = mx.float32 if options.adapters == "fp32" else base
model, _ = load_model(Path(options.model))
model.set_dtype(base)
model.freeze()
scale = {"rank": training.RANK, "scale": training.ALPHA / training.RANK, "dropout": 0.0}
linear_to_lora_layers(model, len(model.layers), scale)
for path, layer in model.named_modules():
    if isinstance(layer, LoRALinear):
        a, b = training.adapter(path, layer.lora_b.shape[1], layer.lora_a.shape[0])
        layer.lora_a, layer.lora_b = (mx.array(m.T).astype(trained) for m in (a, b))
model.train()
optimizer = optim.AdamW(
    training.RATE, list(training.BETAS), training.EPS, training.WEIGHT_DECAY, bias_correction=True
)
rows = training.batch(model.args.vocab_size, options.rows, options.length, options.chat)
# As MLX-LM pads them. The last column is no input: on CUDA the backward pass of attention is fused
# only for multiples of 128.
longest = max(len(ids) for ids, _ in rows)
ids = np.zeros((len(rows), 1 + PADDED_TO * math.ceil(longest / PADDED_TO)), np.int32)
for i, (row, _) in enumerate(rows):
    ids[i, : len(row)] = row
# The loss counts what is from the first to the last of these, both included.
reaches = [[int(np.argmax(labels != -100)), len(row) - 1] for row, labels in rows]
lengths, tokens = mx.array(reaches), mx.array(ids)
mlx_worker.settle(model.parameters(), lengths, tokens)
differentiate = nn.value_and_grad(model, default_loss)
state = [model.state, optimizer.state, mx.random.state]


def clipped(gradients: dict[str, Any]) -> tuple[dict[str, Any], mx.array]:
    """And their norm before. mlx.optimizers.clip_grad_norm adds squares up in the gradients' own
    type, and of 16 bits it loses what is small."""
    squares = [g.astype(mx.float32).square().sum() for _, g in tree_flatten(gradients)]
    norm = mx.sqrt(sum(squares))
    share = mx.minimum(training.CLIP / (norm + 1e-6), 1.0)
    return tree_map(lambda g: (g * share).astype(g.dtype), gradients), norm


@partial(mx.compile, inputs=state, outputs=state)
def update(tokens: mx.array, lengths: mx.array) -> tuple[mx.array, mx.array]:
    (loss, _), gradients = differentiate(model, tokens, lengths)
    gradients, norm = clipped(gradients)
    optimizer.update(model, gradients)
    return loss, norm


def step() -> dict[str, float]:
    loss, norm = update(tokens, lengths)
    mx.eval(state, loss, norm)
    return {"loss": float(loss), "norm": float(norm)}


serve(
    options,
    step,
    ("mlx", "mlx-lm"),
    mlx_worker.threads,
    lambda: mlx_worker.peak(options.device),
)
