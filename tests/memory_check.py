"""A proof that plans overwrite nothing that they still need. It shares nothing with plan/arena.py,
but for what a lifetime is: it walks the dispatches as a device would."""

from collections.abc import Iterator, Sequence

import numpy as np

from krnl.plan import arena
from krnl.plan.arena import Layout, Plan
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.lower import Dispatch
from krnl.plan.step import members

ALIGNMENT = 64  # what kernels may rely on


def arguments(dispatch: Dispatch) -> Iterator[tuple[Buffer, bool, bool]]:
    """Every buffer of a dispatch: whether it is read, whether it is written."""
    call = dispatch.call
    for argument in call.inputs:
        for b in members(argument):
            yield b, True, False
    for parameter, argument in zip(call.op.outputs, call.outputs, strict=True):
        for b in members(argument):
            yield b, parameter.updated, True
    if dispatch.workspace is not None:
        yield dispatch.workspace, False, True


class Owners:
    """For every byte of every block, which root buffer wrote it last. 0 is nobody."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self.numbers = {b: i for i, b in enumerate(layout.places, 1)}
        self.blocks = [np.zeros(block.nbytes, np.int32) for block in layout.blocks]
        for b in layout.places:
            if b.kind is not Kind.TEMP:
                assert (self.bytes(b) == 0).all(), f"{b} lies on another buffer"
                self.bytes(b)[:] = self.numbers[b]

    def bytes(self, b: Buffer) -> np.ndarray:
        if not b.nbytes:
            return np.zeros(0, np.int32)
        place = self.layout.place(b)
        found = self.blocks[place.block][place.offset : place.offset + b.nbytes]
        assert len(found) == b.nbytes, f"{b} reaches beyond its block"
        return found

    def replay(self, dispatches: Sequence[Dispatch]) -> None:
        for dispatch in dispatches:
            used = list(arguments(dispatch))
            for b, reads, _ in used:
                if reads:
                    own = self.bytes(b) == self.numbers[b.root]
                    assert own.all(), f"{dispatch.call.label} reads {b}, which is gone"
            self.check_apart(dispatch, used)
            for b, _, writes in used:
                if writes:
                    self.bytes(b)[:] = self.numbers[b.root]

    def check_apart(self, dispatch: Dispatch, used: list[tuple[Buffer, bool, bool]]) -> None:
        """What a kernel writes overlaps nothing else that it touches."""
        for i, (b, _, writes) in enumerate(used):
            for j, (other, _, _) in enumerate(used):
                if writes and i != j and b.nbytes and other.nbytes:
                    one, two = self.layout.place(b), self.layout.place(other)
                    apart = (
                        one.block != two.block
                        or one.offset + b.nbytes <= two.offset
                        or two.offset + other.nbytes <= one.offset
                    )
                    assert apart, f"{dispatch.call.label} writes {b} over {other}"


def check_memory(plans: Sequence[Plan], largest_block: int) -> None:
    layout = plans[0].layout
    for p in plans:
        assert p.layout is layout
    for block in layout.blocks:
        assert block.file or 0 < block.nbytes <= largest_block
    for b, place in layout.places.items():
        assert b.root is b
        if b.nbytes:
            assert layout.blocks[place.block].kind is b.kind
        assert b.file or place.offset % ALIGNMENT == 0
    owners = Owners(layout)
    for _ in range(2):  # in any order, and again
        for p in plans:
            owners.replay(p.dispatches)
        for p in plans[::-1]:
            owners.replay(p.dispatches)


def check_lifetimes(p: Plan) -> None:
    """Temps that are alive at one time lie apart, pair by pair."""
    touched: dict[Buffer, list[int]] = {}
    for time, dispatch in enumerate(p.dispatches):
        for b, _, _ in arguments(dispatch):
            if b.kind is Kind.TEMP and b.nbytes:
                touched.setdefault(b.root, []).append(time)
    roots = list(touched)
    first, last = (np.array([f(touched[b]) for b in roots]) for f in (min, max))
    places = [p.layout.places[b] for b in roots]
    block = np.array([place.block for place in places])
    start = np.array([place.offset for place in places])
    stop = start + [b.nbytes for b in roots]
    together = (first[:, None] <= last) & (first <= last[:, None])
    overlap = (block[:, None] == block) & (start[:, None] < stop) & (start < stop[:, None])
    np.fill_diagonal(overlap, False)
    assert not (together & overlap).any()


def most_alive(p: Plan) -> int:
    """Bytes of temps alive at once: no arena can be smaller."""
    change = np.zeros(len(p.dispatches) + 1, np.int64)
    for life in arena.lifetimes(p.dispatches):
        change[life.first] += life.buffer.nbytes
        change[life.last + 1] -= life.buffer.nbytes
    return int(change.cumsum().max(initial=0))
