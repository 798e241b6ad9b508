"""Short kernels for the simulator's own tests, with KRNL's headers."""

from functools import cache
from typing import Any

import numpy as np

from krnl.backends.cuda_compiler import Kernel
from krnl.kernels.cuda import sources

from . import build, device

HEAD = '#include "hopper.h"\n'


class Array:
    """Memory of the device that holds `values`."""

    def __init__(self, values: np.ndarray, name: str = "x") -> None:
        memory = device.Memory(build.engine(), values.nbytes, name)
        self.values: np.ndarray = memory.bytes.view(values.dtype).reshape(values.shape)
        self.values[...] = values
        self.address = memory.address

    def __bytes__(self) -> bytes:
        return self.address.to_bytes(8, "little")


def filled(count: int, dtype: Any = np.float32, value: float = 7) -> Array:
    return Array(np.full(count, value, dtype), "y")


@cache
def _kernels(text: str) -> build.Kernels:
    return build.Kernels(lambda library: text, sources.headers())


def launch(
    text: str,
    *arguments: Any,
    groups: int = 1,
    threads: int = 32,
    kernel: str = "kernel",
    **settings: Any,
) -> None:
    """Runs `kernel` of a source behind KRNL's headers. Arguments are arrays, or bytes."""
    function = _kernels(HEAD + text)[Kernel("snippet", kernel)]
    function.launch([bytes(x) for x in arguments], (groups, 1, 1), threads, **settings)


def body(statements: str, parameters: str = "float *y", head: str = "") -> str:
    """A kernel that does what it must, and then `statements`."""
    return (
        f"{head}\n__global__ void kernel({parameters}) {{\n"
        f"  const PreviousLaunch previous(false);\n{statements}\n}}\n"
    )
