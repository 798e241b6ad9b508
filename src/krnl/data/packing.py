"""Which rows make an update, and how they lie in passes.

An update is `batch_size` rows. `pack` lays them end to end into as few passes as first-fit
decreasing finds, each of a fixed capacity of tokens. There is no padding: what is not live is not
computed. Documents cannot see one another, since `doc_start` tells attention where each token's own
document begins, and positions restart there.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from krnl.data.examples import Example
from krnl.errors import ConfigError, DataError

Int32s = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Pass:
    """Documents packed end to end; every array is int32, n = live tokens, t = target tokens.

    tokens [n]; position [n], counted from 0 in each document; document [n], which of the packed
    examples the token is of; doc_start [n], the row where the token's document begins.
    target_row [t]: the rows whose next token is a target, ascending; target [t]: that next token.
    """

    tokens: Int32s
    position: Int32s
    document: Int32s
    doc_start: Int32s
    target_row: Int32s
    target: Int32s
    capacity: int

    @property
    def live(self) -> int:
        """Number of tokens in this pass."""
        return len(self.tokens)


def pack(examples: Sequence[Example], capacity: int) -> list[Pass]:
    """Distribute whole examples over passes of at most `capacity` tokens.

    First-fit decreasing by length, equal lengths in the given order; within a pass documents keep
    the given order. Raises DataError if an example is longer than `capacity`: none is ever split.
    """
    lengths = [len(example.ids) for example in examples]
    for example, length in zip(examples, lengths, strict=True):
        if length > capacity:
            raise DataError(
                f"The row at line {example.line} has {length:,} tokens, but a pass holds "
                f"{capacity:,}. Raise --tokens to {length} or lower --max-length to {capacity}."
            )
    chosen: list[list[int]] = []
    free: list[int] = []
    for row in sorted(range(len(examples)), key=lambda row: -lengths[row]):
        place = next((i for i, room in enumerate(free) if room >= lengths[row]), len(free))
        if place == len(free):
            chosen.append([])
            free.append(capacity)
        chosen[place].append(row)
        free[place] -= lengths[row]
    return [_lay_out(examples, sorted(rows), capacity) for rows in chosen]


def _lay_out(packed: Sequence[Example], rows: Sequence[int], capacity: int) -> Pass:
    examples = [packed[row] for row in rows]
    lengths = np.array([len(example.ids) for example in examples])
    starts = np.cumsum(lengths) - lengths
    tokens = np.concatenate([example.ids for example in examples]).astype(np.int32)
    doc_start = np.repeat(starts, lengths).astype(np.int32)
    # Token i + 1 is predicted at row i. A document's first token is nobody's next token.
    target_row = np.concatenate(
        [start + np.flatnonzero(e.targets[1:]) for start, e in zip(starts, examples, strict=True)]
    ).astype(np.int32)
    return Pass(
        tokens=tokens,
        position=np.arange(len(tokens), dtype=np.int32) - doc_start,
        document=np.repeat(rows, lengths).astype(np.int32),
        doc_start=doc_start,
        target_row=target_row,
        target=tokens[target_row + 1],
        capacity=capacity,
    )


def live_share(passes: Iterable[Pass]) -> float:
    """Live tokens over capacity, between 0 and 1, of all `passes` together; 0 without passes."""
    counts = [(p.live, p.capacity) for p in passes]
    return sum(live for live, _ in counts) / max(1, sum(capacity for _, capacity in counts))


class Order:
    """The rows of every update: `order[u]` is an int64 array of row indices; len() counts updates.

    A pure function of its arguments and `u`, so a resumed run continues where it stopped. Every
    epoch visits each row once; its last update holds what is left over.
    """

    def __init__(self, count: int, batch_size: int, updates: int, shuffle: bool, seed: int) -> None:
        """See `batches`, which checks the arguments."""
        self.per_epoch = -(-count // batch_size)
        self._count = count
        self._batch_size = batch_size
        self._updates = updates
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = -1
        self._rows: NDArray[np.int64] = np.arange(count, dtype=np.int64)

    def __len__(self) -> int:
        return self._updates

    def __getitem__(self, update: int) -> NDArray[np.int64]:
        if not 0 <= update < self._updates:
            raise IndexError(f"update {update} of {self._updates}")
        epoch, batch = divmod(update, self.per_epoch)
        if self._shuffle and epoch != self._epoch:
            self._epoch, self._rows = epoch, self._permutation(epoch)
        start = batch * self._batch_size
        return np.array(self._rows[start : start + self._batch_size])

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return (self[update] for update in range(self._updates))

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        # Sorted Philox words, not Generator.permutation, which other NumPy versions may compute
        # differently.
        generator = np.random.Philox(key=np.array([self._seed, epoch], np.uint64))
        rows: NDArray[np.int64] = np.argsort(generator.random_raw(self._count), kind="stable")
        return rows


def batches(
    count: int,
    batch_size: int,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
) -> Order:
    """The order in which `count` rows are visited, for a number of `epochs` or updates (`steps`).

    Raises ConfigError for a number that makes no sense, DataError if there are no rows.
    """
    if count < 1:
        raise DataError("There are no rows to train on.")
    if (epochs is None) == (steps is None):
        raise ConfigError(
            "Give either `epochs` or `steps`: each alone decides how long training lasts."
        )
    for name, value in (("batch_size", batch_size), ("epochs", epochs), ("steps", steps)):
        if value is not None and value < 1:
            raise ConfigError(f"`{name}` must be at least 1, not {value}.")
    if not 0 <= seed < 2**64:
        raise ConfigError(f"`seed` must be between 0 and 2**64 - 1, not {seed}.")
    updates = steps if steps is not None else (epochs or 0) * -(-count // batch_size)
    return Order(count, batch_size, updates, shuffle, seed)


def random_pass(vocab_size: int, tokens: int, documents: int, labelled: float) -> Pass:
    """A full pass of random tokens, the same each time, in `documents` equal rows; the share
    `labelled` of them are targets. ConfigError for a number that makes no sense."""
    if not 1 <= documents <= tokens // 2:
        raise ConfigError(
            f"documents is {documents}; it must be from 1 to half of the {tokens} tokens."
        )
    if not 0 <= labelled <= 1:
        raise ConfigError(f"labelled is {labelled:g}; it must be from 0 to 1.")
    random = np.random.default_rng(0)
    edges = np.linspace(0, tokens, documents + 1).astype(np.int32)
    lengths = np.diff(edges)
    start = np.repeat(edges[:-1], lengths)
    ids = random.integers(0, vocab_size, tokens).astype(np.int32)
    chosen = random.random(tokens - 1) < labelled
    rows = np.flatnonzero((start[1:] == start[:-1]) & chosen).astype(np.int32)
    return Pass(
        tokens=ids,
        position=np.arange(tokens, dtype=np.int32) - start,
        document=np.repeat(np.arange(documents, dtype=np.int32), lengths),
        doc_start=start,
        target_row=rows,
        target=ids[rows + 1],
        capacity=tokens,
    )
