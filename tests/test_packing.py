"""Packing and order: every row once, nothing overlaps, targets are the next tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from krnl.data.examples import Example
from krnl.data.packing import batches, live_share, pack
from krnl.errors import ConfigError, DataError

CAPACITY = 12


def example(ids: list[int], targets: list[bool], line: int = 1) -> Example:
    return Example(np.array(ids, np.int32), np.array(targets, np.bool_), line, cut=False)


@st.composite
def examples(draw: st.DrawFn) -> list[Example]:
    """Examples whose tokens are all different, so that each can be recognised."""
    lengths = draw(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=20))
    made, token = [], 0
    for line, length in enumerate(lengths, 1):
        targets = [False, *draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))]
        made.append(example(list(range(token, token + length)), targets, line))
        token += length
    return made


@given(examples())
def test_every_row_is_in_one_pass_whole(rows: list[Example]):
    passes = pack(rows, CAPACITY)
    found = []
    for one in passes:
        assert 0 < one.live <= one.capacity == CAPACITY
        starts = np.flatnonzero(one.position == 0)
        assert len(np.unique(one.document)) == len(starts)
        for document in np.split(np.arange(one.live), starts[1:]):
            found.append(one.tokens[document].tolist())
            (row,) = set(one.document[document].tolist())
            assert found[-1] == rows[row].ids.tolist()
            assert (one.doc_start[document] == document[0]).all()
            assert one.position[document].tolist() == list(range(len(document)))
    assert sorted(found) == [row.ids.tolist() for row in rows]


@given(examples())
def test_targets_are_the_next_tokens_of_the_same_document(rows: list[Example]):
    passes = pack(rows, CAPACITY)
    trained = []
    for one in passes:
        assert (np.diff(one.target_row) > 0).all()
        assert (one.tokens[one.target_row + 1] == one.target).all()
        assert (one.doc_start[one.target_row + 1] == one.doc_start[one.target_row]).all()
        trained += one.target.tolist()
        for array in (one.tokens, one.position, one.doc_start, one.document, one.target):
            assert array.dtype == np.int32
    assert sorted(trained) == [int(t) for row in rows for t in row.ids[row.targets]]


@given(examples())
def test_first_fit_decreasing_leaves_no_two_half_empty_passes(rows: list[Example]):
    passes = pack(rows, CAPACITY)
    assert sum(2 * one.live <= CAPACITY for one in passes) <= 1
    again = pack(rows, CAPACITY)
    assert [p.tokens.tolist() for p in passes] == [p.tokens.tolist() for p in again]
    share = sum(len(row) for row in rows) / (CAPACITY * len(passes))
    assert live_share(passes) == share


def test_long_rows_are_placed_first():
    rows = [example([0] * length, [False] * length) for length in (3, 3, 7, 7)]
    assert [one.live for one in pack(rows, 10)] == [10, 10]


def test_by_hand():
    rows = [example([1, 2], [False, True]), example([3, 4, 5], [False, False, True])]
    (one,) = pack(rows, 5)
    assert one.tokens.tolist() == [1, 2, 3, 4, 5]
    assert one.position.tolist() == [0, 1, 0, 1, 2]
    assert one.doc_start.tolist() == [0, 0, 2, 2, 2]
    assert one.target_row.tolist() == [0, 3]
    assert one.target.tolist() == [2, 5]
    assert pack([], 5) == []
    assert live_share([]) == 0


def test_a_row_that_does_not_fit_is_named():
    rows = [example([1], [False], line=1), example([1, 2, 3], [False] * 3, line=8)]
    with pytest.raises(DataError, match=r"line 8 has 3 tokens.*--tokens to 3.*--max-length to 2"):
        pack(rows, 2)


@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 4), st.booleans(), st.integers(0))
def test_every_epoch_visits_every_row_once(count, batch_size, epochs, shuffle, seed):
    seed %= 2**64
    order = batches(count, batch_size, epochs=epochs, shuffle=shuffle, seed=seed)
    updates = list(order)
    per_epoch = -(-count // batch_size)
    assert len(order) == len(updates) == epochs * per_epoch
    for epoch in range(epochs):
        part = updates[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert [len(rows) for rows in part[:-1]] == [batch_size] * (per_epoch - 1)
        visited = np.concatenate(part).tolist()
        assert sorted(visited) == list(range(count))
        if not shuffle:
            assert visited == list(range(count))


def test_order_can_be_entered_anywhere():
    order = batches(100, 7, steps=50, seed=3)
    whole = list(order)
    fresh = batches(100, 7, steps=50, seed=3)
    for update in (49, 0, 31, 14, 15):
        assert (fresh[update] == whole[update]).all()
    assert (batches(100, 7, epochs=9, seed=3)[40] == whole[40]).all()
    with pytest.raises(IndexError):
        order[50]


def test_order_is_the_same_on_every_machine():
    """Written down once: a change would make runs differ from those of earlier versions."""
    first, second = (rows.tolist() for rows in batches(8, 8, epochs=2, seed=1))
    assert first == [3, 5, 2, 7, 0, 6, 1, 4]
    assert second == [0, 6, 5, 3, 4, 7, 2, 1]
    assert batches(8, 8, epochs=2, seed=2)[0].tolist() != first


def test_rows_handed_out_can_be_changed():
    order = batches(4, 4, epochs=1, shuffle=False)
    order[0][:] = 0
    assert order[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"batch_size": 0, "epochs": 1}, "batch_size"),
        ({"batch_size": 1, "epochs": 0}, "epochs"),
        ({"batch_size": 1, "steps": 0}, "steps"),
        ({"batch_size": 1}, "steps"),
        ({"batch_size": 1, "steps": 1, "epochs": 1}, "steps"),
        ({"batch_size": 1, "steps": 1, "seed": -1}, "seed"),
    ],
)
def test_senseless_settings_name_the_field(settings: dict[str, int], field: str):
    with pytest.raises(ConfigError, match=field):
        batches(3, **settings)


def test_no_rows():
    with pytest.raises(DataError, match="no rows"):
        batches(0, 4, epochs=1)
