"""Launches of attention: products, softmax and gradients of scores that lie in the workspace.

Scores of all heads would take h·n·m elements. They are made in parts instead, of some heads and
some rows each, as many as SCORE_BYTES holds; the parts follow one another in the same memory."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from krnl.dtypes import F32, DType
from krnl.kernels.launch import LANES, GpuRow, Launch, pack, pieces
from krnl.kernels.metal.sizes import TILE, VECTOR
from krnl.plan.buffer import Buffer
from krnl.plan.step import Call

# 32 heads of 1024 tokens, forward and in halves. Launches of that size fill any GPU, and what more
# memory would save, one launch in a few, is not worth shorter passes.
SCORE_BYTES = 256 << 20
# Below this many tiles of output, sums over keys are cut into spans, up to that many threadgroups,
# of at least that many keys.
FEW_TILES, MANY_GROUPS, SHORTEST_SPAN = 32, 128, 128
# A thread of the softmax has this many keys of a row before the row gets another simdgroup.
KEYS_PER_THREAD, MOST_THREADS = 16, 256
# Function constants of attention.metal.
HAS_STOP, ALIGNED, HAS_SPANS, HAS_CARRIED = range(4)


@dataclass(frozen=True)
class Part:
    """`Part` of attention.metal, member by member."""

    row_heads: int
    head_heads: int
    rows_per_query: int
    heads_per_key: int
    key_heads: int
    size: int
    first_head: int
    heads: int
    first_row: int
    rows: int
    columns: int
    span: int
    last: bool
    scale: float

    def pack(self) -> bytes:
        *integers, scale = vars(self).values()
        return pack("13If", *integers, scale)

    @property
    def scores(self) -> int:
        return self.heads * self.rows * self.columns

    @property
    def spans(self) -> int:
        return -(-self.columns // self.span)

    @property
    def partial_sums(self) -> int:
        return self.spans * self.heads * self.rows * self.size if self.spans > 1 else 0


def _tiles(size: int) -> int:
    return pieces(size, TILE)


def _padded(size: int) -> int:
    return _tiles(size) * TILE


def _size(call: Call, letter: str) -> int:
    size = call.dims[letter]
    assert isinstance(size, int)
    return size


def _activation(call: Call) -> DType:
    return next(call.writes()).dtype


def _one_type(call: Call) -> bool:
    """Whether all that is [n, h, d] has the type of the output."""
    return all(b.dtype is _activation(call) for b in call.reads() if len(b.shape) == 3)


def _parts(call: Call, rows: int, stacked: int, unit: int, score_bytes: int) -> Iterator[Part]:
    """All rows of some heads, `unit` heads at a time, then of the next ones. With `stacked`, the
    heads that share a key head are rows of one, and `rows` counts them."""
    h, g = _size(call, "h"), _size(call, "g")
    heads = h // stacked
    columns = _padded(_size(call, "m" if "m" in call.dims else "n"))
    bytes_per_row = unit * columns * score_bytes
    rows_at_once = _padded(rows)
    if rows_at_once * bytes_per_row > SCORE_BYTES:
        rows_at_once = max(1, SCORE_BYTES // bytes_per_row // TILE) * TILE
    heads_at_once = max(1, SCORE_BYTES // (rows_at_once * bytes_per_row)) * unit
    for head in range(0, heads, heads_at_once):
        for row in range(0, rows, rows_at_once):
            yield Part(
                row_heads=1 if stacked > 1 else h,
                head_heads=stacked,
                rows_per_query=stacked,
                heads_per_key=heads // g,
                key_heads=g,
                size=_size(call, "d"),
                first_head=head,
                heads=min(heads_at_once, heads - head),
                first_row=row,
                rows=min(rows_at_once, _padded(rows - row)),
                columns=columns,
                span=columns,
                last=row + rows_at_once >= rows,
                scale=call.attributes["scale"],
            )


class _Workspace:
    """Hands out the workspace piece by piece."""

    def __init__(self, buffer: Buffer):
        self._buffer = buffer
        self._used = 0

    def take(self, name: str, elements: int, dtype: DType = F32) -> Buffer:
        size = -(-elements * dtype.size // F32.size)
        self._used += size
        return self._buffer.part(name, self._used - size, (size,))


class _Launches:
    """The launches of a call, gathered one by one."""

    def __init__(self, dtype: DType, has_stop: bool, operands: list[Buffer]):
        self.launches: list[Launch] = []
        self._dtype = dtype
        self._has_stop = has_stop
        self._aligned = all(b.shape[-1] % VECTOR == 0 and b.start % VECTOR == 0 for b in operands)

    def add(
        self,
        function: str,
        arguments: tuple[Buffer | bytes | None, ...],
        groups: tuple[int, int, int],
        threads: int = LANES,
        spans: bool = False,
        carried: bool = False,
    ) -> None:
        constants = {
            HAS_STOP: self._has_stop,
            ALIGNED: self._aligned,
            HAS_SPANS: spans,
            HAS_CARRIED: carried,
        }
        name, types = f"attention_{function}", (self._dtype,)
        self.launches.append(
            Launch("attention", name, arguments, groups, threads, types, constants)
        )


def _forward_parts(call: Call) -> list[Part]:
    """The parts, and how their sums over keys are cut into spans: where few queries look at a long
    cache there are few tiles of output, and each alone would walk along all keys."""
    n, h, g = (_size(call, letter) for letter in "nhg")
    # The heads of a single query that share a key head are rows of one matrix: keys and values are
    # read once for all of them, and fewer of a tile's 32 rows are empty.
    stacked = h // g if n == 1 else 1
    score_bytes = F32.size + _activation(call).size
    parts = []
    for part in _parts(call, n * stacked, stacked, 1, score_bytes):
        tiles = part.heads * _tiles(part.rows) * _tiles(part.size)
        spans = min(MANY_GROUPS // tiles, part.columns // SHORTEST_SPAN)
        if tiles < FEW_TILES and spans > 1:
            part = replace(part, span=_padded(-(-part.columns // spans)))
        parts.append(part)
    return parts


def _forward_bytes(call: Call) -> int:
    parts = _forward_parts(call)
    score_bytes = F32.size + _activation(call).size
    return parts[0].scores * score_bytes + _most_partial_sums(parts) * F32.size


def _most_partial_sums(parts: list[Part]) -> int:
    return max(part.partial_sums for part in parts)


def _forward(call: Call, workspace: Buffer | None) -> list[Launch]:
    assert workspace is not None
    q, k, v, start, stop, live = call.reads()
    o, lse = call.writes()
    parts = _forward_parts(call)
    space = _Workspace(workspace)
    scores = space.take("scores", parts[0].scores)
    p = space.take("p", parts[0].scores, o.dtype)
    partial = space.take("partial", _most_partial_sums(parts))
    made = _Launches(o.dtype, True, [q, k, v])
    for part in parts:
        seen = (start, stop, live, part.pack())
        row_tiles, columns = _tiles(part.rows), _tiles(part.size)
        rows = min(part.rows, _size(call, "n") * part.rows_per_query - part.first_row)
        groups = (_tiles(part.columns), row_tiles, part.heads)
        made.add("scores", (q, k, scores, *seen), groups)
        simdgroups = -(-part.columns // (LANES * KEYS_PER_THREAD))
        threads = min(LANES * simdgroups, MOST_THREADS)
        made.add("softmax", (scores, p, lse, *seen), (rows, 1, part.heads), threads)
        groups = (columns, row_tiles, part.heads * part.spans)
        if part.spans == 1:
            made.add("values", (p, v, o, *seen, None), groups)
        else:
            made.add("values", (p, v, o, *seen, partial), groups, spans=True)
            made.add("spans", (partial, o, *seen), (rows, 1, part.heads))
    return made.launches


def _backward_parts(call: Call) -> list[Part]:
    """P and dS of whole groups, since the gradient of a key is summed over the heads that read it
    in one product."""
    n, h, g = (_size(call, letter) for letter in "nhg")
    return list(_parts(call, n, 1, h // g, 2 * _activation(call).size))


def _carried_sums(call: Call) -> int:
    """Elements of dK, and of dV, that a part of the rows leaves to the next one."""
    part = _backward_parts(call)[0]
    groups = part.heads // part.heads_per_key
    return 0 if part.last else groups * part.columns * part.size


def _backward_bytes(call: Call) -> int:
    scores = _backward_parts(call)[0].scores
    floats = _size(call, "n") * _size(call, "h") + 2 * _carried_sums(call)
    return 2 * scores * _activation(call).size + F32.size * floats


def _backward(call: Call, workspace: Buffer | None) -> list[Launch]:
    assert workspace is not None
    do, q, k, v, o, lse, start, live = call.reads()
    dq, dk, dv = call.writes()
    n, h = _size(call, "n"), _size(call, "h")
    parts = _backward_parts(call)
    space = _Workspace(workspace)
    delta = space.take("delta", n * h)
    p, ds = (space.take(name, parts[0].scores, dq.dtype) for name in ("p", "ds"))
    dk_sums, dv_sums = (space.take(name, _carried_sums(call)) for name in ("dk", "dv"))
    made = _Launches(dq.dtype, False, [do, q, k, v])
    rows_of_delta = MOST_THREADS // LANES
    groups = (-(-n // rows_of_delta), 1, h)
    made.add("delta", (do, o, delta, live, parts[0].pack()), groups, MOST_THREADS)
    for part in parts:
        seen = (start, live, part.pack())
        row_tiles, columns = _tiles(part.rows), _tiles(part.size)
        key_tiles = _tiles(min(n, part.first_row + part.rows))
        groups = (key_tiles, row_tiles, part.heads)
        made.add("score_gradients", (q, k, do, v, lse, delta, p, ds, *seen), groups)
        values = (ds, k, dq, start, None, live, part.pack(), None)
        made.add("values", values, (columns, row_tiles, part.heads))
        groups = (columns, key_tiles, part.heads // part.heads_per_key)
        carried = part.first_row > 0 or not part.last
        for weights, x, gradient, sums in ((ds, q, dk, dk_sums), (p, do, dv, dv_sums)):
            keys = (weights, x, gradient, *seen, sums if carried else None)
            made.add("keys", keys, groups, carried=carried)
    return made.launches


ROWS = [
    GpuRow(
        "attention",
        when=_one_type,
        workspace=_forward_bytes,
        launches=_forward,
        why="scores in float32 and probabilities, as many as fit; sums over spans of keys",
    ),
    GpuRow(
        "attention_backward",
        when=_one_type,
        workspace=_backward_bytes,
        launches=_backward,
        why="probabilities and their gradients, as many as fit; rowsum(dO ∘ O)",
    ),
]
