"""Launches of the ops on rows and on single elements: norms, copies, activation, rotary positions,
dropout, loss, optimizer.

All run on vectors of four elements, which a thread reads in one access where rows allow it; kernels
do the same element by element where they do not.
"""

import struct
from typing import Any

from krnl.dtypes import F16, F32, I32
from krnl.kernels.launch import GpuRow, Launch
from krnl.kernels.metal.sizes import LANES, VECTOR, pieces
from krnl.plan.buffer import Buffer
from krnl.plan.step import Call, members

# Vectors that a thread of a norm keeps in registers (kHeld in norm.metal).
HELD = 4
# Threads to a row that is summed: half of what a threadgroup may have, since a kernel with many
# registers could not be launched with more.
MOST_THREADS = 512
# Rows up to this width are read once by the norms, wider ones twice.
HELD_WIDTH = MOST_THREADS * HELD * VECTOR
# Threads of element-wise work; they share nothing, so it hardly matters.
POINTWISE_THREADS = 256
# Gradients to one partial sum of the norm: eight vectors for each of 512 threads.
NORM_BLOCK = 16384

# Function constants: rows.h, then norm.metal, pointwise.metal and loss.metal.
VECTORISED = 0
NORM_TWIN, NORM_RESIDUAL = 1, 2
DROPOUT_RESIDUAL = 1
LOSS_GRADIENT = 1

Constants = dict[int, bool]


def _threads(elements: int, per_thread: int, most: int = MOST_THREADS) -> int:
    """Whole simdgroups, enough for the elements or as many as are allowed."""
    return min(most, max(1, pieces(elements, per_thread * LANES)) * LANES)


def _vectorised(width: int, *buffers: Buffer | None) -> bool:
    """Whether rows of this width begin and end with a whole vector in all the buffers. Memory that
    is no view begins with one."""
    return width % VECTOR == 0 and all(b.start % VECTOR == 0 for b in buffers if b is not None)


def _arguments(call: Call) -> list[Any]:
    """The call's buffers in the order of its signature, None where one was left out."""
    return [*call.inputs, *call.outputs]


def _reduction(
    library: str,
    function: str,
    arguments: tuple[Any, ...],
    rows: int,
    threads: int,
    constants: Constants | None = None,
) -> list[Launch]:
    """A threadgroup to each row; nothing where there are none."""
    launch = Launch(library, function, arguments, (rows, 1, 1), threads, constants or {})
    return [launch] if rows else []


def _pointwise(
    library: str,
    function: str,
    arguments: tuple[Any, ...],
    items: int,
    rows: int = 1,
    constants: Constants | None = None,
) -> list[Launch]:
    """A thread to each item of each row; nothing where there are none."""
    threads = _threads(items, 1, POINTWISE_THREADS)
    groups = (pieces(items, threads), rows, 1)
    launch = Launch(library, function, arguments, groups, threads, constants or {})
    return [launch] if items * rows else []


def _one_activation(call: Call) -> bool:
    """Whether every buffer that may be of any type is half, or float."""
    pairs = zip(call.op.inputs + call.op.outputs, call.inputs + call.outputs, strict=True)
    free = {b.dtype for p, argument in pairs if p.dtype is None for b in members(argument)}
    return free in ({F16}, {F32})


def _activation_out(call: Call) -> bool:
    """Whether the outputs are half or float; the inputs may be of any type."""
    return all(buffer.dtype in (F16, F32) for buffer in call.writes())


def norm(
    x: Buffer, w: Buffer, live: Buffer, y: Buffer, rstd: Buffer, twin: Buffer | None, eps: float
) -> list[Launch]:
    """RMS norm of rows as wide as w: tokens, or heads within them. `twin` receives y once more, as
    floats where x is half and the other way round."""
    width, rows = w.size, rstd.size
    shape = struct.pack("<IIf", rows // x.shape[0], width, eps)
    constants = {VECTORISED: _vectorised(width, x, w, y, twin), NORM_TWIN: twin is not None}
    arguments = (x, w, live, y, rstd, twin, shape)
    threads = _threads(width, HELD * VECTOR)
    return _reduction("norm", f"rms_norm_{x.dtype}", arguments, rows, threads, constants)


def _norm(call: Call, workspace: Buffer | None) -> list[Launch]:
    x, w, live, y, rstd = _arguments(call)
    return norm(x, w, live, y, rstd, None, call.attributes["eps"])


def _norm_backward(call: Call, workspace: Buffer | None) -> list[Launch]:
    dy, x, w, rstd, *optional, live, dx = _arguments(call)
    residual = optional[0] if optional else None  # head_norm_backward has none
    width, rows = w.size, rstd.size
    shape = struct.pack("<IIf", rows // x.shape[0], width, 0.0)
    constants = {
        VECTORISED: _vectorised(width, dy, x, w, residual, dx),
        NORM_RESIDUAL: residual is not None,
    }
    arguments = (dy, x, w, rstd, residual, live, dx, shape)
    threads = _threads(width, HELD * VECTOR)
    return _reduction("norm", f"rms_norm_backward_{x.dtype}", arguments, rows, threads, constants)


def _flat(function: str, *buffers: Buffer) -> list[Launch]:
    """Every vector of buffers of one size."""
    count = buffers[0].size
    constants = {VECTORISED: _vectorised(count, *buffers)}
    arguments: tuple[Any, ...] = (*buffers, struct.pack("<I", count))
    return _pointwise("pointwise", function, arguments, pieces(count, VECTOR), constants=constants)


def _cast(call: Call, workspace: Buffer | None) -> list[Launch]:
    x, y = _arguments(call)
    return _flat(f"cast_{x.dtype}_{y.dtype}", x, y)


def _zero(call: Call, workspace: Buffer | None) -> list[Launch]:
    return _flat("zero", *_arguments(call))


def _copy_rows(
    function: str, x: Buffer, index: Buffer, live: Buffer, y: Buffer, rows: int
) -> list[Launch]:
    width = y.size // y.shape[0]
    constants = {VECTORISED: _vectorised(width, x, y)}
    arguments = (x, index, live, y, struct.pack("<I", width))
    return _pointwise("pointwise", function, arguments, pieces(width, VECTOR), rows, constants)


def _embedding(call: Call, workspace: Buffer | None) -> list[Launch]:
    ids, table, live, x = _arguments(call)
    return _copy_rows(f"gather_rows_{x.dtype}_{table.dtype}", table, ids, live, x, ids.size)


def _gather_rows(call: Call, workspace: Buffer | None) -> list[Launch]:
    x, index, live, y = _arguments(call)
    return _copy_rows(f"gather_rows_{y.dtype}_{x.dtype}", x, index, live, y, index.size)


def _cache_write(call: Call, workspace: Buffer | None) -> list[Launch]:
    x, row, live, cache = _arguments(call)
    return _copy_rows(f"scatter_rows_{cache.dtype}", x, row, live, cache, row.size)


def _swiglu(call: Call, workspace: Buffer | None) -> list[Launch]:
    """swiglu or swiglu_backward: matrices of one shape, and live."""
    buffers = _arguments(call)
    matrices = [buffer for buffer in buffers if buffer.dtype is not I32]
    rows, width = matrices[0].shape
    constants = {VECTORISED: _vectorised(width, *matrices)}
    arguments = (*buffers, struct.pack("<I", width))
    name, items = f"{call.op.name}_{matrices[0].dtype}", pieces(width, VECTOR)
    return _pointwise("pointwise", name, arguments, items, rows, constants)


def _rope_table(call: Call, workspace: Buffer | None) -> list[Launch]:
    position, inv_freq, *rest = _arguments(call)
    rows, pairs = position.size, inv_freq.size
    table = struct.pack("<If", pairs, call.attributes["scale"])
    arguments = (position, inv_freq, *rest, table)
    return _pointwise("pointwise", "rope_table", arguments, pairs, rows)


def _rope(call: Call, workspace: Buffer | None) -> list[Launch]:
    x, cos, sin, live, y = _arguments(call)
    rows, heads, size = x.shape
    pairs = size // 2
    shape = struct.pack("<IIf", heads, pairs, call.attributes["sign"])
    constants = {VECTORISED: _vectorised(pairs, x, cos, sin, y)}
    arguments = (x, cos, sin, live, y, shape)
    items = heads * pieces(pairs, VECTOR)
    return _pointwise("pointwise", f"rope_{x.dtype}", arguments, items, rows, constants)


def _dropout(call: Call, workspace: Buffer | None) -> list[Launch]:
    x, document, position, key, *optional, live, y = _arguments(call)
    residual = optional[0] if optional else None  # dropout itself has none
    rows, width = x.shape
    rate, stream = call.attributes["rate"], int(call.attributes["stream"])
    threshold = min(round(rate * 2.0**32), 2**32 - 1)
    shape = struct.pack("<IIIf", width, stream, threshold, 1 / (1 - rate))
    constants = {
        VECTORISED: _vectorised(width, x, residual, y),
        DROPOUT_RESIDUAL: residual is not None,
    }
    arguments = (x, document, position, key, residual, live, y, shape)
    name, items = f"dropout_{x.dtype}", pieces(width, VECTOR)
    return _pointwise("pointwise", name, arguments, items, rows, constants)


def _row_losses(call: Call) -> int:
    logits = next(buffer for buffer in call.reads() if len(buffer.shape) == 2)
    return 4 * logits.shape[0]


def _loss(
    target: Buffer, scale: Buffer | None, live: Buffer, logits: Buffer, losses: Buffer, loss: Buffer
) -> list[Launch]:
    """Row losses into `losses`, gradients over the logits if there is a scale, then the sum."""
    rows, classes = logits.shape
    constants = {VECTORISED: _vectorised(classes, logits), LOSS_GRADIENT: scale is not None}
    arguments = (target, scale, live, logits, losses, struct.pack("<I", classes))
    threads = _threads(classes, 4 * VECTOR)
    name = f"cross_entropy_{logits.dtype}"
    return [
        *_reduction("loss", name, arguments, rows, threads, constants),
        *_reduction("loss", "sum_losses", (losses, live, loss), 1, _threads(rows, VECTOR)),
    ]


def _cross_entropy(call: Call, workspace: Buffer | None) -> list[Launch]:
    target, scale, live, loss, logits = _arguments(call)
    assert workspace is not None
    return _loss(target, scale, live, logits, workspace, loss)


def _cross_entropy_loss(call: Call, workspace: Buffer | None) -> list[Launch]:
    logits, target, live, loss = _arguments(call)
    assert workspace is not None
    return _loss(target, None, live, logits, workspace, loss)


def _norm_partials(call: Call) -> int:
    grad = next(call.reads())
    return 4 * pieces(grad.size, NORM_BLOCK)


def _gradient_norm(call: Call, workspace: Buffer | None) -> list[Launch]:
    grad, loss, hyper, result = _arguments(call)
    count = grad.size
    blocks = pieces(count, NORM_BLOCK)
    squares = (grad, hyper, workspace, struct.pack("<II", count, NORM_BLOCK))
    root = (workspace, loss, result, struct.pack("<I", blocks))
    constants = {VECTORISED: _vectorised(count, grad)}
    return [
        *_reduction("optimizer", "sum_squares", squares, blocks, MOST_THREADS, constants),
        *_reduction("optimizer", "gradient_norm", root, 1, _threads(blocks, VECTOR)),
    ]


def _adamw(call: Call, workspace: Buffer | None) -> list[Launch]:
    grad, norm, hyper, param, first, second = _arguments(call)
    count = grad.size
    constants = {VECTORISED: _vectorised(count, grad, param, first, second)}
    arguments = (grad, norm, hyper, param, first, second, struct.pack("<I", count))
    items = pieces(count, VECTOR)
    return _pointwise("optimizer", "adamw", arguments, items, constants=constants)


_ONLY = "the only kernel"
_SUM = "each row's loss, summed in order"

ROWS = [
    GpuRow("rms_norm", when=_one_activation, why=_ONLY, launches=_norm),
    GpuRow("rms_norm_backward", when=_one_activation, why=_ONLY, launches=_norm_backward),
    GpuRow("head_norm", when=_one_activation, why=_ONLY, launches=_norm),
    GpuRow("head_norm_backward", when=_one_activation, why=_ONLY, launches=_norm_backward),
    GpuRow("embedding", when=_activation_out, why=_ONLY, launches=_embedding),
    GpuRow("gather_rows", when=_activation_out, why=_ONLY, launches=_gather_rows),
    GpuRow("cache_write", when=_one_activation, why=_ONLY, launches=_cache_write),
    GpuRow("cast", why=_ONLY, launches=_cast),
    GpuRow("zero", why=_ONLY, launches=_zero),
    GpuRow("swiglu", when=_one_activation, why=_ONLY, launches=_swiglu),
    GpuRow("swiglu_backward", when=_one_activation, why=_ONLY, launches=_swiglu),
    GpuRow("rope_table", why=_ONLY, launches=_rope_table),
    GpuRow("rope", when=_one_activation, why=_ONLY, launches=_rope),
    GpuRow("dropout", when=_one_activation, why=_ONLY, launches=_dropout),
    GpuRow("dropout_backward", when=_one_activation, why=_ONLY, launches=_dropout),
    GpuRow(
        "cross_entropy",
        when=_one_activation,
        workspace=_row_losses,
        why=_SUM,
        launches=_cross_entropy,
    ),
    GpuRow(
        "cross_entropy_loss",
        when=_one_activation,
        workspace=_row_losses,
        why=_SUM,
        launches=_cross_entropy_loss,
    ),
    GpuRow(
        "gradient_norm",
        workspace=_norm_partials,
        why="sums of fixed blocks, added in order",
        launches=_gradient_norm,
    ),
    GpuRow("adamw", why=_ONLY, launches=_adamw),
]
