"""The tables of a block, a layer and attention: what they compare computes the same, what cannot
run says so, and figures are those of the seconds."""

import sys
from pathlib import Path
from typing import Any

import pytest

from bench_worker import write_worker
from krnl.backends.cpu import CpuBackend
from krnl.bench.baselines import settings
from krnl.bench.command import Bench
from krnl.bench.tables import attention, layer, step
from krnl.bench.workloads import (
    BlockShape,
    Workload,
    mlp_block,
)
from krnl.devices import precision_name
from krnl.dtypes import F32
from krnl.errors import BackendError
from open_gate import OpenGate
from timed_gate import TimedGate

TINY = BlockShape(tokens=13, width=24, ffn=36, rank=3)


def bench(gate: Any = None, **against: str) -> Bench:
    return Bench(CpuBackend(), gate or OpenGate(), 2, True, against)


def test_step_alone() -> None:
    result = step.run(bench())
    assert [entry.unit for entry in result.entries] == ["ms"]
    assert result.entries[0].name.startswith("krnl ")


def test_the_reports_figures_stand_beside_the_full_step_in_fp16_only() -> None:
    assert step.reported("krnl", step.FULL, "fp16") == 24.89
    assert step.reported("mlx", step.FULL, "fp16") == 18.51
    assert step.reported("torch", step.FULL, "fp16") is None
    for shape, precision in ((step.QUICK, "fp16"), (step.FULL, "fp32"), (step.FULL, "bf16")):
        assert step.reported("krnl", shape, precision) is None
        assert step.reported("mlx", shape, precision) is None


@pytest.mark.parametrize("agrees", [True, False])
def test_step_against_a_peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, agrees: bool) -> None:
    """A peer that answers with KRNL's own norms is compared; another is not."""
    norms = mlp_block(CpuBackend(), F32, step.QUICK).norms()
    said = norms if agrees else {**norms, "up_proj.dB": 2 * norms["up_proj.dB"]}
    body = f"serve(options, dict, describe=lambda: {{'norms': {said}}})"
    monkeypatch.setattr(step, "script", lambda name: write_worker(tmp_path, body))
    if not agrees:
        with pytest.raises(BackendError, match=r"computes something else.*up_proj\.dB"):
            step.run(bench(torch=sys.executable))
        return
    result = step.run(bench(torch=sys.executable))
    ours, *theirs = result.entries
    backend = CpuBackend()
    wanted = settings("torch", backend, backend.limits.activations[0], ["eager"])
    assert [entry.name for entry in theirs] == [setting.title("torch") for setting in wanted]
    assert [tool.name for tool in result.tools] == ["torch"]
    assert ours.ratio is None
    assert all(entry.ratio is not None and ours.name in entry.note for entry in theirs)


def test_times_and_rates_of_the_step_are_those_of_the_seconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """KRNL takes a millisecond, the peer two and, in another setting, three."""
    body = "serve(options, dict, describe=lambda: {'norms': {}})"
    monkeypatch.setattr(step, "script", lambda name: write_worker(tmp_path, body))
    monkeypatch.setattr(step, "check_norms", lambda *given: None)
    entries = step.run(bench(TimedGate(), torch=sys.executable)).entries
    flops = 2 * 64 * (2 * 3 * 512 * 1408 + 2 * (3 * 512 * 8 + 3 * 8 * 1408))
    for ms, entry in enumerate(entries, 1):
        assert (entry.value, entry.spread) == (pytest.approx(ms), pytest.approx((ms, ms)))
        assert entry.rate == pytest.approx(flops / (1e-3 * ms))
        assert entry.ratio == (None if ms == 1 else pytest.approx(1 / ms))


def test_times_and_rates_of_layers_are_those_of_the_seconds() -> None:
    one, two = layer.run(bench(TimedGate())).entries
    width, kv, ffn, rank = 128, 64, 256, layer.RANK
    shapes = 2 * [(width, width), (width, kv), (width, ffn)] + [(ffn, width)]
    for ms, tokens, entry in ((1, 64, one), (2, 128, two)):
        assert entry.value == pytest.approx(ms) and entry.unit == "ms"
        frozen = 2 * 2 * tokens * sum(n * k for k, n in shapes)
        adapters = 3 * 2 * tokens * rank * sum(k + n for k, n in shapes)
        scores = 14 * tokens**2 / 2 * width  # forward four, backward ten
        rate = (frozen + adapters + scores) / (1e-3 * ms)
        assert entry.rate == pytest.approx(rate, rel=0.1)  # and what is no product


def test_times_and_rates_of_attention_are_those_of_the_seconds() -> None:
    result = attention.run(bench(TimedGate()))
    for ms, (entry, (tokens, each)) in enumerate(
        zip(result.entries, [(64, 4), (64, 14), (128, 4), (128, 14)], strict=False), 1
    ):
        flops = each * tokens**2 / 2 * 4 * 32  # the visible half, heads, size
        assert entry.value == pytest.approx(ms) and entry.unit == "ms"
        assert entry.rate == pytest.approx(flops / (1e-3 * ms))


def test_titles_name_types_as_the_settings_do() -> None:
    name = precision_name(CpuBackend().limits.activations[0])
    assert attention.run(bench()).title.startswith(f"Causal attention in {name}:")
    assert step.run(bench()).entries[0].name == f"krnl {name}"
    assert layer.run(bench()).entries[0].name.endswith(name)


def test_a_norm_that_a_peer_does_not_tell_is_another() -> None:
    with pytest.raises(BackendError, match="the norm of dx is nan there"):
        step.check_norms("peer", {}, {"dx": 1.0})


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


def test_the_first_run_of_a_turn_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every contestant alike: KRNL's block, layer, attention and training."""
    runs = iter([5.0, 1.0])
    work = mlp_block(CpuBackend(), F32, TINY)
    monkeypatch.setattr(work, "run", lambda: next(runs))
    assert work.turn() == 1.0
    counted = {"runs": 0}
    right = Workload.run

    def run(work: Workload) -> float:
        counted["runs"] += 1
        return right(work)

    monkeypatch.setattr(Workload, "run", run)
    for table in (step, layer, attention):
        counted["runs"] = 0
        result = table.run(bench())
        timed = sum(entry.spread is not None for entry in result.entries)
        assert counted["runs"] == 2 * 2 * timed  # two rounds
