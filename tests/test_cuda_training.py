"""Training and generation on an NVIDIA GPU: models against the float64 reference, runs against the
CPU's, a graph against its dispatches one by one."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuda_device import cuda, missing
from generation import answers, make, sequences
from krnl.backends.cpu import CpuBackend
from krnl.dtypes import BF16, F16, F32, DType
from krnl.model import Model
from krnl.training.memory import memory_use
from model_checks import (
    ULPS,
    assert_same,
    check_against_the_reference,
    check_documents_do_not_see_one_another,
    check_no_token_sees_later_ones,
    scaled_run,
)
from runs import (
    ALLOWED,
    check_a_run_follows_the_cpu,
    check_the_storyteller_follows_the_cpu,
    follow,
    run,
    settings,
    write_chat_model,
    write_data,
)
from test_resume import EVERYTHING, Crash, crash_in_pass, same_run
from tiny import (
    DROPOUT,
    LENGTHS,
    MODELS,
    RECOMPUTE,
    REFERENCE,
    Run,
    Write,
    make_documents,
    one_pass,
    write_model,
)

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a GPU")

ACTIVATIONS = (BF16, F16, F32)
# Sizes that tensor cores take; those of the tiny models are odd throughout.
EVEN = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 320,
}  # fmt: skip
SIZES: dict[str, dict[str, int]] = {"odd": {}, "even": EVEN}


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    @cache
    def write(kind: str = "llama", sizes: str = "odd", dtype: DType = BF16) -> Model:
        return write_model(tmp_path_factory.mktemp(kind), kind, dtype, **SIZES[sizes])

    return write


def cuda_run(model: Model, activation: DType, **options: Any) -> Run:
    return scaled_run(cuda(), model, activation, **options)


# How often what storing costs is granted. In float32 products are summed in that type as well,
# where 256 values walk √256 times as far as one rounding.
ROUNDINGS = {F32: 256**0.5, F16: 2.0, BF16: 2.0}


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", MODELS)
def test_cuda_agrees_with_the_reference(
    kind: str, sizes: str, activation: DType, write: Write
) -> None:
    adapter = replace(DROPOUT, rank=4 if sizes == "odd" else 8)
    model, roundings = write(kind, sizes), ROUNDINGS[activation]
    used = check_against_the_reference(cuda(), model, adapter, activation, roundings)
    print(f"{kind} {sizes} {activation}: at most {used:.0%} of the allowance")


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_a_graph_is_its_dispatches_one_by_one(sizes: str, activation: DType, write: Write) -> None:
    """Bit for bit, and the times are those of every dispatch."""
    run = cuda_run(write("qwen3", sizes), activation, adapter=DROPOUT)
    (work,) = one_pass(make_documents(LENGTHS))
    replayed = run.sums([work], update=0)
    for _ in range(3):
        assert_same(run.sums([work], update=0), replayed)
    run.memory.write(run.trainable.grad, np.zeros(run.trainable.size))
    seconds = run.session.time_accumulate(run.session.inputs_of(work, 0))
    loss = float(run.memory.read(run.planned.programs.loss)[0])
    assert_same((loss, run.memory.read(run.trainable.grad)), replayed)
    assert len(seconds) == len(run.planned.accumulate.dispatches)
    assert all(0 <= each < 0.1 for each in seconds) and sum(seconds) > 0


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_recompute_changes_no_bit(sizes: str, activation: DType, write: Write) -> None:
    model, work = write("qwen3", sizes), one_pass(make_documents(LENGTHS))
    results = [
        cuda_run(model, activation, adapter=DROPOUT, recompute=recompute).sums(work)
        for recompute in RECOMPUTE
    ]
    for result in results[1:]:
        assert_same(result, results[0])


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_capacity_and_what_memory_held_play_no_part(
    sizes: str, activation: DType, write: Write
) -> None:
    """45 live tokens in 45 and in 300, the rest NaN and indices that point nowhere."""
    work, results = one_pass(make_documents(LENGTHS)), []
    for tokens in (sum(LENGTHS), 300):
        run = cuda_run(write("qwen3", sizes), activation, tokens=tokens)
        for _ in range(2):
            run.poison()
            results.append(run.sums(work))
    assert_same(results[1], results[0])
    assert_same(results[3], results[2])
    # Other tiles, and other pieces of sums, are chosen for another capacity.
    np.testing.assert_allclose(results[2][0], results[0][0], rtol=ULPS[activation] * activation.eps)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_no_token_sees_later_ones(sizes: str, activation: DType, write: Write) -> None:
    run = cuda_run(write("llama", sizes), activation, adapter=DROPOUT)
    check_no_token_sees_later_ones(run, 50, 40)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("changed", [0, 2])
def test_documents_do_not_see_one_another(
    changed: int, sizes: str, activation: DType, write: Write
) -> None:
    run = cuda_run(write("qwen3", sizes), activation, adapter=DROPOUT)
    check_documents_do_not_see_one_another(run, (9, 34, 11), changed)


@pytest.mark.parametrize("kind", ["llama", "untied"])
def test_the_memory_taken_is_the_memory_planned(kind: str, write: Write) -> None:
    """Weights too are in the GPU's own memory, but for an embedding that is no head; nothing of the
    host's is counted."""
    model = write(kind, "even")
    run = cuda_run(model, BF16)
    use, layout = memory_use(run.planned, cuda()), run.planned.accumulate.layout
    assert use.mapped == use.process == use.saving == 0
    stored = sum(t.nbytes for t in model.checkpoint.tensors.values())
    assert use.held + use.hosted >= stored and (use.hosted > 0) == (kind == "untied")
    of_gpu = [block.nbytes for block in layout.blocks if not block.host]
    assert use.total - use.engine == sum(of_gpu)
    for name, buffer in run.planned.decoder.weights.held.items():
        np.testing.assert_array_equal(run.memory.read(buffer), model.checkpoint.read(name))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_a_table_in_the_hosts_memory_changes_no_bit(
    sizes: str, activation: DType, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, work = write("untied", sizes), one_pass(make_documents(LENGTHS))
    runs = [cuda_run(model, activation, adapter=DROPOUT)]
    monkeypatch.setattr(cuda(), "limits", replace(cuda().limits, own_memory=False))
    runs.append(cuda_run(model, activation, adapter=DROPOUT))
    hosted = [run.planned.accumulate.layout.hosted for run in runs]
    assert hosted[0] > 0 == hosted[1]
    results = [run.sums(work) for run in runs for _ in range(2)]
    for result in results[1:]:
        assert_same(result, results[0])


@pytest.fixture(scope="module")
def validated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("validated"), 10, 5)


@pytest.mark.parametrize("precision", ALLOWED)
def test_a_run_follows_the_cpu(tmp_path, model, validated, precision):
    check_a_run_follows_the_cpu(tmp_path, model, validated, "cuda", precision)


@pytest.mark.parametrize("precision", ALLOWED)
def test_a_run_with_its_table_in_the_hosts_memory_follows_the_cpu(tmp_path, validated, precision):
    """As of every model whose head is not tied. Two updates: the first steps of AdamW go by the
    signs of gradients, those near zero are rounded to either, and of this model's 2,376 parameters
    a few that went the other way move the third update's norm by per cents (seen of fp16)."""
    folder = write_chat_model(tmp_path / "untied", "untied")
    for device, chosen in (("cpu", "fp32"), ("cuda", precision)):
        given: dict[str, Any] = {"device": device, "precision": chosen, "steps": 2, "warmup": 2}
        run(settings(folder, validated, tmp_path / device, **given))
    follow(tmp_path / "cuda", tmp_path / "cpu", ALLOWED[precision])


@pytest.mark.parametrize("precision", ALLOWED)
def test_ten_steps_of_the_storyteller(tmp_path, precision):
    check_the_storyteller_follows_the_cpu(tmp_path, 10, "cuda", precision)


@pytest.mark.parametrize("precision", ALLOWED)
def test_a_resumed_run_is_the_run_that_was_not_stopped(
    tmp_path, monkeypatch, model, data, precision
):
    """Same log, same bytes."""
    given: dict[str, Any] = {**EVERYTHING, "device": "cuda", "precision": precision}
    whole, out = tmp_path / "whole", tmp_path / "out"
    run(settings(model, data, whole, **given))
    with monkeypatch.context() as patch, pytest.raises(Crash):
        crash_in_pass(patch, 5)
        run(settings(model, data, out, **given))
    run(settings(model, data, out, resume=True, **given))
    same_run(out, whole)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", MODELS)
def test_answers_are_those_of_the_cpu(kind: str, sizes: str, write: Write) -> None:
    """Greedy, in float32, with a cache: prompts longer and shorter, in more slots than one."""
    model, prompts = write(kind, sizes), sequences(3, 17, 1, 30)
    wanted = answers(make(model, CpuBackend(), 50), prompts, 12)
    for slots in (1, 3):
        assert answers(make(model, cuda(), 50, slots=slots), prompts, 12) == wanted


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_logits_token_by_token(sizes: str, activation: DType, write: Write) -> None:
    model, (tokens,) = write("qwen3", sizes), sequences(40)
    want = make(model, REFERENCE, 40, picks=40).read_whole(tokens)
    generator = make(model, cuda(), 40, activation=activation)
    got = [generator._run(True, tokens[i : i + 1], [(0, i, 1)], [0])[0] for i in range(40)]
    ulps = 400 if activation is F32 else 60
    assert np.abs(got - want).max() < ulps * activation.eps * np.abs(want).max()
