"""What a model is trained on and how, the same for every tool: rows of random tokens, the adapters'
first values, AdamW. KRNL draws and sets the same (krnl.bench.trainer)."""

import argparse

import numpy as np
from protocol import parser

RANK, ALPHA = 16, 32.0  # on all linear layers but the head
RATE, BETAS, EPS, WEIGHT_DECAY = 1e-4, (0.9, 0.999), 1e-8, 0.0  # AdamW, bias corrected
CLIP = 1.0  # the norm of the gradient


def arguments(
    description: str, precisions: tuple[str, ...], devices: tuple[str, ...]
) -> argparse.ArgumentParser:
    """The first precision and device are what is taken if none is given."""
    made = parser(description)
    made.add_argument("--model", required=True, help="folder of the checkpoint")
    made.add_argument("--rows", type=int, default=4)
    made.add_argument("--length", type=int, default=256)
    made.add_argument("--chat", action="store_true", help="uneven lengths, a third labelled")
    made.add_argument("--precision", choices=precisions, default=precisions[0])
    made.add_argument(
        "--adapters", choices=("16", "fp32"), default="fp32", help="16: as the base, where it is 16"
    )
    made.add_argument("--device", choices=devices, default=devices[0])
    return made


def batch(
    vocab_size: int, rows: int, length: int, chat: bool
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows of (ids, labels); labels are -100 where nothing is to be learnt. `chat`: lengths vary
    from a quarter of `length` to all of it, and the last third of a row is what is trained."""
    random = np.random.default_rng(1)
    lengths = random.integers(length // 4, length + 1, rows) if chat else np.full(rows, length)
    made = []
    for count in lengths:
        ids = random.integers(0, vocab_size, count)
        labels = ids.copy()
        if chat:
            labels[: count - count // 3] = -100
        made.append((ids, labels))
    return made


def adapter(path: str, out_features: int, in_features: int) -> tuple[np.ndarray, np.ndarray]:
    """A [rank, in] and B [out, rank] of the layer at `path`, e.g. model.layers.0.mlp.up_proj. B is
    not zero, or the gradients of A would be."""
    random = np.random.default_rng([0, *path.encode()])
    a = random.standard_normal((RANK, in_features), np.float32) / np.float32(in_features**0.5)
    b = np.float32(0.02) * random.standard_normal((out_features, RANK), np.float32)
    return a, b
