"""Put deliberate faults into the CPU kernels, one at a time, and see that the tests notice.

    python scripts/mutate_kernels.py               # all of them: about a quarter of an hour
    python scripts/mutate_kernels.py norm.cpp eps  # those whose op, file or fault contains a word

Needs what a build needs (CMake, a C++ compiler) and the test dependencies. The package and its
sources are copied to a temporary folder and built there by CMakeLists.txt; every mutant changes one
place, builds one library and runs its op's tests of tests/test_ops.py on it. Ends with 1 if any
mutant survived, or could not be tried.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
KERNELS = Path("src", "krnl", "kernels", "cpu")
LONGEST = 300  # seconds for an op's tests: a fault may make a kernel run on for ever

# A failure is all that is wanted, not the smallest example of it.
PLUGIN = """
from hypothesis import Phase, settings
settings.register_profile("mutants", phases=set(Phase) - {Phase.shrink, Phase.explain})
"""


class Mutant(NamedTuple):
    """`text`, which stands in `file` once, becomes `replacement`; the tests of `op` must fail.
    `isa`: the library whose code it changes, if not the most capable one."""

    file: str
    op: str
    fault: str
    text: str
    replacement: str
    isa: str = ""


def _mutants(file: str, *entries: tuple[str, ...]) -> Iterator[Mutant]:
    for entry in entries:
        yield Mutant(file, *entry)


# Formatted by hand: what is wrong on a mutant's first line, the change on its second.
# fmt: off
MUTANTS = [
    *_mutants(
        "linear.cpp",
        ("lora_down", "no scale", "1] + j, sum * load_some(scale + j, n)", "1] + j, sum"),
        ("lora_linear", "no bias", "load_some(bias[m].as<float>() + j, n)", "Floats{}"),
        ("lora_linear", "no residual", "load_some(residual.as<T>() + at, n)", "Floats{}"),
        ("lora_linear", "every member takes the first one's columns of u",
         "u_column += b[m].shape[1];\n    }", "}"),
        ("lora_linear", "float32 outputs are written in the activations' type",
         "linear_into<T, float>(d);", "linear_into<T, T>(d);"),
        ("lora_swiglu", "gate and up exchanged", "g * sigmoid(g) * h", "h * sigmoid(h) * g"),
        ("lora_swiglu", "up takes the gate's columns of u", "u_column += b[m].shape[1];\n  }", "}"),
        ("lora_up_backward", "every member takes the first one's scale",
         "i * s + j, sum * load_some(scale + j, n)",
         "i * s + j, sum * load_some(scale + j - v_column[m], n)"),
        ("lora_up_backward", "members overwrite the first", "v_column[m] = s;", "v_column[m] = 0;"),
        ("lora_linear_backward", "members after the first left out",
         "m < group; m++) product.sums[0]", "m < 1; m++) product.sums[0]"),
        ("lora_linear_backward", "no adapter",
         "&v = next.one(), &a = next.one();", "&v = next.one(), a = (next.one(), Argument{});"),
        ("lora_swiglu_backward", "half of the derivative of silu", "(s + silu * (1.0f - s))", "s"),
        ("lora_swiglu_backward", "act without up", "at, silu * h, n", "at, silu, n"),
        ("lora_a_grad", "stores instead of adding", "load_some(to, count) + sum", "sum"),
        ("lora_a_grad", "a pair of rows takes one that is dead",
         "s, n - k, count", "s, Cell::depth, count", "avx512bf16"),
        ("lora_b_grad", "stores instead of adding", "+= values[k]", "= values[k]"),
        ("lora_b_grad", "every member takes the first one's columns of u",
         "rows.data += products[m].rows * rows.row;", ""),
    ),
    *_mutants(
        "gemm.h",
        ("lora_linear", "a chunk of K replaces the ones before it",
         "multiply_strip(strip * MR, tiles, chunk > 0)",
         "multiply_strip(strip * MR, tiles, false)"),
        ("lora_down", "the last value of K left out",
         "std::min(to * Cell::depth, term.k) - from",
         "std::min(to * Cell::depth, term.k - 1) - from"),
        ("lora_linear", "a later chunk of K loses the adapter", "first -= cells;", ""),
        ("lora_linear", "the adapter is packed over the weights",
         "lanes[v].cells += cells_of<Cell>(range.k) * lanes[v].stride;", "lanes[v].cells += 0;"),
        ("lora_down", "rows of a whole strip written where fewer live",
         "std::min<int64_t>(MR, product_.rows - row)", "int64_t{MR}"),
        ("lora_linear", "columns of a whole vector written where there are fewer",
         "std::min(begin_[q + 1], product_.columns) - begin_[q];", "begin_[q + 1] - begin_[q];"),
        ("lora_linear", "panels packed over tiles that wait for more of K",
         "(chunks_ == 1 ? 1 : last_strip_ - first_strip_)", "1"),
        ("lora_linear", "strips that wait for more of K share their tiles",
         "chunks_ == 1 ? 0 : strip - first_strip_", "0"),
        ("lora_swiglu", "up is computed over gate",
         "tiles + (q * parts + p) * kTile", "tiles + q * parts * kTile"),
        ("lora_linear", "a member's first piece left out",
         "index -= pieces[m++];", "index -= pieces[m++] - 1;"),
    ),
    *_mutants(
        "tile.h",
        ("lora_down", "the last cell of an odd number left out", "if (cells > 0) advance(0);", ""),
        ("lora_down", "the second of two sums left out",
         "sums == 2 ? sum[0][i][j] + sum[1][i][j] : sum[0][i][j]", "sum[0][i][j]"),
        ("lora_linear_backward", "a later chunk of K begins at the row's first value",
         " + first / Cell::depth * a.cell;", ";"),
        ("lora_swiglu", "up becomes gate", "load(at + part_stride)", "load(at)"),
    ),
    *_mutants(
        "pack.h",
        ("lora_down", "the last value of K left out where it fills no vector",
         "std::memcpy(padded, p, std::max<int64_t>(k, 0) * sizeof(T));",
         "std::memcpy(padded, p, std::max<int64_t>(k - 1, 0) * sizeof(T));"),
        ("lora_linear_backward", "the last row of an odd number left out",
         "if (k > 0) pack_row(k, 0);", "", "avx512bf16"),
        ("lora_a_grad", "a pair of rows takes one that is dead",
         "i < Cell::depth && i < k; i++", "i < Cell::depth; i++", "avx512bf16"),
        ("lora_down", "the end of a converted row left out",
         "if (cell < cells) store_some(", "if (false) store_some("),
        ("lora_down", "the last pair of an odd row takes the next row's first value",
         "k % Cell::depth == 0;", "true;", "avx512bf16"),
        ("lora_linear", "rounded pairs change places",
         "(__m512)load(p + W), (__m512)load(p)",
         "(__m512)load(p), (__m512)load(p + W)", "avx512bf16"),
        ("lora_linear", "float16 weights read as bfloat16",
         "f16) body(static_cast<const f16*>(w.data));",
         "f16) body(static_cast<const bf16*>(w.data));"),
        ("lora_linear_backward", "every block takes the first one's columns",
         "w + first * weights.stride + j", "w + first * weights.stride"),
    ),
    *_mutants(
        "few_rows.h",
        ("lora_down", "the end of K left out", "if (at < k) advance(at, k - at);", ""),
        ("lora_linear", "the second row of a pair is dead", "row + 1 < rows ? 2 : 1", "2"),
        ("lora_swiglu", "a lane left out", "i = 1; i < W; i++) total", "i = 2; i < W; i++) total"),
    ),
    *_mutants(
        "attention_tile.h",
        ("attention", "sums not rescaled when the largest score grows",
         "load(to) * factor[i] + sum[i][j]", "load(to) + sum[i][j]"),
        ("attention", "the last cell of K left out", "for (; k > 0; k--,", "for (; k > 1; k--,"),
        ("attention_backward", "the last vector of columns left out",
         "if (columns > 0) advance", "if (columns > W) advance"),
        ("attention", "the last key's value left out",
         "(from + j, stride, rows, std::min<int64_t>(W, size - j), &lanes)",
         "(from + j, stride, rows - 1, std::min<int64_t>(W, size - j), &lanes)"),
        ("attention", "scores that fill no vector left out",
         "end() const { return round_up(last, W); }", "end() const { return last / W * W; }"),
        ("attention_backward", "every query is the first of its block",
         "copy_cells<Cell>(from + i * stride, size, to + i * cells)",
         "copy_cells<Cell>(from, size, to + i * cells)"),
    ),
    *_mutants(
        "attention.cpp",
        ("attention", "a query sees the key after its last",
         "(column < static_cast<int32_t>(last))", "(column <= static_cast<int32_t>(last))"),
        ("attention", "a query does not see its first key",
         "(column >= static_cast<int32_t>(first))", "(column > static_cast<int32_t>(first))"),
        ("attention", "a strip sees no further than its last query",
         "c.last = std::max(c.last, last);", "c.last = last;"),
        ("attention", "denominators not rescaled when the largest score grows",
         "load(total) * factor[i] + exponentials", "load(total) + exponentials"),
        ("attention", "query heads of another key head",
         "shape.heads + head * share) * size;", "shape.heads + head) * size;"),
        ("attention", "values of the first head",
         "b.v = d[2].as<T>() + head * size;", "b.v = d[2].as<T>();"),
        ("attention", "the log-sum-exp is in units of log 2",
         "std::log2(double(total))) / kLog2e", "std::log2(double(total)))"),
        ("attention", "spans of keys not rescaled",
         "exp2(broadcast(part.top[s * rows + row] - top))[0]", "1.0f"),
        ("attention", "spans of keys overlap",
         "b.last = std::min(b.last, (span + 1) * kSpanKeys);", ""),
        ("attention", "the last span of keys replaces the others",
         "(s > 0 ? load(sums + j) : Floats{})", "Floats{}"),
        ("attention", "e taken for 2", "d.attributes[0] * kLog2e", "d.attributes[0]"),
        ("cache_write", "row numbers not looked at", "row[i] * width, width", "i * width, width"),
    ),
    *_mutants(
        "attention_backward.cpp",
        ("attention_backward", "no delta", "e * (load(ds + j) - delta)", "e * load(ds + j)"),
        ("attention_backward", "no scale", "- delta) * scale", "- delta)"),
        ("attention_backward", "a query sees the key after it",
         "(column < static_cast<int32_t>(last))", "(column <= static_cast<int32_t>(last))"),
        ("attention_backward", "a query sees the document before its own",
         "(column >= static_cast<int32_t>(first)) & ", ""),
        ("attention_backward", "keys miss the first queries that see them",
         "std::max<int64_t>(t.key + j - t.query, 0);",
         "std::max<int64_t>(t.key + j + 2 - t.query, 0);"),
        ("attention_backward", "keys miss queries that see only some of a strip",
         "t.queries, t.key + j + strip)", "t.queries, t.key + j)"),
        ("attention_backward", "heads that share a value head replace each other's sums",
         "{dv + j * width, width}, kAdd)", "{dv + j * width, width})"),
        ("attention_backward", "blocks of keys replace each other's sums",
         "{dq + i * width, width}, kAdd)", "{dq + i * width, width})"),
        ("attention_backward", "blocks that see only some of a block of keys left out",
         "< (block + 1) * kBlock; };", "< block * kBlock; };"),
        ("attention_backward", "query heads of another key head",
         "first_head = key_head * shape.share()", "first_head = key_head"),
    ),
    *_mutants(
        "norm.cpp",
        ("rms_norm", "no eps", "static_cast<double>(width) + eps)", "static_cast<double>(width))"),
        ("rms_norm", "no weight", "* r * load_some(w + j, n)", "* r"),
        ("head_norm", "as many heads as rows",
         "&rstd = d[4];\n  const int64_t rows = d.live(2) * x.shape[1],",
         "&rstd = d[4];\n  const int64_t rows = d.live(2),"),
        ("rms_norm_backward", "no residual", "load_some(ri + j, n)", "Floats{}"),
        ("head_norm_backward", "rstd² for rstd³", "double(r) * r * r *", "double(r) * r *"),
        ("rms_norm_backward", "the mean is formed without the weight",
         "load_some(dyi + j, n) * load_some(w + j, n) * load_some(xi + j, n);",
         "load_some(dyi + j, n) * load_some(xi + j, n);"),
    ),
    *_mutants(
        "loss.cpp",
        ("cross_entropy", "no one-hot", "std::expm1(at_target - lse)", "std::exp(at_target - lse)"),
        ("cross_entropy", "the gradient is not scaled", "- shift) * loss_scale", "- shift)"),
        ("cross_entropy_loss", "the target's logit left out",
         "classes) - to_float(x[target[i]]);", "classes);"),
        ("cross_entropy_loss", "the sum is not rescaled when a later block has a larger logit",
         "total * std::exp(double(top) - above)", "total"),
        ("cross_entropy", "every block is the first one",
         "const T* block = x + first;", "const T* block = x;"),
        ("cross_entropy_loss", "replaces the loss", "double total = *loss;", "double total = 0;"),
    ),
    *_mutants(
        "optimizer.cpp",
        ("gradient_norm", "every block is the first one", "block * kNormBlock;", "0;"),
        ("gradient_norm", "no last elements", "for (; j < count; j++) sums", "for (; false;) sums"),
        ("gradient_norm", "no scale", " * std::fabs(d[2].as<Hyper>()->gradient_scale)", ""),
        ("gradient_norm", "the loss is not looked at",
         "std::isfinite(*d[1].as<float>())", "true"),
        ("adamw", "g for g²", "f.rest2 * g * g", "f.rest2 * g"),
        ("adamw", "the second moment is not corrected", "1 / h.correction2", "1"),
        ("adamw", "the first moment is not corrected", "double(h.lr) / h.correction1", "h.lr"),
        ("adamw", "a norm without end is not minded", "if (!std::isfinite(norm)) return;", ""),
        ("adamw", "no weight decay", "1 - double(h.lr) * h.weight_decay", "1"),
        ("adamw", "gradients are not clipped", "h.clip > 0 ? ", "false ? "),
        ("adamw", "every piece is the first one", "as<float>() + begin", "as<float>()"),
    ),
    *_mutants(
        "dropout.cpp",
        ("dropout", "a round of Philox left out", "round < 10", "round < 9"),
        ("dropout", "no scale", "load_some(xi + j, n) * scale", "load_some(xi + j, n)"),
        ("dropout", "every layer has the same mask", "c3 = Longs{} + stream", "c3 = Longs{}"),
        ("dropout", "the mask repeats within a row", "philox(j / 4,", "philox(0,"),
        ("dropout", "a token's place in the pass decides",
         "position[i], document[i], stream", "static_cast<uint32_t>(i), document[i], stream"),
        ("dropout_backward", "no residual", "load_some(ri + j, n)", "Floats{}"),
    ),
    *_mutants(
        "pointwise.cpp",
        ("embedding", "ids not looked at", "index[i] * width", "i * width"),
        ("gather_rows", "-1 gives no zeros", "if (index[i] < 0)", "if (index[i] < -1)"),
        ("cast", "every piece goes to the first one's place", "as<To>() + first", "as<To>()"),
        ("zero", "the last element left out", "x + last, 0.0f", "x + last - 1, 0.0f"),
        ("swiglu", "sigmoid for silu", "g * sigmoid(g) * load_some", "sigmoid(g) * load_some"),
        ("swiglu", "every piece goes to the first one's place",
         "T* act = d[3].as<T>() + first;", "T* act = d[3].as<T>();"),
        ("swiglu_backward", "a term of the derivative of silu left out",
         "(s + silu * (1.0f - s))", "(s + silu)"),
        ("swiglu_backward", "sigmoid for silu", "da * silu, n", "da * s, n"),
        ("rope_table", "angles are rounded to float32",
         "double(position[i]) * inv_freq[j]", "static_cast<float>(position[i]) * inv_freq[j]"),
        ("rope_table", "no scale of the sine", "scale * std::sin(angle)", "std::sin(angle)"),
        ("rope", "a reflection for a rotation", "va * c - vb * s", "va * c + vb * s"),
        ("rope", "never turned back", "sign * load_some(sin", "load_some(sin"),
        ("rope", "neighbours paired instead of halves", "*b = a + half;", "*b = a + 1;"),
    ),
    *_mutants(
        "rows.h",
        ("cast", "the last piece left out where it is not whole",
         "(rows + step - 1) / step", "std::max<int64_t>(1, rows / step)"),
        ("swiglu", "no last elements", "if (j < count) body", "if (false) body"),
        ("cast", "float16 taken for bfloat16", "f16) body(f16{});", "f16) body(bf16{});"),
    ),
    *_mutants(
        "simd.h",
        ("swiglu", "a coefficient of exp has three digits", "+ 1.6666665459e-1f", "+ 1.67e-1f"),
        ("swiglu", "ln 2 of exp has its first nine bits", "r = r - n * low;", ""),
        ("swiglu", "a term of exp left out", "p * (r * r) + r + 1.0f", "p * (r * r) + 1.0f"),
        ("attention", "a coefficient of exp2 has three digits", "+ 2.402224243e-1f", "+ 2.41e-1f"),
        ("cross_entropy_loss", "no fill", "load(t), broadcast(fill))", "load(t), Floats{})"),
        ("rms_norm", "a sum of every other lane", "return combine(v[0], v[1]);", "return v[0];"),
        ("cast", "bfloat16 truncated instead of rounded",
         "rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16", "rounded = u >> 16", "plain"),
        ("cast", "ties of bfloat16 are rounded away from zero",
         "0x7fff + ((u >> 16) & 1)) >> 16", "0x8000) >> 16", "plain"),
        ("cast", "NaN is rounded", "quiet = (u >> 16) | 0x40", "quiet = rounded", "plain"),
        ("cast", "float16 truncated instead of rounded",
         "0xfff + ((magnitude >> 13) & 1)) >> 13", "0) >> 13", "plain"),
        ("cast", "subnormal float16 wrapped around",
         "small = (Words)(magnitude < (113u << 23))", "small = Words{}", "plain"),
        ("cast", "too much for float16 is wrapped around",
         "large = (Words)(magnitude >= (143u << 23))", "large = Words{}", "plain"),
        ("embedding", "infinite float16 becomes 65536",
         "(Words)(magnitude >= (0x7c00u << 13))", "Words{}", "plain"),
    ),
]
# fmt: on


class Build:
    """The package in a temporary folder, with the libraries that its tests need."""

    def __init__(self, folder: Path, jobs: int):
        self.work, self.saved, self.plugin = (folder / name for name in ("work", "saved", "plugin"))
        self.jobs = jobs
        self.plugin.mkdir()
        (self.plugin / "mutants_plugin.py").write_text(PLUGIN)
        shutil.copytree(ROOT / "src", self.work / "src", ignore=shutil.ignore_patterns("*.so"))
        shutil.copy2(ROOT / "CMakeLists.txt", self.work)
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        output = f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={self.work / KERNELS}"
        _run(["cmake", "-S", self.work, "-B", self.work / "build", output, *generator])
        self.make("plain")
        code = "import krnl.backends.cpu as c; print(c.__file__, *c.available_isas(), sep='\\n')"
        where, *self.isas = _run([sys.executable, "-c", code], env=self._environment()).split("\n")
        if not Path(where).is_relative_to(self.work):
            raise SystemExit(f"Python finds krnl in {where}, not in the copy. Uninstall it there.")
        self.make(self.isas[-1])
        shutil.copytree(self.work, self.saved)

    def make(self, isa: str) -> None:
        target = f"krnl_cpu_{isa}"
        jobs = str(self.jobs)
        _run(["cmake", "--build", self.work / "build", "--target", target, "--parallel", jobs])

    def apply(self, mutant: Mutant, isa: str) -> bool:
        """Builds the library with the mutant in it; whether that made any difference."""
        # With the times of all files as they were, so that only what includes this one is rebuilt.
        shutil.rmtree(self.work)
        shutil.copytree(self.saved, self.work)
        path = self.work / KERNELS / mutant.file
        source = path.read_text()
        if source.count(mutant.text) != 1:
            raise SystemExit(f"{mutant.file} must have this text once: {mutant.text}")
        path.write_text(source.replace(mutant.text, mutant.replacement))
        self.make(isa)
        library = KERNELS / f"krnl_cpu_{isa}.so"
        return (self.work / library).read_bytes() != (self.saved / library).read_bytes()

    def passes(self, op: str, isa: str) -> bool:
        """Whether the op's tests pass. A crash, or no end, is as good as a failure."""
        test = "tests/test_ops.py::test_op_matches_its_reference"
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-p", "mutants_plugin", "--hypothesis-profile=mutants"]
        command += [f"{test}[{op}-{isa}-{activation}]" for activation in ("f32", "bf16")]
        try:
            result = subprocess.run(
                command, cwd=ROOT, env=self._environment(), capture_output=True, timeout=LONGEST
            )
        except subprocess.TimeoutExpired:
            return False
        if result.returncode > 1:  # pytest itself could not run the tests
            raise SystemExit(result.stdout.decode() + result.stderr.decode())
        return result.returncode == 0

    def _environment(self) -> dict[str, str]:
        paths = [str(self.work / "src"), str(self.plugin)]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _run(command: list[str | Path], env: dict[str, str] | None = None) -> str:
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(f"{command} failed:\n{result.stdout}{result.stderr}")
    return result.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mutants whose op, file or fault has a word")
    parser.add_argument("--jobs", type=int, default=1, help="compilers at a time")
    options = parser.parse_args()
    # CMake and Ninja may be installed beside this Python only.
    os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)
    wanted = [
        m
        for m in MUTANTS
        if not options.words or any(w in f"{m.op} {m.file} {m.fault}" for w in options.words)
    ]
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        build = Build(Path(folder), options.jobs)
        for op, isa in sorted({(m.op, m.isa or build.isas[-1]) for m in wanted}):
            if isa in build.isas and not build.passes(op, isa):
                raise SystemExit(f"The tests of {op} on {isa} fail without any mutant.")
        for mutant in wanted:
            started = time.monotonic()
            isa = mutant.isa or build.isas[-1]
            if isa not in build.isas:
                verdict = "skipped"
            elif not build.apply(mutant, isa):
                verdict = "no effect"
            else:
                verdict = "SURVIVED" if build.passes(mutant.op, isa) else "caught"
            counts[verdict] += 1
            seconds = time.monotonic() - started
            line = f"{verdict:9} {mutant.op:22} {mutant.file:22} {mutant.fault}"
            print(f"{line} ({isa}, {seconds:.0f} s)", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return 1 if counts["SURVIVED"] or counts["no effect"] else 0


if __name__ == "__main__":
    sys.exit(main())
