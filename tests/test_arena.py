"""Where buffers lie: no plan overwrites what it still needs, memory is used again, tables that are
only gathered from may stay with the host."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from krnl.dtypes import BF16, F32, I32
from krnl.errors import PlanError
from krnl.ops.pointwise import embedding
from krnl.plan import arena
from krnl.plan.arena import plan
from krnl.plan.buffer import Buffer, FileRegion, Kind
from krnl.plan.lower import Dispatch, Row, Table
from krnl.plan.step import Call, Step
from memory_check import ALIGNMENT, check_lifetimes, check_memory, most_alive
from plan_ops import EVERY, add_up, buffer, combine, project, step, turn


@st.composite
def programs(draw: st.DrawFn) -> list[Step]:
    """Programs over common residents: chains, long-lived temps, groups, views, updates."""
    shared = [buffer(draw(st.integers(1, 40)), 4, kind=kind, name=kind.value) for kind in Kind]
    shared = [b for b in shared if b.kind is not Kind.TEMP]
    totals = buffer(4, kind=Kind.STATE, name="totals")
    steps = []
    for number in range(draw(st.integers(1, 3))):
        s = Step(f"program{number}", draw(st.sampled_from([F32, BF16])), buffer(1, dtype=I32))
        known = list(shared)
        for _ in range(draw(st.integers(1, 14))):
            x = draw(st.sampled_from(known))
            kind = draw(st.sampled_from(["turn", "combine", "project", "add_up", "rows", "into"]))
            if kind == "turn":
                known.append(s(turn, x))
            elif kind == "combine":
                known.append(s(combine, x, None, weight=1.0)[0])
            elif kind == "project":
                sizes = draw(st.lists(st.sampled_from([0, 4, 17]), min_size=1, max_size=3))
                w = tuple(buffer(size, 4, kind=Kind.WEIGHT) for size in sizes)
                y = s(project, x, w, None, None)
                known += [b for b in y if b.shape[1] == 4]
            elif kind == "add_up":
                s(add_up, x, into=totals)
            elif kind == "rows":
                known.append(x.rows(0, draw(st.integers(0, x.shape[0]))))
            else:  # a second life of a temp
                targets = [b for b in known if b.kind is Kind.TEMP and b.shape == x.shape]
                targets = [b for b in targets if b.dtype is s.activation and b.root is not x.root]
                if targets:
                    s(turn, x, into=draw(st.sampled_from(targets)))
        steps.append(s)
    return steps


def scratch(call: Call) -> int:
    return 100 if call.dims.get("n", 0) % 2 else 0


WITH_SCRATCH = Table(
    "test", [Row(o.name, workspace=scratch) for o in (turn, combine, project, add_up)]
)


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(programs(), st.sampled_from([2816, 3000, 4096, 2**40]))
def test_no_program_overwrites_what_it_needs(steps: list[Step], largest_block: int) -> None:
    plans = plan(steps, WITH_SCRATCH, largest_block)
    check_memory(plans, largest_block)
    for p in plans:
        check_lifetimes(p)
    temps = [b for b in plans[0].layout.places if b.kind is Kind.TEMP]
    reserved = plans[0].layout.reserved(Kind.TEMP)
    assert max(most_alive(p) for p in plans) <= reserved
    if largest_block == 2**40:
        assert reserved <= sum(-(-b.nbytes // ALIGNMENT) * ALIGNMENT for b in temps)


def test_memory_is_used_again() -> None:
    """A chain of any length takes two buffers; two programs together take as much as one."""
    steps = []
    for length in (9, 5):
        s, x = step(), buffer(64, 4)
        for _ in range(length):
            x = s(turn, x)
        steps.append(s)
    plans = plan(steps, EVERY)
    assert plans[0].layout.reserved(Kind.TEMP) == 2 * 64 * 4 * 4
    check_memory(plans, 2**62)


def test_blocks_are_filled_one_after_the_other() -> None:
    """Nine buffers of 1024 bytes alive together, in blocks of 4096 that hold four each."""
    s, x = step(), buffer(64, 4)
    kept = [s(turn, x) for _ in range(9)]
    for y in kept:
        s(turn, y, into=x.root)
    (p,) = plan([s], EVERY, 4096)
    temps = [b for b in p.layout.blocks if b.kind is Kind.TEMP]
    assert [b.nbytes for b in temps] == [4096, 4096, 1024]
    check_memory([p], 4096)
    with pytest.raises(PlanError, match=r"takes 1,024 bytes; this device allows 1,000 .*--tokens"):
        plan([s], EVERY, 1000)


def test_weights_in_files_are_mapped_where_they_lie() -> None:
    one, two = Path("one.safetensors"), Path("two.safetensors")
    places = [(one, 72), (two, 8), (one, 2000)]
    weights = [
        Buffer(f"w{i}", (4, 5), BF16, Kind.WEIGHT, file=FileRegion(*place))
        for i, place in enumerate(places)
    ]
    s = step()
    s(project, buffer(3, 5), tuple(weights), None, None)
    (p,) = plan([s], EVERY, 512)
    files = {b.file: b.nbytes for b in p.layout.blocks if b.file}
    assert files == {one: 2040, two: 48}
    for weight, (path, offset) in zip(weights, places, strict=True):
        place = p.layout.place(weight.rows(1, 2))
        assert p.layout.blocks[place.block].file == path and place.offset == offset + 10
    assert p.layout.mapped == 120 and p.layout.reserved(Kind.WEIGHT) == 0


# Tables that may stay in the host's memory.


TABLES = Table("test", [Row(o.name) for o in (turn, project, embedding)])
IDS = buffer(3, dtype=I32, name="ids")


def hosted(*steps: Step, largest_block: int = 2**62, host_tables: bool = True) -> dict[str, int]:
    """Bytes of the buffers that a plan leaves in the host's memory, by name."""
    plans = plan(steps, TABLES, largest_block, host_tables)
    check_memory(plans, largest_block)
    layout = plans[0].layout
    found = {b.name: b.nbytes for b, p in layout.places.items() if layout.blocks[p.block].host}
    assert layout.hosted == sum(found.values())
    held = sum(b.nbytes for b in layout.blocks if b.kind is Kind.WEIGHT and not b.file)
    assert layout.reserved(Kind.WEIGHT) == held - layout.hosted
    return found


def weight(name: str, file: FileRegion | None = None) -> Buffer:
    return Buffer(name, (32, 16), BF16, Kind.WEIGHT, file=file)


def test_a_table_that_is_only_gathered_from_may_stay_with_the_host() -> None:
    s, table, other, w = step(), weight("table"), weight("other"), weight("w")
    x = s(embedding, IDS, table)
    s(embedding, IDS, table.rows(8, 24))
    s(embedding, IDS, other)
    s(project, x, (w,), None, None)
    assert hosted(s) == {"table": 1024, "other": 1024}
    assert hosted(s, largest_block=1024) == {"table": 1024, "other": 1024}
    assert hosted(s, host_tables=False) == {}


def whole(w: Buffer) -> Step:
    s = step()
    s(project, buffer(3, 16), (w,), None, None)
    return s


@pytest.mark.parametrize("view", [lambda w: w, lambda w: w.rows(0, 8)], ids=["all", "part"])
def test_a_table_that_any_call_reads_otherwise_does_not(view: Callable[[Buffer], Buffer]) -> None:
    """In whatever program, before or after."""
    table = weight("table")
    gathers, otherwise = step(), whole(view(table))
    x = gathers(embedding, IDS, table)
    assert hosted(gathers, otherwise) == hosted(otherwise, gathers) == {}
    gathers(project, x, (view(table),), None, None)
    assert hosted(gathers) == {}


def test_only_weights_in_no_file_stay_with_the_host() -> None:
    s = step()
    s(embedding, IDS, weight("mapped", FileRegion(Path("file"), 64)))
    for kind in (Kind.STATE, Kind.INPUT):
        s(embedding, IDS, buffer(32, 16, kind=kind))
    assert hosted(s) == {}


# The checks of memory_check.py and of the planner, each with a fault that it must find.


def test_overlapping_temps_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lifetimes that end one dispatch too early."""

    def too_short(dispatches: Sequence[Dispatch]) -> list[arena.Lifetime]:
        return [
            replace(life, last=max(life.first, life.last - 1)) for life in lifetimes(dispatches)
        ]

    lifetimes = arena.lifetimes
    s, x = step(), buffer(64, 4)
    y = s(turn, s(turn, x))
    s(combine, s(turn, y), y, weight=1.0)
    for faulty, message in ((lifetimes, None), (too_short, "over|is gone")):
        monkeypatch.setattr(arena, "lifetimes", faulty)
        (p,) = plan([s], EVERY)
        if message is None:
            check_memory([p], 2**62)
            check_lifetimes(p)
        else:
            with pytest.raises(AssertionError, match=message):
                check_memory([p], 2**62)
            with pytest.raises(AssertionError):
                check_lifetimes(p)


def test_reading_before_writing_is_refused() -> None:
    s, ghost = step(), buffer(3, 5, kind=Kind.TEMP, name="ghost")
    with s.scope("head"):
        s(turn, ghost)
    with pytest.raises(PlanError, match=r"test: head/turn reads ghost\[3,5\]:f32 before anything"):
        plan([s], EVERY)
    s = step()
    s(add_up, buffer(3, 5), into=buffer(5, kind=Kind.TEMP, name="sum"))
    with pytest.raises(PlanError, match="add_up reads sum"):
        plan([s], EVERY)
