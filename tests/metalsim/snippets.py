"""Runs snippets of Metal on the simulator, for tests of its language and library."""

import ml_dtypes
import numpy as np

from . import build
from .device import Buffer

START = "#include <metal_stdlib>\nusing namespace metal;\n"
DTYPES = {
    "bool": np.bool_,
    "char": np.int8,
    "uchar": np.uint8,
    "short": np.int16,
    "ushort": np.uint16,
    "int": np.int32,
    "uint": np.uint32,
    "long": np.int64,
    "ulong": np.uint64,
    "half": np.float16,
    "bfloat": ml_dtypes.bfloat16,
    "float": np.float32,
}
FLOATS = ["half", "bfloat", "float"]
INTEGERS = [name for name in DTYPES if name not in [*FLOATS, "bool"]]


def run(source, *inputs, out, threads=1, groups=1, mode="fast", **options):
    """Runs `kernel void test(…)` on the inputs and one output, given as an array of its type and
    shape; returns what the kernel made of it. No check may report anything."""
    result = Buffer(out, "out")
    buffers = [Buffer(np.asarray(a), f"input {i}") for i, a in enumerate(inputs)]
    flags = options.pop("flags", ())
    library = build.library(START + source, mode, flags)
    done = library.launch("test", [*buffers, result], groups, threads, **options)
    assert not done.reports, "\n".join(map(str, done.reports))
    return result.view(out.dtype, out.shape).copy()


def each(function, *inputs, to="float", types=None, **options):
    """`function`, an expression in a, b, c, applied to every element of equally long inputs."""
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    types = types or [names[np.asarray(a).dtype] for a in inputs]
    parameters = "".join(f"device const {t} *{n}_, " for t, n in zip(types, "abc", strict=False))
    values = " ".join(f"{t} {n} = {n}_[i];" for t, n in zip(types, "abc", strict=False))
    source = f"""kernel void test({parameters} device {to} *out, uint i [[thread_position_in_grid]])
        {{ {values} out[i] = {function}; }}"""
    n = len(inputs[0])
    out = np.zeros(n, DTYPES[to])
    return run(source, *inputs, out=out, threads=min(n, 256), groups=-(-n // 256), **options)


def evaluate(to, expressions, before=""):
    """The values of constant expressions of one type; several lines of a scalar each."""
    lines = "\n".join(f"out[{i}] = {e};" for i, e in enumerate(expressions))
    source = f"{before}\nkernel void test(device {to} *out) {{\n{lines}\n}}"
    return run(source, out=np.zeros(len(expressions), DTYPES[to]))


def check(to, cases, before=""):
    """Expressions of one type against their values, exactly."""
    got = evaluate(to, [expression for expression, _ in cases], before)
    for (expression, value), found in zip(cases, got, strict=True):
        wanted = np.asarray(value).astype(DTYPES[to])
        assert found == wanted or (found != found and wanted != wanted), (expression, found, wanted)


def samples(name, n=256, seed=0):
    """Values of a type, the awkward ones first."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[name]
    if name == "bool":
        return rng.integers(0, 2, n).astype(bool)
    if name in INTEGERS:
        info = np.iinfo(dtype)
        edges = [info.min, info.max, 0, 1, info.max // 2, info.min // 2]
        rest = rng.integers(info.min, info.max, n - len(edges), dtype, endpoint=True)
        return np.concatenate([np.array(edges, dtype), rest])
    edges = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 6e-8, 65504.0, 1e-5]
    rest = rng.standard_normal(n - len(edges)) * np.exp(rng.standard_normal(n - len(edges)))
    return np.concatenate([edges, rest]).astype(dtype)


def same_bits(a, b):
    """Equal bit for bit, but any NaN equals any other."""
    a, b = np.asarray(a), np.asarray(b)
    bits = np.dtype(f"u{a.itemsize}")
    return bool(np.all((a.view(bits) == b.view(bits)) | ((a != a) & (b != b))))
