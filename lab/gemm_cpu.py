"""Speed of the CPU's matrix products, one kernel and shape at a time.

    python lab/gemm_cpu.py [--only WORD] [--types bf16,f32]

Prints GF/s of the best and of the median call, and the best as a share of the most that the
processor's multipliers were seen to reach so far (others may be using the machine).
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from krnl.backends.cpu import CpuBackend
from krnl.dtypes import BF16, BY_NAME, I32, DType
from krnl.ops import gemm
from krnl.plan.arena import plan
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.op import Op, Parameter
from krnl.plan.step import Step

WEIGHTS = {"w", "w_gate", "w_up"}


@dataclass(frozen=True)
class Product:
    """An op at given sizes (a tuple: one per member of the group) without some optional inputs."""

    title: str
    op: Op
    dims: dict[str, Any]
    without: tuple[str, ...] = ("bias", "residual")


def plain(title: str, n: int, o: int, k: int) -> Iterator[Product]:
    """A product alone, x Wᵀ (nt) and x W (nn): [n,k] times [k,o]."""
    alone = ("u", "b", "v", "a", "bias", "residual")
    yield Product(f"{title} nt", gemm.lora_linear, {"n": n, "c": k, "o": (o,)}, alone)
    yield Product(f"{title} nn", gemm.lora_linear_backward, {"n": n, "c": o, "o": (k,)}, alone)


def layer(name: str, n: int, c: int, f: int, q: int, kv: int, r: int) -> Iterator[Product]:
    """Every product of a decoder layer's step."""
    qkv = {"n": n, "c": c, "o": (q, kv, kv), "r": (r,) * 3, "s": 3 * r}
    mlp = {"n": n, "c": c, "f": f, "p": r, "q": r, "s": 2 * r}
    gate_up = {"n": n, "c": c, "o": (f, f), "r": (r, r), "s": 2 * r}
    down = {"n": n, "c": f, "o": (c,), "r": (r,), "s": r}
    yield Product(f"{name} qkv", gemm.lora_down, qkv)
    yield Product(f"{name} down", gemm.lora_down, down)
    yield Product(f"{name} qkv", gemm.lora_linear, qkv)
    yield Product(f"{name} mlp", gemm.lora_swiglu, mlp)
    yield Product(f"{name} down", gemm.lora_linear, down)
    yield Product(f"{name} gate, up", gemm.lora_up_backward, gate_up)
    yield Product(f"{name} qkv", gemm.lora_up_backward, qkv)
    yield Product(f"{name} gate, up", gemm.lora_linear_backward, gate_up)
    yield Product(f"{name} qkv", gemm.lora_linear_backward, qkv)
    yield Product(f"{name} mlp", gemm.lora_swiglu_backward, {"n": n, "c": c, "f": f, "s": r})
    yield Product(f"{name} qkv", gemm.lora_a_grad, qkv)
    yield Product(f"{name} down", gemm.lora_a_grad, down)
    yield Product(f"{name} gate, up", gemm.lora_b_grad, gate_up)
    yield Product(f"{name} down", gemm.lora_b_grad, down)


def products() -> Iterator[Product]:
    yield from plain("seed 512x5632x2048", 512, 5632, 2048)
    yield from plain("seed 512x2048x5632", 512, 2048, 5632)
    up = {"n": 512, "o": (5632,), "r": (32,), "s": 32}
    yield Product("skinny nt 512x32x2048", gemm.lora_down, {"n": 512, "c": 2048, "s": 32})
    yield Product("skinny nn 512x32x5632", gemm.lora_up_backward, up)
    yield Product("skinny tn 32x2048x512", gemm.lora_a_grad, {"n": 512, "c": 2048, "s": 32})
    yield Product("skinny tn 5632x32x512", gemm.lora_b_grad, up)
    yield from layer("SmolLM2-135M", 1024, 576, 1536, 576, 192, 16)
    yield from layer("Qwen2.5-0.5B", 1024, 896, 4864, 896, 128, 16)
    yield from layer("storyteller", 1800, 256, 768, 256, 128, 16)
    for name, v, c in (("SmolLM2", 49152, 576), ("Qwen", 151936, 896), ("storyteller", 1013, 256)):
        forward, _ = plain(f"{name} head", 512, v, c)
        _, backward = plain(f"{name} head", 512, c, v)
        yield from (forward, backward)
    for n in (1, 4, 16, 17, 32):
        forward, _ = plain(f"decode {n} row(s)", n, 49152, 576)
        yield forward


def buffers(product: Product, parameter: Parameter, activation: DType, weight: DType) -> Any:
    """Buffers for one parameter."""
    if parameter.name in product.without:
        return None
    dtype = parameter.dtype or (weight if parameter.name in WEIGHTS else activation)
    group = max((len(s) for s in product.dims.values() if isinstance(s, tuple)), default=1)

    def one(member: int) -> Buffer:
        sizes = [product.dims[letter] for letter in parameter.letters]
        shape = tuple(s[member] if isinstance(s, tuple) else s for s in sizes)
        return Buffer(parameter.name, shape, dtype, Kind.INPUT)

    return tuple(one(i) for i in range(group)) if parameter.group else one(0)


def seconds(product: Product, backend: CpuBackend, activation: DType, weight: DType) -> list[float]:
    """The durations of calls, for about half a second."""
    rng = np.random.default_rng(0)
    step, live = Step("lab", activation), Buffer("live", (1,), I32, Kind.INPUT)
    inputs = [
        buffers(product, p, activation, weight) for p in product.op.inputs if p.name != "live"
    ]
    outputs = [buffers(product, p, activation, weight) for p in product.op.outputs]
    step(product.op, *inputs, into=tuple(outputs) if len(outputs) > 1 else outputs[0], live=live)
    (planned,) = plan([step], backend.kernels)
    memory = backend.allocate(planned.layout)
    memory.write(live, np.array([product.dims["n"]]))
    for entry in inputs + outputs:
        for buffer in entry if isinstance(entry, tuple) else [entry] if entry is not None else []:
            memory.write(buffer, rng.standard_normal(buffer.shape, np.float32))
    program = backend.compile(planned, memory)
    times = program.time() + program.time()
    while sum(times) < 0.5 and len(times) < 2000:
        times += program.time()
    return times[2:] or times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--types", default="bf16,f32")
    options = parser.parse_args()
    backend = CpuBackend()
    roof = backend.measure_roof().flops
    print(f"{backend.isa}, {backend.limits.threads} threads; weights bf16")
    print(f"{'op':21} {'product':26} {'type':4} {'ms':>8} {'GF/s':>6} {'median':>6} {'% peak':>6}")
    for product in products():
        if options.only not in f"{product.op.name} {product.title}":
            continue
        for name in options.types.split(","):
            activation = BY_NAME[name]
            roof = {t: max(rate, roof[t]) for t, rate in backend.measure_roof().flops.items()}
            times = seconds(product, backend, activation, BF16)
            work = product.op.flops(product.dims)
            best, middle = work / min(times) / 1e9, work / median(times) / 1e9
            print(
                f"{product.op.name:21} {product.title:26} {name:4} {min(times) * 1e3:8.3f} "
                f"{best:6.0f} {middle:6.0f} {1e11 * best / roof[activation]:6.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
