"""Stands in for PyTorch on a CUDA device in bench/torch_products.py, by NumPy on the CPU: what is
captured into a graph runs when the graph is replayed, and only then. How it is to fail is read from
FAKE_TORCH: "no device", "no out_dtype", "other sum", or how many of its calls a graph forgets."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

__version__ = "2.7.0"
bfloat16, float16, float32 = ml_dtypes.bfloat16, np.float16, np.float32
FAILING = os.environ.get("FAKE_TORCH", "")
FORGOTTEN = int(FAILING) if FAILING.isdigit() else 0


class Tensor(np.ndarray):
    def to(self, device: str, dtype: Any, copy: bool) -> "Tensor":
        return self.astype(dtype)

    def zero_(self) -> None:
        self[...] = 0

    def float(self) -> "Tensor":
        return self.astype(np.float32)

    def norm(self) -> float:
        return np.linalg.norm(self)


def from_numpy(values: np.ndarray) -> Tensor:
    return values.view(Tensor)


def zeros(rows: int, columns: int, dtype: Any, device: str) -> Tensor:
    return from_numpy(np.zeros((rows, columns), dtype))


def mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    _run(lambda: np.copyto(out, a.float() @ b.float(), casting="unsafe"))


def addmm(total: Tensor, a: Tensor, b: Tensor, *, out: Tensor, **options: Any) -> None:
    if FAILING == "no out_dtype":
        raise TypeError("addmm() got an unexpected keyword argument 'out_dtype'")
    if FAILING == "other sum":
        raise RuntimeError("self and mat2 must have the same dtype, but got Float and BFloat16")
    assert options["out_dtype"] == total.dtype == out.dtype == float32
    _run(lambda: np.copyto(out, total + a.float() @ b.float()))


class CUDAGraph:
    captured: "CUDAGraph | None" = None

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def replay(self) -> None:
        for call in self.calls[: len(self.calls) - FORGOTTEN]:
            call()


def _run(call: Callable[[], None]) -> None:
    if CUDAGraph.captured is None:
        call()
    else:
        CUDAGraph.captured.calls.append(call)


@contextmanager
def graph(made: CUDAGraph) -> Iterator[None]:
    CUDAGraph.captured = made
    yield
    CUDAGraph.captured = None


@contextmanager
def stream(aside: Any) -> Iterator[None]:
    yield


def Stream() -> Any:  # noqa: N802 (the name is PyTorch's)
    return SimpleNamespace(wait_stream=lambda other: None)


cuda = SimpleNamespace(
    CUDAGraph=CUDAGraph, Stream=Stream, current_stream=Stream, graph=graph, stream=stream,
    is_available=lambda: FAILING != "no device",
    synchronize=lambda: None,
    max_memory_allocated=lambda: 1, reset_peak_memory_stats=lambda: None,
)  # fmt: skip


def get_num_threads() -> int:
    return 1
