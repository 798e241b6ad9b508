"""The tables of a block, a layer and attention: what they compare computes the same, what cannot
run says so, and figures are those of the seconds."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench_worker import write_worker
from krnl.backends.cpu import CpuBackend
from krnl.bench import workloads
from krnl.bench.baselines import settings
from krnl.bench.command import Bench
from krnl.bench.tables import attention, layer, step
from krnl.bench.workloads import (
    BlockShape,
    HeadShape,
    Workload,
    mlp_block,
)
from krnl.devices import precision_name
from krnl.dtypes import F32
from krnl.errors import BackendError, ConfigError
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


def on_a_gpu() -> CpuBackend:
    """The CPU in a GPU's place."""
    backend = CpuBackend()
    backend.name = "cuda"
    return backend


def test_on_a_gpu_everybody_is_waited_for_after_as_many_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A first step of 3 ms makes it seven of them for KRNL, and a peer is told the same."""
    counts: list[int] = []

    def replayed(program: object, memory: object, live: object, count: int) -> float:
        counts.append(count)
        return 0.003

    monkeypatch.setattr(workloads, "replayed", replayed)
    body = (
        "serve(options, lambda: {'x': 1}, describe=lambda: {'norms': {'repeats': options.repeats}})"
    )
    monkeypatch.setattr(step, "script", lambda name: write_worker(tmp_path, body))
    told: list[Any] = []
    monkeypatch.setattr(step, "check_norms", lambda name, theirs, ours: told.append(theirs))
    step.run(replace(bench(TimedGate(), torch=sys.executable), backend=on_a_gpu()))
    assert counts == [1, 1, 7, 7]
    assert told and all(theirs == {"repeats": 7} for theirs in told)
    counts.clear()
    step.run(bench(TimedGate()))
    assert counts == [1, 1]


def test_replays_are_enqueued_before_any_is_waited_for() -> None:
    done: list[str] = []
    program: Any = SimpleNamespace(run=lambda: done.append("run"))
    memory: Any = SimpleNamespace(read=lambda buffer: time.sleep(0.03) or done.append("wait"))
    live: Any = None
    assert 0.01 <= workloads.replayed(program, memory, live, 3) < 0.03
    assert done == ["run", "run", "run", "wait"]


@pytest.mark.parametrize(("seconds", "wanted"), [(1.0, 1), (0.02, 1), (0.015, 2), (0.00015, 134)])
def test_a_gpu_is_busy_for_long_enough(seconds: float, wanted: int) -> None:
    assert workloads.enough(on_a_gpu(), lambda: seconds) == wanted
    assert workloads.enough(CpuBackend(), lambda: seconds) == 1


def test_a_block_of_any_length() -> None:
    short = step.run(bench())
    long = step.run(replace(bench(TimedGate()), length=96))
    assert "64 tokens" in short.title and "96 tokens" in long.title
    assert long.entries[0].rate == pytest.approx(replace(step.QUICK, tokens=96).flops / 1e-3)
    assert step.reported("krnl", replace(step.FULL, tokens=4096), "fp16") is None
    with pytest.raises(ConfigError, match="length is 65,537, and a block has at most 65,536"):
        step.run(replace(bench(), length=65537))


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


def test_on_cuda_attention_is_measured_by_the_size_that_others_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward takes the ninth millisecond, both passes ten: the backward pass the one between."""
    long = attention.LONG_SHAPE
    assert (long.heads, long.kv_heads, long.size, attention.LONG_TOKENS) == (32, 8, 128, 16384)
    monkeypatch.setattr(attention, "SHAPE", HeadShape(2, 1, 16))
    monkeypatch.setattr(attention, "TOKENS", (16, 32, 48, 64))
    monkeypatch.setattr(attention, "LONG_SHAPE", HeadShape(4, 1, 32))
    monkeypatch.setattr(attention, "LONG_TOKENS", 128)
    asked = replace(bench(TimedGate()), backend=on_a_gpu(), quick=False)
    result = attention.run(asked)
    assert "2 heads of 16 and 32, 1 of keys" in result.title
    named = {entry.name: entry for entry in result.entries}
    square = 128**2 / 2 * 4 * 32
    for passes, ms, each in (
        ("forward", 9, 4), ("forward and backward", 10, 14), ("backward", 1, 10),
    ):  # fmt: skip
        entry = named[f"tiled, heads of 32, 128 tokens, {passes}"]
        assert entry.value == pytest.approx(ms)
        assert entry.rate == pytest.approx(each * square / (1e-3 * ms))
    for other in (replace(asked, quick=True), replace(asked, backend=CpuBackend())):
        assert not any("heads of" in entry.name for entry in attention.run(other).entries)


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
