"""Training steps with mlx-lm: its own layers, loss and compiled step."""

from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx_lm.tuner.trainer import default_loss
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model
from protocol import model_arguments, serve
from shapes import batch

PRECISIONS = {"fp32": mx.float32, "fp16": mx.float16, "bf16": mx.bfloat16}

parser = model_arguments(__doc__)
# On a CPU its 16-bit products are slower than float32.
parser.add_argument("--precision", choices=tuple(PRECISIONS), default="fp32")
parser.add_argument("--adapters", choices=("16", "fp32"), default="fp32")
parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
options = parser.parse_args()
mx.set_default_device(mx.gpu if options.device == "gpu" else mx.cpu)
model, _ = load_model(Path(options.model))
model.set_dtype(PRECISIONS[options.precision])
model.freeze()
linear_to_lora_layers(model, len(model.layers), {"rank": 16, "scale": 2.0, "dropout": 0.0})
if options.adapters == "16":
    model.set_dtype(PRECISIONS[options.precision])
model.train()
optimizer = optim.AdamW(learning_rate=1e-4)
rows = batch(model.args.vocab_size, options.rows, options.length, options.chat)
longest = max(len(ids) for ids, _ in rows)
ids = np.zeros((len(rows), longest), np.int32)
for i, (row, _) in enumerate(rows):
    ids[i, : len(row)] = row
first = [int(np.argmax(labels != -100)) for _, labels in rows]
lengths = mx.array([[start, len(row)] for start, (row, _) in zip(first, rows, strict=True)])
tokens = mx.array(ids)
differentiate = nn.value_and_grad(model, default_loss)
state = [model.state, optimizer.state, mx.random.state]


@partial(mx.compile, inputs=state, outputs=state)
def update(tokens: mx.array, lengths: mx.array) -> mx.array:
    (loss, _), gradients = differentiate(model, tokens, lengths)
    optimizer.update(model, gradients)
    return loss


def step() -> float:
    loss = update(tokens, lengths)
    mx.eval(state, loss)
    return float(loss)


serve(options, step)
