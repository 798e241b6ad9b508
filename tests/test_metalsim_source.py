"""Kernels, their arguments, constants and instantiations; what is refused; what is compiled."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from metalsim import build
from metalsim.device import Buffer
from metalsim.snippets import START, run
from metalsim.source import SourceError, convert

# ---- Kernels: arguments, constants, instantiations ----


def test_every_position():
    one = ["thread_index_in_threadgroup", "thread_index_in_simdgroup", "thread_index_in_quadgroup",
           "simdgroup_index_in_threadgroup", "simdgroups_per_threadgroup", "threads_per_simdgroup",
           "thread_execution_width", "quadgroup_index_in_threadgroup", "quadgroups_per_threadgroup",
           "dispatch_simdgroups_per_threadgroup"]  # fmt: skip
    three = ["thread_position_in_grid", "thread_position_in_threadgroup", "threads_per_grid",
             "threadgroup_position_in_grid", "threadgroups_per_grid", "threads_per_threadgroup",
             "dispatch_threads_per_threadgroup"]  # fmt: skip
    parameters = [f"uint p{i} [[{name}]]" for i, name in enumerate(one)]
    parameters += [f"uint3 q{i} [[{name}]]" for i, name in enumerate(three)]
    parameters += [
        "ushort2 short_ [[thread_position_in_grid]]",
        "const uint width [[threads_per_grid]]",
    ]
    count = len(one) + 3 * len(three) + 3
    lines = [f"to[{i}] = p{i};" for i in range(len(one))]
    for i in range(len(three)):
        lines += [f"to[{len(one) + 3 * i + k}] = q{i}[{k}];" for k in range(3)]
    lines += [f"to[{count - 3}] = short_.x; to[{count - 2}] = short_.y; to[{count - 1}] = width;"]
    source = f"""kernel void test(device uint *out, {", ".join(parameters)}) {{
        device uint *to = out + {count} * (q0.x + q2.x * (q0.y + q2.y * q0.z));
            {" ".join(lines)} }}"""
    size, groups = (12, 4, 2), (2, 3, 2)
    grid = [s * g for s, g in zip(size, groups, strict=True)]
    out = run(source, out=np.zeros((grid[2], grid[1], grid[0], count), np.uint32), threads=size,
              groups=groups, mode="checked")  # fmt: skip
    z, y, x = np.mgrid[0 : grid[2], 0 : grid[1], 0 : grid[0]]
    inside = [x % 12, y % 4, z % 2]
    index = inside[0] + 12 * (inside[1] + 4 * inside[2])
    wanted = [index, index % 32, index % 4, index // 32, 3, 32, 32, index // 4, 24, 3]
    wanted += [
        x,
        y,
        z,
        *inside,
        *grid,
        x // 12,
        y // 4,
        z // 2,
        *groups,
        *size,
        *size,
        x,
        y,
        grid[0],
    ]
    for i, value in enumerate(wanted):
        assert np.all(out[..., i] == value), i


def test_arguments_without_an_index_are_numbered_in_order():
    source = """
        struct Sizes { uint n; float scale; };
        kernel void test(device const float *a, constant Sizes &sizes [[buffer(2)]],
                         constant float (&table)[2], device float *out,
                         threadgroup float *scratch [[threadgroup(0)]],
                         uint i [[thread_position_in_grid]]) {
            scratch[i] = a[i]; out[i] = scratch[i] * sizes.scale + table[i % 2]; }"""
    library = build.library(START + source, "checked")
    a, out = Buffer(np.arange(32, dtype=np.float32)), Buffer(128)
    sizes = np.array([(32, 3)], [("n", "u4"), ("scale", "f4")])
    arguments = [a, np.array([1, 2], np.float32), sizes, out]
    done = library.launch("test", arguments, 1, 32, threadgroup_bytes={0: 128})
    assert done.reports == []
    assert np.array_equal(out.view(np.float32), np.arange(32) * 3 + np.tile([1, 2], 16))


CONSTANTS = """
    constant bool add [[function_constant(0)]];
    constant int width [[function_constant(1)]];
    constant half scale [[function_constant(3)]];
    constant bool scaled = is_function_constant_defined(scale);
    constant float factor = scaled ? float(scale) : 1.0f;
    constant bool both = add && scaled;
    float apply(float x) { return x * factor; }
    kernel void test(device const float *x [[buffer(0), function_constant(add)]],
                     device const float *y [[buffer(1), function_constant(both)]],
                     device float *out [[buffer(2)]]) {
        out[0] = add ? apply(x[0]) : -1.0f; out[1] = both ? y[0] : -1.0f;
        out[2] = is_function_constant_defined(scale) ? 1 : 0; out[3] = width; }
    kernel void other(device float *out [[buffer(0)]]) { out[0] = 1; }"""


def test_function_constants():
    library = build.library(START + CONSTANTS, "checked")
    assert library.constants == {"add": 0, "width": 1, "scale": 3}
    x, y, out = Buffer(np.full(1, 5, "f4")), Buffer(np.full(1, 7, "f4")), Buffer(16)
    cases = [
        ({"add": True, "width": 4, "scale": 0.5}, [x, y, out], [2.5, 7, 1, 4]),
        ({"add": True, 1: 5}, [x, None, out], [5, -1, 0, 5]),
        ({0: False, 1: 6}, [None, None, out], [-1, -1, 0, 6]),
    ]
    for constants, arguments, wanted in cases:
        assert library.launch("test", arguments, 1, 1, constants=constants).reports == []
        assert out.view(np.float32).tolist() == wanted
    found = library.launch("test", [None, None, out], 1, 1, constants={"add": True, "width": 1})
    assert [report.kind for report in found.reports][:1] == ["unbound buffer"]


def test_the_pass_knows_which_constants_a_function_needs():
    source = convert(build.preprocess(START + CONSTANTS), "source.metal")
    used = {function.host_name: function.constants for function in source.functions}
    assert used == {"test": {"add", "width", "scale"}, "other": frozenset()}
    assert {c.name: c.needed for c in source.constants} == {
        "add": True,
        "width": True,
        "scale": False,
    }


def test_every_form_of_instantiation():
    source = """
        namespace parts { template <typename T, int N> struct Twice { static T of(T x) {
            return x * N; } }; }
        template <typename T, int N = 2>
        kernel void scale(device const T *x [[buffer(0)]], device T *y [[buffer(1)]],
                          uint i [[thread_position_in_grid]]) {
            threadgroup T copy[32], more[2][N]; threadgroup float other = 0;
            more[i & 1][0] = x[0]; copy[i] = x[i]; other = 1; y[i] = parts::Twice<T,
                N>::of(copy[i]); }
        template [[host_name("scale_f32")]] kernel void scale<float>(device const float *,
            device float *, uint);
        template [[host_name("scale_" "f16")]] [[kernel]] decltype(scale<half, 3>) scale<half, 3>;
        typedef decltype(scale<int, 2>) scale_t;
        template [[host_name("scale_int")]] kernel scale_t scale<int, (2 > 1 ? 4 : 5)>;
        namespace inner {
            [[host_name("renamed")]] [[kernel, max_total_threads_per_threadgroup(64)]]
            void plain(device float *y) { y[0] = 1; }
            template <typename T> [[kernel]] void deep(device T *y) { y[0] = 2; }
            template [[host_name("deep")]] [[kernel]] void deep<float>(device float *);
        }
        #define MAKE(name, type) template [[host_name(#name "_" #type)]] kernel \\
            decltype(scale<type>) scale<type>;
        MAKE(scale, uint) MAKE(scale, short)"""
    library = build.library(START + source, "fast")
    assert library.functions == ["scale_f32", "scale_f16", "scale_int", "renamed", "deep",
                                 "scale_uint", "scale_short"]  # fmt: skip
    for name, dtype, factor in [
        ("scale_f32", "f4", 2),
        ("scale_f16", "f2", 3),
        ("scale_int", "i4", 4),
    ]:
        x = np.arange(32).astype(dtype)
        y = Buffer(x.nbytes)
        library.launch(name, [Buffer(x), y], 1, 32)
        assert np.array_equal(y.view(dtype), x * factor)
    assert library.resources("renamed").max_threads == 64


def test_instantiations_are_matched_with_the_kernel_they_mean():
    """By the number of template arguments, or by the types of the parameters."""
    source = """
        constant int eight [[function_constant(08)]];
        template <typename T, bool small = sizeof(T) < 8, enable_if_t<(sizeof(T) < 8), int> = 0>
        T twice(T x) { return small ? x + x : x; }
        template <typename T> [[kernel]] void fill(device T *y [[buffer(0)]],
            constant T &x [[buffer(1)]])
        { y[0] = twice(x) + T(eight); }
        template [[host_name("fill_f32")]] [[kernel]] void fill(device float *y [[buffer(0)]],
                                                                constant float &x [[buffer(1)]]);
        template <int N> [[kernel, max_total_threads_per_threadgroup(N * 32)]]
        void wide(device float *y [[buffer(2)]]) { y[0] = N; }
        template <int N, typename T> [[kernel, max_total_threads_per_threadgroup(N * 64)]]
        void wide(device T *y [[buffer(1)]], device const T *x [[buffer(0)]]) { y[0] = x[0] + N; }
        template [[host_name("one")]] [[kernel]] decltype(wide<2>) wide<2>;
        template [[host_name("two")]] [[kernel]] decltype(wide<3, half>) wide<3, half>;"""
    library = build.library(START + source, "checked")
    y, half = Buffer(4), Buffer(2)
    library.launch("fill_f32", [y, np.float32(3)], 1, 1, constants={"eight": 8})
    assert y.view(np.float32)[0] == 14
    library.launch("one", [None, None, y], 1, 1)
    assert y.view(np.float32)[0] == 2
    library.launch("two", [np.float16(0.5), half], 1, 1)
    assert half.view(np.float16)[0] == 3.5
    assert [library.resources(name).max_threads for name in ("one", "two")] == [64, 192]


def test_overloads_that_differ_in_the_address_space_alone_are_one():
    source = """
        template <typename T> struct is_device { static constexpr constant bool value = false; };
        template <typename T> struct Reader {};
        template <typename T> struct Reader<device T *> { static T read(device T *p) { return *p;
            } };
        template <typename T> struct Reader<threadgroup T *> { static T read(threadgroup T *p) {
            return *p; } };
        float first(device const float *p) { return p[0]; }
        float first(threadgroup const float *values) { return values[0]; }
        float first(constant float *p);
        struct Complex {
            float re, im;
            constexpr Complex(float a, float b) thread : re(a), im(b) {}
            constexpr Complex(float a, float b) threadgroup : re(a), im(b) {}
            constexpr Complex(float a, float b) constant : re(a), im(b) {}
            float norm() const thread { return re * re + im * im; }
            float norm() const device { return re * re + im * im; }
            float norm() const threadgroup { return re * re + im * im; }
            thread Complex &operator+=(thread const Complex &o) thread { re += o.re; im += o.im;
                return *this; }
            device Complex &operator+=(device const Complex &o) device { re += o.re; im += o.im;
                return *this; }
        };
        kernel void test(device const float *x, device float *out) {
            threadgroup float shared[1]; shared[0] = 3;
            Complex c(x[0], 2); c += Complex(1, 1);
            out[0] = first(x) + first(shared) + c.norm() + Reader<device const float *>::read(x);
                }"""
    out = run(source, np.full(1, 1, np.float32), out=np.zeros(1, np.float32), mode="checked")
    assert out[0] == 1 + 3 + 13 + 1


def test_what_compilers_are_told_is_passed_on_or_ignored():
    source = """
        #define COUNT 4
        #pragma METAL internals : enable
        METAL_FUNC float half_of(float x) { return x / 2; }
        kernel void test(device float *out, uint i [[thread_position_in_grid, maybe_unused]]) {
            float s = 0;
            #pragma unroll
            for (int k = 0; k < 4; k++) s += k;
            #pragma unroll(COUNT)
            for (int k = 0; k < COUNT; k++) s += k;
            #pragma clang loop unroll(full)
            for (int k = 0; k < 4; k++) { [[unroll]] for (int j = 0; j < 2; j++) s += half_of(j); }
            out[0] = s; }"""
    assert run(source, out=np.zeros(1, np.float32))[0] == 14


# ---- Mistakes ----

MISTAKES = {
    "kernel void f(float x) {}": r"metal:3: parameter `float x` of kernel f has no attribute",
    "kernel void f(uint i [[thread_position_in_gird]]) {}":
        r"metal:3: .*`uint i \[\[thread_position_in_gird\]\]`.*Is thread_position_in_grid meant",
    "kernel void f(device float *x [[bufer(0)]]) {}": r"unknown attribute \[\[bufer\]\].*Is buffer",
    "kernel void f(device float *x [[buffer]]) {}": r"\[\[buffer\]\] takes an index",
    "kernel void f(device float *x [[buffer(0)]] [[threadgroup(0)]]) {}": "has two bindings",
    "kernel void f(device float *x [[buffer(0)]]) {\n double d = 1; }":
        "metal:4: Metal has no double",
    'template [[host_name("g")]] kernel void g<float>(device float *);':
        "metal:3: g is instantiated, but no kernel has that name",
    'template <typename T> kernel void g(device T *x) {}\n'
    'template [[host_name("g")]] kernel void g<float>(device float *);\n'
    'template [[host_name("g")]] kernel void g<int>(device int *);':
        "metal:5: two kernels have the host name 'g'",
    "kernel void f(device float *x [[buffer(0)]]) { if (x) { }": "metal:3: this { is never closed",
}  # fmt: skip


@pytest.mark.parametrize("source", MISTAKES)
def test_mistakes_are_named_with_their_line(source):
    with pytest.raises(SourceError, match=MISTAKES[source]):
        build.library(START + source, "fast")


def test_the_compilers_errors_name_the_line_of_the_source(tmp_path):
    with pytest.raises(build.CompileError, match=r"source\.metal:5:\d+: error:.*missing"):
        build.library(START + "kernel void f(device float *x) {\n\n x[0] = missing; }", "fast")
    source = "kernel void f(device\nfloat *x) {\nthreadgroup float a[2],\nb[2];\nx[0] = missing; }"
    with pytest.raises(build.CompileError, match=r"source\.metal:7:\d+: error:.*missing"):
        build.library(START + source, "fast")
    path = tmp_path / "rows.metal"
    (tmp_path / "part.h").write_text("\n\nfloat wrong() { return nothing; }\n")
    path.write_text(START + '#include "part.h"\nkernel void f(device float *x) { x[0] = wrong(); }')
    with pytest.raises(build.CompileError, match=r"part\.h:3:\d+: error:.*nothing"):
        build.library(path, "fast", include=(tmp_path,))
    with pytest.raises(build.CompileError, match=r"part\.h"):
        build.library(path.read_text(), "fast")


@pytest.mark.parametrize("wrong", [
    "float4 v = half4(1);", "float2 v = float4(1).xyz;", "int2 v = float2(1);",
    "float x = max(1, 2.0f);",
    "half h = exp(1);", "float4 v = float4(1, 2);", "float4x4 m = float3x3(1.0f);",
    "simdgroup_float8x8 m; simdgroup_load(m, (device half *)x);",
])  # fmt: skip
def test_what_metal_refuses_is_refused(wrong):
    with pytest.raises(build.CompileError, match=r"source\.metal:3:"):
        build.library(f"{START}kernel void f(device float *x) {{ {wrong} }}", "fast")


def test_a_library_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path)
    build.engine()
    commands = []
    run_compiler = build.run
    monkeypatch.setattr(build, "run", lambda *a: (commands.append(a), run_compiler(*a))[1])
    source = START + "kernel void f(device float *x) { x[0] = NUMBER; }"
    first = build.library(source, "fast", ("-DNUMBER=1",))
    compiled = len(commands)
    assert build.library(source, "fast", ("-DNUMBER=1",)).path == first.path
    assert len(commands) == compiled + 1  # preprocessed only
    assert build.library(source, "fast", ("-DNUMBER=2",)).path != first.path
    assert build.library(source, "checked", ("-DNUMBER=1",)).path != first.path
    assert sorted(Path(tmp_path).glob("*")) == sorted(Path(tmp_path).glob("*.so"))


def test_libraries_unused_for_a_while_are_removed(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path)
    old, recent = tmp_path / "old.so", tmp_path / "recent.so"
    for path, age in ((old, build.KEPT_SECONDS + 60), (recent, build.KEPT_SECONDS - 60)):
        path.touch()
        os.utime(path, (time.time() - age,) * 2)
    build.library(START + "kernel void f(device float *x) { x[0] = 7; }", "fast")
    assert (old.exists(), recent.exists()) == (False, True)
