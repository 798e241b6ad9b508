"""Deliberate faults in the CUDA kernels, one at a time: the simulator reports each, or the numbers
are wrong in one of several orders of threads."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from cudasim import build
from cudasim.backend import SimulatedCudaBackend, enqueued
from cudasim.device import BACKWARD, FORWARD
from krnl.backends.cuda_compiler import Kernel
from krnl.dtypes import BF16, F32, DType
from krnl.kernels.cuda import gemm_wgmma, sources
from krnl.kernels.cuda.table import table
from krnl.kernels.cuda.target import Target
from krnl.kernels.launch import GpuRow, Launch
from krnl.plan.arena import plan
from krnl.plan.buffer import Buffer
from krnl.plan.lower import Table
from krnl.plan.step import Call
from mutants import Mutant, mutants
from op_bench import Chosen, forget_last_keys, hide_last_keys, keys_shared_by
from op_cases import CASE

# Orders of threads, and whether launches are told to run beside the one before.
WAYS = ((BACKWARD, False), (FORWARD, True), (2, False))


@dataclass(frozen=True)
class Example:
    """A call of an op. `capability` says which kernels take it; `tiling` how gemm_wgmma cuts it."""

    op: str
    dims: dict[str, Any]
    live: int | None = None
    activation: DType = BF16
    capability: int = 80
    tiling: gemm_wgmma.Tiling | None = None
    split: int | None = None  # blocks that share a sum of gradients of keys
    blocks: int | None = None  # that take the tiles
    put: tuple[tuple[str, float], ...] = ()  # first elements of inputs
    unseen: int = 0  # so many of the last keys are seen by no query, and NaN in a second run

    def bench(self) -> Chosen:
        made = Chosen(CASE[self.op], self.activation, self.dims, live=self.live)
        for name, value in self.put:
            made.values[name].flat[0] = value
        return made

    def check(self, device: SimulatedCudaBackend) -> None:
        bench = self.bench()
        if self.unseen:
            hide_last_keys(bench, self.unseen)
        bench.check(device)
        if self.unseen:
            results = bench.run(device)
            forget_last_keys(bench, self.unseen)
            np.testing.assert_equal(bench.run(device), results)

    @property
    def kernels(self) -> Table:
        if self.split is not None:
            return keys_shared_by(self.split)
        if self.tiling is None:
            return table(Target(self.capability))
        return Table("cuda", [self._tiled(self.tiling)])

    def _tiled(self, tiling: gemm_wgmma.Tiling) -> GpuRow:
        def launches(call: Call, workspace: Buffer | None) -> list[Launch]:
            made = [job.launch(tiling, Target(90)) for job in gemm_wgmma.jobs(call)[0]]
            return [replace(x, groups=(self.blocks or x.groups[0], 1, 1)) for x in made]

        return GpuRow(self.op, kernel=f"{self.op}_wgmma", launches=launches)


HOPPER: dict[str, Any] = {"capability": 90}
Tiling = gemm_wgmma.Tiling
LINEAR = {"n": 150, "c": 200, "o": (200,), "r": (16,), "s": 16}
SWIGLU = {"n": 70, "c": 72, "f": 72, "p": 8, "q": 24, "s": 32}
# Whole tiles and edges of tiles, rows that are dead, sums in pieces, rows that are read one element
# at a time: what the kernels distinguish.
EXAMPLES = {
    "simt": Example("lora_linear", {"n": 70, "c": 73, "o": (37,), "r": (5,), "s": 5}, 69),
    "simt chunks": Example("lora_linear", {"n": 33, "c": 1301, "o": (37,), "r": (5,), "s": 5}, 32),
    "simt tn": Example("lora_a_grad", {"n": 70, "c": 73, "s": 35}, 66),
    "simt swiglu": Example("lora_swiglu", {"n": 70, "c": 73, "f": 41, "p": 7, "q": 4, "s": 11}, 69),
    "mma": Example("lora_linear", {"n": 150, "c": 168, "o": (136,), "r": (24,), "s": 24}, 149),
    "mma tn": Example("lora_a_grad", {"n": 150, "c": 200, "s": 24}, 131),
    "mma swiglu": Example("lora_swiglu", SWIGLU, 69),
    "wgmma": Example("lora_linear", LINEAR, 149, tiling=Tiling(128, 128)),
    "wgmma steps": Example("lora_linear", {**LINEAR, "c": 1000}, 149, tiling=Tiling(128, 256)),
    "wgmma handed": Example(
        "lora_swiglu", {**SWIGLU, "n": 150}, 149, tiling=Tiling(128, 256, hands_over=True), blocks=1
    ),
    "wgmma handed back": Example(
        "lora_swiglu_backward",
        {"n": 150, "c": 72, "f": 136, "s": 16},
        149,
        tiling=Tiling(128, 256, hands_over=True),
        blocks=1,
    ),
    "wgmma handed at once": Example(  # K of one step, whose middle is its beginning
        "lora_swiglu_backward",
        {"n": 300, "c": 64, "f": 264, "s": 0},
        290,
        tiling=Tiling(128, 256, hands_over=True),
        blocks=1,
    ),
    "wgmma split": Example("lora_linear", LINEAR, 149, tiling=Tiling(128, 64, 2)),
    "wgmma tn": Example("lora_a_grad", {"n": 150, "c": 200, "s": 24}, 131, tiling=Tiling(64, 64)),
    "wgmma swiglu": Example("lora_swiglu", SWIGLU, 69, tiling=Tiling(64, 128)),
    "attention": Example("attention", {"n": 70, "m": 90, "h": 4, "g": 2, "d": 40}, 67),
    "attention backward": Example("attention_backward", {"n": 70, "h": 4, "g": 2, "d": 40}, 67),
    "attention simt": Example("attention", {"n": 30, "m": 500, "h": 4, "g": 2, "d": 26}, 29, F32),
    "attention simt backward": Example(
        "attention_backward", {"n": 40, "h": 4, "g": 2, "d": 26}, 39, F32
    ),
    "attention unseen": Example(
        "attention", {"n": 70, "m": 450, "h": 2, "g": 1, "d": 64}, 67, unseen=30, **HOPPER
    ),
    "attention wgmma": Example(
        "attention", {"n": 200, "m": 450, "h": 2, "g": 1, "d": 64}, 197, **HOPPER
    ),
    "attention wgmma backward": Example(
        "attention_backward", {"n": 500, "h": 2, "g": 1, "d": 64}, 490, split=1
    ),
    "attention shared keys": Example(
        "attention_backward", {"n": 270, "h": 3, "g": 1, "d": 64}, 267, split=4
    ),
    "norm": Example("rms_norm", {"n": 3, "c": 1032}, 2),
    "norm odd": Example("rms_norm", {"n": 3, "c": 1029}, 2),
    "norm short": Example("rms_norm", {"n": 11, "c": 40}, 10),
    "norm wide": Example("rms_norm", {"n": 2, "c": 20000}, 2),
    "norm backward": Example("rms_norm_backward", {"n": 3, "c": 1032}, 2),
    "loss": Example("cross_entropy", {"n": 5, "v": 1104}, 4),
    "loss odd": Example("cross_entropy", {"n": 5, "v": 1101}, 4),
    "gradient norm": Example("gradient_norm", {"p": 40001}),
    "adamw": Example("adamw", {"p": 1001}, put=(("norm", 5.0),)),
    "adamw overflow": Example("adamw", {"p": 1001}, put=(("norm", float("inf")),)),
    "gather": Example("gather_rows", {"n": 9, "t": 5, "c": 72}, 8),
    "swiglu": Example("swiglu", {"n": 9, "f": 77}, 8),
    "rope": Example("rope", {"n": 9, "h": 3, "d": 26, "p": 13}, 8),
    "dropout": Example("dropout_backward", {"n": 9, "c": 72}, 8),
}


@cache
def unmutated() -> dict[str, str]:
    """All files of the kernels, by name."""
    return {f"{name}.cu": sources.source(name) for name in sources.libraries()} | sources.headers()


# Formatted by hand: what is wrong on a mutant's first line, the change on the next.
# fmt: off
MUTANTS = [
    *mutants(
        "common.h", "norm",
        ("a sum of the block before all have written theirs",
         "if (lane == 0) scratch[warp] = x;\n  __syncthreads();\n  x = warp_sum(",
         "if (lane == 0) scratch[warp] = x;\n  x = warp_sum("),
        ("warps that do not exist summed",
         "warp_sum(lane < warps ? scratch[lane] : 0.0f)", "warp_sum(scratch[lane])"),
        ("a warp's sum without its upper half",
         "offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl",
         "offset = kWarp / 4; offset > 0; offset /= 2) x += __shfl"),
        ("the launch before not waited for", '"griddepcontrol.wait;"', '""'),
        ("beside the launch before, not waited for at the end", "if (beside) wait();", ""),
        ("the next launch let begin too early",
         'asm volatile("griddepcontrol.wait;" ::: "memory");\n    '
         'asm volatile("griddepcontrol.launch_dependents;" ::: "memory");',
         'asm volatile("griddepcontrol.launch_dependents;" ::: "memory");\n    '
         'asm volatile("griddepcontrol.wait;" ::: "memory");'),
    ),
    *mutants(
        "rows.h", "norm odd, loss odd",
        ("an element beyond the row read",
         "j < width && i < width - j", "j < width && i <= width - j"),
        ("an element beyond the row written",
         "if (i < width - j) row[j + i]", "if (i <= width - j) row[j + i]"),
        ("rows read by eights that are not aligned",
         "if (kVectorised && j < width)", "if (j + 8 <= width)"),
    ),
    *mutants(
        "norm.cu", "norm short",
        ("dead rows normalised",
         "if (team.row >= uint32(*live) * rows.per_token) return;\n\n  Vector held",
         "if (team.row > uint32(*live) * rows.per_token) return;\n\n  Vector held"),
    ),
    *mutants(
        "norm.cu", "norm wide",
        ("a wide row taken for one that is held",
         "width <= lap ? held[i] : load<kVectorised>(x + start, j, width)", "held[i]"),
    ),
    *mutants(
        "norm.cu", "norm backward",
        ("no residual", "if constexpr (kResidual) result", "if constexpr (false) result"),
        ("the mean is the sum", "team.sum(products) / float(width)", "team.sum(products)"),
    ),
    *mutants(
        "loss.cu", "loss",
        ("every thread writes the loss", "if (threadIdx.x == 0) *loss += sum;", "*loss += sum;"),
        ("dead rows summed",
         "row < rows; row += blockDim.x) sum", "row <= rows; row += blockDim.x) sum"),
        ("a sum not rescaled when the largest logit grows", "sum *= expf(top - highest);", ""),
        ("no one-hot", "if (j + i == label) gradient.of[i] -= one;", ""),
    ),
    *mutants(
        "optimizer.cu", "gradient norm",
        ("the last block is as long as the others",
         "min_of(blocks.block, blocks.count - start)", "blocks.block"),
        ("the scale left out", "values.of[i] * scale", "values.of[i]"),
        ("a block too many added up", "block < count; block", "block <= count; block"),
    ),
    *mutants(
        "optimizer.cu", "adamw, adamw overflow",
        ("an update in spite of overflow", "at >= count || !is_finite(*norm)", "at >= count"),
        ("first moments stored as second",
         "store<kVectorised>(second, j, count, v)", "store<kVectorised>(second, j, count, m)"),
    ),
    *mutants(
        "pointwise.cu", "gather",
        ("a negative index read", "if (from >= 0) values", "values"),
    ),
    *mutants(
        "pointwise.cu", "dropout",
        ("a counter for eight columns", "philox({j / 4 + 1, place", "philox({j / 4, place"),
    ),
    *mutants(
        "pointwise.cu", "rope",
        ("the second half not rotated", "b.of[i] * c.of[i] + a.of[i] * sine", "b.of[i] * c.of[i]"),
    ),
    *mutants(
        "gemm_simt.cu", "simt",
        ("a stage filled while others multiply",
         "    multiply(sums, a_stage, b_stage);\n    __syncthreads();\n  }\n}\n\n// grid.x",
         "    multiply(sums, a_stage, b_stage);\n  }\n}\n\n// grid.x"),
        ("rows beyond the edge loaded",
         "return i < rows && k < depth ? to_float(a[at])", "return k < depth ? to_float(a[at])"),
        ("columns beyond the edge written",
         "column + j < columns)\n        finish<kSwigluBackward>",
         "column + j <= columns)\n        finish<kSwigluBackward>"),
    ),
    *mutants(
        "gemm_simt.cu", "simt chunks",
        ("all chunks in one place", "if (shape.chunks > 1) y +=", "if (false) y +="),
        ("a chunk too many added up",
         "chunk < shape.chunks; chunk++", "chunk <= shape.chunks; chunk++"),
    ),
    *mutants(
        "gemm.h", "simt tn, mma tn",
        ("dead rows summed",
         "kLayout == kTN ? min_of(pair.depth, live) : pair.depth", "pair.depth"),
    ),
    *mutants(
        "gemm_simt.cu", "simt swiglu",
        ("up's adapter begins with gate's", "start - (is_up ? shape.gate_rank : 0)", "start"),
    ),
    *mutants(
        "gemm_mma.cu", "mma",
        ("tiles used before they are there",
         "wait_copies<kStages - 2>();", "wait_copies<kStages - 1>();"),
        ("other threads' copies not waited for",
         "__syncthreads();  // this step's", "// this step's"),
        ("pieces in another place than they are read from",
         "piece ^ row / kRowsOfLine % min_of(kPieces, 8)",
         "piece ^ (row & 6) / kRowsOfLine % min_of(kPieces, 8) + (row & 1)"),
        ("columns beyond the matrix loaded",
         "i * kDown < from.rows && 0 < from.columns &&", "i * kDown < from.rows &&"),
        ("the second eight columns are the first", "b[j / 2][j % 2 * 2]", "b[j / 2][0]"),
        ("a column too many written",
         "if (row >= rows || column >= shape.columns) return;\n    float x[2]",
         "if (row >= rows || column > shape.columns) return;\n    float x[2]"),
    ),
    *mutants(
        "gemm_mma.cu", "mma swiglu",
        ("up's adapter begins with gate's",
         "shape.columns, shape.gate_rank, shape.up_rank)", "shape.columns, 0, shape.up_rank)"),
    ),
    *mutants(
        "epilogue.h", "mma",
        ("no residual", "if (epilogue.residual) {", "if (false) {"),
    ),
    *mutants(
        "gemm_wgmma.cu", "wgmma steps",
        ("a stage released while products read it",
         "        running = turn.stage;\n", "        running = -1, release(turn.stage);\n"),
        ("products of a stage that is not full",
         "wait(&ring.full[turn.stage], turn.parity);", ""),
        ("a stage filled that is not empty",
         "        wait(&ring.empty[turn.stage], turn.parity ^ 1);\n", ""),
        ("sums read while products run",
         "      wait_products<0>();\n      pin(sums);",
         "      wait_products<1>();\n      pin(sums);"),
        ("phases never change", "stage = 0, parity ^= 1;", "stage = 0;"),
        ("fewer bytes announced than come",
         "arrive_and_expect(&ring.full[turn.stage], Operands::kBytes)",
         "arrive_and_expect(&ring.full[turn.stage], Operands::kBytesA)"),
        ("the same columns of K again",
         "(kAlongM ? k * 16 * 128 : k * 32)", "(kAlongM ? k * 16 * 128 : k / 2 * 64)"),
        ("barriers that the copy engine does not know of", "    fence_barrier_init();\n", ""),
        ("more arrivals expected than come",
         "init_barrier(&empty[stage], Kernel::kMultiplyingWarps)",
         "init_barrier(&empty[stage], Kernel::kMultiplyingWarps + 1)"),
    ),
    *mutants(
        "gemm_wgmma.cu", "wgmma handed",
        ("sums written that have not come", "{ wait(&handed[sender], turn.parity); }", "{}"),
        ("sums never said to be taken", "arrive(&taken[sender]);", ";"),
        ("sums handed over where others are still to be written",
         "    wait(&taken[warp()], turn.parity ^ 1);\n", ""),
        ("the last half kept", "    if (kHandsOver && rests) hand_over(rest, handing);\n", ""),
        ("the first half twice", "pack_half<1>(sums, rest)", "pack_half<0>(sums, rest)"),
        ("one warp's rows left out", "sender += kWriters)", "sender += kWriters + 1)"),
    ),
    *mutants(
        "gemm_wgmma.cu", "wgmma handed at once",
        ("a half kept for a step that does not come", "i == all / 2", "i == all / 2 + 1"),
    ),
    *mutants(
        "gemm_wgmma.cu", "wgmma split",
        ("the residual added by every block of a cluster", "kStore && rank == 0 ?", "kStore ?"),
    ),
    *mutants(
        "gemm_wgmma.cu", "wgmma",
        ("a residual of dead rows",
         "column < columns_left && row < rows()", "column < columns_left"),
        ("the residual of the row above", "thread_row(tile) + half * 8;\n      const T *const from",
         "thread_row(tile);\n      const T *const from"),
    ),
    *mutants(
        "swiglu.h", "wgmma handed",
        ("columns beyond the matrix written", "column < part.columns", "column <= part.columns"),
        ("up in gate's place", "read(from + kColumns / 2)", "read(from)"),
    ),
    *mutants(
        "swiglu.h", "wgmma handed back",
        ("gate of a row before",
         "gate + place(i));\n", "gate + place(max_of(i - 1, 0)));\n"),
        ("the derivative of the sigmoid", "fmaf(-silu, s, s + silu)", "fmaf(-s, s, s)"),
    ),
    *mutants(
        "exchange.h", "wgmma split",
        ("sums exchanged where products still read",
         "[thread]\n  sync_cluster();", "[thread]"),
        ("sums of the peers not waited for",
         "  sync_cluster();\n#pragma unroll\n  for (int i = 0; i < kShare; i++) mine",
         "#pragma unroll\n  for (int i = 0; i < kShare; i++) mine"),
        ("the first peer's sums added twice", "places[(peer *", "places[(peer / 2 *"),
    ),
    *mutants(
        "gemm_wgmma.cu", "wgmma tn",
        ("dead rows multiplied", "if (live >= kDepth) return;", "return;"),
        ("tokens forgotten without waiting for one another",
         "    sync_threads(1, threads);\n", ""),
    ),
    *mutants(
        "gemm_wgmma.cu", "wgmma swiglu",
        ("up's adapter begins with gate's",
         "tile.column, k - shape.member[0].rank);", "tile.column, k);"),
        ("up's tile in gate's place",
         "fetch_b<kColumns>(turn.stage, kColumns, &maps.b[1]",
         "fetch_b<kColumns>(turn.stage, 0, &maps.b[1]"),
    ),
    *mutants(
        "staging.h", "wgmma",
        ("columns beyond the matrix written",
         "if (column >= columns_left) continue;", "if (column > columns_left) continue;"),
        ("the lower half of a matrix in the upper's place",
         "lane / 8 % 2 * 8 + lane % 8", "lane % 8"),
    ),
    *mutants(
        "attention_simt.cu", "attention simt",
        ("a query sees the key after its last",
         "const int last = stop[query];", "const int last = stop[query] + 1;"),
        ("a sum not rescaled", "total = total * factor + p;", "total = total + p;"),
        ("every warp's maximum is the row's",
         "exp2f(top - row_top) / row_total", "1.0f / row_total"),
    ),
    *mutants(
        "attention_simt.cu", "attention simt backward",
        ("a key is not seen by its own query",
         "int query = key + warp * kWarp;", "int query = key + 1 + warp * kWarp;"),
        ("one head of those that share a key",
         "head < (key_head + 1) * group; head++", "head < key_head * group + 1; head++"),
    ),
    *mutants(
        "attention_mma.cu", "attention",
        ("hidden keys seen", "column >= row_stop) scores", "column > row_stop) scores"),
        ("the largest score of one lane", "    new_top = max_of_four(new_top);\n", ""),
        ("keys of dead rows multiplied",
         "there = first + row < stop && column < size", "there = column < size"),
    ),
    *mutants(
        "attention_mma.cu", "attention backward",
        ("a query does not see itself", "if (seer < key ||", "if (seer <= key ||"),
        ("no delta", "fmaf(dp[i][j], shape.scale, -row_delta[j / 2])", "dp[i][j] * shape.scale"),
    ),
    *mutants(
        "attention_wgmma.cu", "attention wgmma",
        ("scores used while products run",
         "      wait_products<1>();\n      finish_scores(i);",
         "      finish_scores(i);\n      wait_products<1>();"),
        ("keys released before all warps have read them",
         "init_barrier(empty(i), kConsumers * kWarpgroup / kWarp)", "init_barrier(empty(i), 1)"),
        ("scores used before products are done",
         "consumer * kConsumerRows, k.get(0));\n    wait_products<0>();",
         "consumer * kConsumerRows, k.get(0));"),
        ("earlier sums not rescaled", "out[j] *= factor[j / 2 % 2];", "out[j] *= 1.0f;"),
    ),
    *mutants(
        "attention_wgmma.cu", "attention unseen",
        ("values multiplied that nobody sees", "if (rows < kKeys) last.forget(rows);", ""),
    ),
    *mutants(
        "attention_wgmma.cu", "attention wgmma backward",
        ("the upper rows' lse for all", "-lse[j / 2 % 2]", "-lse[0]"),
        ("keys released while products read them",
         "if (i > 0) k.release(i - 1);", "k.release(i);"),
        ("dead keys multiplied", "if (key + kKeys > seen.stop) {", "if (false) {"),
        ("queries released while products read them",
         "      if (i > 0) {\n        q.release(i - 1);\n        d_out.release(i - 1);\n      }",
         "      q.release(i);\n      d_out.release(i);"),
    ),
    *mutants(
        "attention_wgmma.cu", "attention shared keys",
        ("all blocks sum the first tiles", "count = all_tiles * (rank + 1) / kSplit - first_tile;",
         "count = all_tiles / kSplit;"),
        ("a share begins with the first query",
         "int query = block_first + first_tile % of_head * kQueries;", "int query = block_first;"),
        ("tiles of the first head",
         "key_head * group + (first_tile + i) / of_head;", "key_head * group;"),
        ("dV scaled as dK",
         "float scale = keys ? shape.scale : 1.0f,", "float scale = shape.scale,"),
        ("all blocks write the first columns", " + at + rank % kHalf * kColumns;", " + at;"),
        ("sums of nothing begin with anything",
         "float key_sums[kWidth / 2] = {}, value_sums[kWidth / 2] = {},",
         "float key_sums[kWidth / 2], value_sums[kWidth / 2],"),
        ("blocks without tiles wait for no keys",
         "    k.get(0);\n    v.get(0);", "    if (count > 0) k.get(0), v.get(0);"),
        ("the first warpgroup does not wait for the cluster",
         "if constexpr (kSplit > 1) share_nothing();", ""),
    ),
]
# fmt: on


def outcome(functions: build.Kernels, examples: tuple[str, ...]) -> str:
    """What goes wrong; "" if nothing does."""
    for order, beside in WAYS:
        for name in examples:
            example = EXAMPLES[name]
            device = SimulatedCudaBackend(
                kernels=example.kernels, functions=functions, order=order, beside=beside
            )
            try:
                example.check(device)
            except AssertionError as seen:  # a KernelError is one
                return str(seen)
    return ""


def kernels_of(mutant: Mutant) -> list[Kernel]:
    found = []
    for name in mutant.examples:
        example = EXAMPLES[name]
        (made,) = plan([example.bench().emit()[0]], example.kernels)
        found += [Kernel.of(launch) for launch in enqueued(made)]
    return found


def compiled(files: dict[str, str]) -> build.Kernels:
    return build.Kernels(
        lambda library: files[f"{library}.cu"],
        {name: text for name, text in files.items() if name.endswith(".h")},
    )


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file} {mutant.fault}")
def test_a_fault_is_seen(mutant: Mutant) -> None:
    files = unmutated()
    functions = compiled(files | {mutant.file: mutant.of(files[mutant.file])})
    functions.prepare(kernels_of(mutant))  # raises where it does not compile, which is no answer
    assert outcome(functions, mutant.examples)


@pytest.mark.parametrize("name", EXAMPLES)
def test_without_a_fault_nothing_is_seen(name: str) -> None:
    assert not outcome(compiled(unmutated()), (name,))
