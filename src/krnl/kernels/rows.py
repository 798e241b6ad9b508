"""Launches of the ops on rows and on single elements: norms, copies, activation, rotary positions,
dropout, loss, optimizer. Kernels of these names, with these arguments and constants, are on every
kind of GPU; a `Dialect` has what differs.

All run on vectors of a few adjacent elements, which a thread reads together where rows allow it;
kernels do the same element by element where they do not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from krnl.dtypes import I32, DType
from krnl.kernels.launch import LANES, GpuRow, Launch, pack, pieces
from krnl.plan.buffer import Buffer
from krnl.plan.step import Call, members

# Threads of element-wise work; they share nothing, so it hardly matters.
POINTWISE_THREADS = 256
# Gradients to one partial sum of the norm, and the threads that add them up.
NORM_BLOCK, NORM_THREADS = 16384, 512

# Function constants: of all kernels with rows, then of norm, pointwise and loss.
VECTORISED = 0
NORM_TWIN, NORM_RESIDUAL = 1, 2
DROPOUT_RESIDUAL = 1
LOSS_GRADIENT = 1

Constants = dict[int, bool]


@dataclass(frozen=True)
class Dialect:
    """One kind of GPU, as these launches see it."""

    activations: tuple[DType, ...]
    vector: int  # adjacent elements that a thread reads and writes together
    held: int  # vectors that a thread of a norm keeps in registers
    most_threads: int  # to a row that is summed
    # Rows of a norm that share a group where LANES threads are enough for each of them.
    short_rows: int
    most_groups: int  # along the second axis, that of element-wise work's rows

    @property
    def held_width(self) -> int:
        """Rows up to this width are read once by the norms, wider ones twice."""
        return self.most_threads * self.held * self.vector

    def threads(self, elements: int, per_thread: int) -> int:
        """To a row of so many elements."""
        return _threads(elements, per_thread, self.most_threads)

    def vectorised(self, width: int, *buffers: Buffer | None) -> bool:
        """Whether rows of this width begin and end with a whole vector in all the buffers. Memory
        that is no view begins with one."""
        starts = [buffer.start for buffer in buffers if buffer is not None]
        return all(place % self.vector == 0 for place in (width, *starts))


def _threads(elements: int, per_thread: int, most: int) -> int:
    """Whole simdgroups, enough for the elements or as many as are allowed."""
    return min(most, max(1, pieces(elements, per_thread * LANES)) * LANES)


def operands(call: Call) -> list[Any]:
    """The call's buffers in the order of its signature, None where one was left out."""
    return [*call.inputs, *call.outputs]


def _reduction(
    library: str,
    function: str,
    arguments: tuple[Any, ...],
    rows: int,
    threads: int,
    types: tuple[DType, ...] = (),
    constants: Constants | None = None,
) -> list[Launch]:
    """A group to each row; nothing where there are none."""
    groups = (rows, 1, 1)
    launch = Launch(library, function, arguments, groups, threads, types, constants or {})
    return [launch] if rows else []


def _pointwise(
    dialect: Dialect,
    library: str,
    function: str,
    arguments: tuple[Any, ...],
    items: int,
    rows: int = 1,
    types: tuple[DType, ...] = (),
    constants: Constants | None = None,
) -> list[Launch]:
    """A thread to each item of each row; nothing where there are none."""
    threads = _threads(items, 1, POINTWISE_THREADS)
    groups = (pieces(items, threads), min(rows, dialect.most_groups), 1)
    launch = Launch(library, function, arguments, groups, threads, types, constants or {})
    return [launch] if items * rows else []


def norm(
    dialect: Dialect,
    x: Buffer,
    w: Buffer,
    live: Buffer,
    y: Buffer,
    rstd: Buffer,
    twin: Buffer | None,
    eps: float,
) -> list[Launch]:
    """RMS norm of rows as wide as w: tokens, or heads within them. `twin` receives y once more, as
    floats where x is half and the other way round."""
    width, rows = w.size, rstd.size
    shape = pack("IIf", rows // x.shape[0], width, eps)
    constants = {VECTORISED: dialect.vectorised(width, x, w, y, twin), NORM_TWIN: twin is not None}
    given = (x, w, live, y, rstd, twin, shape)
    return _norm_launch(dialect, "rms_norm", given, rows, width, x.dtype, constants)


def _norm_launch(
    dialect: Dialect,
    function: str,
    arguments: tuple[Any, ...],
    rows: int,
    width: int,
    dtype: DType,
    constants: Constants,
) -> list[Launch]:
    threads, groups = dialect.threads(width, dialect.held * dialect.vector), rows
    if threads == LANES:
        threads, groups = LANES * dialect.short_rows, pieces(rows, dialect.short_rows)
    return _reduction("norm", function, arguments, groups, threads, (dtype,), constants)


def _norm(dialect: Dialect, call: Call, workspace: Buffer | None) -> list[Launch]:
    x, w, live, y, rstd = operands(call)
    return norm(dialect, x, w, live, y, rstd, None, call.attributes["eps"])


def _norm_backward(dialect: Dialect, call: Call, workspace: Buffer | None) -> list[Launch]:
    dy, x, w, rstd, *optional, live, dx = operands(call)
    residual = optional[0] if optional else None  # head_norm_backward has none
    width, rows = w.size, rstd.size
    shape = pack("IIf", rows // x.shape[0], width, 0.0)
    constants = {
        VECTORISED: dialect.vectorised(width, dy, x, w, residual, dx),
        NORM_RESIDUAL: residual is not None,
    }
    given = (dy, x, w, rstd, residual, live, dx, shape)
    return _norm_launch(dialect, "rms_norm_backward", given, rows, width, x.dtype, constants)


def _flat(
    dialect: Dialect, function: str, types: tuple[DType, ...], *buffers: Buffer
) -> list[Launch]:
    """Every vector of buffers of one size."""
    count = buffers[0].size
    given: tuple[Any, ...] = (*buffers, pack("I", count))
    constants = {VECTORISED: dialect.vectorised(count, *buffers)}
    items = pieces(count, dialect.vector)
    return _pointwise(dialect, "pointwise", function, given, items, 1, types, constants)


def _cast(dialect: Dialect, call: Call, workspace: Buffer | None) -> list[Launch]:
    x, y = operands(call)
    return _flat(dialect, "cast", (x.dtype, y.dtype), x, y)


def _zero(dialect: Dialect, call: Call, workspace: Buffer | None) -> list[Launch]:
    return _flat(dialect, "zero", (), *operands(call))


def _copy_rows(
    dialect: Dialect,
    function: str,
    types: tuple[DType, ...],
    x: Buffer,
    index: Buffer,
    live: Buffer,
    y: Buffer,
) -> list[Launch]:
    """One row for each index."""
    width = y.size // y.shape[0]
    given = (x, index, live, y, pack("I", width))
    constants = {VECTORISED: dialect.vectorised(width, x, y)}
    items = pieces(width, dialect.vector)
    return _pointwise(dialect, "pointwise", function, given, items, index.size, types, constants)


def _embedding(dialect: Dialect, call: Call, workspace: Buffer | None) -> list[Launch]:
    ids, table, live, x = operands(call)
    return _copy_rows(dialect, "gather_rows", (x.dtype, table.dtype), table, ids, live, x)


def _gather_rows(dialect: Dialect, call: Call, workspace: Buffer | None) -> list[Launch]:
    x, index, live, y = operands(call)
    return _copy_rows(dialect, "gather_rows", (y.dtype, x.dtype), x, index, live, y)


def _cache_write(dialect: Dialect, call: Call, workspace: Buffer | None) -> list[Launch]:
    x, row, live, cache = operands(call)
    return _copy_rows(dialect, "scatter_rows", (cache.dtype,), x, row, live, cache)


def _swiglu(dialect: Dialect, call: Call, workspace: Buffer | None) -> list[Launch]:
    """swiglu or swiglu_backward: matrices of one shape, and live."""
    buffers = operands(call)
    matrices = [buffer for buffer in buffers if buffer.dtype is not I32]
    rows, width = matrices[0].shape
    given = (*buffers, pack("I", width))
    types, constants = (matrices[0].dtype,), {VECTORISED: dialect.vectorised(width, *matrices)}
    items = pieces(width, dialect.vector)
    return _pointwise(dialect, "pointwise", call.op.name, given, items, rows, types, constants)


def _rope_table(dialect: Dialect, call: Call, workspace: Buffer | None) -> list[Launch]:
    position, inv_freq, *rest = operands(call)
    rows, pairs = position.size, inv_freq.size
    shape = pack("If", pairs, call.attributes["scale"])
    given = (position, inv_freq, *rest, shape)
    return _pointwise(dialect, "pointwise", "rope_table", given, pairs, rows)


def _rope(dialect: Dialect, call: Call, workspace: Buffer | None) -> list[Launch]:
    x, cos, sin, live, y = operands(call)
    rows, heads, size = x.shape
    pairs = size // 2
    shape = pack("IIf", heads, pairs, call.attributes["sign"])
    given = (x, cos, sin, live, y, shape)
    types, constants = (x.dtype,), {VECTORISED: dialect.vectorised(pairs, x, cos, sin, y)}
    items = heads * pieces(pairs, dialect.vector)
    return _pointwise(dialect, "pointwise", "rope", given, items, rows, types, constants)


def _dropout(dialect: Dialect, call: Call, workspace: Buffer | None) -> list[Launch]:
    x, document, position, key, *optional, live, y = operands(call)
    residual = optional[0] if optional else None  # dropout itself has none
    rows, width = x.shape
    rate, stream = call.attributes["rate"], int(call.attributes["stream"])
    threshold = min(round(rate * 2.0**32), 2**32 - 1)
    shape = pack("IIIf", width, stream, threshold, 1 / (1 - rate))
    given = (x, document, position, key, residual, live, y, shape)
    constants = {
        VECTORISED: dialect.vectorised(width, x, residual, y),
        DROPOUT_RESIDUAL: residual is not None,
    }
    items = pieces(width, dialect.vector)
    return _pointwise(dialect, "pointwise", "dropout", given, items, rows, (x.dtype,), constants)


def _row_losses(call: Call) -> int:
    logits = next(buffer for buffer in call.reads() if len(buffer.shape) == 2)
    return 4 * logits.shape[0]


def _loss(
    dialect: Dialect,
    target: Buffer,
    scale: Buffer | None,
    live: Buffer,
    logits: Buffer,
    losses: Buffer | None,
    loss: Buffer,
) -> list[Launch]:
    """Row losses into `losses`, gradients over the logits if there is a scale, then the sum."""
    rows, classes = logits.shape
    given = (target, scale, live, logits, losses, pack("I", classes))
    constants = {
        VECTORISED: dialect.vectorised(classes, logits),
        LOSS_GRADIENT: scale is not None,
    }
    threads, types = dialect.threads(classes, 4 * dialect.vector), (logits.dtype,)
    threads_of_sum = dialect.threads(rows, dialect.vector)
    return [
        *_reduction("loss", "cross_entropy", given, rows, threads, types, constants),
        *_reduction("loss", "sum_losses", (losses, live, loss), 1, threads_of_sum),
    ]


def _cross_entropy(dialect: Dialect, call: Call, workspace: Buffer | None) -> list[Launch]:
    target, scale, live, loss, logits = operands(call)
    return _loss(dialect, target, scale, live, logits, workspace, loss)


def _cross_entropy_loss(dialect: Dialect, call: Call, workspace: Buffer | None) -> list[Launch]:
    logits, target, live, loss = operands(call)
    return _loss(dialect, target, None, live, logits, workspace, loss)


def _norm_partials(call: Call) -> int:
    grad = next(call.reads())
    return 4 * pieces(grad.size, NORM_BLOCK)


def _gradient_norm(dialect: Dialect, call: Call, workspace: Buffer | None) -> list[Launch]:
    grad, loss, hyper, result = operands(call)
    count = grad.size
    blocks = pieces(count, NORM_BLOCK)
    squares = (grad, hyper, workspace, pack("II", count, NORM_BLOCK))
    root = (workspace, loss, result, pack("I", blocks))
    constants = {VECTORISED: dialect.vectorised(count, grad)}
    threads = dialect.threads(blocks, dialect.vector)
    return [
        *_reduction("optimizer", "sum_squares", squares, blocks, NORM_THREADS, constants=constants),
        *_reduction("optimizer", "gradient_norm", root, 1, threads),
    ]


def _adamw(dialect: Dialect, call: Call, workspace: Buffer | None) -> list[Launch]:
    grad, norm, hyper, param, first, second = operands(call)
    count = grad.size
    given = (grad, norm, hyper, param, first, second, pack("I", count))
    constants = {VECTORISED: dialect.vectorised(count, grad, param, first, second)}
    items = pieces(count, dialect.vector)
    return _pointwise(dialect, "optimizer", "adamw", given, items, constants=constants)


_ONLY = "the only kernel"
_SUM = "each row's loss, summed in order"


def rows(dialect: Dialect) -> list[GpuRow]:
    """A row for every op of these, on activations that the GPU computes in."""

    def one_activation(call: Call) -> bool:
        """Whether every buffer that may be of any type has one and the same."""
        pairs = zip(call.op.inputs + call.op.outputs, call.inputs + call.outputs, strict=True)
        free = {b.dtype for p, argument in pairs if p.dtype is None for b in members(argument)}
        return len(free) == 1 and free <= set(dialect.activations)

    def activation_out(call: Call) -> bool:
        """Whether the outputs are activations; the inputs may be of any type."""
        return all(buffer.dtype in dialect.activations for buffer in call.writes())

    def row(
        op: str,
        launches: Callable[[Dialect, Call, Buffer | None], list[Launch]],
        when: Callable[[Call], bool] = one_activation,
        workspace: Callable[[Call], int] = lambda call: 0,
        why: str = _ONLY,
    ) -> GpuRow:
        return GpuRow(
            op, when=when, workspace=workspace, why=why, launches=partial(launches, dialect)
        )

    def always(call: Call) -> bool:
        return True

    return [
        row("rms_norm", _norm),
        row("rms_norm_backward", _norm_backward),
        row("head_norm", _norm),
        row("head_norm_backward", _norm_backward),
        row("embedding", _embedding, activation_out),
        row("gather_rows", _gather_rows, activation_out),
        row("cache_write", _cache_write),
        row("cast", _cast, always),
        row("zero", _zero, always),
        row("swiglu", _swiglu),
        row("swiglu_backward", _swiglu),
        row("rope_table", _rope_table, always),
        row("rope", _rope),
        row("dropout", _dropout),
        row("dropout_backward", _dropout),
        row("cross_entropy", _cross_entropy, workspace=_row_losses, why=_SUM),
        row("cross_entropy_loss", _cross_entropy_loss, workspace=_row_losses, why=_SUM),
        row(
            "gradient_norm",
            _gradient_norm,
            always,
            _norm_partials,
            "sums of fixed blocks, added in order",
        ),
        row("adamw", _adamw, always),
    ]
