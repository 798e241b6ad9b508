"""Launches of the matrix products of 16-bit elements on Hopper, whose tiles are fetched by the copy
engine and multiplied by whole warpgroups (gemm_wgmma.cu)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from krnl.dtypes import BF16, F16
from krnl.kernels.cuda.exchange import exchange_clocks
from krnl.kernels.cuda.target import CLUSTER_SIZES, Target
from krnl.kernels.launch import Launch, TensorMap, pack, pieces
from krnl.kernels.products import (
    LAYOUTS,
    PAIRS,
    Epilogue,
    Pair,
    Product,
    columns_from,
    inputs,
    products,
)
from krnl.plan.buffer import Buffer
from krnl.plan.step import Call

# enum Epilogue
STORE, STORE_FLOATS, ACCUMULATE, ACCUMULATE_ACROSS, SWIGLU, SWIGLU_BACKWARD = range(6)
MEMBERS = 3  # results that one launch computes side by side
DEPTH, STRIP = 64, 64  # of a tile in K; what a swizzled row holds along M or N
WARPGROUP = 128
# What a multiprocessor does in a clock while all of them work, fitted to what an H200 took.
MULTIPLIED = 0.9 * 2048  # multiplications, of 2,048 that its tensor cores could do
FETCHED = 46  # bytes of operands, from the cache
WRITTEN = 14  # bytes of results
MOVED = 20  # bytes that come from the GPU's memory or go there: its part of what that moves
STEP = 500  # clocks of a step, however small
# Where memory is what all wait for, this share of what is done meanwhile counts: of several tilings
# the one that is least busy is chosen.
HIDDEN = 1 / 16
SHARED_BYTES = 226 << 10  # of the 227 KiB that a block may have; barriers take the rest
FEWEST_STAGES, MOST_STAGES = 3, 8


@dataclass(frozen=True)
class Tiling:
    """How results are cut: rows and columns of a tile, and the blocks of a cluster that share one.
    `hands_over`: what has been summed is written by other warps while the next tile is
    multiplied."""

    rows: int
    columns: int
    split: int = 1
    hands_over: bool = False

    @property
    def threads(self) -> int:
        """Of a block: one warpgroup fetches, others multiply."""
        return WARPGROUP * (self.rows // 64 + 1)

    @property
    def stage_bytes(self) -> int:
        return 2 * DEPTH * (self.rows + self.columns)

    def staging_bytes(self, kind: int) -> int:
        """Shared memory of the epilogue: results on their way to memory, and what it reads. Floats
        go there from registers."""
        if kind in (STORE_FLOATS, ACCUMULATE, ACCUMULATE_ACROSS):
            return 0
        if self.hands_over:  # sums of half a tile
            return self.rows * (self.columns + 16)
        columns = (self.columns // 2 if kind == SWIGLU else self.columns) // self.split
        if kind == SWIGLU_BACKWARD:  # gate and up
            return 2 * self.rows * (2 * columns + 16)
        piece = next(piece for piece in (64, 32, 16) if columns % piece == 0)
        return self.rows * (2 * piece + 16)

    def stages(self, kind: int) -> int:
        """Tiles of both operands that the ring holds."""
        free = SHARED_BYTES - self.staging_bytes(kind)
        return min(MOST_STAGES, free // self.stage_bytes)

    def shared_bytes(self, kind: int) -> int:
        return self.stages(kind) * self.stage_bytes + self.staging_bytes(kind)

    def blocks(self, job: "Job") -> int:
        return job.tiles(self) * self.split

    def clocks(self, job: "Job", target: Target) -> float:
        """What a job takes, roughly: waves of tiles, each of which is multiplied, or waits for its
        operands, and then written."""
        waves = pieces(job.tiles(self), target.clusters(self.split))
        area = self.rows * self.columns
        step = max(area * DEPTH / MULTIPLIED, self.stage_bytes / FETCHED, STEP)
        multiply = pieces(job.steps, self.split) * step
        finish = area * job.written_bytes / WRITTEN / self.split
        if self.hands_over:
            busy = waves * max(multiply, finish) + finish
        else:
            busy = waves * (multiply + finish)
        moving = job.moved_bytes / MOVED / target.multiprocessors
        return max(busy, moving) + HIDDEN * busy + waves * exchange_clocks(area, self.split)


TILINGS = [
    *(
        Tiling(rows, columns, split)
        for rows, columns in (
            (128, 256), (128, 192), (128, 128), (64, 256), (64, 128), (128, 64), (64, 64),
        )
        for split in CLUSTER_SIZES
    ),
    Tiling(128, 256, hands_over=True),
]  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What one launch computes: a product; several of as many rows, each of a single pair; or gate
    and up, whose act goes into `act`. `across`: results are added to the transpose of y."""

    members: Sequence[Product]
    act: Buffer | None = None
    across: bool = False

    @property
    def first(self) -> Product:
        return self.members[0]

    @property
    def kind(self) -> int:
        epilogue = self.first.epilogue
        if self.act is not None:
            return SWIGLU
        if epilogue.swiglu:
            return SWIGLU_BACKWARD
        if epilogue.accumulates:
            return ACCUMULATE_ACROSS if self.across else ACCUMULATE
        if epilogue.to_floats:
            return STORE_FLOATS
        return STORE

    @property
    def steps(self) -> int:
        """Along K, at full capacity; of gate and up as if up had no adapter."""
        return sum(pieces(pair.depth, DEPTH) for pair in self.first.all_pairs)

    @property
    def written_bytes(self) -> int:
        """For an element of the sums; what is read beside the operands counts too."""
        return {
            STORE_FLOATS: 4,
            ACCUMULATE: 8,
            ACCUMULATE_ACROSS: 8,
            SWIGLU: 3,
            SWIGLU_BACKWARD: 10,
        }.get(self.kind, 4 if self.first.epilogue.residual else 2)

    @property
    def moved_bytes(self) -> int:
        """The fewest that come from memory and go there."""
        operands = {
            (buffer.root, buffer.start, columns): 2 * pair.depth * columns
            for m in self.members
            for pair in m.all_pairs
            for buffer, columns in ((pair.a, m.rows), (pair.b, m.columns))
        }
        written = sum(m.rows * m.columns for m in self.members) * self.written_bytes
        return sum(operands.values()) + written

    def width(self, tiling: Tiling) -> int:
        """Columns of a member in a tile."""
        return tiling.columns // 2 if self.kind == SWIGLU else tiling.columns

    def member_tiles(self, tiling: Tiling) -> list[int]:
        """Tiles along N; gate and up share theirs."""
        members = self.members[:1] if self.kind == SWIGLU else self.members
        return [pieces(member.columns, self.width(tiling)) for member in members]

    def tiles(self, tiling: Tiling) -> int:
        return pieces(self.first.rows, tiling.rows) * sum(self.member_tiles(tiling))

    @property
    def alike(self) -> bool:
        """Whether one launch computes all members: they have as many rows, and a pair each."""
        products = self.members
        return len({p.rows for p in products}) == 1 and all(len(p.pairs) == 1 for p in products)

    @property
    def fits(self) -> bool:
        """Whether all rows begin at multiples of 16 bytes, as the copy engine wants it of operands
        and vectors of results. Results are of one type, and those of floats have no residual; with
        SwiGLU, gate and up have adapters both or neither."""
        first = self.first
        dtype = first.pairs[0].a.dtype
        pairs = [pair for member in self.members for pair in member.all_pairs]
        return (
            first.rows * sum(member.columns for member in self.members) > 0
            and dtype in (F16, BF16)
            and len(first.pairs) <= PAIRS
            and len(self.members) <= MEMBERS
            and all(p.a.dtype is dtype and p.b.dtype is dtype for p in pairs)
            and all(p.aligned(8) and p.depth > 0 for p in pairs)
            and all(m.columns % 8 == 0 and m.epilogue.stride % 8 == 0 for m in self.members)
            and all(b is None or b.start % 8 == 0 for b in self._results())
            and (self.act is None or len({m.adapter is None for m in self.members}) == 1)
            and len({m.epilogue.to_floats for m in self.members}) == 1
            and not (first.epilogue.residual and (first.epilogue.to_floats or first.epilogue.scale))
        )

    def tiling(self, target: Target, tilings: Sequence[Tiling] = TILINGS) -> Tiling:
        """Of these, the one that takes the fewest clocks."""
        possible = (tiling for tiling in tilings if tiling.split <= target.multiprocessors)
        return min(
            filter(self.allows, possible),
            key=lambda tiling: tiling.clocks(self, target),
        )

    def allows(self, tiling: Tiling) -> bool:
        """Whether shared memory holds it, and a block's part of the columns can be written: whole
        matrices of 16 columns, and with SwiGLU those of gate and up together. Only where several
        results are written is it worth handing them over."""
        return (
            self.width(tiling) // tiling.split % 16 == 0
            and (tiling.split == 1 or self.kind != SWIGLU)
            and (not tiling.hands_over or self.kind in (SWIGLU, SWIGLU_BACKWARD))
            and tiling.stages(self.kind) >= FEWEST_STAGES
        )

    def launch(self, tiling: Tiling, target: Target) -> Launch:
        """Cut as given."""
        blocks = tiling.blocks(self)
        constants = (
            LAYOUTS.index(self.first.layout), self.kind,
            tiling.rows, tiling.columns, tiling.stages(self.kind), tiling.split, tiling.hands_over,
        )  # fmt: skip
        return Launch(
            "gemm_wgmma",
            "gemm_wgmma",
            (
                self._maps(tiling),
                self._results(),
                self.first.live,
                self._shape(tiling),
            ),
            # Blocks go from tile to tile, except those of clusters.
            (min(blocks, target.multiprocessors) if tiling.split == 1 else blocks, 1, 1),
            tiling.threads,
            (self.first.pairs[0].a.dtype,),
            dict(enumerate(constants)),
            shared=tiling.shared_bytes(self.kind),
            cluster=tiling.split,
        )

    def _maps(self, tiling: Tiling) -> tuple[TensorMap | None, ...]:
        """struct Maps."""
        width = self.width(tiling)
        owners = self.members[:1] if self.kind == SWIGLU else self.members
        a = [_map_a(m, pair, tiling.rows) for m in owners for pair in m.pairs]
        b = [_map_b(m, pair, width) for m in self.members for pair in m.pairs]
        u: list[TensorMap | None] = []
        adapter: list[TensorMap | None] = []
        for member in self.members:
            pair = member.adapter
            u.append(_map_a(member, pair, tiling.rows) if pair else None)
            adapter.append(_map_b(member, pair, width) if pair else None)
        if self.kind == SWIGLU and u[0] and u[1]:  # one step takes what is gate's and what is up's
            u[0] = replace(u[0], columns=u[0].columns + u[1].columns)
        return (
            *_padded(a, PAIRS),
            *_padded(b, PAIRS),
            *_padded(u, MEMBERS),
            *_padded(adapter, MEMBERS),
        )

    def _results(self) -> tuple[Buffer | None, ...]:
        """struct Results."""
        epilogues, first = [m.epilogue for m in self.members], self.first.epilogue
        y = [e.y for e in epilogues]
        swiglu: Sequence[Buffer | None] = first.swiglu or (None,) * 4
        if self.act is not None:
            y, swiglu = [self.act], (*y, None, None)
        scales = _padded([e.scale for e in epilogues], MEMBERS)
        biases = _padded([e.bias for e in epilogues], MEMBERS)
        return (*_padded(y, MEMBERS), *scales, *biases, first.residual, *swiglu)

    def _shape(self, tiling: Tiling) -> bytes:
        """struct Shape."""
        first, tiles = self.first, self.member_tiles(tiling)
        owners = self.members if len(first.pairs) == 1 and self.kind != SWIGLU else [first]
        depths = [pair.depth for member in owners for pair in member.pairs]
        numbers = [first.rows, len(first.pairs), len(self.members), sum(tiles)]
        numbers += [*depths, *[0] * (PAIRS - len(depths))]
        for i, member in enumerate(self.members):
            rank = member.adapter.depth if member.adapter else 0
            numbers += [member.columns, sum(tiles[:i]), rank, member.epilogue.stride]
        numbers += [0] * 4 * (MEMBERS - len(self.members))
        return pack(f"{len(numbers)}i", *numbers)


def jobs(call: Call) -> tuple[list[Job], list[Product]]:
    """Of any op in ops/gemm.py, and its products that these kernels cannot make. Products of as
    many rows and a pair each are one job; others have one each."""
    if call.op.name == "lora_swiglu":
        job = _swiglu_job(call)
        return [job] if job.fits else [], []
    across = call.op.name == "lora_b_grad"
    single, others = [], []
    for product in products(call):
        # Rows are then the rank, often the same for all.
        job = Job([_transposed(product) if across else product], across=across)
        if job.fits:
            single.append(job)
        else:
            others.append(product)
    together = Job([job.first for job in single], across=across)
    return [together] if together.alike and together.fits else single, others


def _transposed(product: Product) -> Product:
    (pair,) = product.pairs
    turned = Pair(pair.b, pair.a, pair.depth, pair.b_stride, pair.a_stride)
    return replace(product, rows=product.columns, columns=product.rows, pairs=[turned])


def _swiglu_job(call: Call) -> Job:
    x, w_gate, w_up, u, b_gate, b_up, live = inputs(call)
    *outputs, act = call.writes()
    (n, c), f = x.shape, w_gate.shape[0]
    members, start = [], 0
    for w, b, y in zip((w_gate, w_up), (b_gate, b_up), outputs, strict=True):
        rank, adapter = b.shape[1] if b else 0, None
        if rank:
            adapter = Pair(columns_from(u, start), b, rank, u.shape[1], rank)
        pairs = [Pair(x, w, c, c, c)]
        members.append(Product("nt", n, f, pairs, adapter, live, Epilogue(y, f)))
        start += rank
    return Job(members, act)


def _map_a(product: Product, pair: Pair, rows: int) -> TensorMap:
    if product.layout == "tn":
        return TensorMap(pair.a, pair.depth, product.rows, pair.a_stride, DEPTH, STRIP)
    return TensorMap(pair.a, product.rows, pair.depth, pair.a_stride, rows, DEPTH)


def _map_b(product: Product, pair: Pair, columns: int) -> TensorMap:
    if product.layout == "nt":
        return TensorMap(pair.b, product.columns, pair.depth, pair.b_stride, columns, DEPTH)
    return TensorMap(pair.b, pair.depth, product.columns, pair.b_stride, DEPTH, STRIP)


def _padded(found: Sequence[Any], count: int) -> list[Any]:
    return [*found, *[None] * (count - len(found))]
