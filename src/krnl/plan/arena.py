"""The arena: an address for every buffer before anything runs, and the checks that make a replay
safe."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from krnl.errors import PlanError
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.lower import Dispatch, Table, lower
from krnl.plan.step import Step, members

ALIGNMENT = 64  # bytes: a cache line, and the widest vector


@dataclass(frozen=True)
class Block:
    """A stretch of memory to reserve, or a file to map. `kind` is the kind of what lies in it;
    `host`: not in the device's own memory but in the host's, where the device reads it."""

    kind: Kind
    nbytes: int
    file: Path | None = None
    host: bool = False


@dataclass(frozen=True)
class Place:
    """A byte offset in a block."""

    block: int
    offset: int


@dataclass
class Layout:
    """Blocks, and where in them each root buffer lies."""

    blocks: list[Block] = field(default_factory=list)
    places: dict[Buffer, Place] = field(default_factory=dict)

    def place(self, buffer: Buffer) -> Place:
        """Where a buffer or view begins."""
        root = self.places[buffer.root]
        return Place(root.block, root.offset + buffer.start * buffer.dtype.size)

    def reserved(self, kind: Kind) -> int:
        """Bytes to reserve for a kind on the device, mapped files left out."""
        return sum(
            b.nbytes for b in self.blocks if b.kind is kind and b.file is None and not b.host
        )

    @property
    def hosted(self) -> int:
        """Bytes of weights that the device reads in the host's memory."""
        return sum(b.nbytes for b in self.blocks if b.host)

    @property
    def mapped(self) -> int:
        """Bytes of weights that are read where they lie in their files."""
        return sum(buffer.nbytes for buffer in self.places if buffer.file)


@dataclass(frozen=True)
class Plan:
    """A program ready for a backend to compile. Programs planned together share a layout."""

    name: str
    dispatches: list[Dispatch]
    layout: Layout
    saved: int  # bytes of activations kept from the forward to the backward pass

    @property
    def flops(self) -> int:
        """Floating-point operations of a run at full capacity."""
        return sum(d.call.flops for d in self.dispatches)


@dataclass(frozen=True)
class Lifetime:
    """A temp, and the first and the last dispatch that touches it."""

    buffer: Buffer
    first: int
    last: int


def plan(
    steps: Sequence[Step], table: Table, largest_block: int = 2**62, host_tables: bool = False
) -> list[Plan]:
    """Lowers programs and lays them out over one memory, in blocks of at most `largest_block`
    bytes. `host_tables`: weights of which no program reads more than the rows that indices point to
    are left in the host's memory."""
    lowered = [lower(step.calls, table) for step in steps]
    for step, dispatches in zip(steps, lowered, strict=True):
        check_written(step.name, dispatches)
    layout = Layout()
    roots = list(dict.fromkeys(b.root for dispatches in lowered for b in _buffers(dispatches)))
    _map_files(layout, [b for b in roots if b.file])
    if host_tables:
        others = _more_than_gathered(lowered)
        tables = [b for b in roots if b.kind is Kind.WEIGHT and not b.file and b not in others]
        _reserve(layout, Kind.WEIGHT, [_lasting(tables)], largest_block, host=True)
    for kind in (Kind.WEIGHT, Kind.STATE, Kind.GRAD, Kind.INPUT):
        rest = [b for b in roots if b.kind is kind and b not in layout.places]
        _reserve(layout, kind, [_lasting(rest)], largest_block)
    _reserve(layout, Kind.TEMP, [lifetimes(dispatches) for dispatches in lowered], largest_block)
    return [
        Plan(step.name, dispatches, layout, sum(b.nbytes for b in step.saved))
        for step, dispatches in zip(steps, lowered, strict=True)
    ]


def _lasting(buffers: Iterable[Buffer]) -> list[Lifetime]:
    """Of buffers that share their memory with nothing."""
    return [Lifetime(buffer, 0, 0) for buffer in buffers]


def lifetimes(dispatches: Sequence[Dispatch]) -> list[Lifetime]:
    """The lifetimes of a program's temps."""
    first: dict[Buffer, int] = {}
    last: dict[Buffer, int] = {}
    for index, dispatch in enumerate(dispatches):
        for buffer in _buffers([dispatch]):
            if buffer.kind is Kind.TEMP:
                first.setdefault(buffer.root, index)
                last[buffer.root] = index
    return [Lifetime(buffer, first[buffer], last[buffer]) for buffer in first]


def check_written(name: str, dispatches: Sequence[Dispatch]) -> None:
    """Refuses a program that reads a temp before anything wrote it."""
    written: set[Buffer] = set()
    for dispatch in dispatches:
        for buffer in dispatch.call.reads():
            if buffer.kind is Kind.TEMP and buffer.root not in written:
                raise PlanError(
                    f"{name}: {dispatch.call.label} reads {buffer} before anything wrote it."
                )
        written.update(b.root for b in dispatch.call.writes())


def check_gradients(plan: Plan, region: Buffer) -> None:
    """Refuses a program that leaves any of the gradient region unwritten: a trainable was
    forgotten."""
    written = np.zeros(region.size, bool)
    for dispatch in plan.dispatches:
        for buffer in dispatch.call.writes():
            if buffer.root is region:
                written[buffer.start : buffer.start + buffer.size] = True
    if not written.all():
        raise PlanError(
            f"{plan.name}: nothing writes element {int(np.argmin(written))} of {region}."
        )


def _buffers(dispatches: Iterable[Dispatch]) -> Iterable[Buffer]:
    for dispatch in dispatches:
        yield from dispatch.call.reads()
        yield from dispatch.call.writes()
        if dispatch.workspace is not None:
            yield dispatch.workspace


def _more_than_gathered(programs: Iterable[Iterable[Dispatch]]) -> set[Buffer]:
    """The roots of which more is touched than rows that indices point to."""
    return {
        buffer.root
        for dispatches in programs
        for call in (dispatch.call for dispatch in dispatches)
        for name, argument in call.arguments.items()
        if name != call.op.gathered
        for buffer in members(argument)
    }


def _map_files(layout: Layout, weights: Sequence[Buffer]) -> None:
    """One block per checkpoint file, as long as the weights in it reach."""
    ends: dict[Path, int] = {}
    regions = [(weight, weight.file) for weight in weights if weight.file]
    for weight, region in regions:
        ends[region.path] = max(ends.get(region.path, 0), region.offset + weight.nbytes)
    blocks = {path: len(layout.blocks) + i for i, path in enumerate(ends)}
    layout.blocks += [Block(Kind.WEIGHT, end, path) for path, end in ends.items()]
    for weight, region in regions:
        layout.places[weight] = Place(blocks[region.path], region.offset)


def _reserve(
    layout: Layout,
    kind: Kind,
    programs: Sequence[Sequence[Lifetime]],
    largest_block: int,
    host: bool = False,
) -> None:
    """Blocks for the buffers of one kind; programs reuse one another's memory."""
    addresses: dict[Buffer, int] = {}
    for program in programs:
        addresses.update(assign(program, largest_block))
    if not addresses:
        return
    total = max(1, *(address + buffer.nbytes for buffer, address in addresses.items()))
    first = len(layout.blocks)
    for start in range(0, total, largest_block):
        layout.blocks.append(Block(kind, min(largest_block, total - start), host=host))
    for buffer, address in addresses.items():
        # A buffer of no bytes may sit at the very end, where no block begins.
        block = min(address, max(total - 1, 0)) // largest_block
        layout.places[buffer] = Place(first + block, address - block * largest_block)


def assign(lifetimes: Sequence[Lifetime], largest_block: int = 2**62) -> dict[Buffer, int]:
    """An address in bytes for every buffer: those alive together never overlap, and none straddles
    a multiple of `largest_block`. Largest first, each at the lowest address where it fits."""
    count = len(lifetimes)
    start, end, first, last = (np.zeros(count, np.int64) for _ in range(4))
    addresses: dict[Buffer, int] = {}
    by_size = sorted(lifetimes, key=lambda life: -life.buffer.nbytes)
    for i, life in enumerate(by_size):
        nbytes = -(-life.buffer.nbytes // ALIGNMENT) * ALIGNMENT
        if nbytes > largest_block:
            raise PlanError(
                f"{life.buffer} takes {nbytes:,} bytes; this device allows {largest_block:,} in "
                "one piece. Lower --tokens."
            )
        alive = np.flatnonzero((first[:i] <= life.last) & (last[:i] >= life.first))
        alive = alive[np.argsort(start[alive], kind="stable")]
        # Candidates: address 0 and the end of everything that lies below; a gap ends where the next
        # buffer starts.
        candidate = np.concatenate([[0], np.maximum.accumulate(end[alive])])
        straddles = candidate // largest_block != (candidate + max(nbytes, 1) - 1) // largest_block
        candidate = np.where(straddles, (candidate // largest_block + 1) * largest_block, candidate)
        limit = np.concatenate([start[alive], [np.iinfo(np.int64).max]])
        address = int(candidate[np.argmax(candidate + nbytes <= limit)])
        start[i], end[i], first[i], last[i] = address, address + nbytes, life.first, life.last
        addresses[life.buffer] = address
    return addresses
