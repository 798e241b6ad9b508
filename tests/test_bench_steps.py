"""The tables of whole steps: what they time is right, what they compare computes the same, what
cannot run says so. No figure is looked at."""

import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from bench_worker import write_worker
from krnl.backends.cpu import CpuBackend
from krnl.backends.reference import ReferenceBackend
from krnl.bench.baselines import AGREEMENT, title, variants
from krnl.bench.command import Bench
from krnl.bench.shapes import SHAPES, write
from krnl.bench.tables import attention, hetero, layer, model, step
from krnl.bench.trainer import Trainer
from krnl.bench.workloads import (
    BlockShape,
    HeadShape,
    Workload,
    attention_alone,
    decoder_layer,
    mlp_block,
)
from krnl.dtypes import BF16, F16, F32, DType
from krnl.errors import BackendError, ConfigError
from krnl.models.config import parse
from metalsim.install import SimulatedBackend, metal_backend
from open_gate import OpenGate

TINY = BlockShape(tokens=13, width=24, ffn=36, rank=3)


def bench(**against: str) -> Bench:
    gate: Any = OpenGate()
    return Bench(CpuBackend(), gate, 2, True, against)


# Workloads


def test_the_block_is_that_of_the_report() -> None:
    assert BlockShape().flops == pytest.approx(72.4e9, rel=1e-3)
    assert mlp_block(CpuBackend(), F32, step.QUICK).flops == pytest.approx(
        step.QUICK.flops, rel=2e-3
    )


@pytest.mark.parametrize("activation", [F32, BF16])
def test_a_right_block_passes_its_check(activation: DType) -> None:
    block = mlp_block(CpuBackend(), activation, TINY)
    block.check()
    assert block.run() > 0
    block.run()
    block.check()  # gradients add up over runs, and are counted from zero


@pytest.mark.parametrize("wrong", ["dx", "gate_proj.dA", "up_proj.dB"])
def test_a_wrong_block_is_not_timed(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    block = mlp_block(CpuBackend(), F32, TINY)
    right = block.results

    def off() -> dict[str, np.ndarray]:
        results = right()
        return {**results, wrong: results[wrong] * np.float32(1.001)}

    monkeypatch.setattr(block, "results", off)
    with pytest.raises(BackendError, match=f"the MLP block: {wrong} is off by .* not timed"):
        block.check()


def test_numbers_that_are_none_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    block = mlp_block(CpuBackend(), F32, TINY)
    right = block.results
    monkeypatch.setattr(block, "results", lambda: {n: v * np.nan for n, v in right().items()})
    with pytest.raises(BackendError, match="is off by nan"):
        block.check()


@pytest.mark.parametrize(
    "part", ["gate_proj.weight", "up_proj.weight", "down_proj.weight", "adapter", "x", "dy"]
)
def test_every_part_of_the_block_has_a_say(part: str) -> None:
    """Norms that hardly move without a part could not tell that another tool leaves it out."""
    block = mlp_block(ReferenceBackend(), F32, TINY)
    full = block.norms()
    (buffer,) = (b for b in block.inputs if b.name == part)
    block.memory.write(buffer, np.zeros(buffer.shape))
    moved = max(abs(norm / full[name] - 1) for name, norm in block.norms().items())
    assert moved > 3 * AGREEMENT


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("activation", [F32, BF16])
def test_attention_alone_is_right(backward: bool, activation: DType) -> None:
    work = attention_alone(CpuBackend(), activation, HeadShape(4, 2, 10), 37, backward)
    work.check()
    assert work.run() > 0


# On Metal, in the simulator: what would be timed is right. Times are nobody's there.


@pytest.fixture(scope="module")
def simulated() -> SimulatedBackend:
    return metal_backend("fast")


@pytest.mark.parametrize("activation", [F16, F32])
def test_metal_computes_what_is_timed(simulated: SimulatedBackend, activation: DType) -> None:
    mlp_block(simulated, activation, TINY).check()
    attention_alone(simulated, activation, HeadShape(4, 2, 10), 37, backward=True).check()
    shape = {**SHAPES[layer.MODEL], "num_hidden_layers": 1, **layer.QUICK_SIZES}
    decoder_layer(simulated, activation, parse(shape, "tiny"), 37, 3).check()
    simulated.simulation.expect_clean()


def test_both_engines_compute_what_is_timed_of_them(simulated: SimulatedBackend) -> None:
    gate: Any = OpenGate()
    assert "GPU beside the CPU" in hetero.contestants(Bench(simulated, gate, 1, True, {}))


# Tables


def test_step_alone() -> None:
    result = step.run(bench())
    assert [entry.unit for entry in result.entries] == ["ms"]
    assert result.entries[0].name.startswith("krnl ")


def test_the_reports_figures_stand_beside_the_full_step_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (entry,) = step.run(bench()).entries
    assert entry.reported is None
    monkeypatch.setattr(step, "FULL", step.QUICK)
    (entry,) = step.run(replace(bench(), quick=False)).entries
    assert entry.reported == 24.89


@pytest.mark.parametrize("agrees", [True, False])
def test_step_against_a_peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, agrees: bool) -> None:
    """A peer that answers with KRNL's own norms is compared; another is not."""
    norms = mlp_block(CpuBackend(), F32, step.QUICK).norms()
    said = norms if agrees else {**norms, "up_proj.dB": 2 * norms["up_proj.dB"]}
    body = f"serve(options, lambda: 0.0, lambda: {{'norms': {said}}})"
    monkeypatch.setattr(step, "script", lambda name: write_worker(tmp_path, body))
    if not agrees:
        with pytest.raises(BackendError, match=r"computes something else.*up_proj\.dB"):
            step.run(bench(torch=sys.executable))
        return
    ours, *theirs = step.run(bench(torch=sys.executable)).entries
    wanted = variants("torch", CpuBackend(), CpuBackend().limits.activations[0])
    assert [entry.name for entry in theirs] == [title("torch", *variant) for variant in wanted]
    assert ours.ratio is None
    assert all(entry.ratio is not None and ours.name in entry.note for entry in theirs)


@pytest.mark.parametrize("peer", ["torch", "mlx"])
@pytest.mark.parametrize("table", [step, model])
def test_real_peers(table: ModuleType, peer: str) -> None:
    variable = f"KRNL_{peer.upper()}_PYTHON"
    if variable not in os.environ:
        pytest.skip(f"{variable} names no interpreter that has {peer}")
    result = table.run(bench(**{peer: os.environ[variable]}))
    assert len({entry.name for entry in result.entries if entry.ratio}) > 0


def test_layer() -> None:
    result = layer.run(bench())
    assert len(result.entries) == len(layer.QUICK_TOKENS)
    assert all(entry.value is not None for entry in result.entries)


def test_a_wrong_layer_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def complain(work: Workload) -> None:
        raise BackendError("wrong")

    monkeypatch.setattr(Workload, "check", complain)
    for table in (layer, step, attention):
        with pytest.raises(BackendError, match="wrong"):
            table.run(bench())


def test_attention_names_the_way_that_is_not_here() -> None:
    *measured, missing = attention.run(bench()).entries
    assert len(measured) == 2 * len(attention.QUICK_TOKENS)
    assert all(entry.name.startswith("tiled") and entry.value for entry in measured)
    assert (missing.name, missing.value) == ("materialised", None)
    assert missing.note == "the cpu backend has no materialised attention"


def test_model_tells_speed_and_memory() -> None:
    speed, memory = model.run(bench()).entries
    assert speed.name.startswith("smollm2-135m, krnl")
    assert (speed.unit, memory.unit) == ("tokens/s", "MiB")
    assert memory.value is not None
    assert 20 < memory.value < 2000


def test_a_model_that_trains_something_else_is_not_compared() -> None:
    model._check_losses({"krnl": 6.24, "peft": 6.3})
    for loss in (5.8, float("nan")):
        with pytest.raises(BackendError, match=r"peft has loss .* something else"):
            model._check_losses({"krnl": 6.24, "peft": loss})


def test_what_a_trainer_cannot_do_is_said_by_the_parent(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        Trainer(tmp_path, "cpu", "auto", 2, 32)


def test_a_trainer_that_dies_says_so(tmp_path: Path) -> None:
    write(SHAPES["smollm2-135m"] | model.QUICK_SIZES, "tiny", tmp_path)
    with Trainer(tmp_path, "cpu", "auto", 2, 32) as trainer:
        trainer._process.kill()
        with pytest.raises(BackendError, match="ended with -9"):
            trainer.ask()


# Two engines


def test_shares_are_those_of_the_report() -> None:
    forward = hetero.cpu_share(cpu=6.73, gpu=4.0, other=4.3)
    backward = hetero.cpu_share(cpu=9.70, gpu=3.5, other=4.46)
    assert (round(forward, 2), round(backward, 2)) == (0.77, 0.60)
    assert (hetero.cpu_rows(forward, 512), hetero.cpu_rows(backward, 512)) == (384, 320)


def test_both_engines_end_together() -> None:
    cpu, gpu, other = 5.0, 3.0, 1.0
    share = hetero.cpu_share(cpu, gpu, other)
    assert share * cpu == pytest.approx(other + (1 - share) * gpu)


def test_a_gpu_with_enough_to_do_leaves_all_rows_to_the_cpu() -> None:
    assert hetero.cpu_share(cpu=1.0, gpu=1.0, other=5.0) == 1.0
    assert hetero.cpu_rows(1.0, 500) == 500


def test_one_engine_runs_while_the_other_is_busy() -> None:
    runs: list[str] = []

    def other() -> float:
        time.sleep(0.01)
        runs.append("other")
        return 0.0

    def run() -> float:
        assert runs, "the other engine was not busy yet"
        time.sleep(0.1)
        assert len(runs) > 2, "it does not go on meanwhile"
        return 42.0

    threads = threading.active_count()
    assert hetero.beside(run, other) == 42.0
    assert threading.active_count() == threads


def test_an_engine_that_fails_beside_the_other_is_heard() -> None:
    def fail() -> float:
        raise BackendError("the GPU is gone")

    with pytest.raises(BackendError, match="the GPU is gone"):
        hetero.beside(lambda: 1.0, fail)
    with pytest.raises(BackendError, match="the GPU is gone"):
        hetero.beside(fail, lambda: 1.0)


def test_two_engines_need_a_gpu() -> None:
    result = hetero.run(bench())
    assert result.measurement is None
    assert {entry.value for entry in result.entries} == {None}
    assert all("needs a GPU" in entry.note for entry in result.entries)


def test_two_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a second CPU engine in the GPU's place."""
    gpu = CpuBackend()
    gpu.name = "metal"
    gate: Any = OpenGate()
    result = hetero.run(Bench(gpu, gate, 1, True, {}))
    entries = {entry.name: entry for entry in result.entries}
    assert entries["total at once"].reported == 4675
    for part, reported in (("forward", 0.77), ("backward", 0.60)):
        share = entries[f"CPU's share of the rows, {part}"]
        assert share.value is not None
        assert 0 < share.value <= 1
        assert share.reported == reported
