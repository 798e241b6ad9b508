"""Whole runs on the CUDA kernels, in the simulator, against the CPU's."""

from pathlib import Path
from typing import Any

import pytest

from cudasim.backend import SimulatedCudaBackend
from cudasim.device import BACKWARD
from krnl import devices
from krnl.backends import cuda
from runs import follow, run, updates
from test_storyteller import config as storyteller

STEPS = 3
# Relative differences of an update's loss and gradient norm that are granted to bf16: see
# test_cuda_training.
ALLOWED = {"loss": 2 * 2.0**-8, "grad_norm": 20 * 2.0**-8}


def test_steps_of_the_storyteller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint in bf16, against the CPU in float32, with the kernels for Hopper."""
    backend = SimulatedCudaBackend(order=BACKWARD)
    monkeypatch.setattr(cuda, "CudaBackend", lambda: backend)
    monkeypatch.setattr(devices, "has_cuda", lambda: True)
    given: dict[str, Any] = {"steps": STEPS, "batch_size": 2, "tokens": 256, "shuffle": False}
    for device, precision in (("cpu", "fp32"), ("cuda", "bf16")):
        run(storyteller(tmp_path / device, device=device, precision=precision, **given))
    follow(tmp_path / "cuda", tmp_path / "cpu", ALLOWED)
    assert len(updates(tmp_path / "cuda")) == STEPS
    assert {"attention_wgmma", "gemm_wgmma"} <= {kernel.library for kernel in backend.executed}
