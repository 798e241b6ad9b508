"""`krnl profile`: what it counts, what it calls it, and what it writes."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import krnl.bench.gate
import krnl.profile
from krnl.backends.base import Roof
from krnl.backends.cpu import CpuBackend
from krnl.backends.reference import ReferenceBackend
from krnl.bench.control import open_gate
from krnl.data.packing import random_pass
from krnl.dtypes import BF16, F32
from krnl.errors import ConfigError, Refused
from krnl.formats.peft import AdapterConfig
from krnl.options import ProfileOptions
from krnl.profile import ROUNDS, Profile, Timing, profile_run
from krnl.profile_names import names, place
from krnl.profile_report import as_json, as_trace, draw, print_profile, report
from krnl.training.config import TrainConfig
from metalsim.install import metal_backend
from open_gate import OpenGate
from runs import krnl_process
from tiny import ALL, plan_model, write_model

MODEL = str(Path(__file__).parent.parent / "examples" / "storyteller" / "model")
CONFIG = TrainConfig(model=MODEL, tokens=256)
TRIES = 3  # to find the machine quiet
ALLOWED = 0.1  # between the sum of dispatches and a whole replay


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_run(CONFIG, documents=4, labelled=0.25, gate=OpenGate())


@pytest.fixture(scope="module")
def forced() -> Profile:
    return profile_run(CONFIG, gate=OpenGate(trusted=False))


def printed(profile: Profile, **options: object) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        print_profile(profile, console, **options)
    return capture.get()


def test_every_dispatch_is_timed_and_grouped(profile):
    assert all(t.seconds > 0 for t in profile.timings)
    for by in ("kernel", "label", "layer"):
        groups = profile.grouped(by)
        assert sum(t.count for t in groups) == len(profile.timings)
        assert sum(t.seconds for t in groups) == pytest.approx(profile.total)
        assert sum(t.floor for t in groups) == pytest.approx(sum(t.floor for t in profile.timings))
    # The machine may be busy: only nonsense is caught.
    assert 0.2 < profile.total / profile.replay < 5


def test_layers_stand_in_the_order_of_the_pass(profile):
    layers = [group.label for group in profile.grouped("layer")]
    down, up = [f"layer {i}" for i in range(4)], [f"layer {i}" for i in (3, 2, 1, 0)]
    assert layers == [
        "fwd embedding", *(f"fwd {x}" for x in down), "fwd head", "bwd head",
        *(f"bwd {x}" for x in up),
    ]  # fmt: skip


def test_work_is_that_of_live_rows(profile):
    heads, head_dim, layers = 4, 64, 4
    visible = 4 * (64 * 65 // 2)
    attention = next(t for t in profile.grouped() if t.kernel == "attention")
    assert attention.flops == layers * 4 * visible * heads * head_dim
    targets = len(random_pass(1013, 256, 4, 0.25).target)
    head = [t for t in profile.timings if t.label == "fwd logits = h@Wᵀ"]
    assert sum(t.flops for t in head) == 2 * targets * 1013 * 256
    weights, rows = 2 * 1013 * 256, 2 * targets * (256 + 1013)
    live = 4  # the count itself
    assert sum(t.nbytes for t in head) == pytest.approx(weights + rows + live)


def test_a_floor_is_the_higher_one(profile):
    flops, nbytes = profile.roof.flops[profile.activation], profile.roof.nbytes
    for t in profile.timings:
        assert t.floor == max(t.flops / flops, t.nbytes / nbytes)
        assert (t.bound == "compute") == (t.flops / flops > t.nbytes / nbytes)
    # Wide products are for the arithmetic units, what copies rows is for the memory.
    bounds = {t.label: t.bound for t in profile.timings}
    assert bounds["fwd down = s@Wᵀ + u@Bᵀ + x"] == "compute"
    assert bounds["fwd x = embedding(tokens)"] == "memory"


def test_a_group_is_under_the_roof_that_most_of_its_floor_comes_from(profile):
    one = Timing("a", "k", "l", 1, 1.0, 0.0, 0.0, 0.3, "compute")
    other = replace(one, floor=0.2, bound="memory")
    (group,) = replace(profile, timings=[one, other]).grouped()
    assert (group.bound, group.floor, group.gap) == ("compute", 0.5, 1.5)
    (group,) = replace(profile, timings=[one, other, other]).grouped()
    assert group.bound == "memory"


def test_rows_of_a_random_pass_cannot_see_one_another():
    work = random_pass(50, 100, 3, 1.0)
    assert work.live == 100 and len(work.target) == 100 - 3
    np.testing.assert_array_equal(work.target, work.tokens[work.target_row + 1])
    assert np.all(work.doc_start[work.target_row] == work.doc_start[work.target_row + 1])
    with pytest.raises(ConfigError, match="documents is 51"):
        random_pass(50, 100, 51, 1.0)


# A whole pass of the plainest family, adapters everywhere; layers that are alike once.
LLAMA = """
fwd x = embedding(tokens)
fwd cos, sin = rope_table(position)
fwd h = rms_norm(x)
fwd u of q, k, v = h@Aᵀ
fwd q, k, v = h@Wᵀ + u@Bᵀ
fwd q = rope(q)
fwd k = rope(k)
fwd att = attention(q, k, v)
fwd u of o = att@Aᵀ
fwd o = att@Wᵀ + u@Bᵀ + x
fwd u of gate, up = h@Aᵀ
fwd gate, up = h@Wᵀ + u@Bᵀ; s = silu(gate)∘up
fwd u of down = s@Aᵀ
fwd down = s@Wᵀ + u@Bᵀ + x
fwd x = gather_rows(x)
fwd logits = h@Wᵀ
fwd loss, dlogits = cross_entropy(logits)
bwd dh = dlogits@W
bwd dx = rms_norm_backward(dh, x)
bwd dx = gather_rows(dx)
bwd h = rms_norm(x)
bwd dB of down += dxᵀ@u
bwd v of down = dx@B
bwd ds = dx@W + v@A; dgate, dup = swiglu'(ds)
bwd dA of down += vᵀ@s
bwd dB of gate, up += dgateᵀ@u, dupᵀ@u
bwd v of gate, up = dgate@B, dup@B
bwd dA of gate, up += vᵀ@h
bwd dh = dgate@W + dup@W + v@A
bwd dx = rms_norm_backward(dh, x, dx)
bwd dB of o += dxᵀ@u
bwd v of o = dx@B
bwd dA of o += vᵀ@att
bwd datt = dx@W + v@A
bwd dq, dk, dv = attention_backward(datt, q, k, v, att)
bwd dq = rope(dq)
bwd dk = rope(dk)
bwd dB of q, k, v += dqᵀ@u, dkᵀ@u, dvᵀ@u
bwd v of q, k, v = dq@B, dk@B, dv@B
bwd dA of q, k, v += vᵀ@h
bwd dh = dq@W + dk@W + dv@W + v@A
"""


def labels(tmp_path: Path, kind: str, adapter: AdapterConfig, **options: object) -> list[str]:
    planned = plan_model(write_model(tmp_path / kind, kind), adapter, **options)
    return names([dispatch.call for dispatch in planned.accumulate.dispatches])


def test_dispatches_are_called_by_what_they_compute(tmp_path):
    assert list(dict.fromkeys(labels(tmp_path, "llama", ALL))) == LLAMA.strip().splitlines()


def test_names_tell_which_members_carry_an_adapter(tmp_path):
    adapter = AdapterConfig(rank=3, alpha=6.0, targets=("q_proj", "v_proj"))
    found = labels(tmp_path, "qwen2", adapter)
    for name in (
        "fwd u of q, v = h@Aᵀ",
        "fwd q, k, v = h@Wᵀ + u@Bᵀ + bias",
        "fwd o = att@Wᵀ + x",
        "fwd gate, up = h@Wᵀ; s = silu(gate)∘up",
        "bwd dB of q, v += dqᵀ@u, dvᵀ@u",
        "bwd v of q, v = dq@B, dv@B",
        "bwd ds = dx@W; dgate, dup = swiglu'(ds)",
    ):
        assert name in found


@pytest.mark.parametrize("kind", ["llama", "untied"])
def test_an_adapter_on_the_head_is_called_after_it(tmp_path, kind):
    adapter = AdapterConfig(rank=3, alpha=6.0, targets=("lm_head",))
    found = labels(tmp_path, kind, adapter)
    for name in ("fwd u of logits = h@Aᵀ", "fwd logits = h@Wᵀ + u@Bᵀ"):
        assert name in found
    for name in ("bwd dB of logits += dlogitsᵀ@u", "bwd dA of logits += vᵀ@h"):
        assert name in found


def test_names_with_dropout_norms_of_heads_and_layers_made_again(tmp_path):
    adapter = AdapterConfig(rank=2, alpha=4.0, dropout=0.1)
    found = labels(tmp_path, "qwen3", adapter, recompute="layer")
    for name in (
        "fwd q = head_norm(q)",
        "fwd s = dropout(s)",
        "bwd gate, up = h@Wᵀ + u@Bᵀ; s = silu(gate)∘up",
        "bwd ds = dx@W",
        "bwd ds of down = v@A",
        "bwd ds = dropout_backward(ds)",
        "bwd dgate, dup, s = swiglu_backward(ds, gate, up)",
        "bwd dk = head_norm_backward(dk, k)",
    ):
        assert name in found


def test_places_in_a_model(tmp_path):
    calls = [d.call for d in plan_model(write_model(tmp_path / "m")).accumulate.dispatches]
    found = list(dict.fromkeys(map(place, calls)))
    assert found == ["embedding", "layer 0", "layer 1", "head"]


def test_what_is_printed(profile):
    text = printed(profile)
    assert "lora_swiglu_backward" in text and "whole replay" in text and "widest gaps" in text
    assert f"{profile.roof.nbytes / 1e9:,.0f} GB/s" in text and "under a roof of" in text
    assert "untrusted" not in text
    assert "fwd down = s@Wᵀ + u@Bᵀ + x" in printed(profile, by="label")
    assert "bwd layer 3" in printed(profile, by="layer")
    every = printed(profile, every=True).splitlines()
    assert sum("fwd down = s@Wᵀ" in line for line in every) >= 4


def test_forced_figures_are_marked_everywhere(forced):
    lines = [x for x in printed(forced).splitlines() if x not in forced.measurement.notes]
    figures = [line for line in lines if any(character.isdigit() for character in line)]
    assert len(figures) > 20
    assert all("untrusted" in line for line in figures)
    content = as_json(forced)
    assert content["trusted"] is False
    assert all(dispatch["trusted"] is False for dispatch in content["dispatches"])
    events = as_trace(forced)["traceEvents"]
    assert "untrusted" in events[0]["args"]["name"]
    assert all(event["args"]["trusted"] is False for event in events if event["ph"] == "X")


def test_json(profile, tmp_path):
    report(profile, ProfileOptions(json=str(tmp_path / "p.json")), Console(quiet=True))
    content = json.loads((tmp_path / "p.json").read_text())
    assert content["schema"] == 1
    assert content.keys() == {
        "schema", "trusted", "machine", "tokens", "activation", "replay", "sum", "roof",
        "measurement", "dispatches",
    }  # fmt: skip
    assert len(content["dispatches"]) == len(profile.timings)
    assert content["roof"]["flops"].keys() == {"f32", "bf16"}
    assert content["sum"] == pytest.approx(sum(d["seconds"] for d in content["dispatches"]))
    assert content["measurement"]["seconds"].keys() == {"replay", "dispatches"}
    assert all(len(s) == ROUNDS for s in content["measurement"]["seconds"].values())
    assert content["machine"]["backend"] == "cpu"


def test_the_trace_is_one_that_perfetto_loads(profile, tmp_path):
    """The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU"""
    report(profile, ProfileOptions(trace=str(tmp_path / "t.json")), Console(quiet=True))
    content = json.loads((tmp_path / "t.json").read_text())
    metadata = [e for e in content["traceEvents"] if e["ph"] == "M"]
    assert [e["name"] for e in metadata] == ["process_name", "thread_name"]
    assert all(isinstance(e["args"]["name"], str) for e in metadata)
    complete = [e for e in content["traceEvents"] if e["ph"] == "X"]
    assert len(metadata) + len(complete) == len(content["traceEvents"])
    for event in complete:
        assert event.keys() == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        assert event["ts"] >= 0 and event["dur"] > 0
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
    # Layers lie end to end, and dispatches inside them; on one thread, viewers nest them by time.
    layers = [e for e in complete if e["cat"] == "layer"]
    dispatches = [e for e in complete if e["cat"] != "layer"]
    assert [e["name"] for e in dispatches] == [t.label for t in profile.timings]
    for events in (layers, dispatches):
        at = 0.0
        for event in events:
            assert event["ts"] == pytest.approx(at, abs=1e-6)
            at = event["ts"] + event["dur"]
        assert at == pytest.approx(1e6 * profile.total)
    edges = np.array([e["ts"] for e in layers[1:]])
    for event in dispatches:
        inside = (edges > event["ts"] + 1e-6) & (edges < event["ts"] + event["dur"] - 1e-6)
        assert not inside.any(), "a dispatch reaches over the end of its layer"


def test_a_picture(profile, tmp_path):
    for by in ("kernel", "label", "layer"):
        draw(profile, by, tmp_path / f"{by}.png")
        assert (tmp_path / f"{by}.png").read_bytes().startswith(b"\x89PNG")


def test_the_reference_is_not_timed():
    with pytest.raises(ConfigError, match="whose times say nothing"):
        profile_run(TrainConfig(model=MODEL, device="reference"))


def test_the_simulator_is_refused_by_name(monkeypatch):
    """Before anything runs, and with --force."""
    backend = metal_backend("fast")
    monkeypatch.setattr(krnl.profile, "open_backend", lambda device: backend)
    with pytest.raises(Refused, match="'KRNL Metal simulator' is a simulator"):
        profile_run(TrainConfig(model=MODEL, device="metal"), force=True)
    assert not backend.simulation.executed


class Clocked(ReferenceBackend):
    """A device that tells times, and nothing of what it could do; one kernel launches nothing."""

    name = "metal"
    limits = replace(ReferenceBackend.limits, activations=(F32,))

    def compile(self, plan, memory):
        program = super().compile(plan, memory)
        program.time = lambda: [0.0] + [1e-3] * (len(plan.dispatches) - 1)
        return program


def test_a_device_whose_roof_is_not_known(monkeypatch, tmp_path):
    monkeypatch.setattr(krnl.profile, "open_backend", lambda device: Clocked())
    model = write_model(tmp_path / "m")
    config = TrainConfig(model=str(model.folder), device="metal", tokens=16)
    profile = profile_run(config, gate=OpenGate())
    assert profile.roof is None and {t.floor for t in profile.timings} == {None}
    assert profile.total == pytest.approx(1e-3 * (len(profile.timings) - 1))
    text = printed(profile)
    assert "is not measured yet" in text
    assert "roof" not in text and "reached" not in text and "widest gaps" not in text
    content = as_json(profile)
    assert content["roof"] is None and content["dispatches"][0]["bound"] is None
    draw(profile, "label", tmp_path / "p.png")


@pytest.mark.parametrize(("bound", "limit"), [("compute", "2 GFLOP/s"), ("memory", "7 GB/s")])
def test_a_line_names_the_roof_in_the_type_of_the_pass(profile, bound, limit):
    roof = Roof({F32: 9e9, BF16: 2e9}, 7e9)
    timings = [replace(t, bound=bound) for t in profile.timings]
    text = printed(replace(profile, roof=roof, activation=BF16, timings=timings), by="layer")
    lines = [line for line in text.splitlines() if "bwd layer" in line and "%" in line]
    assert sum(f"  {limit}  " in line for line in lines) == 4


def test_the_command(tmp_path):
    """As a process; forced, as other things run beside the tests."""
    files = {name: tmp_path / f"p.{name}" for name in ("json", "trace", "png")}
    flags = [word for name, path in files.items() for word in (f"--{name}", path)]
    ended = krnl_process("profile", MODEL, "--tokens", 64, "--by", "layer", "--force", *flags)
    assert ended.returncode == 0, ended.stderr
    assert "untrusted: sum of dispatches" in ended.stdout and "bwd layer 0" in ended.stdout
    assert all(path.stat().st_size > 0 for path in files.values())


def test_the_sum_of_dispatches_is_a_replay(monkeypatch, tmp_path):
    """In quiet, which the gate finds out; where it is not quiet, this proves nothing."""
    monkeypatch.setattr(krnl.bench.gate, "LEARNING_WINDOWS", 1)
    config = replace(CONFIG, tokens=1024)
    for _ in range(TRIES):
        try:
            gate = open_gate(CpuBackend(), force=False, path=tmp_path / "references.json")
            profile = profile_run(config, gate=gate)
        except Refused as refusal:
            reason = str(refusal)
            print(reason)
        else:
            assert abs(profile.total / profile.replay - 1) < ALLOWED
            return
    pytest.skip(f"tried {TRIES} times: {reason}")
