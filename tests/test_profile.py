"""`krnl profile`: what it measures and what it counts."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

import krnl.bench.gate
import krnl.profile
from krnl.backends.base import Roof
from krnl.backends.cpu import CpuBackend
from krnl.backends.reference import ReferenceBackend
from krnl.bench.control import open_gate
from krnl.bench.gate import Measurement
from krnl.data.packing import random_pass
from krnl.dtypes import F32
from krnl.errors import ConfigError, PlanError, Refused
from krnl.profile import ROUNDS, Profile, Timing, profile_run
from krnl.profile_report import as_json, picture
from krnl.training.budget import BudgetedPlan, plan_within
from krnl.training.config import TrainConfig
from metalsim.install import metal_backend
from open_gate import OpenGate
from profiles import CONFIG, MODEL, printed, profiled
from tiny import write_model

TRIES = 3  # to find the machine quiet
ALLOWED = 0.1  # between the sum of dispatches and a whole replay


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profiled()


def test_every_dispatch_is_timed_and_grouped(profile):
    assert all(t.seconds > 0 for t in profile.timings)
    for by in ("kernel", "label", "layer"):
        groups = profile.grouped(by)
        assert sum(t.count for t in groups) == len(profile.timings)
        assert sum(t.seconds for t in groups) == pytest.approx(profile.total)
        assert sum(t.floor for t in groups) == pytest.approx(sum(t.floor for t in profile.timings))
    # The machine may be busy: only nonsense is caught, which is there every time.
    tries = chain([profile], (profiled.__wrapped__() for _ in range(TRIES)))
    assert any(0.2 < each.total / each.replay < 5 for each in tries)


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
    assert profile.targets == targets and profile.documents == 4
    weights, rows = 2 * 1013 * 256, 2 * targets * (256 + 1013)
    live = 4  # the count itself
    assert sum(t.nbytes for t in head) == weights + rows + live


def test_of_tables_only_rows_that_are_taken_move(profile):
    """Not the whole table of the embedding, nor all rows where the labelled ones are gathered."""
    work, row, live = random_pass(1013, 256, 4, 0.25), 2 * 256, 4
    nbytes = {t.label: t.nbytes for t in profile.timings}
    different, targets = len(set(work.tokens.tolist())), len(work.target)
    assert nbytes["fwd x = embedding(tokens)"] == row * (different + 256) + 4 * 256 + live
    assert nbytes["fwd x = gather_rows(x)"] == 2 * row * targets + 4 * targets + live
    assert nbytes["bwd dx = gather_rows(dx)"] == row * (targets + 256) + 4 * 256 + live


def test_a_window_hides_keys(monkeypatch, tmp_path):
    monkeypatch.setattr(krnl.profile, "ROUNDS", 1)
    model = write_model(tmp_path / "m", "window")  # 5 keys
    config = TrainConfig(model=str(model.folder), tokens=32, precision="fp32")
    for documents, length in ((1, 32), (4, 8)):
        profile = profile_run(config, documents, gate=OpenGate())
        visible = documents * sum(min(i + 1, 5) for i in range(length))
        flops = {t.kernel: t.flops for t in profile.timings}
        assert flops["attention"] == 4 * visible * 4 * 10
        assert flops["attention_backward"] == 10 * visible * 4 * 10


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


def test_a_profile_within_a_limit_is_that_of_the_run(monkeypatch):
    """What is computed again is timed, and said."""
    monkeypatch.setattr(krnl.profile, "ROUNDS", 1)
    monkeypatch.setattr("krnl.training.memory._resident", lambda: 2**26)
    monkeypatch.setattr("krnl.training.memory.DRAWING", 0)
    monkeypatch.setattr("krnl.profile.plan_within", watched := Watched())
    profile_run(CONFIG, gate=OpenGate())
    kept = watched.planned.use.total
    assert watched.planned.recomputed == ""
    profile = profile_run(replace(CONFIG, memory_limit=(kept - 1) / 2**30), gate=OpenGate())
    again = [t for t in profile.timings if t.label.startswith("bwd gate, up = ")]
    assert [t.layer for t in again] == ["bwd layer 0"]
    said = "gate and up of 1 of 4 trained decoder layers are computed again to stay within"
    assert printed(profile).splitlines()[1].startswith(said)
    assert as_json(profile)["recomputed"].startswith(said)
    with pytest.raises(PlanError, match="more than --memory-limit"):
        profile_run(replace(CONFIG, memory_limit=0.001), gate=OpenGate())


class Watched:
    """Plans, and keeps the last plan."""

    planned: BudgetedPlan

    def __call__(self, *given: object) -> BudgetedPlan:
        self.planned = plan_within(*given)
        return self.planned


def test_rows_of_a_random_pass_cannot_see_one_another():
    work = random_pass(50, 100, 3, 1.0)
    assert work.live == 100 and len(work.target) == 100 - 3
    np.testing.assert_array_equal(work.target, work.tokens[work.target_row + 1])
    assert np.all(work.doc_start[work.target_row] == work.doc_start[work.target_row + 1])
    with pytest.raises(ConfigError, match="documents is 51"):
        random_pass(50, 100, 51, 1.0)


@pytest.mark.parametrize("labelled", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_share_is_one(labelled):
    with pytest.raises(ConfigError, match=r"labelled is .* from 0 to 1"):
        random_pass(50, 100, 3, labelled)


def test_a_pass_without_targets(monkeypatch, tmp_path):
    monkeypatch.setattr(krnl.profile, "ROUNDS", 1)
    model = write_model(tmp_path / "m")
    config = TrainConfig(model=str(model.folder), tokens=16)
    profile = profile_run(config, labelled=0.0, gate=OpenGate())
    assert profile.targets == 0 and "with 0 targets" in printed(profile)
    assert {t.flops for t in profile.timings if t.label == "fwd logits = h@Wᵀ"} == {0}


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


def test_a_device_of_unknown_limits(monkeypatch, tmp_path):
    monkeypatch.setattr(krnl.profile, "open_backend", lambda device: Clocked())
    model = write_model(tmp_path / "m")
    config = TrainConfig(model=str(model.folder), device="metal", tokens=16)
    profile = profile_run(config, gate=OpenGate())
    assert profile.roof is None and {t.floor for t in profile.timings} == {None}
    assert profile.total == pytest.approx(1e-3 * (len(profile.timings) - 1))
    text = "".join(printed(profile).splitlines(keepends=True)[:-3])
    assert "is not measured yet" in text
    assert "roof" not in text and "reached" not in text and "widest gaps" not in text
    content = as_json(profile)
    assert content["roof"] is None and content["dispatches"][0]["bound"] is None
    assert picture(profile, "label").axes[0].get_legend() is None


# What is measured


class Roofed(Clocked):
    """A device that tells of its roof too: something else each time. Writes down what it does."""

    def __init__(self, roofs: list[Roof]):
        super().__init__()
        self.roofs, self.did = iter(roofs), []

    def measure_roof(self) -> Roof:
        self.did.append("roof")
        return next(self.roofs)

    def compile(self, plan, memory):
        program = super().compile(plan, memory)
        run, time = program.run, program.time

        def noted(name: str, act: Callable[[], object]) -> Callable[[], object]:
            return lambda: (self.did.append(name), act())[1]

        program.run, program.time = noted("replay", run), noted("dispatches", time)
        return program


ROOFS = [Roof({F32: 1e9 * flops}, 1e9 * nbytes) for flops, nbytes in zip(
    (5, 9, 1, 7, 3, 6, 8), (40, 20, 10, 30, 70, 60, 50), strict=True
)]  # fmt: skip


def test_any_device_that_tells_its_roof_takes_part(monkeypatch, tmp_path):
    """In the same rounds as what is compared with it; medians of all."""
    backend = Roofed(ROOFS)
    monkeypatch.setattr(krnl.profile, "open_backend", lambda device: backend)
    model = write_model(tmp_path / "m")
    config = TrainConfig(model=str(model.folder), device="metal", tokens=16)
    profile = profile_run(config, gate=OpenGate())
    # Each turn on a pass begins with a replay that is not counted.
    a_round = ["replay", "replay", "replay", "dispatches", "roof"]
    assert backend.did == ROUNDS * a_round
    assert profile.roof == Roof({F32: 6e9}, 40e9)
    assert profile.replay == profile.measurement.median("replay")
    assert "6 GFLOP/s in f32, 40 GB/s" in printed(profile)


class ShutGate(OpenGate):
    """Finds the machine busy before anything is run."""

    def measure(self, contestants: Mapping[str, Callable[[], float]], rounds: int) -> Measurement:
        assert contestants.keys() == {"replay", "dispatches", "roof"}
        raise Refused("It is busy.")


def test_nothing_is_run_outside_of_the_gate(monkeypatch, tmp_path):
    backend = Roofed(ROOFS)
    monkeypatch.setattr(krnl.profile, "open_backend", lambda device: backend)
    model = write_model(tmp_path / "m")
    with pytest.raises(Refused, match="It is busy"):
        profile_run(TrainConfig(model=str(model.folder), tokens=16), gate=ShutGate())
    assert backend.did == []


def test_the_sum_of_dispatches_is_a_replay(monkeypatch, tmp_path):
    """In quiet, which the gate finds out; where it refuses, this proves nothing."""
    monkeypatch.setattr(krnl.bench.gate, "LEARNING_WINDOWS", 1)
    config = replace(CONFIG, tokens=1024)
    for _ in range(TRIES):
        try:
            gate = open_gate(CpuBackend(), force=False, path=tmp_path / "references.json")
            profile = profile_run(config, gate=gate)
        except Refused as refusal:
            reason = str(refusal)
        else:
            assert abs(profile.total / profile.replay - 1) < ALLOWED
            return
    pytest.skip(f"tried {TRIES} times: {reason}")
