"""Launches of attention on Hopper: the copy engine fetches tiles, whole warpgroups multiply them
(attention_wgmma.cu)."""

from dataclasses import dataclass

from krnl.dtypes import F32
from krnl.kernels.cuda.exchange import exchange_clocks
from krnl.kernels.cuda.target import CLUSTER_SIZES, Target
from krnl.kernels.launch import Argument, Launch, TensorMap, pack, pieces
from krnl.plan.buffer import Buffer
from krnl.plan.step import Call

WIDTHS = (64, 96, 128)  # sizes of heads
STRIP = 64  # columns of a tile that the copy engine fetches at once
WARPGROUP = 128
WARPGROUP_ROWS = 64  # that a warpgroup multiplies
GRADIENT_WARPGROUPS = 2
GRADIENT_ROWS = GRADIENT_WARPGROUPS * WARPGROUP_ROWS
# Tiles that pass by: their rows, and how many of each of two matrices are in shared memory.
KEYS, KEY_STAGES = 128, 2
QUERIES, QUERY_STAGES = 64, 4
LANES_OF_ROW = 4  # kLanesOfRow
# For each column of a head, what a tile of queries takes that passes by a block of keys: fitted to
# what an H200 took.
TILE_CLOCKS = 28


def fits(call: Call) -> bool:
    """Whether there are kernels for heads of this size, and keys to fetch. The caller sees to it
    that elements have 16 bits and all heads begin at multiples of 16 bytes."""
    keys = list(call.reads())[1 if call.op.name == "attention" else 2]
    return keys.shape[-1] in WIDTHS and keys.shape[0] > 0


def forward(call: Call) -> list[Launch]:
    q, k, v, start, stop, live = call.reads()
    o, lse = call.writes()
    kernels = _Kernels(call, q, k, 3 if q.shape[-1] == 64 else 2)  # kForwardConsumers
    maps = (_map(q, kernels.rows), _map(k, KEYS), _map(v, KEYS))
    tiles = kernels.rows + 2 * KEY_STAGES * KEYS
    return kernels.launch("attention_forward", "h", (maps, start, stop, live, o, lse), tiles)


def terms_bytes(call: Call) -> int:
    """Workspace of `backward`: two numbers for each query and head."""
    n, h, _ = next(call.reads()).shape
    return 2 * h * pieces(n, GRADIENT_ROWS) * GRADIENT_ROWS * F32.size


def key_splits(d: int) -> list[int]:
    """How many blocks may share a sum of dK and dV, of heads of `d`: each writes whole matrices of
    16 columns."""
    return [split for split in CLUSTER_SIZES if 2 * d % (16 * split) == 0]


def key_split(call: Call, target: Target) -> int:
    """How many blocks share each sum of dK and dV: as many as take the fewest clocks, roughly, and
    as if all queries were one document's. The first keys take most tiles, others on average half as
    many."""
    _, q, k, *_ = call.reads()
    (n, h, d), g = q.shape, k.shape[1]
    shared, most_tiles = pieces(n, GRADIENT_ROWS) * g, h // max(g, 1) * pieces(n, QUERIES)

    def clocks(split: int) -> float:
        at_once = target.clusters(split)
        exchange = exchange_clocks(2 * GRADIENT_ROWS * d, split)
        tiles = max(most_tiles / split, shared * most_tiles / 2 / (at_once * split))
        return tiles * TILE_CLOCKS * d + pieces(shared, at_once) * exchange

    possible = (split for split in key_splits(d) if split <= target.multiprocessors)
    return min(possible, key=clocks)


def backward(call: Call, terms: Buffer | None, split: int) -> list[Launch]:
    """`split` blocks share each sum of dK and dV."""
    if terms is None:  # there is nothing
        return []
    do, q, k, v, o, lse, start, live = call.reads()
    dq, dk, dv = call.writes()
    kernels = _Kernels(call, q, k, GRADIENT_WARPGROUPS)
    rows = kernels.rows
    by_query = (_map(q, rows), _map(k, KEYS), _map(v, KEYS), _map(do, rows))
    by_key = (_map(q, QUERIES), _map(k, rows), _map(v, rows), _map(do, QUERIES))
    key_tiles, query_tiles = KEY_STAGES * KEYS, QUERY_STAGES * QUERIES
    return [
        *kernels.launch("attention_row_terms", "h", (do, o, lse, live, terms)),
        *kernels.launch(
            "attention_query_gradients",
            "h",
            (by_query, terms, start, live, dq),
            2 * (rows + key_tiles),
        ),
        *kernels.launch(
            "attention_key_gradients",
            "g",
            (by_key, terms, start, live, dk, dv),
            2 * (rows + query_tiles),
            split=split,
            independent=True,
        ),
    ]


@dataclass(frozen=True)
class _Kernels:
    """The library, specialised for a call, with so many warpgroups that multiply."""

    call: Call
    q: Buffer
    k: Buffer
    warpgroups: int

    @property
    def rows(self) -> int:
        """Of a block."""
        return self.warpgroups * WARPGROUP_ROWS

    def launch(
        self,
        function: str,
        heads: str,
        arguments: tuple[Argument | tuple[TensorMap, ...], ...],
        tile_rows: int = 0,
        split: int | None = None,
        independent: bool = False,
    ) -> list[Launch]:
        """Blocks for all rows of the heads that `heads` counts: h or g; clusters of `split` blocks
        for kernels that have these. Of those that have tiles, `tile_rows` are in shared memory."""
        (n, h, d), g = self.q.shape, self.k.shape[1]
        blocks = pieces(n, self.rows)
        groups = blocks * {"h": h, "g": g}[heads] * (split or 1)
        if groups == 0:
            return []
        threads, shared = self.rows * LANES_OF_ROW, 0
        if tile_rows:
            threads = (1 + self.warpgroups) * WARPGROUP
            shared = tile_rows * pieces(d, STRIP) * STRIP * self.q.dtype.size + self._staging_bytes
        return [
            Launch(
                "attention_wgmma",
                function,
                (*arguments, pack("4if", h, g, d, blocks, self.call.attributes["scale"])),
                (groups, 1, 1),
                threads,
                (self.q.dtype,),
                {0: d} if split is None else {0: d, 1: split},
                shared=shared,
                cluster=split or 1,
                independent=independent,
            )
        ]

    @property
    def _staging_bytes(self) -> int:
        """Of results on their way to memory: rows of kStagingColumns and a vector more."""
        columns = STRIP if self.q.shape[-1] % STRIP == 0 else STRIP // 2
        return self.rows * (columns * self.q.dtype.size + 16)


def _map(heads: Buffer, box_rows: int) -> TensorMap:
    """Of [n, h, d], as rows of all heads."""
    n, h, d = heads.shape
    return TensorMap(heads, n, h * d, h * d, box_rows, STRIP)
