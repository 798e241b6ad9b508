"""What the workers with PyTorch have in common."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import protocol
import torch

DEVICES = ("cpu", "cuda", "mps")
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def prepare(options: argparse.Namespace) -> None:
    """To be called before anything is computed. Ends with a sentence where PyTorch cannot use the
    device."""
    there = {
        "cpu": lambda: True,
        "cuda": lambda: torch.cuda.is_available(),
        "mps": lambda: torch.backends.mps.is_available(),
    }
    if not there[options.device]():
        sys.exit(
            f"device is {options.device}, which PyTorch {torch.__version__} cannot use here: it "
            "finds no such GPU, or was built without support for it."
        )
    if options.threads is not None:
        torch.set_num_threads(options.threads)


def finish(device: str) -> None:
    """Waits until the device has done all it was given."""
    if device != "cpu":
        getattr(torch, device).synchronize()


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """What `run` does, as one CUDA graph. What it allocates is allocated before."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def peak(device: str) -> int:
    """Bytes: on a CUDA device, the most that tensors held since this was last asked; on Apple's,
    what Metal allocated; on the CPU, the most that the process had resident so far."""
    if device == "mps":
        return torch.mps.driver_allocated_memory()
    if device == "cpu":
        return protocol.resident()
    most = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return most


def serve(
    options: argparse.Namespace,
    step: Callable[[], dict[str, float]],
    describe: Callable[[], dict[str, Any]] = dict,
    packages: Sequence[str] = (),
) -> None:
    """As `protocol.serve`, of steps that PyTorch enqueues. `packages`: that take part beside it."""
    device = options.device
    protocol.serve(
        options,
        step,
        ["torch", *packages],
        torch.get_num_threads,
        lambda: peak(device),
        describe,
        lambda: finish(device),
    )
