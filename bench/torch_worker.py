"""What the workers with PyTorch have in common."""

import argparse

import torch
from protocol import resident

DEVICES = ("cpu", "cuda", "mps")
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def use_threads(options: argparse.Namespace) -> None:
    """To be called before anything is computed."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)


def finish(device: str) -> None:
    """Waits until the device has done all it was given."""
    if device != "cpu":
        getattr(torch, device).synchronize()


def peak(device: str) -> int:
    """Bytes: on a CUDA device, the most that tensors held since this was last asked; on Apple's,
    what Metal allocated; on the CPU, the most that the process had resident so far."""
    if device == "mps":
        return torch.mps.driver_allocated_memory()
    if device == "cpu":
        return resident()
    most = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return most
