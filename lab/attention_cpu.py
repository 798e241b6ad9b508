"""Attention on the CPU: GF/s on the visible scores, and the share of the peak.

    python lab/attention_cpu.py [--rounds 20] [--fp32]

Forward counts 4 · d operations for every visible score of every head, backward 10 · d. The best of
the rounds is printed: other jobs on the machine can only make a round slower. The peak is what the
same cores reach on registers, measured just before.
"""

import argparse

import numpy as np

from krnl.backends.cpu import CpuBackend
from krnl.dtypes import BF16, F32, I32, DType
from krnl.ops.attention import attention, attention_backward
from krnl.plan.arena import plan
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.op import Op
from krnl.plan.step import Step

ONE = 1 << 30  # all tokens in one document
# name, queries (the last rows of the keys), keys, heads, key heads, head size, tokens of a document
SHAPES = [
    ("SmolLM2-135M", 1024, 1024, 9, 3, 64, ONE),
    ("Qwen2.5-0.5B", 1024, 1024, 14, 2, 64, ONE),
    ("storyteller, short documents", 2048, 2048, 4, 2, 64, 115),
    ("Llama-3.2-1B", 1024, 1024, 32, 8, 64, ONE),
    ("heads of 128", 1024, 1024, 16, 8, 128, ONE),
    ("heads of 96", 1024, 1024, 12, 12, 96, ONE),
    ("long", 4096, 4096, 9, 3, 64, ONE),
    ("prefill behind a cache", 256, 4096, 9, 3, 64, ONE),
    ("one token", 1, 4096, 9, 3, 64, ONE),
    ("one token, heads of 128", 1, 4096, 32, 8, 128, ONE),
]
FORWARD = "q k v start stop"
BACKWARD = "do q k v o lse start"


class Case:
    """The buffers and values of one shape."""

    def __init__(self, n: int, m: int, h: int, g: int, d: int, document: int, dtype: DType) -> None:
        self.dtype, self.scale = dtype, d**-0.5
        rng = np.random.default_rng(0)
        row = np.arange(m - n, m)
        start = row // document * document
        self.visible = float((row + 1 - start).sum()) * h * d
        self.buffers: dict[str, Buffer] = {}
        self.values: dict[str, np.ndarray] = {}
        for name in ("q", "k", "v", "do", "o"):
            size = (m, g, d) if name in "kv" else (n, h, d)
            self._add(name, rng.normal(size=size), dtype)
        self._add("lse", np.full((n, h), 10.0), F32)
        self._add("start", start, I32)
        self._add("stop", row + 1, I32)
        self._add("live", np.array([n]), I32)

    def _add(self, name: str, values: np.ndarray, dtype: DType) -> None:
        self.buffers[name] = Buffer(name, values.shape, dtype, Kind.INPUT)
        self.values[name] = values

    def seconds(self, op: Op, inputs: list[str], backend: CpuBackend, rounds: int) -> float:
        """The shortest time of one call."""
        like = [("q", self.dtype), ("lse", F32)]
        if op is attention_backward:
            like = [("q", self.dtype), ("k", self.dtype), ("v", self.dtype)]
        into = tuple(Buffer("to " + n, self.buffers[n].shape, t, Kind.STATE) for n, t in like)
        step = Step("lab", self.dtype)
        given = [self.buffers[name] for name in inputs]
        step(op, *given, into=into, live=self.buffers["live"], scale=self.scale)
        (planned,) = plan([step], backend.kernels)
        memory = backend.allocate(planned.layout)
        for name in [*inputs, "live"]:
            memory.write(self.buffers[name], self.values[name])
        program = backend.compile(planned, memory)
        program.run()
        return min(program.time()[0] for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--fp32", action="store_true", help="activations in fp32 instead of bf16")
    options = parser.parse_args()
    dtype = F32 if options.fp32 else BF16
    backend = CpuBackend()
    most = backend.measure_roof().flops[dtype] / 1e9
    print(f"{backend.isa}, {backend.limits.threads} threads, {dtype}, peak {most:.0f} GF/s")

    for name, n, m, h, g, d, document in SHAPES:
        case = Case(n, m, h, g, d, document, dtype)
        words = [f"{name:30}{f'{n}x{m}x{h}x{g}x{d}':20}"]
        for op, inputs, operations in ((attention, FORWARD, 4), (attention_backward, BACKWARD, 10)):
            if op is attention_backward and n != m:
                continue
            seconds = case.seconds(op, inputs.split(), backend, options.rounds)
            speed = 1e-9 * operations * case.visible / seconds
            words.append(f"{1e3 * seconds:8.2f} ms {speed:5.0f} GF/s {speed / most:4.0%}")
        print("  ".join(words), flush=True)


if __name__ == "__main__":
    main()
