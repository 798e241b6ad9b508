"""The MLP block of the report as numbers: RMSNorm, SwiGLU, LoRA on gate and up, frozen weights,
forward and backward with the gradient at its input. KRNL draws the same (krnl.bench.workloads)."""

import argparse
from dataclasses import dataclass

import numpy as np
from protocol import parser

EPS = 1e-5


@dataclass(frozen=True)
class Block:
    """y = x + down(silu(gate(h)) ∘ up(h)) with h = rms_norm(x). `adapters` are A [rank, in] and
    B [out, rank] of gate, then those of up."""

    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray
    adapters: list[np.ndarray]
    x: np.ndarray
    dy: np.ndarray


def arguments(
    description: str, precisions: tuple[str, ...], devices: tuple[str, ...]
) -> argparse.ArgumentParser:
    """The first precision and device are what is taken if none is given."""
    made = parser(description)
    made.add_argument("--tokens", type=int, default=512)
    made.add_argument("--width", type=int, default=2048)
    made.add_argument("--ffn", type=int, default=5632)
    made.add_argument("--rank", type=int, default=32)
    made.add_argument("--precision", choices=precisions, default=precisions[0])
    made.add_argument(
        "--adapters", choices=("16", "fp32"), default="16", help="16: as the base, where it is 16"
    )
    made.add_argument("--device", choices=devices, default=devices[0])
    return made


def drawn(tokens: int, width: int, ffn: int, rank: int) -> Block:
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return random.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)

    weights = [matrix(ffn, width), matrix(ffn, width), matrix(width, ffn)]
    adapters = [matrix(rank, width), matrix(ffn, rank), matrix(rank, width), matrix(ffn, rank)]
    x, dy = (random.standard_normal((tokens, width), np.float32) for _ in range(2))
    return Block(*weights, adapters, x, dy)


def norms(gradients: list[float]) -> dict[str, dict[str, float]]:
    """What a worker says of its first step: the norm of each gradient, by KRNL's names."""
    names = ("dx", "gate_proj.dA", "gate_proj.dB", "up_proj.dA", "up_proj.dB")
    return {"norms": dict(zip(names, gradients, strict=True))}
