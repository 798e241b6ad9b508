"""Which launches run beside one another on CUDA: the host's decision against every byte that
programs touch, and against all that kernels promise about when they wait. In the simulator launches
that run beside one another change places."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudasim.backend import SimulatedCudaBackend, swapped
from cudasim.device import BACKWARD
from krnl.backends import cuda_overlap
from krnl.backends.cuda_overlap import beside
from krnl.dtypes import BF16, F16, F32
from krnl.kernels.cuda.table import table
from krnl.kernels.cuda.target import Target
from krnl.kernels.launch import GpuRow, Launch, TensorMap, launches
from krnl.plan.arena import Plan, plan
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.lower import Dispatch, Table, lower
from krnl.plan.op import op
from krnl.plan.step import Call, Step
from op_bench import SIZES, Chosen, chosen
from op_cases import CASE, CASES, Case

Choose = Callable[[Sequence[Any]], Any]
Bytes = set[tuple[int, int]]  # blocks, and offsets in them


@op("x[n] y[m]? -> z[n]")
def make(x: Any, y: Any) -> Any:
    """Stands for ops that write results."""
    return x


@op("x[n] -> +z[m]")
def update(x: Any, z: Any) -> Any:
    """And for those that change them."""
    return z


@dataclass
class Program:
    """A plan of few bytes, and what each dispatch launches."""

    planned: Plan
    made: list[list[Launch]]
    touched: list[tuple[Bytes, Bytes]] = field(init=False)  # read, written

    def __post_init__(self) -> None:
        self.touched = [self._touched(dispatch) for dispatch in self.planned.dispatches]

    def _touched(self, dispatch: Dispatch) -> tuple[Bytes, Bytes]:
        scratch = [dispatch.workspace] if dispatch.workspace else []
        written = [*dispatch.call.writes(), *scratch]
        return self._bytes(list(dispatch.call.reads())), self._bytes(written)

    def _bytes(self, buffers: list[Buffer]) -> Bytes:
        places = [(self.planned.layout.place(buffer), buffer.nbytes) for buffer in buffers]
        return {(p.block, p.offset + i) for p, nbytes in places for i in range(nbytes)}

    def conflict(self, first: int, second: int) -> bool:
        """Whether the order of two dispatches matters."""
        (reads, writes), (others_reads, others_writes) = self.touched[first], self.touched[second]
        return bool(writes & (others_reads | others_writes) or reads & others_writes)


def program(choose: Choose) -> Program:
    """Some calls on states, parts of them, and temps, which share memory."""
    step = Step("test", F32)
    state = Buffer("state", (48,), F32, Kind.STATE)
    parts = [state.part(f"from {start}", start, (16,)) for start in (0, 8, 15, 31)]
    known = [*parts, Buffer("input", (16,), F32, Kind.INPUT), Buffer("none", (0,), F32, Kind.STATE)]
    wanted: dict[str, tuple[list[Launch], int]] = {}
    for index in range(choose(range(1, 7))):
        count, scratch = choose([0, 1, 1, 1, 2, 3]), choose([0, 0, 0, 64])
        own = [
            Launch("lib", "f", (), (1, 1, 1), 32, independent=choose([False, True]))
            for _ in range(count)
        ]
        with step.scope(str(index)):
            if choose([0, 0, 1]):
                step(update, choose(known), into=choose(known))
            else:
                x = choose(known)
                fit = [None, None, *(b for b in known if b.shape == x.shape)]
                result = step(make, x, choose([None, *known]), into=choose(fit))
                if result not in known:
                    known.append(result)
        wanted[step.calls[-1].label] = own, scratch

    def launched(call: Call, workspace: Buffer | None) -> list[Launch]:
        return wanted[call.label][0]

    rows = [
        GpuRow(op.name, workspace=lambda call: wanted[call.label][1], launches=launched)
        for op in (make, update)
    ]
    # Of so few bytes that kinds of buffers have several blocks, or of as many as they like.
    (planned,) = plan([step], Table("cuda", rows), choose([256, 2**62]))
    return Program(planned, [launches(dispatch) for dispatch in planned.dispatches])


def ordered(flags: Sequence[bool]) -> set[tuple[int, int]]:
    """Pairs of launches of which the first is known to have ended before the second touches
    memory: what follows from when kernels wait, let the next begin, and end (common.h)."""
    after: dict[tuple[str, int], list[tuple[str, int]]] = {}

    def then(first: tuple[str, int], second: tuple[str, int]) -> None:
        after.setdefault(first, []).append(second)

    for i, flag in enumerate(flags):
        then(("begins", i), ("works", i))
        then(("works", i), ("ends", i))
        # Of a launch that is `beside` some thread may do so before all have done their work.
        then(("begins", i), ("waits", i))
        then(("ends", i - 1), ("waits", i))
        then(("waits", i), ("begins", i + 1))
        then(("waits", i), ("ends", i))
        if not flag:
            then(("waits", i), ("works", i))
    found = set()
    for i in range(len(flags)):
        seen, left = set(), [("ends", i)]
        while left:
            event = left.pop()
            if event not in seen:
                seen.add(event)
                left += after.get(event, [])
        found |= {(i, at) for what, at in seen if what == "works"}
    return found


def faults(tried: Program) -> Iterator[str]:
    """What is wrong with the decision about a program."""
    flags = beside(tried.planned, tried.made)
    every = [(d, i) for d, made in enumerate(tried.made) for i in range(len(made))]
    safe = ordered([flags[d][i] for d, i in every])
    for second, (d, i) in enumerate(every):
        for first, (other, _) in enumerate(every[:second]):
            if d == other:
                touching = first < second - 1 or not tried.made[d][i].independent
            else:
                touching = tried.conflict(other, d)
            if touching and (first, second) not in safe:
                yield f"launch {second} may begin while {first} runs"
        if i == 0:
            alone = second == 0 or tried.conflict(every[second - 1][0], d)
            if flags[d][0] == alone:
                yield f"dispatch {d} waits: {alone} is wanted"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_runs_at_once_shares_no_byte(data: st.DataObject) -> None:
    tried = program(lambda choices: data.draw(st.sampled_from(list(choices))))
    assert not list(faults(tried))


Touched = cuda_overlap._Touched


def by_names(buffers: Any, layout: Any) -> list[tuple[int, int, int]]:
    return [(id(b.root), b.start, b.start + b.size) for b in buffers if b.size]


def meets(some: str, others: str) -> Callable[[Any, Any], bool]:
    def conflicts(own: Any, before: Any) -> bool:
        return cuda_overlap._meet(getattr(own, some), getattr(before, others))

    return conflicts


def by_kind(*kinds: tuple[str, str]) -> Callable[[Any, Any], bool]:
    """A decision that looks at these only: what a dispatch does, and what the one before."""
    return lambda own, before: any(meets(*kind)(own, before) for kind in kinds)


READ, OVERWRITTEN, WRITTEN_TWICE = ("reads", "writes"), ("writes", "reads"), ("writes", "writes")
WRONG: dict[str, tuple[Any, str, Any]] = {
    "what was read is overwritten": (Touched, "conflicts", by_kind(READ, WRITTEN_TWICE)),
    "what was written is overwritten": (Touched, "conflicts", by_kind(READ, OVERWRITTEN)),
    "what was written is read": (Touched, "conflicts", by_kind(OVERWRITTEN, WRITTEN_TWICE)),
    "buffers are told apart by name": (cuda_overlap, "_stretches", by_names),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_decision_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = [program(Random(seed).choice) for seed in range(300)]
    assert not any(list(faults(tried)) for tried in tries)
    monkeypatch.setattr(*WRONG[name])
    assert any("may begin" in fault for tried in tries for fault in faults(tried))


def test_only_the_launch_before_may_still_run() -> None:
    for flags in product([False, True], repeat=6):
        missing = {(i, j) for j in range(6) for i in range(j)} - ordered(flags)
        assert missing == {(j - 1, j) for j in range(1, 6) if flags[j]}


def test_launches_change_places_in_the_simulator_where_kernels_allow_it() -> None:
    for flags in product([False, True], repeat=6):
        order = swapped([False, *flags])
        assert sorted(order) == list(range(7))
        assert all(order.index(i) < order.index(j) for i, j in ordered([False, *flags]))
    assert swapped([False, True, True, False, True]) == [1, 0, 2, 4, 3]


# ---- What the ops launch ----


def dispatches(case: Case, target: Target) -> Iterator[Dispatch]:
    """An op's calls as the tables lower them."""
    for activation, sizes in product((BF16, F16, F32), SIZES.values()):
        yield from lower(chosen(case, sizes, activation).emit()[0].calls, table(target))


def extent(argument: Buffer | TensorMap) -> tuple[Buffer, int, int]:
    """The root of what a kernel is given, and which of its bytes."""
    if isinstance(argument, Buffer):
        first, count = argument.start, argument.size
    else:
        first = argument.buffer.start
        count = (argument.rows - 1) * argument.stride + argument.columns
        argument = argument.buffer
    size = argument.dtype.size
    return argument.root, first * size, (first + count) * size


@pytest.mark.parametrize("target", [Target(80), Target(90)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op.name)
def test_kernels_are_given_nothing_but_what_their_call_touches(case: Case, target: Target) -> None:
    for dispatch in dispatches(case, target):
        call, scratch = dispatch.call, dispatch.workspace
        touched = [*call.reads(), *call.writes(), *([scratch] if scratch else [])]
        known = [extent(buffer) for buffer in touched]
        for launch in launches(dispatch):
            for argument in launch.arguments:
                for part in argument if isinstance(argument, tuple) else (argument,):
                    if not isinstance(part, Buffer | TensorMap):
                        continue
                    root, first, end = extent(part)
                    assert any(
                        root is its_root and its_first <= first and end <= its_end
                        for its_root, its_first, its_end in known
                    ), f"{launch.function} of {call.label} is given {part}"


def made_of(name: str, target: Target, dims: dict[str, Any]) -> tuple[Dispatch, list[Launch]]:
    (dispatch,) = lower(Chosen(CASE[name], BF16, dims).emit()[0].calls, table(target))
    return dispatch, launches(dispatch)


HEADS = {"n": 64, "h": 4, "g": 2, "d": 64}


def test_launches_of_a_dispatch_that_need_not_wait() -> None:
    """On Hopper dK and dV want of attention's backward only what lies two launches back; other
    kernels make delta with dQ. Products need nothing of one another but what the sums of their
    chunks lie in."""
    _, made = made_of("attention_backward", Target(90), HEADS)
    assert [(x.function, x.independent) for x in made] == [
        ("attention_row_terms", False),
        ("attention_query_gradients", False),
        ("attention_key_gradients", True),
    ]
    _, made = made_of("attention_backward", Target(80), HEADS)
    assert [x.independent for x in made] == [False, False]
    group = {"n": 8, "c": 4096, "o": (64, 32768), "r": (16, 16), "s": 32}
    dispatch, made = made_of("lora_linear", Target(80), group)
    assert [(x.function, x.independent) for x in made] == [
        ("gemm_mma", False),
        ("gemm_reduce", False),
        ("gemm_mma", True),
    ]
    assert all((dispatch.workspace in x.arguments) is not x.independent for x in made)


@pytest.mark.parametrize(
    "name, target, dims",
    [
        ("attention_backward", Target(90), HEADS),
        ("lora_down", Target(80), {"n": 8, "c": 1024, "s": 16}),  # in chunks
    ],
)
def test_a_launch_that_wrongly_need_not_wait_shows_in_the_simulator(
    name: str, target: Target, dims: dict[str, Any]
) -> None:
    def hasty(row: GpuRow) -> GpuRow:
        def launches(call: Call, scratch: Buffer | None) -> list[Launch]:
            return [replace(launch, independent=True) for launch in row.launches(call, scratch)]

        return replace(row, launches=launches)

    bench, right = Chosen(CASE[name], BF16, dims), table(target)
    bench.check(SimulatedCudaBackend(kernels=right, order=BACKWARD))
    wrong = Table("cuda", [hasty(row) for row in right.rows if isinstance(row, GpuRow)])
    with pytest.raises(AssertionError):
        bench.check(SimulatedCudaBackend(kernels=wrong, order=BACKWARD))
