"""From signatures to an arena: what the planner refuses, and a proof that no plan overwrites what
it still needs. The emitted lists of tiny models are kept as text in tests/golden;
KRNL_UPDATE_GOLDEN=1 writes them anew."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from krnl.backends.cpu import CpuBackend
from krnl.backends.cuda import ON_PAPER
from krnl.dtypes import BF16, F32, I32, DType
from krnl.errors import PlanError
from krnl.formats.peft import AdapterConfig
from krnl.kernels.cpu.table import TABLE
from krnl.model import Model
from krnl.models.training_programs import Recomputed, TrainingPrograms
from krnl.ops.pointwise import embedding
from krnl.plan import arena
from krnl.plan.arena import Layout, Plan, check_gradients, plan
from krnl.plan.buffer import Buffer, FileRegion, Kind
from krnl.plan.lower import Dispatch, Row, Table
from krnl.plan.op import op
from krnl.plan.step import Argument, Call, Step, members
from tiny import ALL, plan_model, write_model

GOLDEN = Path(__file__).parent / "golden"
ALIGNMENT = 64  # what kernels may rely on


# Ops to plan with. Nothing here runs them.


@op("x[n,c] -> y[n,c]")
def turn(x):
    return x


@op("x[n,c] y[n,c]? live -> z[n,c] total[n]:f32", flops=lambda d: d["n"] * d["c"])
def combine(x, y, *, weight):
    return x, x


@op("x[n,c] w*[o,c] bias*[o]:f32? residual[n,o]? -> y*[n,o]")
def project(x, w, bias, residual):
    return w


@op("x[n,c] -> +total[c]:f32")
def add_up(x, total):
    return total


@op("-> y[2]:i32")
def pair():
    return 0


EVERY = Table("test", [Row(o.name) for o in (turn, combine, project, add_up, pair)])


def buffer(*shape: int, dtype: DType = F32, kind: Kind = Kind.INPUT, name: str = "b") -> Buffer:
    return Buffer(name, shape, dtype, kind)


def step(activation: DType = F32) -> Step:
    return Step("test", activation, buffer(1, dtype=I32, name="live"))


# The language of signatures.


def test_a_signature_says_everything() -> None:
    x, y, live = combine.inputs
    assert (x.name, x.letters, x.dtype, x.optional) == ("x", ("n", "c"), None, False)
    assert y.optional and not y.group
    assert (live.name, live.letters, live.dtype) == ("live", ("1",), I32)
    assert combine.has_live and not turn.has_live
    assert combine.attributes == ("weight",)
    assert [p.dtype for p in combine.outputs] == [None, F32]
    assert [p.group for p in project.inputs] == [False, True, True, False]
    assert project.inputs[2].optional and project.inputs[2].dtype is F32
    assert add_up.outputs[0].updated and not add_up.inputs[0].updated


@pytest.mark.parametrize(
    "word", ["x", "x[n", "x[]", "x[n,]", "x[n]:", "*x[n]", "x[n]?:f32", "x[n]f32", "x+[n]", "[n]"]
)
def test_what_is_not_a_parameter_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="is not a parameter"):
        op(f"{word} -> y[n]")(lambda x: x)


def test_other_malformed_signatures_are_refused() -> None:
    with pytest.raises(KeyError, match="f99"):
        op("x[n]:f99 -> y[n]")(lambda x: x)
    for signature in ("x[n] y[n]", "x[n] -> y[n] -> z[n]"):
        with pytest.raises(ValueError):
            op(signature)(lambda x: x)


# What a step makes of a call, and what it refuses.


def test_outputs_take_shape_and_type_from_the_signature() -> None:
    s = step(BF16)
    z, total = s(combine, buffer(3, 5), None, weight=1.0)
    assert (z.shape, z.dtype, z.kind) == ((3, 5), BF16, Kind.TEMP)
    assert (total.shape, total.dtype) == ((3,), F32)
    (call,) = s.calls
    assert (call.dims["n"], call.dims["c"]) == (3, 5)
    assert call.flops == 15 and call.inputs[2] is s.live
    assert s(pair).shape == (2,)


def test_groups_differ_from_member_to_member() -> None:
    s = step()
    w = (buffer(4, 5), buffer(0, 5), buffer(7, 5))
    y = s(project, buffer(3, 5), w, None, None)
    assert [b.shape for b in y] == [(3, 4), (3, 0), (3, 7)]
    assert s.calls[0].group == 3 and s.calls[0].dims["o"] == (4, 0, 7)
    bias = tuple(buffer(o) for o in (4, 0, 7))
    assert len(s(project, buffer(3, 5), w, bias, None)) == 3
    (alone,) = s(project, buffer(3, 5), w[:1], None, buffer(3, 4))
    assert alone.shape == (3, 4)


def test_scopes_label_calls() -> None:
    s = step()
    with s.scope("forward"), s.scope("layer0"):
        y = s(turn, buffer(2, 2))
    s(turn, y)
    assert [call.label for call in s.calls] == ["forward/layer0/turn", "turn"]
    assert y.name == "forward/layer0/turn.y"


X, W = buffer(3, 5, name="x"), (buffer(4, 5), buffer(7, 5))
REFUSALS: dict[str, tuple[str, Callable[[Step], Any]]] = {
    "too few inputs": ("1 inputs were given", lambda s: s(project, X)),
    "too many inputs": ("2 inputs were given", lambda s: s(turn, X, X)),
    "missing attribute": (
        r"attributes are \['weight'\], got \[\]",
        lambda s: s(combine, X, None),
    ),
    "unknown attribute": ("got", lambda s: s(turn, X, weight=1.0)),
    "other size": ("c is 5, but .* makes it 6", lambda s: s(combine, X, buffer(3, 6), weight=1.0)),
    "other rank": ("'x' is", lambda s: s(turn, buffer(3, 5, 1))),
    "integer for a float": ("'x' is", lambda s: s(turn, buffer(3, 5, dtype=I32))),
    "other float type": (
        "'bias' is .*f32, got",
        lambda s: s(project, X, W, (buffer(4, dtype=BF16), buffer(7)), None),
    ),
    "required input left out": ("'x' wants a buffer, got None", lambda s: s(turn, None)),
    "group for a buffer": ("'x' wants a buffer", lambda s: s(turn, (X,))),
    "buffer for a group": ("'w' wants a group", lambda s: s(project, X, W[0], None, None)),
    "groups of other lengths": (
        r"o is \(4, 7\), but 'bias' makes it \(4,\)",
        lambda s: s(project, X, W, (buffer(4),), None),
    ),
    "member of other width": (
        "c is 5, but",
        lambda s: s(project, X, (W[0], buffer(7, 6)), None, None),
    ),
    "residual for two members": (
        "makes it",
        lambda s: s(project, X, W, None, buffer(3, 4)),
    ),
    "live of two": (
        "'live' must have size 1",
        lambda s: s(combine, X, None, live=buffer(2, dtype=I32), weight=1.0),
    ),
    "live of floats": ("'live' is", lambda s: s(combine, X, None, live=buffer(1), weight=1.0)),
    "no live anywhere": (
        "'live' wants a buffer",
        lambda s: Step("bare", F32)(combine, X, None, weight=1.0),
    ),
    "updated output not given": (r"must be given with into=", lambda s: s(add_up, X)),
    "target of other size": ("c is 5, but", lambda s: s(add_up, X, into=buffer(4))),
    "target of other type": ("'total' is", lambda s: s(add_up, X, into=buffer(5, dtype=BF16))),
    "target group for a buffer": ("'into' for 'total'", lambda s: s(add_up, X, into=(buffer(5),))),
    "target buffer for a group": ("'into' for 'y'", lambda s: s(project, X, W, None, None, into=X)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_calls_that_do_not_fit_are_refused(name: str) -> None:
    message, emit = REFUSALS[name]
    s = step()
    with s.scope("forward"), pytest.raises(PlanError, match=message) as error:
        emit(s)
    assert s.calls == []
    if name != "no live anywhere":
        assert str(error.value).startswith("forward/")


def test_saved_buffers_are_read_only() -> None:
    s = step()
    y = s(turn, buffer(3, 5))
    s(turn, buffer(3, 5), into=y)
    s.save(y.rows(0, 1), None)
    for target in (y, y.part("view", 0, (3, 5))):
        with pytest.raises(PlanError, match=r"turn would overwrite .* still needs"):
            s(turn, buffer(3, 5), into=target)
    with s.unsaved():
        z = s(turn, y)
        s.save(z)
    s(turn, y, into=z)
    assert s.saved == {y}


def test_views_stay_inside() -> None:
    b = buffer(4, 6)
    assert (b.rows(1, 3).start, b.rows(1, 3).shape, b.rows(1, 3).root) == (6, (2, 6), b)
    assert b.rows(1, 3).rows(1, 2).start == 12
    assert b.heads(3).shape == (4, 3, 2) and b.heads(3).flat().shape == (4, 6)
    for start, shape in ((-1, (1,)), (20, (5,)), (0, (25,))):
        with pytest.raises(PlanError, match="does not lie inside"):
            b.part("view", start, shape)
    with pytest.raises(PlanError, match="does not lie inside"):
        b.rows(1, 3).rows(0, 3)


# Lowering.


def test_the_first_row_that_takes_the_call_is_chosen() -> None:
    rows = [
        Row("turn", "wide", when=lambda call: call.dims["c"] == 64, workspace=lambda call: 10),
        Row("turn"),
    ]
    s = step()
    s(turn, buffer(2, 64))
    s(turn, buffer(2, 63))
    wide, other = arena.lower(s.calls, Table("test", rows))
    assert (wide.row.name, other.row.name) == ("wide", "turn")
    assert wide.workspace is not None and wide.workspace.nbytes >= 10 and other.workspace is None


def test_a_call_without_a_kernel_is_an_error_before_anything_runs() -> None:
    s = step()
    with s.scope("head"):
        s(turn, buffer(2, 64, dtype=BF16, name="h"))
    table = Table("test", [Row("turn", when=lambda call: False), Row("pair")])
    with pytest.raises(
        PlanError, match=r"test backend has no kernel for head/turn on h\[2,64\]:bf16"
    ):
        plan([s], table)


# The arena. What follows shares nothing with arena.py: it walks the dispatches as a device would.


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


@pytest.mark.parametrize("adapter", [ALL, replace(ALL, targets=("lm_head",))], ids=["all", "head"])
@pytest.mark.parametrize(
    ("kind", "found"), [("untied", ["model.embed_tokens.weight"]), ("llama", [])]
)
def test_the_table_of_a_head_that_is_not_tied(
    kind: str, found: list[str], adapter: AdapterConfig, tmp_path: Path
) -> None:
    """On a device with memory of its own; on others there is none."""
    model = write_model(tmp_path, kind)
    for device, expected in ((ON_PAPER, found), (CpuBackend(), [])):
        planned = plan_model(model, adapter, device)
        check_memory([planned.accumulate, planned.evaluate, planned.update], 2**62)
        layout = planned.accumulate.layout
        assert [b.name for b, p in layout.places.items() if layout.blocks[p.block].host] == expected


# The checks of this file and of the planner, each with a fault that it must find.


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
    s(add_up, X, into=buffer(5, kind=Kind.TEMP, name="sum"))
    with pytest.raises(PlanError, match="add_up reads sum"):
        plan([s], EVERY)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return write_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


ADAPTERS = {
    "all": ALL,
    "dropout": replace(ALL, dropout=0.1),
    "head": replace(ALL, targets=("lm_head",)),
}


@pytest.mark.parametrize("recompute", [0, 1, 2, "layer"])
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("activation", [F32, BF16], ids=str)
def test_training_programs_keep_what_they_need(
    model: Model, adapter: str, recompute: Recomputed, activation: DType
) -> None:
    options = {"activation": activation, "tokens": 200, "recompute": recompute}
    planned = plan_model(model, ADAPTERS[adapter], CpuBackend(), **options)
    plans = [planned.accumulate, planned.evaluate, planned.update]
    check_memory(plans, 2**62)
    for p in plans:
        check_lifetimes(p)
    # The same programs in blocks just large enough for the largest buffer.
    programs = planned.programs
    steps = [programs.accumulate(), programs.evaluate(), programs.update()]
    temps = [b for b in planned.accumulate.layout.places if b.file is None]
    largest = -(-max(b.nbytes for b in temps) // ALIGNMENT) * ALIGNMENT
    split = plan(steps, TABLE, largest)
    assert sum(b.kind is Kind.TEMP for b in split[0].layout.blocks) > 1
    check_memory(split, largest)


def test_the_arena_is_close_to_what_is_alive(model: Model) -> None:
    planned = plan_model(model, tokens=200)
    alive = max(most_alive(p) for p in (planned.accumulate, planned.evaluate, planned.update))
    assert alive <= planned.accumulate.layout.reserved(Kind.TEMP) <= 1.1 * alive


def test_recompute_saves_less(model: Model) -> None:
    layers = model.config.layers
    plans = [plan_model(model, recompute=r, tokens=200) for r in (*range(layers + 1), "layer")]
    saved = [p.accumulate.saved for p in plans]
    reserved = [p.accumulate.layout.reserved(Kind.TEMP) for p in plans]
    flops = [p.accumulate.flops for p in plans]
    assert saved == sorted(set(saved), reverse=True)
    assert reserved == sorted(reserved, reverse=True) and reserved[-1] < reserved[-2] < reserved[0]
    assert flops == sorted(set(flops))
    # Exactly gate and up of a layer each time.
    gate_and_up = 2 * 200 * model.config.intermediate_size * F32.size
    assert [a - b for a, b in pairwise(saved[:-1])] == layers * [gate_and_up]
    more = plan_model(model, recompute=layers + 1, tokens=200).accumulate
    assert (more.saved, more.flops) == (saved[layers], flops[layers])


def accumulate_without(programs: TrainingPrograms, index: int) -> tuple[Step, Call]:
    emitted = programs.accumulate()
    return emitted, emitted.calls.pop(index)


def test_every_forgotten_call_is_noticed(model: Model) -> None:
    """Each call left out in turn: its temps are read unwritten, or its gradients are missing. What
    remains wrote in place: a temp that something else had written, or the loss."""
    planned = plan_model(model, recompute=2)
    programs, grad = planned.programs, planned.decoder.trainable.grad
    unnoticed, gradients = [], 0
    for index in range(len(programs.accumulate().calls)):
        emitted, left_out = accumulate_without(programs, index)
        try:
            (p,) = plan([emitted], TABLE)
            check_gradients(p, grad)
        except PlanError as error:
            if "nothing writes element" in str(error):
                gradients += 1
                assert left_out.op.name in ("lora_a_grad", "lora_b_grad")
            continue
        unnoticed.append(left_out.op.name)
    # Four groups in each of two layers, an A and a B gradient for each.
    assert gradients == 2 * 2 * 4
    assert set(unnoticed) <= {"cross_entropy"}


# Golden lists.


def emitted_text(s: Step) -> str:
    """One call a line. Temps are numbered, * if kept for backward; @ is where a view begins."""
    numbers: dict[Buffer, str] = {}

    def show(argument: Argument) -> str:
        if argument is None:
            return "-"
        if isinstance(argument, tuple):
            return "(" + " ".join(show(b) for b in argument) + ")"
        b = argument
        name = b.name
        if b.kind is Kind.TEMP:
            saved = "*" if b.root in s.saved else ""
            name = numbers.setdefault(b.root, f"%{len(numbers)}") + saved
        elif b.root is not b:
            name = f"{b.name} of {b.root.name}"
        at = f"@{b.start}" if b.start else ""
        return f"{name}{at}[{','.join(map(str, b.shape))}]:{b.dtype}"

    lines = []
    for call in s.calls:
        given = ", ".join(map(show, call.inputs))
        results = ", ".join(map(show, call.outputs))
        attributes = "".join(f" {k}={v:g}" for k, v in call.attributes.items())
        lines.append(f"{call.label}({given}) -> {results}{attributes}")
    return f"{s.name}\n" + "".join(f"    {line}\n" for line in lines)


GOLDEN_PLANS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "llama": ("llama", replace(ALL, targets=("q_proj", "v_proj")), {}),
    "qwen3": ("qwen3", ALL, {}),
    "dropout": ("untied", replace(ALL, dropout=0.1), {"activation": BF16}),
    "recompute-mlp": ("qwen2", ALL, {"recompute": 2}),
    "recompute-layer": ("window", ALL, {"recompute": "layer"}),
    "head": ("untied", replace(ALL, targets=("lm_head",)), {}),
}


@pytest.mark.parametrize("name", GOLDEN_PLANS)
def test_golden_plans(name: str, tmp_path: Path) -> None:
    kind, adapter, options = GOLDEN_PLANS[name]
    planned = plan_model(write_model(tmp_path, kind), adapter, tokens=16, **options)
    programs = planned.programs
    steps = [programs.accumulate(), programs.evaluate(), programs.update()]
    text = "\n".join(emitted_text(s) for s in steps)
    path = GOLDEN / f"{name}.plan"
    if os.environ.get("KRNL_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    assert path.read_text("utf-8") == text


def test_bytes_are_those_of_every_operand_but_where_an_op_says_otherwise(tmp_path):
    """At capacity; what is updated is read and written."""
    n, c, v, keys = 16, 24, 61, 20
    adapter = replace(ALL, targets=("q_proj", "v_proj", "down_proj"))
    planned = plan_model(write_model(tmp_path / "m"), adapter, tokens=n)
    less: dict[str, set[int]] = {}
    for program in (planned.accumulate, planned.update, planned.evaluate):
        for call in (dispatch.call for dispatch in program.dispatches):
            whole = sum(b.nbytes for b in [*call.reads(), *call.writes()])
            if whole != call.nbytes:
                less.setdefault(call.op.name, set()).add(whole - call.nbytes)
    assert less == {
        "embedding": {4 * (v - n) * c},
        "lora_b_grad": {4 * n * keys},  # k has no adapter
        "lora_up_backward": {4 * n * keys},
        "zero": {4, 4 * planned.decoder.trainable.size},
    }
