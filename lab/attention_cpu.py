"""Attention on the CPU: GF/s on the visible scores, forward and backward, and the share of the peak.

    python lab/attention_cpu.py [--rounds 20] [--fp32]

Forward counts 4 · d operations for every visible score of every head, backward 10 · d. The best of the rounds is
printed: other jobs on the machine can only make a round slower.
"""

import argparse
import ctypes
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from krnl.backends.cpu import CpuBackend
from krnl.dtypes import BF16, F32, I32, DType
from krnl.ops.attention import attention, attention_backward
from krnl.plan.arena import plan
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.step import Step

# name, queries, keys, heads, key heads, head size, tokens of a document (0: one document; queries are the last rows)
SHAPES = [
    ("SmolLM2-135M", 1024, 1024, 9, 3, 64, 0),
    ("Qwen2.5-0.5B", 1024, 1024, 14, 2, 64, 0),
    ("storyteller, short documents", 2048, 2048, 4, 2, 64, 115),
    ("Llama-3.2-1B", 1024, 1024, 32, 8, 64, 0),
    ("heads of 128", 1024, 1024, 16, 8, 128, 0),
    ("heads of 96", 1024, 1024, 12, 12, 96, 0),
    ("long", 4096, 4096, 9, 3, 64, 0),
    ("prefill behind a cache", 256, 4096, 9, 3, 64, 0),
    ("one token", 1, 4096, 9, 3, 64, 0),
    ("one token, heads of 128", 1, 4096, 32, 8, 128, 0),
]


def peak(bf16: bool, threads: int) -> float:
    """GF/s that the cores reach on registers, now."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "peak.so"
        source = Path(__file__).parent / "peak.cpp"
        command = ["c++", "-O2", "-march=native", "-shared", "-fPIC", "-pthread", str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        measure = ctypes.CDLL(str(library)).peak
    measure.restype = ctypes.c_double
    return max(measure(int(bf16), threads) for _ in range(3))


def best(step: Step, values: dict[Buffer, np.ndarray], backend: CpuBackend, rounds: int) -> float:
    """The shortest time of the step's only call, in seconds."""
    (planned,) = plan([step], backend.kernels)
    memory = backend.allocate(planned.layout)
    for buffer, value in values.items():
        memory.write(buffer, value)
    program = backend.compile(planned, memory)
    program.run()
    return min(program.time()[0] for _ in range(rounds))


def measure(shape: tuple[int, ...], document: int, dtype: DType, backend: CpuBackend, rounds: int) -> list[tuple[float, float]]:
    """(seconds, operations) of forward, and of backward where every key is a query."""
    n, m, h, g, d = shape
    rng = np.random.default_rng(0)
    row = np.arange(m - n, m)
    start = row // document * document if document else np.zeros(n)
    sizes = {"q": (n, h, d), "k": (m, g, d), "v": (m, g, d), "do": (n, h, d), "o": (n, h, d)}
    buffers = {name: Buffer(name, size, dtype, Kind.INPUT) for name, size in sizes.items()}
    values = {buffer: rng.normal(size=buffer.shape) for buffer in buffers.values()}
    integers = {name: Buffer(name, (n,), I32, Kind.INPUT) for name in ("start", "stop")} | {"live": Buffer("live", (1,), I32, Kind.INPUT)}
    values |= {integers["start"]: start, integers["stop"]: row + 1, integers["live"]: np.array([n])}
    lse = Buffer("lse", (n, h), F32, Kind.INPUT)
    values[lse] = np.full((n, h), 10.0)
    outputs = {name: Buffer("d" + name, sizes[name], dtype, Kind.STATE) for name in ("q", "k", "v")}
    visible = float((row + 1 - start).sum()) * h * d

    def time(op, names, into):  # type: ignore[no-untyped-def]
        inputs = [({**buffers, **integers, "lse": lse})[name] for name in names.split()]
        step = Step("lab", dtype)
        step(op, *inputs, into=into, live=integers["live"], scale=d**-0.5)
        used = {buffer: value for buffer, value in values.items() if buffer in (*inputs, integers["live"])}
        return best(step, used, backend, rounds)

    out = (Buffer("out", (n, h, d), dtype, Kind.STATE), Buffer("out_lse", (n, h), F32, Kind.STATE))
    results = [(time(attention, "q k v start stop", out), 4 * visible)]
    if n == m:
        results.append((time(attention_backward, "do q k v o lse start", tuple(outputs.values())), 10 * visible))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--fp32", action="store_true", help="activations in fp32 instead of bf16")
    options = parser.parse_args()
    dtype = F32 if options.fp32 else BF16
    backend = CpuBackend()
    most = peak(dtype is BF16, backend.limits.threads)
    print(f"{backend.description}, {dtype}, peak {most:.0f} GF/s")
    for name, *shape, document in SHAPES:
        results = measure(tuple(shape), document, dtype, backend, options.rounds)
        words = [f"{1e3 * s:7.2f} ms {1e-9 * f / s:5.0f} GF/s {1e-9 * f / s / most:4.0%}" for s, f in results]
        print(f"{name:30} {'x'.join(map(str, shape)):20} forward {'   backward '.join(words)}")


if __name__ == "__main__":
    main()
