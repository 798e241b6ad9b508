"""What the workers with MLX have in common."""

import ctypes
from typing import Any

import mlx.core as mx
from protocol import resident

DEVICES = ("cpu", "gpu")
PRECISIONS = {"fp32": mx.float32, "fp16": mx.float16, "bf16": mx.bfloat16}


def use_device(device: str) -> None:
    """To be called before anything is computed."""
    mx.set_default_device(mx.gpu if device == "gpu" else mx.cpu)


def settle(*arrays: Any) -> None:
    """Computes them, and gives back what the host filled on the way: a GPU would take that memory
    for its own work, and it is slower there."""
    mx.eval(*arrays)
    mx.synchronize()
    mx.clear_cache()


def threads() -> int | None:
    """Of OpenBLAS, where openblas_for_mlx.c lent it, which takes them from OPENBLAS_NUM_THREADS.
    None: MLX and the libraries that it brings do not tell."""
    try:
        return int(ctypes.CDLL(None).scipy_openblas_get_num_threads())
    except AttributeError:
        return None


def peak(device: str) -> int:
    """Bytes: on a GPU, the most that arrays held since this was last asked; on the CPU, the most
    that the process had resident so far."""
    if device == "cpu":
        return resident()
    most = mx.get_peak_memory()
    mx.reset_peak_memory()
    return most
