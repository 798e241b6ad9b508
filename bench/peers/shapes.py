"""Batches of random tokens, the same for every tool. The checkpoints they are for are made by
krnl.bench.shapes."""

import numpy as np


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
