"""The functions of Metal's standard library on the simulator give what NumPy gives."""

import math
import re

import ml_dtypes
import numpy as np
import pytest

from metalsim.snippets import DTYPES, FLOATS, INTEGERS, check, each, run, samples

# ---- Mathematics ----

UNARY = {
    "acos": np.arccos, "asin": np.arcsin, "asinh": np.arcsinh,
    "atan": np.arctan, "atanh": np.arctanh, "ceil": np.ceil, "cos": np.cos, "cosh": np.cosh,
    "cospi": lambda x: np.cos(np.pi * x), "exp": np.exp, "exp2": np.exp2,
    "exp10": lambda x: 10.0**x, "fabs": np.abs, "abs": np.abs, "floor": np.floor,
    "fract": lambda x: x - np.floor(x), "log": np.log, "log2": np.log2, "log10": np.log10,
    "rint": np.rint, "round": lambda x: np.sign(x) * np.floor(np.abs(x) + 0.5),
    "rsqrt": lambda x: 1 / np.sqrt(x), "saturate": lambda x: np.clip(x, 0, 1), "sign": np.sign,
    "sin": np.sin, "sinh": np.sinh, "sinpi": lambda x: np.sin(np.pi * x), "sqrt": np.sqrt,
    "tan": np.tan, "tanh": np.tanh, "tanpi": lambda x: np.tan(np.pi * x), "trunc": np.trunc,
}  # fmt: skip
BINARY = {
    "atan2": np.arctan2, "copysign": np.copysign, "divide": np.divide, "fmax": np.fmax,
    "fdim": lambda x, y: np.fmax(x - y, 0), "fmin": np.fmin, "fmod": np.fmod, "max": np.fmax,
    "min": np.fmin, "pow": np.power, "powr": np.power, "step": lambda x, y: (y >= x) * 1.0,
}  # fmt: skip
TERNARY = {
    "fma": lambda x, y, z: x * y + z, "clamp": lambda x, y, z: np.clip(x, np.minimum(y, z), z),
    "fmax3": lambda *a: np.max(a, 0), "max3": lambda *a: np.max(a, 0),
    "fmin3": lambda *a: np.min(a, 0), "min3": lambda *a: np.min(a, 0),
    "fmedian3": lambda *a: np.median(a, 0), "median3": lambda *a: np.median(a, 0),
    "mix": lambda x, y, a: x + (y - x) * a,
}  # fmt: skip
NOT_TWICE = {"copysign", "step", "abs", "saturate", "sign", "max3", "min3", "median3"}


@pytest.mark.parametrize("name", ["float", "half"])
@pytest.mark.parametrize("arity", [1, 2, 3])
def test_mathematics(name, arity):
    """Each function within a few units in the last place; vectors of 2, 3 and 4 as single numbers;
    the fast and precise variants by name."""
    functions = [UNARY, BINARY, TERNARY][arity - 1]
    rng = np.random.default_rng(arity)
    n = 48  # of numbers in [0.02, 0.98], where every function is defined
    inputs = rng.uniform(0.02, 0.98, (arity, n)).astype(DTYPES[name])
    parameters = ", ".join(f"device const {name} *{p}" for p in "xyz"[:arity])
    lines = []
    for row, function in enumerate(functions):
        arguments = ", ".join(f"{p}[i]" for p in "xyz"[:arity])
        lines.append(f"out[{row * n} + i] = {function}({arguments});")
        for width in (2, 3, 4):
            vectors = (
                f"{name}{width}({', '.join(f'{p}[{width} * i + {k}]' for k in range(width))})"
                for p in "xyz"[:arity]
            )
            lines.append(f"if (i < {n // width}) {{ {name}{width} v = {function}("
                         f"{', '.join(vectors)});")  # fmt: skip
            lines += [f"same &= as_bits(v[{k}]) == as_bits({function}("
                      + ", ".join(f"{p}[{width} * i + {k}]" for p in "xyz"[:arity]) + "));"
                      for k in range(width)]  # fmt: skip
            lines.append("}")
        if function not in NOT_TWICE and name == "float":
            lines.append(
                f"same &= precise::{function}({arguments}) == fast::{function}({arguments});"
            )
    bits = "uint" if name == "float" else "ushort"
    source = f"""{bits} as_bits({name} x) {{ return as_type<{bits}>(x); }}
        kernel void test({parameters}, device {name} *out, uint i [[thread_position_in_grid]]) {{
            bool same = true;
            {" ".join(lines)}
            out[{len(functions) * n} + i] = same; }}"""
    out = run(source, *inputs, out=np.zeros((len(functions) + 1, n), DTYPES[name]), threads=n)
    x = inputs.astype(np.float64)
    for function, row in zip(functions, out, strict=False):
        wanted = functions[function](*x)
        unit = np.spacing(np.abs(wanted).astype(DTYPES[name])).astype(np.float64)
        # libm is within one unit; differences of pi times x carry the rounding of x - floor(x).
        error = np.abs(row.astype(np.float64) - wanted) / unit
        assert error.max() <= 2, (function, error.max())
    assert np.all(out[-1] == 1)


def test_mathematics_at_the_edges():
    inf, nan = math.inf, math.nan
    check("float", [
        ("acosh(2.0f)", np.float32(math.acosh(2))), ("fract(-1e-30f)", 1 - 2.0**-24),
        ("max(NAN, 1.0f)", 1), ("min(1.0h, half(NAN))", 1), ("saturate(NAN)", 0),
        ("sign(NAN)", 0), ("exp(-INFINITY)", 0), ("rint(2.5f)", 2), ("round(-2.5f)", -3),
        ("sinpi(1e6f)", 0), ("cospi(2.5f)", 0), ("sinpi(-1.5f)", 1), ("sinpi(1.0f)", 0),
        ("log(0.0f)", -inf),
        ("ldexp(1.5f, 3)", 12), ("float(ldexp(1.5h, -24))", 2.0**-23), ("ilogb(9.0f)", 3),
        ("nextafter(1.0f, 2.0f)", 1 + 2.0**-23), ("float(nextafter(1.0h, 2.0h))", 1 + 2.0**-10),
        ("float(nextafter(0.0h, -1.0h))", -(2.0**-24)), ("smoothstep(0.0f, 1.0f, 0.25f)", 0.15625),
        ("max(float4(-1, 2, -3, 4), 0.0f).z", 0), ("clamp(float2(-1, 3), 0.0f, 1.0f).y", 1),
        ("sqrt(-1.0f)", nan), ("fma(1e20f, 1e20f, -INFINITY)", -inf),
        ("pow(float2(2, 3), 2.0f).y", 9), ("ldexp(float2(1, 1), int2(1, 2)).y", 4),
    ])  # fmt: skip
    source = """kernel void test(device float *out) {
        float whole, c; int e; float2 wholes; int2 es;
        out[0] = modf(-2.75f, whole); out[1] = whole; out[2] = frexp(12.0f, e); out[3] = e;
        out[4] = sincos(0.5f, c); out[5] = c; out[6] = modf(float2(1.5f, 2.25f), wholes).y;
        out[7] = wholes.y; out[8] = frexp(float2(1, 8), es).y; out[9] = es.y; }"""
    sine, cosine = np.float32(math.sin(0.5)), np.float32(math.cos(0.5))
    wanted = [-0.75, -2, 0.75, 4, sine, cosine, 0.25, 2, 0.5, 4]
    assert run(source, out=np.zeros(10, np.float32)).tolist() == wanted


@pytest.mark.parametrize("flags", [(), ("-ffast-math",)])
def test_relations(flags):
    """Also with fast math, under which a compiler may take comparisons with NaN away."""
    tests = {
        "isnan": np.isnan, "isinf": np.isinf, "isfinite": np.isfinite, "signbit": np.signbit,
        "isnormal": lambda x: np.isfinite(x) & (np.abs(x) >= np.finfo(x.dtype).tiny),
    }  # fmt: skip
    x = samples("float", 64)
    with np.errstate(over="ignore"):
        h = x.astype(np.float16)
    lines = "".join(f"out[{k} * 128 + i] = {name}(x[i]); out[{k} * 128 + 64 + i] = {name}(h[i]);"
                    for k, name in enumerate(tests))  # fmt: skip
    source = f"""kernel void test(device const float *x, device const half *h, device bool *out,
                                  uint i [[thread_position_in_grid]]) {{ {lines} }}"""
    out = run(source, x, h, out=np.zeros((2 * len(tests), 64), bool), threads=64, flags=flags)
    for k, (name, wanted) in enumerate(tests.items()):
        assert np.array_equal(out[2 * k], wanted(x)), name
        assert np.array_equal(out[2 * k + 1], wanted(h)), name
    if flags:
        return
    check("bool", [
        ("any(bool3(false, true, false))", True), ("all(bool3(true, true, false))", False),
        ("all(float2(1, 2) == float2(1, 2))", True), ("isunordered(1.0f, NAN)", True),
        ("isordered(1.0f, 2.0f)", True), ("isnan(float3(0, NAN, 0)).y", True),
        ("any(isinf(float2(0, INFINITY)))", True), ("select(false, true, true)", True),
    ])  # fmt: skip
    check("float", [
        ("select(1.0f, 2.0f, true)", 2), ("select(float2(1), float2(2), bool2(false, true)).y", 2),
    ])  # fmt: skip


def test_geometry():
    check("float", [
        ("dot(float3(1, 2, 3), float3(4, 5, 6))", 32), ("length(float2(3, 4))", 5),
        ("length_squared(float2(3, 4))", 25), ("distance(float2(1, 1), float2(4, 5))", 5),
        ("distance_squared(float2(1, 1), float2(4, 5))", 25), ("normalize(float2(3, 4)).y",
        np.float32(4) * np.float32(0.2)), ("cross(float3(1, 0, 0), float3(0, 1, 0)).z", 1),
        ("reflect(float2(1, -1), float2(0, 1)).y", 1),
        ("faceforward(float2(0, 1), float2(0, 1), float2(0, 1)).y", -1),
        ("refract(float2(0, -1), float2(0, 1), 1.0f).y", -1),
        ("float(dot(half2(1, 2), half2(3, 4)))", 11),
        ("fast::normalize(float2(0, 2)).y", 1), ("fast::length(float2(3, 4))", 5),
    ])  # fmt: skip


# ---- Integers ----


def wrap(x, dtype):
    """The low bits of a Python integer as a number of the type."""
    info = np.iinfo(dtype)
    return (x - info.min) % (info.max - info.min + 1) + info.min


def bits_of(x, dtype):
    return int(x) % (1 << np.iinfo(dtype).bits)


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_functions(name):
    dtype = DTYPES[name]
    info = np.iinfo(dtype)
    width = info.bits
    a, b, c = (samples(name, 128, seed) for seed in (1, 2, 3))
    b, c = np.roll(b, 1), np.roll(c, 2)  # edges meet edges

    def saturated(x):
        return min(max(x, info.min), info.max)

    functions = {
        "abs(a)": lambda a, b, c: wrap(abs(a), dtype),
        "addsat(a, b)": lambda a, b, c: saturated(a + b),
        "subsat(a, b)": lambda a, b, c: saturated(a - b),
        "hadd(a, b)": lambda a, b, c: (a + b) >> 1,
        "rhadd(a, b)": lambda a, b, c: (a + b + 1) >> 1,
        "mulhi(a, b)": lambda a, b, c: (a * b) >> width,
        "madhi(a, b, c)": lambda a, b, c: wrap(((a * b) >> width) + c, dtype),
        "madsat(a, b, c)": lambda a, b, c: saturated(a * b + c),
        "min(a, b)": lambda a, b, c: min(a, b),
        "max(a, b)": lambda a, b, c: max(a, b),
        "clamp(a, min(b, c), max(b, c))": lambda a, b, c: sorted((a, b, c))[1],
        "min3(a, b, c)": lambda a, b, c: min(a, b, c),
        "max3(a, b, c)": lambda a, b, c: max(a, b, c),
        "median3(a, b, c)": lambda a, b, c: sorted((a, b, c))[1],
        "clz(a)": lambda a, b, c: width - bits_of(a, dtype).bit_length(),
        "ctz(a)": lambda a, b, c: (a & -a).bit_length() - 1 if a else width,
        "popcount(a)": lambda a, b, c: bits_of(a, dtype).bit_count(),
        "reverse_bits(a)": lambda a, b, c: wrap(
            int(f"{bits_of(a, dtype):0{width}b}"[::-1], 2), dtype),
        "rotate(a, b)": lambda a, b, c: wrap(
            bits_of(a, dtype) << (b % width) | bits_of(a, dtype) >> (width - b % width), dtype),
        "extract_bits(a, 2, 5)": lambda a, b, c: (
            ((a >> 2) & 31) - (32 if info.min < 0 and (a >> 6) & 1 else 0)),
        "insert_bits(a, b, 2, 5)": lambda a, b, c: wrap(a & ~(31 << 2) | (b & 31) << 2, dtype),
    }  # fmt: skip
    lines = [f"out[{row * 128} + i] = {call};" for row, call in enumerate(functions)]
    vectors = [f"{name}4 v{row} = " + re.sub(r"\b([abc])\b", r"\1\1", call)
               + f"; same &= v{row}.z == {call};" 
               for row, call in enumerate(functions)]  # fmt: skip
    source = f"""kernel void test(device const {name} *a_, device const {name} *b_,
            device const {name} *c_,
            device {name} *out, uint i [[thread_position_in_grid]]) {{
        {name} a = a_[i], b = b_[i], c = c_[i]; {name}4 aa = a, bb = b, cc = c; bool same = true;
        {" ".join(lines)} {" ".join(vectors)} out[{len(functions) * 128} + i] = same; }}"""
    out = run(source, a, b, c, out=np.zeros((len(functions) + 1, 128), dtype), threads=128)
    for (call, function), row in zip(functions.items(), out, strict=False):
        wanted = [function(int(x), int(y), int(z)) for x, y, z in zip(a, b, c, strict=True)]
        assert row.tolist() == wanted, call
    assert np.all(out[-1] == 1)
    unsigned = name if name.startswith("u") else f"u{name}"
    difference = each("absdiff(a, b)", a, b, to=unsigned)
    assert difference.tolist() == [abs(int(x) - int(y)) for x, y in zip(a, b, strict=True)]


def test_24_bit_products():
    check("int", [
        ("mul24(-3, 5)", -15), ("mad24(2, 3, 4)", 10), ("int(mul24(0x01000002u, 3u))", 6),
        ("int(mad24(2u, 3u, 4u))", 10), ("mul24(int2(2, 3), int2(4, 5)).y", 15),
    ])  # fmt: skip


def test_packing():
    check("uint", [
        ("pack_float_to_unorm4x8(float4(0, 0.5f, 1, 2))", 0xFFFF8000),
        ("pack_float_to_snorm4x8(float4(0, 0.5f, -1, 2))", 0x7F814000),
        ("pack_float_to_unorm2x16(float2(0.5f, 1))", 0xFFFF8000),
        ("pack_float_to_snorm2x16(float2(-1, 0.5f))", 0x40008001),
        ("pack_half_to_unorm4x8(half4(0, 0.5h, 1, 2))", 0xFFFF8000),
        ("pack_half_to_snorm2x16(half2(-1, 1))", 0x7FFF8001),
        ("pack_float_to_unorm10a2(float4(1, 0, 1, 1))", 0xFFF003FF),
        ("pack_float_to_unorm565(float3(1, 0, 1))", 0xF81F),
        ("pack_float_to_srgb_unorm4x8(float4(1, 0, 0.5f, 1))", 0xFFBC00FF),
    ])  # fmt: skip
    check("float", [
        ("unpack_unorm4x8_to_float(0xFF800000u).z", np.float32(128 / 255)),
        ("unpack_snorm4x8_to_float(0x80817F00u).w", -1), ("unpack_snorm4x8_to_float(0x7F00u).y", 1),
        ("unpack_unorm2x16_to_float(0xFFFF0000u).y", 1),
        ("unpack_snorm2x16_to_float(0x8001u).x", -1),
        ("float(unpack_unorm4x8_to_half(0xFFu).x)", 1),
        ("unpack_unorm10a2_to_float(0xFFF003FFu).w", 1),
        ("unpack_unorm565_to_float(ushort(0xF81F)).z", 1),
        ("unpack_unorm4x8_srgb_to_float(0xFFu).x", 1),
    ])  # fmt: skip


# ---- The rest of the library ----


def test_limits_and_constants():
    cases = []
    for name in INTEGERS:
        info = np.iinfo(DTYPES[name])
        cases += [
            (
                f"numeric_limits<{name}>::max() == {name}({info.max}ul)",
                1,
            )
        ]
        cases += [(f"numeric_limits<{name}>::min() == {name}({info.min + 1}l - 1)", 1)]
    for name in FLOATS:
        info = ml_dtypes.finfo(DTYPES[name])
        for member, value in {"max": info.max, "min": info.tiny, "epsilon": info.eps,
                              "lowest": info.min,
                              "denorm_min": info.smallest_subnormal}.items():  # fmt: skip
            cases.append((f"numeric_limits<{name}>::{member}() == {name}({float(value)!r}f)", 1))
    cases += [("M_PI_F", np.float32(np.pi)), ("float(M_PI_H)", np.float16(np.pi)),
              ("FLT_MAX", np.finfo(np.float32).max), ("float(HALF_MAX)", 65504),
              ("INT_MIN", -(2.0**31)),
              ("M_LOG2E_F", np.float32(np.log2(np.e))), ("isinf(INFINITY)", 1), ("isnan(NAN)", 1),
              ("numeric_limits<float>::infinity()", np.inf),
              ("MAXFLOAT == FLT_MAX", 1)]  # fmt: skip
    check("float", cases)


def test_arrays_uniforms_logs_and_traits():
    before = """
        struct Point { float x; };
        constant os_log logger("subsystem", "category");
        template <typename T> struct Sum { static T of(thread const array<T, 4> &a) {
            T total = T(0); for (T x : a) total += x; return total; } };
        static_assert(is_same_v<remove_addrspace_t<device float>, float>, "");
        static_assert(is_same_v<conditional_t<is_floating_point_v<half>, int, char>, int>, "");
        template <typename T, typename = enable_if_t<is_integral<T>::value>> float kind(T) {
            return 1; }
        float kind(float) { return 2; }
        float sum_of_four(float x) { logger.log_debug("%f", x); array<float, 4> a = {x, x, x};
            a[3] = 1; return Sum<float>::of(a) + a.size(); }"""
    check("float", [
        ("sum_of_four(2)", 11), ("make_uniform(3) + 1", 4), ("kind(3u)", 1), ("kind(3.0f)", 2),
        ("is_signed_v<int> && !is_signed_v<uint>", 1), ("is_same<decltype(1.0h), half>::value", 1),
        ("integral_constant<int, 3>() + 1", 4), ("sizeof(array<half, 6>)", 12),
    ], before)  # fmt: skip
