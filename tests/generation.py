"""Generators of tiny models, prompts of random tokens, and the answers as lists of tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from krnl.backends.base import Backend
from krnl.dtypes import F32
from krnl.generator import Generator, Sampling
from krnl.model import Model
from tiny import ALL, VOCABULARY, make_modules

NO_END: frozenset[int] = frozenset()
GREEDY = Sampling()


def sequences(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng([seed, 29])
    return [rng.integers(0, VOCABULARY, n).astype(np.int32) for n in lengths]


def answers(
    generator: Generator, prompts: Sequence[np.ndarray], longest: int, sampling: Sampling = GREEDY,
    end_ids: frozenset[int] = NO_END,
) -> list[list[int]]:  # fmt: skip
    """The ids of every answer."""
    found: list[list[int]] = [[] for _ in prompts]
    for token in generator.stream(prompts, longest, end_ids, sampling):
        found[token.prompt].append(token.id)
    return found


def make(model: Model, backend: Backend, context: int, slots: int = 1, **more: Any) -> Generator:
    adapter = ALL, make_modules(model, ALL)
    return Generator(model, adapter, backend, more.pop("activation", F32), context, slots, **more)
