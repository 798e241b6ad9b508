"""A single matrix product as numbers. KRNL draws the same (krnl.bench.products)."""

import argparse

import numpy as np
from protocol import parser

FIRST = 64  # elements of a result's first row that are told


def arguments(
    description: str, precisions: tuple[str, ...], devices: tuple[str, ...]
) -> argparse.ArgumentParser:
    """The first precision and device are what is taken if none is given."""
    made = parser(description)
    made.add_argument("--layout", choices=("nn", "tn", "nt"), default="nt")
    made.add_argument("--m", type=int, default=512)
    made.add_argument("--n", type=int, default=2048)
    made.add_argument("--k", type=int, default=2048)
    made.add_argument("--copies", type=int, default=2, help="of the operands, taken in turn")
    made.add_argument("--calls", type=int, default=24, help="products of a step")
    made.add_argument("--precision", choices=precisions, default=precisions[0])
    made.add_argument("--device", choices=devices, default=devices[0])
    return made


def drawn(layout: str, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """a [m, k] and b [k, n] as they lie in memory: [k, m] where the layout begins with t, [n, k]
    where it ends with one."""
    shapes = {
        "a": (k, m) if layout[0] == "t" else (m, k),
        "b": (n, k) if layout[1] == "t" else (k, n),
    }
    a, b = (
        np.random.default_rng([0, *name.encode()]).standard_normal(shape, np.float32)
        for name, shape in shapes.items()
    )
    return a, b
