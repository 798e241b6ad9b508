"""The lint of Metal sources: our kernels pass, and every rule reports a fault made on purpose."""

from dataclasses import dataclass
from pathlib import Path

import pytest

import krnl
from metalsim.lint import lint

KERNELS = sorted(Path(krnl.__file__).parent.glob("kernels/metal/*.metal"))
EXPERIMENTS = {"types"}  # what other element types cost is what they ask

SAMPLE = """\
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

constant constexpr uint WIDTH = 32;
constant bool has_bias [[function_constant(0)]];

struct Shape {
  uint rows, columns;
};

METAL_FUNC float scaled(float x, float factor) { return x * factor; }

METAL_FUNC float total(device const half *row, uint columns) {
  float sum = 0.0f;
  for (uint i = 0; i < columns; i += 4) {
    const half4 values = *(device const half4 *)(row + i);
    sum += dot(float4(values), float4(1.0f));
  }
  return scaled(sum, 0.5f);
}

template <typename T>
kernel void sample(device const half *x [[buffer(0)]], device T *y [[buffer(1)]],
                   constant Shape &shape [[buffer(2)]],
                   device const float *bias [[buffer(3), function_constant(has_bias)]],
                   uint row [[threadgroup_position_in_grid]],
                   uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float scratch[WIDTH];
  threadgroup half tile[64];
  const Shape copy = shape;
  simdgroup_half8x8 a, b;
  simdgroup_float8x8 sum = simdgroup_float8x8(0.0f);
  simdgroup_load(a, x, 8);
  simdgroup_load(b, x, 8, ulong2(0, 0), true);
  simdgroup_multiply_accumulate(sum, a, b, sum);
  tile[lane] = 1.5h;
  scratch[lane] = total(x + row * copy.columns, copy.columns);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float value = scratch[lane ^ 1] + float(tile[lane]) + simd_sum(sum.thread_elements()[0]);
  if (has_bias) value += bias[lane];
  y[row * WIDTH + lane] = T(value);
}

template [[host_name("sample_f16")]] kernel void sample<half>(
    device const half *, device half *, constant Shape &, device const float *, uint, uint);
"""


@dataclass(frozen=True)
class Fault:
    name: str
    text: str  # in the sample
    replacement: str
    message: str  # a part of it
    seen_at: str = ""  # what stands on the line that is reported, if not the replacement


FAULTS = [
    # address spaces
    Fault("plain parameter", "device const half *row,", "const half *row,", "no address space"),
    Fault("plain local", "float sum = 0.0f;\n", "float sum = 0.0f; float *p = &sum;\n",
          "without an address space"),
    Fault("plain reference", "uint columns) {\n", "uint columns) { float s; float &r = s;\n",
          "without an address space"),
    Fault("plain kernel argument", "constant Shape &shape", "Shape &shape", "no address space"),
    Fault("wrong space passed", "total(x + row", "total(tile + row", "no matching function"),
    Fault("wrong space assigned", "const Shape copy = shape;",
          "const Shape copy = shape; threadgroup const half *p = x;", "cannot initialize"),
    Fault("cast to another space", "*(device const half4 *)(row + i)",
          "*(thread const half4 *)(row + i)", "changes the address space"),
    Fault("cast of a member to another space", "float sum = 0.0f;\n",
          "float sum = 0.0f; threadgroup const half2 *p = (threadgroup const half2 *)&row[2];\n",
          "changes the address space"),
    Fault("cast of a reference to another space", "return scaled(",
          "threadgroup float &r = (threadgroup float &)row[0]; return scaled(",
          "changes the address space"),
    Fault("write to constant", "const Shape copy = shape;",
          "const Shape copy = shape; shape.rows = 1;", "const"),
    Fault("write to const", "tile[lane] = 1.5h;", "tile[lane] = x[0] = 1.5h;", "read-only"),
    # arguments and names
    Fault("no binding", "uint lane [[thread_index_in_simdgroup]]", "uint lane", "no attribute"),
    Fault("no buffer index", "constant Shape &shape [[buffer(2)]]", "constant Shape &shape",
          "no [[buffer(n)]]"),
    Fault("index taken", "[[buffer(2)]]", "[[buffer(1)]]", "buffer(1) is taken"),
    Fault("index too large", "[[buffer(2)]]", "[[buffer(31)]]", "numbered up to 30"),
    Fault("misspelt attribute", "[[threadgroup_position_in_grid]]", "[[threadgroup_position]]",
          "unknown attribute"),
    Fault("positions of several sizes", "uint lane [[thread_index_in_simdgroup]]",
          "uint3 lane3 [[thread_position_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]",
          "positions of several sizes"),
    Fault("no host name", '[[host_name("sample_f16")]] kernel', "kernel", "host_name"),
    Fault("no signature", "(\n    device const half *, device half *, constant Shape &, "
          "device const float *, uint, uint)", "", "signature"),
    Fault("name that Metal does not have", "simd_sum(", "simd_total(", "undeclared"),
    # types
    Fault("double", "float sum = 0.0f;", "double sum = 0.0f;", "no double"),
    Fault("literal without suffix", "scaled(sum, 0.5f)", "scaled(sum, 0.5)", "no suffix"),
    Fault("exponent without suffix", "scaled(sum, 0.5f)", "scaled(sum, 5e-1)", "no suffix"),
    Fault("bfloat", "const Shape copy = shape;", "const Shape copy = shape; bfloat z;", "bfloat"),
    Fault("half accumulators",
          "simdgroup_float8x8 sum = simdgroup_float8x8(0.0f);",
          "simdgroup_half8x8 sum = simdgroup_half8x8(0.0h);", "accumulators are float",
          "simdgroup_multiply_accumulate"),
    Fault("matrix stored as another type", "tile[lane] = 1.5h;", "simdgroup_store(sum, tile, 8);",
          "no matching function"),
    Fault("vector converted by itself", "dot(float4(values), ", "dot(values, ",
          "no matching function"),
    Fault("vector of too few elements", "float4(1.0f)", "float4(1.0f, 1.0f)", "its elements"),
    Fault("bits of another size", "scaled(sum, 0.5f)", "as_type<half>(sum)", "keeps the size"),
    Fault("finite by comparison", "return scaled(", "return isnan(sum) ? 0.0f : scaled(",
          "test the bits"),
    Fault("infinite mask", "float sum = 0.0f;", "float sum = -INFINITY;", "test the bits"),
    # what Metal, or our dialect, does not have
    Fault("lambda", "float sum = 0.0f;",
          "float sum = 0.0f; auto square = [](float v) { return v * v; };", "lambdas"),
    Fault("atomics", "device T *y", "device atomic_uint *y", "order of threads"),
    Fault("goto", "return scaled(", "goto end; end: return scaled(", "no goto"),
    Fault("new", "float sum = 0.0f;", "float sum = *new float;", "no new"),
    Fault("recursion", "{ return x * factor; }",
          "{ return x > 1.0f ? scaled(x - 1.0f, factor) : x; }", "scaled calls scaled"),
    Fault("recursion in a circle", "METAL_FUNC float scaled(float x, float factor) { return x",
          "METAL_FUNC float other(float x);\n"
          "METAL_FUNC float scaled(float x, float factor) { return other(x); }\n"
          "METAL_FUNC float other(float x) { return scaled(x, 2.0f); }\n"
          "METAL_FUNC float third(float x, float factor) { return x", "recursion"),
    Fault("global that is not constant", "constant constexpr uint WIDTH", "constexpr uint WIDTH",
          "not constant"),
    Fault("threadgroup variable at file scope", "struct Shape {",
          "threadgroup float shared[32];\nstruct Shape {", "outside a kernel"),
    Fault("threadgroup variable in a function", "float sum = 0.0f;",
          "threadgroup float shared[8]; float sum = 0.0f;", "not at the top"),
    Fault("threadgroup variable in a block", "if (has_bias) value += bias[lane];",
          "if (has_bias) { threadgroup float shared[8]; value += bias[lane]; }", "not at the top"),
    Fault("too much threadgroup memory", "scratch[WIDTH]", "scratch[8192]", "more than 32768",
          "threadgroup half tile"),
]  # fmt: skip


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_kernels_pass(path: Path) -> None:
    assert not lint(path, experiment=path.stem in EXPERIMENTS)


def test_the_sample_passes(tmp_path: Path) -> None:
    path = tmp_path / "sample.metal"
    path.write_text(SAMPLE, "utf-8")
    assert not lint(path)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_faults_are_found(fault: Fault, tmp_path: Path) -> None:
    """At the place of the fault. Only recursion has none."""
    before, found, after = SAMPLE.partition(fault.text)
    assert found, f"the sample has no {fault.text!r}"
    path = tmp_path / "sample.metal"
    path.write_text(before + fault.replacement + after, "utf-8")
    findings = lint(path)
    assert any(fault.message in finding.message for finding in findings), findings
    if "recursion" not in fault.name:
        text = before if not fault.seen_at else SAMPLE.partition(fault.seen_at)[0]
        first = text.count("\n") + 1
        lines = range(first, first + fault.replacement.count("\n") + 1)
        places = {f"sample.metal:{line}" for line in lines}
        assert places & {finding.place for finding in findings}, findings


def test_experiments_may_accumulate_in_any_type(tmp_path: Path) -> None:
    path = tmp_path / "sample.metal"
    source = SAMPLE.replace("simdgroup_float8x8", "simdgroup_bfloat8x8").replace(
        "8x8(0.0f)", "8x8(0)"
    )
    path.write_text(source, "utf-8")
    assert lint(path)
    assert not lint(path, experiment=True)
