"""What is computed again so that a run keeps within its memory: as little as that asks for."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import krnl.model
import krnl.training.loop
import krnl.training.memory
import krnl.training.prepare
from krnl.backends.base import Backend, Paper
from krnl.backends.cpu import CpuBackend
from krnl.backends.cuda import ON_PAPER as CUDA
from krnl.backends.metal import ON_PAPER as METAL
from krnl.dtypes import BF16, F32
from krnl.errors import PlanError
from krnl.formats.peft import AdapterConfig
from krnl.model import imagined_weights
from krnl.models.config import linear_paths, parse
from krnl.models.training_programs import Recomputed
from krnl.planning import plan_run, print_plan
from krnl.training.budget import Budget, BudgetedPlan, memory_budget, plan_within
from krnl.training.config import Recompute, TrainConfig
from krnl.training.loop import train
from krnl.training.memory import gib, memory_use
from krnl.training.session import TrainingPlan, plan_training
from runs import adapter_bytes, timeless, write_chat_model, write_data
from runs import settings as small_settings
from tiny import ALL, MODELS, SIZES

LAYERS, WIDTH, TOKENS = 5, 144, 100
SHAPE = parse(
    {**SIZES, **MODELS["llama"], "num_hidden_layers": LAYERS, "intermediate_size": WIDTH}, "deep"
)
ADAPTERS = {
    "all layers": ALL,
    "the upper two": replace(ALL, targets=r".*layers\.[34]\..*q_proj"),
    "the middle one": replace(ALL, targets=r".*layers\.2\..*down_proj"),
    "head": replace(ALL, targets=("lm_head",)),
}
TRAINED = {"all layers": 5, "the upper two": 2, "the middle one": 3, "head": 0}
# The process plays no part in either. On one, what is kept is cut up into blocks.
DEVICES = {
    "cuda": CUDA,
    "metal": replace(METAL, limits=replace(METAL.limits, largest_block=600_000, own_memory=True)),
}
GATE_AND_UP = 2 * TOKENS * WIDTH * F32.size


def planning(adapter: AdapterConfig, device: Backend | Paper) -> tuple[Any, ...]:
    weights = imagined_weights(SHAPE, BF16, device.limits.mapped_alignment)
    paths = adapter.select(linear_paths(SHAPE))
    return SHAPE, weights, adapter, paths, device, F32, TOKENS


@cache
def totals(adapter: str, device: str) -> dict[Recomputed, int]:
    """Bytes of every choice, each planned on its own."""
    given, backend = planning(ADAPTERS[adapter], DEVICES[device]), DEVICES[device]
    choices: Sequence[Recomputed] = (*range(TRAINED[adapter] + 1), "layer")
    return {c: memory_use(plan_training(*given, c), backend).total for c in choices}


def within(
    nbytes: int, adapter: str = "all layers", device: str = "cuda", recompute: Recompute = "auto"
) -> BudgetedPlan:
    given = planning(ADAPTERS[adapter], DEVICES[device])
    return plan_within(nbytes / 2**30, recompute, *given)


def calls(planned: TrainingPlan) -> list[tuple[str, str]]:
    plans = (planned.accumulate, planned.evaluate, planned.update)
    return [(d.call.label, d.row.name) for p in plans for d in p.dispatches]


# The choice.


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(list(ADAPTERS)), st.sampled_from(list(DEVICES)), st.data())
def test_the_fewest_layers_that_fit_are_computed_again(
    adapter: str, device: str, data: st.DataObject
) -> None:
    all_of_them = totals(adapter, device)
    kept, least = all_of_them[0], min(all_of_them.values())
    edges = [total + by for total in all_of_them.values() for by in (-1, 0)]
    limit = data.draw(
        st.sampled_from(edges) | st.integers(least - 1000, kept + 1000), label="limit"
    )
    chosen = within(limit, adapter, device)
    fitting = [c for c in range(TRAINED[adapter] + 1) if all_of_them[c] <= limit]
    expected = fitting[0] if fitting else "layer"
    assert chosen.training.programs.recomputed == expected
    # As if it had been asked for from the beginning.
    alone = plan_training(*planning(ADAPTERS[adapter], DEVICES[device]), expected)
    assert calls(chosen.training) == calls(alone)
    assert chosen.use == memory_use(alone, DEVICES[device])
    assert chosen.use.total == all_of_them[expected]
    assert (chosen.shortage() == "") == (chosen.use.total <= limit)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_each_layer_more_takes_less_memory(adapter: str, device: str) -> None:
    """Gate and up of each, until what is at work in a layer is more than what is kept of it."""
    *some, all_of_them, layer = totals(adapter, device).values()
    saved = [a - b for a, b in pairwise(some)]
    assert all(GATE_AND_UP - 2**13 <= s <= GATE_AND_UP + 2**13 for s in saved)
    assert layer <= all_of_them
    if some:
        assert layer < all_of_them <= some[-1]


@pytest.mark.parametrize("device", DEVICES)
def test_more_memory_is_never_answered_with_more_work(device: str) -> None:
    every = totals("all layers", device)
    limits = sorted({total + by for total in every.values() for by in (-1, 0, 9999)})
    flops = [within(limit, device=device).training.accumulate.flops for limit in limits]
    assert flops == sorted(flops, reverse=True)
    # The last layer adds nothing: it is at work when all others are kept, as the first is then.
    assert len(set(flops)) == LAYERS + 1


def test_with_room_nothing_is_computed_again() -> None:
    roomy = within(totals("all layers", "cuda")[0])
    kept = within(2**62, recompute="none")
    assert calls(roomy.training) == calls(kept.training)
    assert roomy.use == kept.use and roomy.recomputed == kept.recomputed == ""


def test_only_the_lowest_trained_layers_are() -> None:
    every = totals("the upper two", "cuda")
    chosen = within(every[1], "the upper two")
    again = {label for label, _ in calls(chosen.training) if "backward" in label}
    assert {label for label in again if label.endswith("/lora_swiglu")} == {
        "backward/layer3/mlp/lora_swiglu"
    }


def test_few_plans_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of layers is computed, not searched for."""
    tried: list[Recomputed] = []
    right = krnl.training.budget.plan_programs

    def counted(programs: Any, backend: Any) -> TrainingPlan:
        tried.append(programs.recomputed)
        return right(programs, backend)

    monkeypatch.setattr(krnl.training.budget, "plan_programs", counted)
    every = totals("all layers", "cuda")
    for layers in range(1, LAYERS - 1):
        tried.clear()
        assert within(every[layers]).training.programs.recomputed == layers
        assert len(tried) <= 3
    tried.clear()
    within(every[0])
    assert tried == []


@pytest.mark.parametrize(
    ("recompute", "chosen"), [("none", 0), ("mlp", LAYERS), ("layer", "layer")]
)
@pytest.mark.parametrize("nbytes", [1, 2**62])
def test_what_is_asked_for_is_done_whatever_the_memory(
    recompute: Recompute, chosen: Recomputed, nbytes: int
) -> None:
    assert within(nbytes, recompute=recompute).training.programs.recomputed == chosen


# The limit, and the words.


def test_the_smaller_limit_counts() -> None:
    device = replace(CUDA, limits=replace(CUDA.limits, memory=3 * 2**30))
    for asked in (None, 3.0, 4.0, 1e300, math.nextafter(3.0, 4.0)):
        assert memory_budget(device, asked) == Budget(3 * 2**30, "cuda may use on this machine")
    assert memory_budget(device, 2.5) == Budget(5 * 2**29, "--memory-limit")


@pytest.mark.parametrize("above", [True, False])
@pytest.mark.parametrize("recompute", ["auto", "none", "mlp", "layer"])
def test_a_shortage_says_how_much_and_what_helps(recompute: Recompute, above: bool) -> None:
    """Fewer tokens help as long as what is no activation keeps within the limit."""
    use = within(2**62, recompute=recompute).use
    others = use.total - use.saved - use.temporaries
    limit = others if above else others - 1
    planned = within(limit, recompute=recompute)
    said = planned.shortage()
    over = gib(planned.use.total - limit)
    needed = f"This run needs {gib(planned.use.total)}, which is {over} more than --memory-limit"
    assert said.startswith(needed)
    with pytest.raises(PlanError, match=f"^{re.escape(said)}$"):
        planned.check()
    assert "--recompute" not in said  # auto would need more, too
    assert ("lower --tokens" in said) == above
    assert ("lower --rows" in planned.shortage(lower="--rows")) == above
    alone = f"Weights, adapter and the rest alone take {gib(others)}, whatever the activations: "
    assert (alone + "raise the limit, or choose a smaller model or rank." in said) != above
    assert "to stay within" not in planned.recomputed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recompute", ["auto", "none", "mlp", "layer"])
def test_auto_is_advised_where_it_fits(recompute: Recompute, device: str) -> None:
    """Where it does not, there is nothing to be had from it."""
    *_, mlp, layer = totals("all layers", device).values()
    for limit in (layer, layer - 1, mlp - 1):
        said = within(limit, device=device, recompute=recompute).shortage()
        auto_fits = not within(limit, device=device).shortage()
        helps = bool(said) and auto_fits
        assert helps == (limit >= layer and recompute in ("none", "mlp"))
        assert said.endswith("lower --tokens, or leave --recompute at auto.") == helps
        assert ("--recompute" in said) == helps


def test_a_limit_that_nobody_set_cannot_be_raised() -> None:
    planned = within(1000)
    device = replace(planned, budget=Budget(1000, "cuda may use on this machine"))
    assert device.shortage().endswith("activations: choose a smaller model or rank.")


def test_what_is_computed_again_is_said() -> None:
    every = totals("the upper two", "cuda")
    limit = gib(every[1])
    said = f"gate and up of 1 of 2 trained decoder layers are computed again to stay within {limit}"
    assert within(every[1], "the upper two").recomputed == said
    limit = gib(every["layer"])
    said = "everything inside 2 of 2 trained decoder layers is computed again to stay within "
    assert within(every["layer"], "the upper two").recomputed == said + limit
    mlp = within(2**62, "the upper two", recompute="mlp")
    assert mlp.recomputed == "gate and up of 2 of 2 trained decoder layers are computed again"
    for recompute in ("mlp", "layer"):
        assert within(2**62, "head", recompute=recompute).recomputed == ""
    said = "gate and up of 1 of 1 trained decoder layer are computed again"
    uppermost = replace(ALL, targets=r".*layers\.4\..*q_proj")
    assert plan_within(None, "mlp", *planning(uppermost, CUDA)).recomputed == said


# Whole runs.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": LAYERS, "intermediate_size": WIDTH}
    return write_chat_model(tmp_path_factory.mktemp("model"), **sizes)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"), 12, 4)


@pytest.fixture
def resident(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process takes the same each time, and the picture nothing, so that single layers
    count."""
    monkeypatch.setattr(krnl.training.memory, "_resident", lambda: 2**26)
    monkeypatch.setattr(krnl.training.memory, "DRAWING", 0)


def bytes_of(config: TrainConfig, recompute: Recompute) -> int:
    return plan_run(replace(config, recompute=recompute), CpuBackend(), F32).plan.use.total


def test_a_run_within_a_limit_is_the_same_run(tmp_path, model, data, resident):
    """Bit for bit, and it says what it does."""
    config = partial(small_settings, model, data, tokens=TOKENS, dropout=0.2, recompute="auto")
    kept, layer = (bytes_of(config(tmp_path), r) for r in ("none", "layer"))
    said = {}
    for name, nbytes in (
        ("kept", kept), ("one", kept - 1), ("three", kept - 5 * GATE_AND_UP // 2), ("layer", layer)
    ):  # fmt: skip
        console = Console(width=200, record=True, quiet=False)
        with console.capture() as capture:
            train(config(tmp_path / name, memory_limit=nbytes / 2**30), console)
        said[name] = re.findall(r"(.* computed again .*)\n", capture.get())
        assert timeless(tmp_path / name) == timeless(tmp_path / "kept")
        assert adapter_bytes(tmp_path / name) == adapter_bytes(tmp_path / "kept")
        (most,) = re.findall(r"at most (.*) MiB of memory", capture.get())
        assert float(most) <= nbytes / 2**20 + 0.05
    layers_of = f"of {LAYERS} trained decoder layers are"
    again = f"gate and up of {{}} {layers_of} computed again to stay within .* MiB"
    assert said["kept"] == []
    for name, layers in (("one", 1), ("three", 3)):
        (line,) = said[name]
        assert re.fullmatch(again.format(layers), line)
    everything = f"everything inside {LAYERS} of {LAYERS} trained decoder layers is computed"
    assert said["layer"][0].startswith(everything)
    with pytest.raises(PlanError, match=r"more than --memory-limit"):
        train(config(tmp_path / "less", memory_limit=(layer - 1) / 2**30), Console(quiet=True))
    assert not (tmp_path / "less").exists()


def test_a_run_may_go_on_with_less_memory(tmp_path, model, data, resident):
    config = partial(small_settings, model, data, tokens=TOKENS)
    kept = bytes_of(config(tmp_path), "none")
    quiet = Console(quiet=True)
    train(config(tmp_path / "whole", epochs=2, save_every=1), quiet)
    train(config(tmp_path / "parts", epochs=2, save_every=1), quiet)
    last = max((tmp_path / "parts/checkpoints").iterdir())
    for path in last.iterdir():
        path.unlink()
    last.rmdir()
    less = {"memory_limit": (kept - 1) / 2**30, "resume": True}
    train(config(tmp_path / "parts", epochs=2, save_every=1, **less), quiet)
    assert timeless(tmp_path / "parts") == timeless(tmp_path / "whole")
    assert adapter_bytes(tmp_path / "parts") == adapter_bytes(tmp_path / "whole")


def test_a_plan_says_it_too(tmp_path, model, data, resident):
    def said(**given: Any) -> str:
        config = small_settings(model, data, tmp_path, tokens=TOKENS, **given)
        console = Console(width=200)
        with console.capture() as capture:
            print_plan(plan_run(config, CpuBackend(), F32), console, dispatches=False)
        return capture.get()

    kept = bytes_of(small_settings(model, data, tmp_path, tokens=TOKENS), "none")
    assert "computed again" not in said()
    text = said(memory_limit=(kept - 1) / 2**30)
    assert (
        f"gate and up of 1 of {LAYERS} trained decoder layers are computed again to stay within"
        in text
    )
    assert "This run needs" not in text
    text = said(memory_limit=0.001)
    assert (
        f"everything inside {LAYERS} of {LAYERS} trained decoder layers is computed again\n" in text
    )
    assert "more than --memory-limit (1.0 MiB)" in text


@pytest.mark.parametrize("further", [False, True])
def test_a_plan_holds_what_the_run_holds_when_memory_is_measured(
    tmp_path, model, data, monkeypatch, further
):
    """Rows and adapter. The process counts as it is then, so a limit means the same to both."""
    config = small_settings(model, data, tmp_path / "new", tokens=TOKENS)
    if further:
        train(config, Console(quiet=True))
        config = replace(config, init_adapter=config.out, out=str(tmp_path / "further"))
    events: list[str] = []

    def watched(module: Any, name: str, event: str) -> None:
        right = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given: events.append(event) or right(*given))

    watched(krnl.training.prepare, "build", "rows")
    watched(krnl.training.prepare, "initial_modules", "adapter")
    watched(krnl.model, "read_adapter", "adapter")
    watched(krnl.training.memory, "_resident", "measured")
    seen = []
    for act in (
        lambda: plan_run(config, CpuBackend(), F32),
        lambda: train(config, Console(quiet=True)),
    ):
        events.clear()
        act()
        seen.append(events[: events.index("measured") + 1])
    assert seen[0] == seen[1] == ["rows", "rows", "adapter", "measured"]


def test_where_the_picture_takes_most_no_activation_counts(tmp_path, model, data, monkeypatch):
    """The plan has what drawing takes beyond training, and a shortage is not put on --tokens."""
    config = small_settings(model, data, tmp_path)
    most = 1 << 30
    monkeypatch.setattr(krnl.training.memory, "DRAWING", most)
    use = plan_run(config, CpuBackend(), F32).plan.use
    assert use.drawing > 0 and use.total - use.process == most
    planned = plan_run(replace(config, memory_limit=0.5), CpuBackend(), F32).plan
    assert "raise the limit" in planned.shortage() and "--tokens" not in planned.shortage()
