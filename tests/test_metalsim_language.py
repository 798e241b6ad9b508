"""Metal's numbers, vectors and matrices on the simulator give what NumPy gives."""

import itertools
import re

import numpy as np
import pytest

from metalsim import build
from metalsim.device import Buffer
from metalsim.snippets import DTYPES, INTEGERS, START, check, each, run, same_bits, samples

# ---- Numbers ----


@pytest.mark.parametrize("name", ["half", "bfloat"])
def test_arithmetic_is_rounded_after_every_operation(name):
    """Bit for bit as NumPy does it, also in a chain, where excess precision would show."""
    n, dtype = 4096, DTYPES[name]
    a, b = samples(name, n, 1), samples(name, n, 2)
    with np.errstate(all="ignore"):
        assert same_bits(each("a + b", a, b, to=name), a + b)
        assert same_bits(each("a - b", a, b, to=name), a - b)
        assert same_bits(each("a * b", a, b, to=name), a * b)
        assert same_bits(each("a / b", a, b, to=name), a / b)
        chain = a * a + a - a * dtype(0.3)
        third = "0.3h" if name == "half" else "0.3bf"
        assert same_bits(each(f"a * a + a - a * {third}", a, to=name), chain)
        source = f"""kernel void test(device const {name}4 *a, device const {name}4 *b,
                        device {name}4 *out, uint i [[thread_position_in_grid]])
                     {{ out[i] = a[i] * b[i] + a[i] - b[i] / a[i]; }}"""
        out = run(source, a, b, out=np.zeros(n, dtype), threads=n // 4)
        assert same_bits(out, a * b + a - b / a)


@pytest.mark.parametrize("source", DTYPES)
def test_every_type_converts_to_every_other(source):
    """Of values that both have; what is out of range is undefined in Metal too."""
    a = np.array([0, 1, 2, 3, 5, 100, 64, 7]).astype(DTYPES[source])
    parameters = "".join(f", device {target} *to_{target}" for target in DTYPES)
    lines = " ".join(f"to_{target}[i] = {target}(a[i]);" for target in DTYPES)
    code = f"""kernel void test(device const {source} *a{parameters},
                                uint i [[thread_position_in_grid]]) {{ {lines} }}"""
    outputs = [Buffer(np.zeros(8, dtype)) for dtype in DTYPES.values()]
    build.library(START + code, "fast").launch("test", [Buffer(a), *outputs], 1, 8)
    for target, out in zip(DTYPES, outputs, strict=True):
        dtype = DTYPES[target]
        assert np.array_equal(out.contents.view(dtype), a.astype(dtype)), target


@pytest.mark.parametrize(("source", "target"), [("float", "half"), ("float", "bfloat"),
                                                ("half", "bfloat"),
                                                ("bfloat", "half")])  # fmt: skip
def test_conversions_round_to_nearest_even(source, target):
    a = samples(source, 4096)
    with np.errstate(over="ignore"):
        wanted = a.astype(np.float32).astype(DTYPES[target])
    assert same_bits(each(f"{target}(a)", a, to=target), wanted)
    assert same_bits(each(f"static_cast<{target}>(a)", a, to=target), wanted)


def test_literals_are_float_or_half():
    check("float", [
        ("1.0 / 3.0", np.float32(1) / np.float32(3)),
        ("sizeof(1.0)", 4), ("sizeof(1e-3)", 4), ("sizeof(.5)", 4), ("sizeof(1.0h)", 2),
        ("sizeof(1h)", 2), ("sizeof(0x1p-3)", 4), ("0x1.8p1", 3), ("1.5H", 1.5),
        ("0.1h", np.float16(0.1)), ("1e30f * 1e-30", np.float32(1e30) * np.float32(1e-30)),
        ("1.0bf", 1), ("2.0F", 2), ("0xFFu", 255), ("1'000", 1000),
    ])  # fmt: skip


def test_bfloat_mixes_as_a_type_of_the_language():
    before = "constant bfloat two = 2.0bf;"
    check("float", [
        ("sizeof(two + two)", 2), ("sizeof(two + 1)", 2), ("sizeof(two * 1.5f)", 4),
        ("two * 1.5f", 3), ("1 + two", 3), ("-two", -2), ("float(half(two))", 2),
        ("two < 3 ? 1.0f : 0.0f", 1), ("two == two", 1), ("float(bfloat(1.00390625f))", 1.0),
        ("bfloat(3.0h)", 3), ("int(two)", 2), ("as_type<ushort>(two)", 0x4000),
        ("float(two == 2 ? two : 0)", 2), ("two ? 1.0f : 0.0f", 1),
    ], before)  # fmt: skip
    source = """kernel void test(device bfloat *out) {
        bfloat x = 1; x += 2.0f; x *= x; x -= 1; x /= 2; out[0] = x; out[1] = bool(x); }"""
    assert list(run(source, out=np.zeros(2, DTYPES["bfloat"]))) == [4, 1]


# ---- Vectors ----


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "bool"])
def test_vector_operators(name):
    dtype = DTYPES[name]
    a, b = samples(name, 64, 3), samples(name, 64, 4)
    b[b == 0] = 1
    if name in INTEGERS and np.iinfo(dtype).min < 0:
        b[b == -1] = 3  # the least number divided by -1 is undefined
    whole = f"""out[4 * 16 + i] = a[i] % b[i]; out[5 * 16 + i] = (a[i] & b[i]) | ~a[i];
                out[6 * 16 + i] = a[i] ^ {name}(5); out[7 * 16 + i] = (a[i] << 1) >> 1;"""
    source = f"""kernel void test(device const {name}4 *a, device const {name}4 *b,
                    device {name}4 *out, uint i [[thread_position_in_grid]]) {{
        out[i] = a[i] + b[i] * {name}(2); out[16 + i] = -(a[i] - b[i]); out[32 + i] = a[i] / b[i];
        out[48 + i] = select(a[i], b[i], a[i] < b[i]);
        {whole if name in INTEGERS else ""} }}"""
    out = run(source, a, b, out=np.zeros((8, 64), dtype), threads=16)
    with np.errstate(all="ignore"):
        assert same_bits(out[0], a + b * dtype(2))
        assert same_bits(out[1], -(a - b))
        if name in INTEGERS:
            exact = [int(abs(int(x)) // abs(int(y))) * (1 if (x < 0) == (y < 0) else -1)
                     for x, y in zip(a, b, strict=True)]  # fmt: skip
            quotient = np.array(exact, dtype)
        else:
            quotient = a / b
        assert same_bits(out[2], quotient)
        assert same_bits(out[3], np.where(a < b, b, a))
        if name in INTEGERS:
            assert np.array_equal(out[4], a - quotient * b)
            assert np.array_equal(out[5], (a & b) | ~a)
            assert np.array_equal(out[6], a ^ dtype(5))
            assert np.array_equal(out[7], (a << dtype(1)) >> dtype(1))


def test_comparisons_and_logic_give_bool_vectors():
    a, b = samples("float", 64, 1), samples("float", 64, 2)
    source = """kernel void test(device const float4 *a, device const float4 *b, device bool4 *out,
                                 uint i [[thread_position_in_grid]]) {
        out[i] = a[i] < b[i]; out[16 + i] = a[i] >= b[i]; out[32 + i] = a[i] == b[i];
        out[48 + i] = a[i] != a[i]; out[64 + i] = (a[i] < b[i]) && !(a[i] > 0.0f);
        out[80 + i] = (a[i] < b[i]) || bool4(a[i]); }"""
    out = run(source, a, b, out=np.zeros((6, 64), bool), threads=16)
    wanted = [a < b, a >= b, a == b, a != a, (a < b) & ~(a > 0), (a < b) | (a != 0)]
    for row, expected in zip(out, wanted, strict=True):
        assert np.array_equal(row, expected)


def test_every_swizzle_is_read():
    """All of two, three and four letters, of vectors with two, three and four components."""
    for n in (2, 3, 4):
        cases = []
        for length in (2, 3, 4):
            for picked in itertools.product(range(n), repeat=length):
                for letters in ("xyzw", "rgba"):
                    name = "".join(letters[i] for i in picked)
                    weights = ", ".join(str(10**i) for i in range(length))
                    value = sum((i + 1) * 10**k for k, i in enumerate(picked))
                    cases.append((f"dot(v.{name}, float{length}({weights}))", value))
        values = ", ".join(str(i + 1) for i in range(n))
        check("float", cases, f"constant float{n} v = float{n}({values});")


def test_swizzles_are_written():
    source = """kernel void test(device float4 *out) {
        float4 v = float4(1, 2, 3, 4);
        v.xy = v.yx; out[0] = v;
        v.wzyx = v; out[1] = v;
        v.rgb *= 2; v.ba += float2(10, 20); out[2] = v;
        out[3].zw = float2(7, 8); out[3].x = 5; out[3][1] = 6;
        half3 h = half3(1, 2, 3); h.zx = h.xz; h.y -= 1.0h; out[4].xyz = float3(h); }"""
    out = np.full((5, 4), -1, np.float32)
    assert run(source, out=out, mode="checked").tolist() == [
        [2, 1, 3, 4], [4, 3, 1, 2], [8, 6, 12, 22], [5, 6, 7, 8], [3, 1, 1, -1],
    ]  # fmt: skip


def test_vectors_are_constructed():
    check("float", [
        ("float4(1).w", 1), ("float4(float2(1, 2), 3, 4).z", 3),
        ("float4(1, float2(2, 3), 4).z", 3),
        ("float4(1, 2, float2(3, 4)).w", 4), ("float4(float3(1, 2, 3), 4).w", 4),
        ("float4(1, float3(2, 3, 4)).w", 4), ("float4(float2(1, 2), float2(3, 4)).z", 3),
        ("float4(float4(1, 2, 3, 4).wz, half2(5, 6)).z", 5), ("float3(half3(1, 2, 3)).z", 3),
        ("float3(int3(1, 2, -3)).z", -3), ("int2(float2(1.9f, -1.9f)).y", -1),
        ("float4{1, 2, 3, 4}.y", 2), ("float2(uint2(1, 2).yx).x", 2), ("uint4(1u, 2, 3, 4).w", 4),
        ("float(bool2(3.0f, 0.0f).x)", 1), ("vec<half, 4>(1, 2, 3, 4).z", 3),
        ("float2(packed_float2(3, 4)).y", 4), ("float4(float2(v), 0, 1).x", 2), ("float4().x", 0),
    ], "constant float v = 2;")  # fmt: skip
    check(
        "float",
        [("tile.x * tile.y", 32), ("sizes[3]", 4)],
        "constexpr constant uint2 tile = uint2(8, 4); constant float sizes[tile.y] = {1, 2, 3, 4};",
    )


def test_sizes_and_alignments():
    cases = []
    for name, dtype in DTYPES.items():
        size = np.dtype(dtype).itemsize
        cases += [
            *((f"sizeof({name}{n})", size * (4 if n == 3 else n)) for n in (2, 3, 4)),
            *((f"alignof({name}{n})", size * (4 if n == 3 else n)) for n in (2, 3, 4)),
            *((f"sizeof(packed_{name}{n})", size * n) for n in (2, 3, 4)),
            (f"alignof(packed_{name}3)", size),
        ]  # fmt: skip
    check("uint", cases)


def test_packed_vectors():
    source = """kernel void test(device packed_float3 *x, device packed_half3 *h,
                                 device float3 *out) {
        out[0] = x[0] * 2 + x[1]; out[1] = float3(half3(h[1])); x[1] = out[0]; x[1].s[0] = 9;
        x[0] += float3(1); out[2] = max(x[1], float3(x[0])); h[0] = half3(float3(x[1])); }"""
    x, h = np.arange(1, 7, dtype=np.float32), np.arange(1, 7, dtype=np.float16)
    out = run(source, x, h, out=np.zeros((3, 4), np.float32), mode="checked")
    assert out[:, :3].tolist() == [[6, 9, 12], [4, 5, 6], [9, 9, 12]]


def test_a_vector_moves_in_one_access():
    source = (
        START
        + """kernel void test(device const half4 *x, device half4 *y,
                                 uint i [[thread_position_in_grid]])
        { y[i] = x[i] + 1; }"""
    )
    library = build.library(source, "checked")
    x, y = Buffer(np.zeros(128, np.float16)), Buffer(256)
    counters = library.launch("test", [x, y], 1, 32).counters
    assert (counters["device_loads"], counters["device_stores"]) == (32, 32)
    assert (counters["device_bytes_read"], counters["device_bytes_written"]) == (256, 256)


def test_unions_and_structures_hold_vectors():
    source = """
        struct Pair { half4 a; float2 b; };
        union Bits { float4 v; uint u[4]; float f[4]; half2 h[4]; };
        Bits copied(Bits b) { Bits c = b; c.u[3] = 0; return c; }
        kernel void test(device float *out) {
            Bits bits; bits.v = float4(1, 2, 3, 4); bits.f[2] = 7; out[0] = bits.v.z;
            Bits other = {float4(5)}; other = copied(bits); out[5] = other.v.x + other.v.w;
            out[1] = bits.u[0]; Pair p = {half4(1, 2, 3, 4), float2(5, 6)}; Pair q = p;
            out[2] = q.a.w + q.b.y; float4 list[2] = {float4(1), {1, 2, 3, 4}}; out[3] = list[1].w;
            bits.h[0] = half2(1, 2); out[4] = bits.u[0]; }"""
    assert run(source, out=np.zeros(6, np.float32)).tolist() == [
        7, 0x3F800000, 10, 4, 0x40003C00, 1]  # fmt: skip


def test_as_type():
    check("uint", [
        ("as_type<uint>(1.0f)", 0x3F800000), ("as_type<uint>(half2(1, 2))", 0x40003C00),
        ("as_type<ushort>(1.0h)", 0x3C00), ("as_type<uint2>(float2(1, 2)).y", 0x40000000),
        ("as_type<ushort4>(ulong(0x0004000300020001)).z", 3), ("as_type<uchar4>(0x04030201u).w", 4),
        ("as_type<uint>(as_type<float>(0x7FC00001u))", 0x7FC00001),
    ])  # fmt: skip


# ---- Matrices ----


@pytest.mark.parametrize("name", ["half", "float"])
def test_matrices(name):
    rng = np.random.default_rng(0)
    cases, before = [], ""
    for columns, rows in itertools.product((2, 3, 4), (2, 3, 4)):
        # Small whole numbers: products are exact in half too. Indices are [column][row].
        m, k = rng.integers(-4, 5, (2, columns, rows))
        v, w = rng.integers(-4, 5, columns), rng.integers(-4, 5, rows)

        def call(function, numbers):
            return f"{function}({', '.join(map(str, numbers))})"

        size = f"{columns}x{rows}"
        matrix = f"{name}{size}"
        before += f"""
            #define M{size} {call(matrix, [call(f"{name}{rows}", column) for column in m])}
            #define K{size} {call(matrix, k.reshape(-1))}
            #define V{size} {call(f"{name}{columns}", v)}
            #define W{size} {call(f"{name}{rows}", w)}"""
        found = []
        for r in range(rows):
            found += [(f"(M * V)[{r}]", (v @ m)[r]), (f"transpose(M)[{r}][0]", m[0][r])]
            found += [(f"(M + K)[1][{r}]", (m + k)[1][r]), (f"(M - K)[0][{r}]", (m - k)[0][r])]
            found += [(f"(2 * M * 2)[1][{r}]", 4 * m[1][r]), (f"(-M)[1][{r}]", -m[1][r])]
            found += [(f"(M * transpose(K))[{c}][{r}]", (k.T @ m)[c][r]) for c in range(rows)]
            found += [(f"{matrix}(3)[1][{r}]", 3 if r == 1 else 0)]
        found += [(f"(W * M)[{c}]", (m @ w)[c]) for c in range(columns)]
        found += [("M == M && M != K", 1), (f"float{size}(M)[1][1]", m[1][1])]
        if columns == rows:
            found.append(("determinant(M)", round(np.linalg.det(m))))
        cases += [(re.sub(r"\b([MKVW])\b", rf"\g<1>{size}", e), value) for e, value in found]
    check(name, cases, before)
