"""Deliberate faults in the Metal kernels, one at a time: the simulator's checks report each, or the
numbers are wrong.

A missing barrier or a forgotten guard often leaves the numbers right, here and this time. How many
of the faults only the checks see is printed at the end.
"""

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest

from krnl.dtypes import F16
from krnl.errors import BackendError
from krnl.kernels.metal.sources import source
from krnl.plan.arena import Block, Layout, Place, Plan
from metalsim import build
from metalsim.install import SimulatedBackend, metal_backend
from mutants import Mutant, mutants
from op_bench import Chosen
from op_cases import CASE


@dataclass(frozen=True)
class Example:
    """A call of an op, in half. `put` replaces the first element of an input."""

    op: str
    dims: dict[str, Any]
    live: int | None = None
    put: dict[str, float] = field(default_factory=dict)


# Whole tiles and edges of tiles, rows that are dead, sums in pieces, rows that are read one element
# at a time: what the kernels distinguish.
EXAMPLES = {
    "nt": Example("lora_linear", {"n": 70, "c": 72, "o": (40,), "r": (12,), "s": 12}, 69),
    "nt odd": Example("lora_linear", {"n": 35, "c": 37, "o": (33,), "r": (5,), "s": 5}, 34),
    "nt chunks": Example("lora_linear", {"n": 33, "c": 300, "o": (40,), "r": (12,), "s": 12}, 32),
    "nn": Example(
        "lora_linear_backward", {"n": 70, "c": 72, "o": (40, 36), "r": (8, 4), "s": 12}, 69
    ),
    "nn odd": Example(
        "lora_linear_backward", {"n": 35, "c": 37, "o": (33,), "r": (5,), "s": 5}, 34
    ),
    "tn": Example("lora_a_grad", {"n": 70, "c": 72, "s": 36}, 69),
    "swiglu": Example("lora_swiglu", {"n": 70, "c": 72, "f": 40, "p": 8, "q": 4, "s": 12}, 69),
    "attention": Example("attention", {"n": 70, "m": 100, "h": 4, "g": 2, "d": 40}, 69),
    "spans": Example("attention", {"n": 2, "m": 700, "h": 4, "g": 2, "d": 40}, 2),
    "attention backward": Example("attention_backward", {"n": 70, "h": 4, "g": 2, "d": 40}, 69),
    "norm": Example("rms_norm", {"n": 3, "c": 1028}, 2),
    "norm odd": Example("rms_norm", {"n": 3, "c": 1029}, 2),
    "norm wide": Example("rms_norm", {"n": 2, "c": 8196}, 2),
    "norm backward": Example("rms_norm_backward", {"n": 3, "c": 1028}, 2),
    "loss": Example("cross_entropy", {"n": 5, "v": 1100}, 4),
    "loss few": Example("cross_entropy", {"n": 5, "v": 5}, 4),
    "gradient norm": Example("gradient_norm", {"p": 40001}),
    "gradient norm overflow": Example("gradient_norm", {"p": 1001}, put={"grad": np.inf}),
    "adamw": Example("adamw", {"p": 1001}, put={"norm": 5.0}),
    "adamw overflow": Example("adamw", {"p": 1001}, put={"norm": np.inf}),
    "gather": Example("gather_rows", {"n": 9, "t": 5, "c": 72}, 8),
    "dropout": Example("dropout_backward", {"n": 9, "c": 72}, 8),
}


@cache
def bench(name: str) -> Chosen:
    example = EXAMPLES[name]
    made = Chosen(CASE[example.op], F16, example.dims, live=example.live)
    for parameter, value in example.put.items():
        made.values[parameter].flat[0] = value
    return made


# The end of gemm.metal, where it says which kernels there are. Of all of them a compiler makes a
# quarter of a minute; an example needs one or two.
GEMM_END = "#define FOR_WEIGHTS"
GEMM_KERNELS = {
    "nt": 'GEMM("nt_f16_f16", NT, half, half)\nREDUCE("f16", half)\n',
    "nn": 'GEMM("nn_f16_f16", NN, half, half)\nREDUCE("f16", half)\n',
    "tn": 'GEMM("tn_f16", TN, half, half)\nREDUCE("f16", half)\n',
    "swiglu": 'SWIGLU("f16_f16", half, half)\n',
}
FLOAT_ATTENTION = 'ATTENTION(float, "f32")'


@cache
def unmutated(file: str, examples: tuple[str, ...]) -> str:
    """The source with no more kernels than examples need."""
    text = source(file.removesuffix(".metal"))
    if file == "gemm.metal":
        head, mark, _ = text.partition(GEMM_END)
        assert mark, f"gemm.metal has no {GEMM_END!r} any more; say here where its kernels begin."
        return head + "".join(GEMM_KERNELS[k] for k in sorted({e.split()[0] for e in examples}))
    if file == "attention.metal":
        assert FLOAT_ATTENTION in text, f"attention.metal has no {FLOAT_ATTENTION!r} any more."
        return text.replace(FLOAT_ATTENTION, "")
    return text


def mutated(mutant: Mutant) -> str:
    return mutant.of(unmutated(mutant.file, mutant.examples))


def barriers(file: str, examples: str, function: str) -> Iterator[Mutant]:
    """Every barrier of a function deleted, and weakened so that it orders no memory."""
    names = tuple(examples.split(", "))
    whole = unmutated(file, names)
    body = re.search(rf"\b{function}\([^;{{]*\) \{{\n(.*?)\n\}}\n", whole, re.DOTALL)
    calls = list(re.finditer(r"\w+_barrier\([^;]*\);", body[1])) if body else []
    assert body and calls, f"{file} has no function {function} with barriers any more."
    for number, call in enumerate(calls, 1):
        # As much of what stands before it as makes the text unique.
        start = call.start()
        while whole.count(body[1][start : call.end()]) > 1:
            start = body[1].rindex("\n", 0, start)
        before, name = body[1][start : call.start()], call.group().partition("(")[0]
        for change, barrier in (
            ("deleted", ""),
            ("orders nothing", f"{name}(mem_flags::mem_none);"),
        ):
            fault = f"{function}'s barrier {number} of {len(calls)} {change}"
            yield Mutant(fault, file, names, before + call.group(), before + barrier)


# Formatted by hand: what is wrong on a mutant's first line, the change on the next.
# fmt: off
MUTANTS = [
    *barriers("gemm.metal", "nt", "multiply_columns"),
    *barriers("loss.metal", "loss", "threadgroup_max"),
    *barriers("optimizer.metal", "gradient norm", "threadgroup_sum"),
    *mutants(
        "gemm.metal", "nt",
        ("a value scattered to the row of another",
         "stage[(4 * i + 1) * TILE + lane]", "stage[(4 * i + 2) * TILE + lane]"),
        ("a value scattered to another lane's column",
         "stage[(4 * i + 1) * TILE + lane]", "stage[(4 * i + 1) * TILE + (lane ^ 1) / 2]"),
        ("a value not staged", "stage[(4 * i + 3) * TILE + lane] = T(to_float(values.w));", ""),
        ("one vector too many staged",
         "for (uint i = 0; i < TILE / 4; i++) {\n    const",
         "for (uint i = 0; i <= TILE / 4; i++) {\n    const"),
        ("the staging array too short",
         "layout == NT ? TILE * TILE : 1", "layout == NT ? TILE * TILE - 8 : 1"),
        ("the staged tile read a row further on",
         "a_stride, 8 * a_stride);\n    load<false>(b_blocks, stage + k * TILE,",
         "a_stride, 8 * a_stride);\n    load<false>(b_blocks, stage + (k + 1) * TILE,"),
        ("columns that do not exist staged", "lane < columns ? depth : 0", "depth"),
        ("whole steps run into the rest",
         "for (; k + TILE <= depth; k += TILE) {", "for (; k < depth; k += TILE) {"),
        ("values behind the last staged",
         "if (i + j >= first && i + j < last) values[j]", "if (i + j >= first) values[j]"),
        ("columns beyond the edge stored",
         "(i < rows && j + 1 < columns)) finish(epilogue",
         "(i < rows && j < columns + 1)) finish(epilogue"),
        ("rows beyond the edge stored",
         "const bool whole = rows >= TILE && columns >= TILE;",
         "const bool whole = columns >= TILE;"),
        ("dead rows computed", "min(shape.rows, live_rows), row)", "shape.rows, row)"),
        ("two lanes hold the same row", "(lane >> 1 & 3); }", "(lane >> 2 & 3); }"),
        ("no adapter", "  if (has_adapter)\n    multiply", "  if (false)\n    multiply"),
        ("no residual", "if (has_residual) value +=", "if (false) value +="),
    ),
    *mutants(
        "gemm.metal", "nt odd",
        ("rows read by fours that are not aligned", "if (whole && aligned)", "if (whole)"),
        ("edges read by fours that are not aligned", "if (aligned && i >= first", "if (i >= first"),
    ),
    *mutants(
        "gemm.metal", "nt chunks",
        ("all chunks in one place",
         "linear.floats += ulong(group.z) * shape.rows * shape.columns;", ";"),
        ("chunks overlap by a step",
         "step, step + chunk_steps, row, column, rows, columns, aligned,",
         "step, step + chunk_steps + 1, row, column, rows, columns, aligned,"),
        ("a chunk too many added up",
         "chunk < shape.chunks; chunk++", "chunk <= shape.chunks; chunk++"),
        ("a chunk left out",
         "for (uint chunk = 0; chunk < shape.chunks", "for (uint chunk = 1; chunk < shape.chunks"),
        ("sums of dead rows added up",
         "if (row >= (accumulates ? shape.rows : min(shape.rows, uint(live[0])))) return;", ""),
    ),
    *mutants(
        "gemm.metal", "nn",
        ("whole columns taken for granted",
         "if (aligned && rows >= TILE && columns >= TILE) {", "if (aligned && rows >= TILE) {"),
        ("rows beyond the edge loaded",
         "const bool exists = row < rows;", "const bool exists = true;"),
        ("the second pair of matrices is the first", "i == 1) {", "i == 3) {"),
    ),
    *mutants(
        "gemm.metal", "nn odd",
        ("a column beyond the edge loaded",
         "exists && column + 1 < columns", "exists && column < columns"),
    ),
    *mutants(
        "gemm.metal", "tn",
        ("dead rows summed",
         "const uint depth = layout == TN ? live_rows : shape.pair[i].depth;",
         "const uint depth = shape.pair[i].depth;"),
        ("gradients replaced instead of added to",
         "if (accumulates) value += linear.floats[at];", ""),
    ),
    *mutants(
        "gemm.metal", "swiglu",
        ("columns of half a tile taken for granted",
         "rows >= TILE && columns >= TILE / 2, aligned", "rows >= TILE, aligned"),
        ("weights beyond the edge staged", "exists ? shape.depth : 0, rows", "shape.depth, rows"),
        ("up's adapter begins with gate's", "first = is_up ? shape.gate_rank : 0", "first = 0"),
        ("gate's columns beside gate's", "own = column + lane % (TILE / 2)", "own = column + lane"),
    ),
    *mutants(
        "attention.metal", "attention",
        ("masked probabilities left as they were",
         "i = tile_floor(seen.first) / 4 + index; i * 4 < tile_ceil(seen.stop)",
         "i = first / 4 + index; i * 4 < last"),
        ("every thread writes the log-sum-exp", "if (index == 0) lse", "lse"),
        ("a query sees the key after its last",
         "return has_stop ? uint(stop[query])", "return has_stop ? uint(stop[query]) + 1"),
        ("a thread's sum not rescaled to the row's largest score",
         "total * precise::exp(top - row_top)", "total"),
        ("keys of the first head",
         "(part.first_head + head) / part.heads_per_key * part.size", "0"),
    ),
    *mutants(
        "attention.metal", "spans",
        ("a sum not rescaled when the largest score grows",
         "total *= precise::exp(top - new_top);", ""),
        ("spans overlap", "min(seen.stop, span + part.span)", "seen.stop"),
        ("all spans in one place",
         "partial + (group.z * part.rows + row", "partial + (head * part.rows + row"),
    ),
    *mutants(
        "attention.metal", "attention backward",
        ("every lane writes delta", "if (lane == 0) delta[at] = sum;", "delta[at] = sum;"),
        ("a query does not see itself", "key <= query && key >=", "key < query && key >="),
        ("dead queries seen", "query < p.queries && key", "key"),
        ("no delta", "(dp - ds.delta[(ds.p.query + row) * ds.p.lse_stride])", "dp"),
        ("one head of those that share a key",
         "head < first_head + part.heads_per_key", "head < first_head + 1"),
    ),
    *mutants(
        "norm.metal", "norm, norm odd",
        ("every thread writes the norm",
         "if (thread_index == 0) rstd[row] = scale;", "rstd[row] = scale;"),
        ("simdgroups that do not exist summed",
         "simd_sum(lane < threads / kLanes ? scratch[lane] : 0.0f)", "simd_sum(scratch[lane])"),
        ("one simdgroup not summed",
         "simd_sum(lane < threads / kLanes ? scratch[lane] : 0.0f)",
         "simd_sum(lane + 1 < threads / kLanes ? scratch[lane] : 0.0f)"),
        ("an element beyond the row read",
         "if (j + i < width) values[i] = row[j + i];",
         "if (j + i <= width) values[i] = row[j + i];"),
        ("an element beyond the row written",
         "if (j + i < width) row[j + i] = values[i];",
         "if (j + i <= width) row[j + i] = values[i];"),
        ("a vector beyond the row written",
         "if (j < width) *(device vec<T, 4> *)(row + j) = values;",
         "*(device vec<T, 4> *)(row + j) = values;"),
    ),
    *mutants(
        "norm.metal", "norm wide",
        ("a wide row taken for one that is held",
         "width <= lap ? held[i] : load4(x + start, j, width)", "held[i]"),
    ),
    *mutants(
        "norm.metal", "norm backward",
        ("no residual", "if (has_residual) result +=", "if (false) result +="),
        ("the mean is the sum",
         "const float mean = sum / float(width);", "const float mean = sum;"),
    ),
    *mutants(
        "loss.metal", "loss, loss few",
        ("every thread writes the row's loss",
         "if (label / 4 % threads == thread_index) losses", "losses"),
        ("every thread writes the loss", "if (thread_index == 0) *loss += sum;", "*loss += sum;"),
        ("dead rows summed",
         "row < uint(*live); row += threads", "row <= uint(*live); row += threads"),
        ("a sum not rescaled when the largest logit grows",
         "sum = sum * precise::exp(previous - top) +", "sum = sum +"),
        ("zeros beyond the row are logits", "values[i] = -FLT_MAX;", "values[i] = 0.0f;"),
        ("no one-hot", "gradient[label - j] -= *loss_scale;", ""),
        ("the scratch of a reduction too small",
         "threadgroup float scratch[kSimdgroups];\n  if (row",
         "threadgroup float scratch[2];\n  if (row"),
    ),
    *mutants(
        "optimizer.metal", "gradient norm, gradient norm overflow",
        ("the last block is as long as the others",
         "size = min(blocks.block, blocks.count - first)", "size = blocks.block"),
        ("a block too many added up",
         "block < count; block += threads", "block <= count; block += threads"),
        ("the scale left out",
         "as_type<float4>(bits) * hyper.gradient_scale", "as_type<float4>(bits)"),
        ("every thread writes a block's sum", "if (thread_index == 0) sums[block]", "sums[block]"),
    ),
    *mutants(
        "optimizer.metal", "adamw, adamw overflow",
        ("an update in spite of overflow",
         "if (!is_finite(*norm) || j >= count) return;", "if (j >= count) return;"),
        ("not clipped", "(hyper.gradient_scale * shrink)", "hyper.gradient_scale"),
        ("first moments stored as second",
         "store4(second, j, count, v);", "store4(second, j, count, m);"),
    ),
    *mutants(
        "pointwise.metal", "gather",
        ("a negative index read", "from < 0 ? uint4(0u) : load_bits", "load_bits"),
    ),
]
# fmt: on


class Apart:
    """Gives every buffer memory of its own, so that not even a neighbour's may be read: what lies
    beyond the edge of a matrix is often read and multiplied by nothing."""

    def __init__(self, backend: SimulatedBackend):
        self.backend, self.kernels = backend, backend.kernels

    def allocate(self, layout: Layout) -> Any:
        roots = list(layout.places)
        blocks = [Block(root.kind, root.nbytes) for root in roots]
        return self.backend.allocate(
            Layout(blocks, {root: Place(i, 0) for i, root in enumerate(roots)})
        )

    def compile(self, plan: Plan, memory: Any) -> Any:
        return self.backend.compile(plan, memory)


@dataclass(frozen=True)
class Outcome:
    reports: frozenset[str]  # their kinds
    wrong: bool  # numbers, or a kernel that a GPU would not survive


def device_with(file: str, text: str) -> SimulatedBackend:
    return metal_backend(
        "checked", source=lambda name: text if f"{name}.metal" == file else source(name)
    )


def outcome(mutant: Mutant) -> Outcome:
    text = mutated(mutant)
    build.library(text, "checked")  # raises where it does not compile, which is no answer
    device = device_with(mutant.file, text)
    wrong = False
    for name in mutant.examples:
        try:
            bench(name).check(Apart(device))
        except (AssertionError, BackendError):
            wrong = True
    return Outcome(frozenset(report.kind for _, report in device.simulation.reports), wrong)


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """Compiles what will be run on all cores. Errors come again where a library is used."""
    specifications = [getattr(item, "callspec", None) for item in request.session.items]
    chosen = [s.params["mutant"] for s in specifications if s and "mutant" in s.params]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for mutant in chosen:
            pool.submit(lambda m: build.library(mutated(m), "checked"), mutant)


SEEN: dict[Mutant, Outcome] = {}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file} {mutant.fault}")
def test_a_fault_is_seen(mutant: Mutant) -> None:
    SEEN[mutant] = seen = outcome(mutant)
    assert seen.reports or seen.wrong


@pytest.mark.parametrize("key", sorted({(m.file, m.examples) for m in MUTANTS}), ids=str)
def test_without_a_fault_nothing_is_seen(key: tuple[str, tuple[str, ...]]) -> None:
    file, examples = key
    device = device_with(file, unmutated(file, examples))
    for name in examples:
        bench(name).check(Apart(device))
    device.simulation.expect_clean()


def test_the_checks_see_what_numbers_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    by_checks = sum(bool(seen.reports) and not seen.wrong for seen in SEEN.values())
    by_numbers = sum(seen.wrong and not seen.reports for seen in SEEN.values())
    with capsys.disabled():
        print(
            f"\n{len(SEEN)} faults: {by_checks} seen by the simulator's checks alone, "
            f"{by_numbers} by numbers alone"
        )
    assert by_checks or len(SEEN) < len(MUTANTS)
