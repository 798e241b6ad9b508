"""Whole runs on the CUDA kernels, in the simulator, against the CPU's."""

from pathlib import Path

import pytest

from cudasim.backend import SimulatedCudaBackend
from cudasim.device import BACKWARD
from krnl import devices
from krnl.backends import cuda
from runs import check_the_storyteller_follows_the_cpu


def test_steps_of_the_storyteller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels for Hopper."""
    backend = SimulatedCudaBackend(order=BACKWARD)
    monkeypatch.setattr(cuda, "CudaBackend", lambda: backend)
    monkeypatch.setattr(devices, "has_cuda", lambda: True)
    given = {"batch_size": 2, "tokens": 256}
    check_the_storyteller_follows_the_cpu(tmp_path, 3, "cuda", "bf16", **given)
    assert {"attention_wgmma", "gemm_wgmma"} <= {kernel.library for kernel in backend.executed}
