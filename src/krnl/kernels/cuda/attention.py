"""Launches of attention: tensor cores multiply heads of 16-bit elements in tiles, and other kernels
take one row at a time. Neither keeps scores in memory."""

from collections.abc import Callable
from dataclasses import dataclass

from krnl.dtypes import BF16, F16, F32, DType
from krnl.kernels.cuda import attention_wgmma
from krnl.kernels.cuda.target import Target
from krnl.kernels.launch import LANES, GpuRow, Launch, pack, pieces
from krnl.plan.buffer import Buffer
from krnl.plan.step import Call

# attention_mma.cu: rows and warps of a block, widths that heads are filled up to, and elements in a
# copy of 16 bytes.
BLOCK_ROWS, BLOCK_WARPS, WIDTHS, VECTOR = 64, 4, (32, 64, 96, 128), 8
# attention_simt.cu: columns of a row that a lane has, and warps that share a row.
COLUMNS_PER_LANE, ROW_WARPS = (1, 2, 4, 8), 4
# So few queries leave most of a tile's rows empty. They are those of generation: each has a long
# cache, and many warps share it.
FEW_QUERIES, CACHE_WARPS = 16, 16


def _size(call: Call, letter: str) -> int:
    size = call.dims[letter]
    assert isinstance(size, int)
    return size


def _heads(call: Call) -> list[Buffer]:
    """All that is [n, h, d]."""
    return [b for b in [*call.reads(), *call.writes()] if len(b.shape) == 3]


def _dtype(call: Call) -> DType:
    return next(call.writes()).dtype


def _starts_at_multiples(call: Call, count: int) -> bool:
    """Whether all rows of [n, h, d] begin at multiples of `count` elements."""
    return all(b.shape[-1] % count == 0 and b.start % count == 0 for b in _heads(call))


def _fits_rows(call: Call) -> bool:
    dtype, widest = _dtype(call), LANES * COLUMNS_PER_LANE[-1]
    one_type = all(b.dtype is dtype for b in _heads(call))
    return one_type and dtype in (BF16, F16, F32) and _size(call, "d") <= widest


def _fits_tensor_cores(call: Call) -> bool:
    return (
        _fits_rows(call)
        and _dtype(call) is not F32
        and _size(call, "d") <= WIDTHS[-1]
        and _starts_at_multiples(call, VECTOR)
        # The largest score is looked for before scores are scaled.
        and call.attributes["scale"] > 0
    )


def _has_many_queries(call: Call) -> bool:
    return _size(call, "n") > FEW_QUERIES


@dataclass(frozen=True)
class _Kernels:
    """One of the two libraries: rows and warps of its blocks, and template arguments behind the
    type."""

    library: str
    rows: int
    warps: int
    constants: tuple[int | bool, ...]

    def launch(self, call: Call, function: str, heads: str, *arguments: Buffer) -> list[Launch]:
        """Blocks for all rows of the heads that `heads` counts: h or g."""
        n, h, g, d = (_size(call, letter) for letter in "nhgd")
        blocks = pieces(n, self.rows)
        groups = blocks * _size(call, heads)
        if groups * d == 0:
            return []
        shape = pack("4if", h, g, d, blocks, call.attributes["scale"])
        return [
            Launch(
                self.library,
                function,
                (*arguments, shape),
                (groups, 1, 1),
                self.warps * LANES,
                (_dtype(call),),
                dict(enumerate(self.constants)),
            )
        ]


def _on_tensor_cores(call: Call) -> _Kernels:
    width = next(w for w in WIDTHS if _size(call, "d") <= w)
    return _Kernels("attention_mma", BLOCK_ROWS, BLOCK_WARPS, (width,))


def _row_by_row(call: Call, warps: int = ROW_WARPS) -> _Kernels:
    columns = next(c for c in COLUMNS_PER_LANE if _size(call, "d") <= c * LANES)
    return _Kernels(
        "attention_simt", 1, warps, (columns, _starts_at_multiples(call, columns), warps)
    )


def _row_by_row_forward(call: Call) -> _Kernels:
    return _row_by_row(call, ROW_WARPS if _has_many_queries(call) else CACHE_WARPS)


Choice = Callable[[Call], _Kernels]
Launches = Callable[[Call, Buffer | None], list[Launch]]


def _forward(kernels: Choice) -> Launches:
    def launches(call: Call, workspace: Buffer | None) -> list[Launch]:
        arguments = (*call.reads(), *call.writes())
        return kernels(call).launch(call, "attention_forward", "h", *arguments)

    return launches


def _delta_bytes(call: Call) -> int:
    """rowsum(dO ∘ O), which the gradients of keys and values need as well."""
    return _size(call, "n") * _size(call, "h") * F32.size


def _backward(kernels: Choice) -> Launches:
    def launches(call: Call, workspace: Buffer | None) -> list[Launch]:
        if workspace is None:  # there is nothing
            return []
        do, q, k, v, o, lse, start, live = call.reads()
        dq, dk, dv = call.writes()
        chosen = kernels(call)
        queries = (do, q, k, v, o, lse, start, live, dq, workspace)
        keys = (do, q, k, v, lse, workspace, start, live, dk, dv)
        return [
            *chosen.launch(call, "attention_query_gradients", "h", *queries),
            *chosen.launch(call, "attention_key_gradients", "g", *keys),
        ]

    return launches


def hopper_rows(target: Target) -> list[GpuRow]:
    """What only Hopper has."""
    return [
        GpuRow(
            "attention",
            "attention_wgmma",
            when=lambda call: (
                _fits_tensor_cores(call) and _has_many_queries(call) and attention_wgmma.fits(call)
            ),
            launches=lambda call, workspace: attention_wgmma.forward(call),
            why="whole warpgroups multiply, the copy engine fetches",
        ),
        GpuRow(
            "attention_backward",
            "attention_backward_wgmma",
            when=lambda call: _fits_tensor_cores(call) and attention_wgmma.fits(call),
            workspace=attention_wgmma.terms_bytes,
            launches=lambda call, terms: attention_wgmma.backward(
                call, terms, attention_wgmma.key_split(call, target)
            ),
            why="whole warpgroups multiply, the copy engine fetches",
        ),
    ]


ROWS = [
    GpuRow(
        "attention",
        "attention_mma",
        when=lambda call: _fits_tensor_cores(call) and _has_many_queries(call),
        launches=_forward(_on_tensor_cores),
        why="tiles of queries and keys",
    ),
    GpuRow(
        "attention",
        "attention_simt",
        when=_fits_rows,
        launches=_forward(_row_by_row_forward),
        why="other types, sizes and alignments; few queries",
    ),
    GpuRow(
        "attention_backward",
        "attention_backward_mma",
        when=_fits_tensor_cores,
        workspace=_delta_bytes,
        launches=_backward(_on_tensor_cores),
        why="tiles of queries and keys, for dQ and again for dK and dV: blocks share no sum",
    ),
    GpuRow(
        "attention_backward",
        "attention_backward_simt",
        when=_fits_rows,
        workspace=_delta_bytes,
        launches=_backward(_row_by_row),
        why="other types, sizes and alignments",
    ),
]
