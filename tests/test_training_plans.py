"""The plans of training programs: they keep what they need and nothing is forgotten, whatever is
computed again; which tables stay with the host, and how many bytes are moved."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from krnl.backends.cpu import CpuBackend
from krnl.backends.cuda import ON_PAPER
from krnl.data.packing import pack
from krnl.dtypes import BF16, F32, DType
from krnl.errors import PlanError
from krnl.formats.peft import AdapterConfig
from krnl.kernels.cpu.table import TABLE
from krnl.model import Model
from krnl.models.training_programs import Recomputed, TrainingPrograms
from krnl.plan.arena import check_gradients, plan
from krnl.plan.buffer import Kind
from krnl.plan.step import Call, Step
from memory_check import ALIGNMENT, check_lifetimes, check_memory, most_alive
from tiny import ALL, Run, make_documents, plan_model, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return write_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


ADAPTERS = {
    "all": ALL,
    "dropout": replace(ALL, dropout=0.1),
    "head": replace(ALL, targets=("lm_head",)),
}


@pytest.mark.parametrize("recompute", [0, 1, 2, "layer"])
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("activation", [F32, BF16], ids=str)
def test_training_programs_keep_what_they_need(
    model: Model, adapter: str, recompute: Recomputed, activation: DType
) -> None:
    options = {"activation": activation, "tokens": 200, "recompute": recompute}
    planned = plan_model(model, ADAPTERS[adapter], CpuBackend(), **options)
    plans = [planned.accumulate, planned.evaluate, planned.update]
    check_memory(plans, 2**62)
    for p in plans:
        check_lifetimes(p)
    # The same programs in blocks just large enough for the largest buffer.
    programs = planned.programs
    steps = [programs.accumulate(), programs.evaluate(), programs.update()]
    temps = [b for b in planned.accumulate.layout.places if b.file is None]
    largest = -(-max(b.nbytes for b in temps) // ALIGNMENT) * ALIGNMENT
    split = plan(steps, TABLE, largest)
    assert sum(b.kind is Kind.TEMP for b in split[0].layout.blocks) > 1
    check_memory(split, largest)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("kind", ["qwen3", "window"])
def test_inputs_lie_side_by_side(kind: str, adapter: str, tmp_path: Path) -> None:
    """Every part is read by a program, begins where a buffer of its own might, and shares nothing
    with the others; together they take no more than they would apart."""
    model = write_model(tmp_path, kind)
    planned = plan_model(model, ADAPTERS[adapter], tokens=100)
    inputs = vars(planned.programs.inputs).values()
    buffers = {b for x in inputs for b in (x.values() if isinstance(x, dict) else [x]) if b}
    whole = planned.programs.inputs.whole
    parts = sorted((b for b in buffers - {whole} if b.root is whole), key=lambda b: b.start)
    plans = [planned.accumulate, planned.evaluate, planned.update]
    read = [b for p in plans for d in p.dispatches for b in d.call.reads() if b.root is whole]
    for part in parts:
        assert part.start * part.dtype.size % ALIGNMENT == 0
        assert any(part.start <= b.start < part.start + part.size for b in read), part
    assert all(a.start + a.size <= b.start for a, b in pairwise(parts))
    apart = sum(-(-b.nbytes // ALIGNMENT) * ALIGNMENT for b in buffers - {whole})
    assert planned.accumulate.layout.reserved(Kind.INPUT) <= apart


@pytest.mark.parametrize("too_many", ["tokens", "target_row"])
def test_a_pass_that_is_larger_than_planned_is_refused(too_many: str, model: Model) -> None:
    """Before anything is written or run: kernels would go beyond their memory."""
    run = Run(model, tokens=64)
    (work,) = pack(make_documents([40, 25]), 65)
    if too_many == "target_row":
        (work,) = pack(make_documents([40, 24]), 64)
        rows = np.zeros(65, np.int32)
        work = replace(work, target_row=rows, target=rows)
    with pytest.raises(PlanError, match=rf"^A part of 65 .* does not lie inside {too_many}\["):
        run.session.inputs_of(work, 1)


def test_the_arena_is_close_to_what_is_alive(model: Model) -> None:
    planned = plan_model(model, tokens=200)
    alive = max(most_alive(p) for p in (planned.accumulate, planned.evaluate, planned.update))
    assert alive <= planned.accumulate.layout.reserved(Kind.TEMP) <= 1.1 * alive


def test_recompute_saves_less(model: Model) -> None:
    layers = model.config.layers
    plans = [plan_model(model, recompute=r, tokens=200) for r in (*range(layers + 1), "layer")]
    saved = [p.accumulate.saved for p in plans]
    reserved = [p.accumulate.layout.reserved(Kind.TEMP) for p in plans]
    flops = [p.accumulate.flops for p in plans]
    assert saved == sorted(set(saved), reverse=True)
    assert reserved == sorted(reserved, reverse=True) and reserved[-1] < reserved[-2] < reserved[0]
    assert flops == sorted(set(flops))
    # Exactly gate and up of a layer each time.
    gate_and_up = 2 * 200 * model.config.intermediate_size * F32.size
    assert [a - b for a, b in pairwise(saved[:-1])] == layers * [gate_and_up]
    more = plan_model(model, recompute=layers + 1, tokens=200).accumulate
    assert (more.saved, more.flops) == (saved[layers], flops[layers])


def accumulate_without(programs: TrainingPrograms, index: int) -> tuple[Step, Call]:
    emitted = programs.accumulate()
    return emitted, emitted.calls.pop(index)


def test_every_forgotten_call_is_noticed(model: Model) -> None:
    """Each call left out in turn: its temps are read unwritten, or its gradients are missing. What
    remains wrote in place: a temp that something else had written, or the loss."""
    planned = plan_model(model, recompute=2)
    programs, grad = planned.programs, planned.decoder.trainable.grad
    unnoticed, gradients = [], 0
    for index in range(len(programs.accumulate().calls)):
        emitted, left_out = accumulate_without(programs, index)
        try:
            (p,) = plan([emitted], TABLE)
            check_gradients(p, grad)
        except PlanError as error:
            if "nothing writes element" in str(error):
                gradients += 1
                assert left_out.op.name in ("lora_a_grad", "lora_b_grad")
            continue
        unnoticed.append(left_out.op.name)
    # Four groups in each of two layers, an A and a B gradient for each.
    assert gradients == 2 * 2 * 4
    assert set(unnoticed) <= {"cross_entropy"}


@pytest.mark.parametrize("adapter", [ALL, replace(ALL, targets=("lm_head",))], ids=["all", "head"])
@pytest.mark.parametrize(
    ("kind", "found"), [("untied", ["model.embed_tokens.weight"]), ("llama", [])]
)
def test_the_table_of_a_head_that_is_not_tied(
    kind: str, found: list[str], adapter: AdapterConfig, tmp_path: Path
) -> None:
    """On a device with memory of its own; on others there is none."""
    model = write_model(tmp_path, kind)
    for device, expected in ((ON_PAPER, found), (CpuBackend(), [])):
        planned = plan_model(model, adapter, device)
        check_memory([planned.accumulate, planned.evaluate, planned.update], 2**62)
        layout = planned.accumulate.layout
        assert [b.name for b, p in layout.places.items() if layout.blocks[p.block].host] == expected


def test_bytes_are_those_of_every_operand_but_where_an_op_says_otherwise(tmp_path):
    """At capacity; what is updated is read and written."""
    n, c, v, keys = 16, 24, 61, 20
    adapter = replace(ALL, targets=("q_proj", "v_proj", "down_proj"))
    planned = plan_model(write_model(tmp_path / "m"), adapter, tokens=n)
    less: dict[str, set[int]] = {}
    for program in (planned.accumulate, planned.update, planned.evaluate):
        for call in (dispatch.call for dispatch in program.dispatches):
            whole = sum(b.nbytes for b in [*call.reads(), *call.writes()])
            if whole != call.nbytes:
                less.setdefault(call.op.name, set()).add(whole - call.nbytes)
    assert less == {
        "embedding": {4 * (v - n) * c},
        "lora_b_grad": {4 * n * keys},  # k has no adapter
        "lora_up_backward": {4 * n * keys},
        "zero": {4, 4 * planned.decoder.trainable.size},
    }
