"""Other tools as processes: what they are given, what they answer, and what is said when they
cannot."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from bench_worker import BENCH, write_worker
from krnl.backends.cpu import CpuBackend
from krnl.bench import baselines
from krnl.bench.baselines import Worker, check_agreement, script, title, variants
from krnl.bench.workloads import BlockShape, mlp_block
from krnl.dtypes import BF16, F16, F32, DType
from krnl.errors import BackendError, ConfigError

TINY = BlockShape(tokens=13, width=24, ffn=36, rank=3)


# What peers are given


def peers_block() -> ModuleType:
    """bench/peers/block.py, which needs NumPy alone."""
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module("peers.block")
    finally:
        sys.path.pop(0)


def test_peers_draw_the_numbers_that_krnl_draws() -> None:
    theirs = peers_block().drawn(TINY.tokens, TINY.width, TINY.ffn, TINY.rank)
    work = mlp_block(CpuBackend(), F32, TINY)
    ours = {buffer.name: values for buffer, values in work.inputs.items()}
    np.testing.assert_array_equal(ours["gate_proj.weight"], theirs.gate)
    np.testing.assert_array_equal(ours["up_proj.weight"], theirs.up)
    np.testing.assert_array_equal(ours["down_proj.weight"], theirs.down)
    np.testing.assert_array_equal(ours["x"], theirs.x)
    np.testing.assert_array_equal(ours["dy"], theirs.dy)
    a_gate, b_gate, a_up, b_up = (values.ravel() for values in theirs.adapters)
    np.testing.assert_array_equal(ours["adapter"], np.concatenate([a_gate, a_up, b_gate, b_up]))


@pytest.mark.parametrize(
    ("peer", "activation", "wanted"),
    [
        ("torch", BF16, ["torch bf16, adapters bf16", "torch bf16, adapters fp32"]),
        ("torch", F32, ["torch fp32, adapters fp32"]),
        ("mlx", BF16, ["mlx fp32, adapters fp32"]),
    ],
)
def test_peers_run_in_16_bits_with_both_kinds_of_adapters(
    peer: str, activation: DType, wanted: list[str]
) -> None:
    found = variants(peer, CpuBackend(), activation)
    assert [title(peer, *variant) for variant in found] == wanted


def test_mlx_runs_in_16_bits_on_a_gpu() -> None:
    gpu: Any = type("Gpu", (), {"name": "metal"})()
    assert variants("mlx", gpu, F16) == [("fp16", "16"), ("fp16", "fp32")]


def test_a_peer_that_computes_something_else_is_not_compared() -> None:
    ours = {"dx": 10.0, "gate_proj.dA": 3.0}
    check_agreement("torch", {"dx": 10.05, "gate_proj.dA": 3.0}, ours)
    with pytest.raises(BackendError, match=r"something else than KRNL.*dx is 9\.8"):
        check_agreement("torch", {"dx": 9.8, "gate_proj.dA": 3.0}, ours)


# Workers


def test_a_worker_steps_when_it_is_asked(tmp_path: Path) -> None:
    body = """
        count = 0
        def step():
            global count
            count += 1
            print("noise")  # goes to standard error
            return float(count)
        serve(options, step, lambda: {"said": "hello"})
        """
    with Worker(sys.executable, write_worker(tmp_path, body)) as worker:
        assert (worker.hello["loss"], worker.hello["said"]) == (1.0, "hello")
        assert worker.ask()["loss"] == 2.0
        assert worker.seconds() >= 0
        seconds, loss, peak = worker.update()
        assert (seconds >= 0, loss, peak > 1 << 20) == (True, 4.0, True)


def test_a_worker_alone_does_the_steps_it_was_told(tmp_path: Path) -> None:
    path = write_worker(tmp_path, "serve(options, lambda: 7.0)")
    command = [sys.executable, str(path), "--steps", "2"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [sorted(line) for line in lines] == [
        ["first", "loss"],
        *[["loss", "peak", "seconds"]] * 2,
    ]


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    path = write_worker(tmp_path, "import a_framework_that_is_not_here")
    with pytest.raises(ConfigError, match=r"with .* ended with 1, saying 'ModuleNotFoundError"):
        Worker(sys.executable, path)
    with pytest.raises(ConfigError, match="does not start: No such file"):
        Worker(str(tmp_path / "python"), path)


def test_a_worker_that_dies_says_so(tmp_path: Path) -> None:
    body = """
        import os
        count = 0
        def step():
            global count
            count += 1
            if count > 1: os._exit(9)
            return 0.0
        serve(options, step)
        """
    with Worker(sys.executable, write_worker(tmp_path, body)) as worker:
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"ended with 9\. Is there enough memory"):
                worker.ask()


def test_scripts_are_found_from_a_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert script("torch_block.py").is_file()
    monkeypatch.setattr(baselines, "__file__", str(tmp_path / "a" / "b" / "c" / "d.py"))
    monkeypatch.chdir(BENCH.parent)
    assert script("mlx_block.py").is_file()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="run krnl bench --against inside a clone"):
        script("torch_block.py")
