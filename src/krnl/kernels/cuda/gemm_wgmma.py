"""Launches of the matrix products of 16-bit elements on Hopper, whose tiles are fetched by the copy
engine and multiplied by whole warpgroups (gemm_wgmma.cu)."""

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from krnl.dtypes import BF16, F16
from krnl.kernels.cuda.gemm_chunks import LAYOUTS
from krnl.kernels.launch import Launch, TensorMap, pieces
from krnl.kernels.products import (
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
STORE, ADD, STORE_FLOATS, ACCUMULATE, ACCUMULATE_ACROSS, SWIGLU, SWIGLU_BACKWARD = range(7)
MEMBERS = 3  # results that one launch computes side by side
DEPTH, STRIP = 64, 64  # of a tile in K; what a swizzled row holds along M or N
WARPGROUP = 128
# An H100 and an H200 have 132 multiprocessors; on others the choice of tiles is merely not as good.
MULTIPROCESSORS = 132
# Clusters that run at once, by their size: they lie within one of the GPU's partitions, and not all
# have a multiple of four (cuOccupancyMaxActiveClusters on an H200).
CLUSTERS = {1: MULTIPROCESSORS, 2: 66, 4: 30, 8: 15}
# In a clock, while all of them work, a multiprocessor multiplies so much of 2,048 pairs, fetches
# and writes so many bytes: fitted to what an H200 took.
EFFICIENCY, FETCHED, WRITTEN = 0.95, 48, 14
SHARED_BYTES = 226 << 10  # of the 227 KiB that a block may have; barriers take the rest
FEWEST_STAGES, MOST_STAGES = 3, 8


@dataclass(frozen=True)
class Tiling:
    """How results are cut: rows and columns of a tile, and the blocks of a cluster that share one.
    `in_turns`: the two warpgroups of a block that multiply have tiles of their own; one writes
    while the other multiplies."""

    rows: int
    columns: int
    split: int = 1
    in_turns: bool = False

    @property
    def threads(self) -> int:
        """Of a block: one warpgroup fetches, others multiply."""
        return WARPGROUP * (3 if self.in_turns else self.rows // 64 + 1)

    @property
    def stage_bytes(self) -> int:
        return 2 * DEPTH * (self.rows + self.columns)

    def staging_bytes(self, kind: int) -> int:
        """Shared memory of the epilogue: results on their way to memory, and what it reads."""
        read = {ADD: 1, SWIGLU_BACKWARD: 2}.get(kind, 0)
        columns = (self.columns // 2 if kind == SWIGLU else self.columns) // self.split
        if not read:
            columns = next(piece for piece in (64, 32, 16) if columns % piece == 0)
        return self.rows * (2 * columns + 16) * max(read, 1)

    def stages(self, kind: int) -> int:
        """Of the ring."""
        free = SHARED_BYTES - self.staging_bytes(kind)
        return min(MOST_STAGES, free // self.stage_bytes)

    def shared_bytes(self, kind: int) -> int:
        return self.stages(kind) * self.stage_bytes + self.staging_bytes(kind)

    def blocks(self, job: "Job") -> int:
        return job.tiles(self) * self.split

    def clocks(self, job: "Job") -> float:
        """What a job takes, roughly: waves of tiles, each of which is multiplied, or waits for its
        operands, and then written."""
        waves = pieces(job.tiles(self), CLUSTERS[self.split])
        area = self.rows * self.columns
        step = max(area * DEPTH / 2048 / EFFICIENCY, self.stage_bytes / FETCHED)
        multiply = pieces(job.steps, self.split) * step
        finish = area * job.written_bytes / WRITTEN / self.split + 2000 * (self.split > 1)
        if self.in_turns:
            return waves * max(multiply, finish) + finish
        return waves * (multiply + finish)


TILINGS = [
    *(
        Tiling(rows, columns, split)
        for rows, columns in (
            (128, 256), (128, 192), (128, 128), (64, 256), (64, 128), (128, 64), (64, 64),
        )
        for split in CLUSTERS
    ),
    Tiling(128, 128, in_turns=True),
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
        return ADD if epilogue.residual else STORE

    @property
    def steps(self) -> int:
        """Along K, at full capacity."""
        return sum(pieces(pair.depth, DEPTH) for pair in self.first.all_pairs)

    @property
    def written_bytes(self) -> int:
        """For an element of the sums; what the epilogue reads counts too."""
        return {
            STORE_FLOATS: 4,
            ACCUMULATE: 8,
            ACCUMULATE_ACROSS: 8,
            ADD: 4,
            SWIGLU: 3,
            SWIGLU_BACKWARD: 10,
        }.get(self.kind, 2)

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
    def fits(self) -> bool:
        """Whether all rows begin at multiples of 16 bytes, as the copy engine wants it of operands
        and vectors of results. Results are of one type, and those of floats have no residual; with
        SwiGLU, gate and up have adapters both or neither."""
        first = self.first
        dtype = first.pairs[0].a.dtype
        pairs = [pair for member in self.members for pair in member.all_pairs]
        return (
            dtype in (F16, BF16)
            and len(first.pairs) <= PAIRS
            and len(self.members) <= MEMBERS
            and all(p.a.dtype is dtype and p.b.dtype is dtype for p in pairs)
            and all(p.aligned(8) and p.depth > 0 for p in pairs)
            and all(m.columns % 8 == 0 and m.epilogue.stride % 8 == 0 for m in self.members)
            and all(b is None or b.start % 8 == 0 for b in self._results())
            and (self.act is None or len({m.adapter is None for m in self.members}) == 1)
            and len({m.epilogue.to_floats for m in self.members}) == 1
            and not (first.epilogue.to_floats and first.epilogue.residual)
        )

    def tiling(self, splits: Collection[int] = CLUSTERS) -> Tiling:
        """The one that takes the fewest clocks, of those whose tiles so many blocks share."""
        return min(
            (t for t in TILINGS if t.split in splits and self.allows(t)),
            key=lambda tiling: tiling.clocks(self),
        )

    def allows(self, tiling: Tiling) -> bool:
        """Whether shared memory holds it, and a block's part of the columns can be written: whole
        matrices of 16 columns, and with SwiGLU those of gate and up together."""
        return (
            self.width(tiling) // tiling.split % 16 == 0
            and (tiling.split == 1 or self.kind != SWIGLU)
            and tiling.stages(self.kind) >= FEWEST_STAGES
        )

    def launch(self, tiling: Tiling | None = None) -> Launch:
        """Cut as given, or as seems best."""
        tiling = tiling or self.tiling()
        blocks = tiling.blocks(self)
        constants = (
            LAYOUTS.index(self.first.layout), self.kind,
            tiling.rows, tiling.columns, tiling.stages(self.kind), tiling.split, tiling.in_turns,
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
            (min(blocks, MULTIPROCESSORS) if tiling.split == 1 else blocks, 1, 1),
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
        return (*_three(a), *_three(b), *_three(u), *_three(adapter))

    def _results(self) -> tuple[Buffer | None, ...]:
        """struct Results."""
        epilogues, first = [m.epilogue for m in self.members], self.first.epilogue
        y = [e.y for e in epilogues]
        swiglu: Sequence[Buffer | None] = first.swiglu or (None,) * 4
        if self.act is not None:
            y, swiglu = [self.act], (*y, None, None)
        scales = _three([e.scale for e in epilogues])
        biases = _three([e.bias for e in epilogues])
        return (*_three(y), *scales, *biases, first.residual, *swiglu)

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
        return struct.pack(f"<{len(numbers)}i", *numbers)


def jobs(call: Call) -> list[Job]:
    """Of any op in ops/gemm.py. Products of as many rows and a pair each are one job; others have
    one each."""
    if call.op.name == "lora_swiglu":
        return [_swiglu_job(call)]
    across = call.op.name == "lora_b_grad"
    made = [p for p in products(call) if p.rows * p.columns]
    if across:  # rows are then the rank, the same for all
        made = [_transposed(product) for product in made]
    alike = len({p.rows for p in made}) == 1 and all(len(p.pairs) == 1 for p in made)
    if alike and len(made) <= MEMBERS:
        return [Job(made, across=across)]
    return [Job([product], across=across) for product in made]


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


def _three(found: Sequence[Any]) -> list[Any]:
    return [*found, *[None] * (3 - len(found))]
