"""Which C++ kernel computes each op, and how much scratch it wants from the plan."""

from collections.abc import Callable

from krnl.dtypes import F32
from krnl.plan.buffer import Buffer
from krnl.plan.lower import Row, Table
from krnl.plan.step import Call

# Bytes that each thread holds for packed panels and tiles (kThreadScratch in parallel.h).
THREAD_SCRATCH = 4 << 20

# attention.cpp: kBlockRows and kSpanKeys; simd.h: the widest W.
BLOCK_ROWS, SPAN_KEYS, WIDEST = 192, 512, 16
# optimizer.cpp: kNormBlock.
NORM_BLOCK = 16384


def _pieces(size: int, piece: int) -> int:
    return -(-size // piece)


def _dims(call: Call, letters: str) -> list[int]:
    """Sizes of plain letters."""
    sizes = [call.dims[letter] for letter in letters]
    return [size for size in sizes if isinstance(size, int)]


def _spans(call: Call) -> int:
    """A sum and two statistics for every row, head and span of keys, where the queries are few."""
    n, m, h, g, d = _dims(call, "nmhgd")
    spans = _pieces(m, SPAN_KEYS) if n <= max(1, BLOCK_ROWS * g // h) else 1
    return 4 * spans * n * h * (_pieces(d, WIDEST) * WIDEST + 2) if spans > 1 else 0


def _head_sums(call: Call) -> int:
    """dq, dk and dv in float32, and a number for every row and head."""
    n, h, g, d = _dims(call, "nhgd")
    return 4 * n * (h + (h + 2 * g) * _pieces(d, WIDEST) * WIDEST)


def _row_losses(call: Call) -> int:
    return 8 * _dims(call, "n")[0]


def _norm_partials(call: Call) -> int:
    return 8 * _pieces(_dims(call, "p")[0], NORM_BLOCK)


def _same_or_float(call: Call) -> bool:
    """Whether the outputs have the type of the first input, or are floats."""
    x = next(iter(call.reads()))
    return all(y.dtype in (x.dtype, F32) for y in call.writes())


def _transposed_cells(narrow: int) -> Callable[[Call], int]:
    """Input number `narrow`, [n,s], as transposed cells of 32 bits; floats are used where they
    lie."""

    def nbytes(call: Call) -> int:
        buffer = call.inputs[narrow]
        assert isinstance(buffer, Buffer)
        return 0 if buffer.dtype is F32 else buffer.size * 4

    return nbytes


TABLE = Table(
    "cpu",
    [
        Row("attention", workspace=_spans, why="few queries: partial results of spans of the keys"),
        Row("attention_backward", workspace=_head_sums, why="sums in float32, and rowsum(dO ∘ O)"),
        Row("cross_entropy", workspace=_row_losses, why="each row's loss, summed in order"),
        Row("cross_entropy_loss", workspace=_row_losses, why="each row's loss, summed in order"),
        Row("gradient_norm", workspace=_norm_partials, why="sums of fixed blocks, added in order"),
        Row("lora_linear", when=_same_or_float, why="the only kernel"),
        Row(
            "lora_a_grad",
            workspace=_transposed_cells(0),
            why="v transposed for broadcasts in the inner loop",
        ),
        Row(
            "lora_b_grad",
            workspace=_transposed_cells(1),
            why="u transposed for broadcasts in the inner loop",
        ),
        *(
            Row(name, why="the only kernel")
            for name in [
                "adamw",
                "cache_write",
                "cast",
                "dropout",
                "dropout_backward",
                "embedding",
                "gather_rows",
                "head_norm",
                "head_norm_backward",
                "lora_down",
                "lora_linear_backward",
                "lora_swiglu",
                "lora_swiglu_backward",
                "lora_up_backward",
                "rms_norm",
                "rms_norm_backward",
                "rope",
                "rope_table",
                "swiglu",
                "swiglu_backward",
                "zero",
            ]
        ),
    ],
)
