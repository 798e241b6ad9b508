"""Which launches of a program may run beside the one before them; what that means for kernels is
told in common.h, at PreviousLaunch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from krnl.kernels.launch import Launch
from krnl.plan.arena import Layout, Plan
from krnl.plan.buffer import Buffer
from krnl.plan.lower import Dispatch

Stretch = tuple[int, int, int]  # a block of the layout, and bytes of it: from where, to where


@dataclass(frozen=True)
class _Touched:
    """The memory that a dispatch reads and writes. Buffers of other names may lie in it too."""

    reads: list[Stretch]
    writes: list[Stretch]

    def conflicts(self, before: "_Touched") -> bool:
        """Whether one of both writes what the other touches."""
        return (
            _meet(self.reads, before.writes)
            or _meet(self.writes, before.writes)
            or _meet(self.writes, before.reads)
        )


def beside(plan: Plan, made: Sequence[Sequence[Launch]]) -> list[list[bool]]:
    """Of each dispatch's launches, `made` of it in this order, whether they may run while the
    launch before them does. Nothing runs any more by then that comes earlier: a dispatch is
    compared with the last one before it that launches anything."""
    found: list[list[bool]] = []
    before: _Touched | None = None
    for dispatch, launches in zip(plan.dispatches, made, strict=True):
        touched = _touched(dispatch, plan.layout)
        first = before is not None and not touched.conflicts(before)
        found.append([x.independent if i else first for i, x in enumerate(launches)])
        if launches:
            before = touched
    return found


def _touched(dispatch: Dispatch, layout: Layout) -> _Touched:
    call, scratch = dispatch.call, dispatch.workspace
    writes = [*call.writes(), *([scratch] if scratch else [])]
    return _Touched(_stretches(call.reads(), layout), _stretches(writes, layout))


def _stretches(buffers: Iterable[Buffer], layout: Layout) -> list[Stretch]:
    places = [(layout.place(buffer), buffer.nbytes) for buffer in buffers if buffer.nbytes]
    return [(place.block, place.offset, place.offset + nbytes) for place, nbytes in places]


def _meet(some: Sequence[Stretch], others: Sequence[Stretch]) -> bool:
    return any(
        block == other and start < its_end and its_start < end
        for block, start, end in some
        for other, its_start, its_end in others
    )
