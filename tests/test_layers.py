"""Whole tiny models: gradients against central differences, backends against one another, and what
must not change a result: other documents, later tokens, packing, capacity, recompute, threads."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from krnl.backends.cpu import CpuBackend, available_isas
from krnl.data.packing import Pass, pack
from krnl.dtypes import BF16, F16, F32, DType
from krnl.formats.peft import AdapterConfig
from krnl.model import Model
from krnl.models import training_programs
from krnl.models.decoder import Decoder
from krnl.models.training_programs import Recomputed, TrainingPrograms
from krnl.plan.arena import plan
from model_checks import (
    assert_close,
    assert_same,
    check_a_window_hides_what_lies_before_it,
    check_documents_do_not_see_one_another,
    check_no_token_sees_later_ones,
    check_rope_there_and_back,
    derivative,
    hyper,
)
from tiny import (
    ALL,
    DROPOUT,
    LENGTHS,
    MODELS,
    RECOMPUTE,
    REFERENCE,
    Run,
    Write,
    make_documents,
    make_modules,
    one_pass,
    with_longer_header,
    with_targets,
)

HEAD = replace(ALL, targets=("q_proj", "lm_head"))

# float64: a gradient passes some 100 roundings of 2⁻⁵³, each amplified a hundredfold at most.
EXACT = 1e-12


@pytest.fixture
def use_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CpuBackend]:
    """Opens the CPU with an instruction set and a number of threads. It holds for one backend at a
    time: the next one with the same instruction set changes the threads of both."""

    def use(isa: str = available_isas()[-1], threads: int = 2) -> CpuBackend:
        monkeypatch.setenv("KRNL_CPU_ISA", isa)
        monkeypatch.setenv("KRNL_THREADS", str(threads))
        return CpuBackend()

    return use


GRADIENT_CASES = {
    **{kind: (kind, ALL, 0) for kind in MODELS},
    **{f"dropout-{r}": ("qwen3", DROPOUT, r) for r in RECOMPUTE},
    **{f"recompute-{r}": ("untied", ALL, r) for r in RECOMPUTE[1:]},
    "few-targets": ("llama", replace(ALL, targets=("q_proj", "v_proj")), 0),
    "few-targets-dropout": ("qwen2", replace(DROPOUT, targets=("k_proj", "up_proj")), 2),
    "upper-layer": ("llama", replace(ALL, targets=r".*layers\.1.*down_proj"), "layer"),
    "head": ("llama", HEAD, 0),
    "untied-head": ("untied", replace(ALL, targets=("lm_head",)), "layer"),
    "ranks-and-scales": (
        "window",
        AdapterConfig(4, 8.0, rslora=True, rank_pattern={"v_proj": 1}, alpha_pattern={"q_proj": 1}),
        0,
    ),
}


@pytest.mark.parametrize("case", GRADIENT_CASES)
def test_gradients_are_those_of_the_loss(case: str, write: Write) -> None:
    """Central differences along a random direction in every A and every B, in float64. With a step
    of 2e-4 the formula is off by about 1e-9, as is the rounding of a loss, 1e-13 / 2e-4."""
    kind, adapter, recompute = GRADIENT_CASES[case]
    run = Run(write(kind), adapter, recompute=recompute)
    work = pack(make_documents(LENGTHS), 30)
    assert len(work) > 1
    param = run.session.state()["param"]
    _, gradient = run.sums(work)
    assert len(run.modules(param)) == 2 * len(adapter.select(run.trainable.parts))
    rng = np.random.default_rng(1)
    for name, values in run.modules(gradient).items():
        direction = np.zeros(run.trainable.size)
        run.modules(direction)[name][...] = rng.normal(size=values.shape)
        direction /= np.linalg.norm(direction)

        def loss(h: float, direction: np.ndarray = direction) -> float:
            run.place(param + h * direction)
            return run.sums(work)[0]

        off = abs(derivative(loss, 2e-4) - gradient @ direction)
        assert off <= 1e-7 * np.linalg.norm(values), name


def test_evaluate_is_the_loss_without_dropout(write: Write) -> None:
    work = pack(make_documents(LENGTHS), 30)
    dropped, plain = Run(write(), DROPOUT), Run(write(), ALL)
    assert dropped.session.evaluate(work) == plain.sums(work)[0] == plain.session.evaluate(work)
    assert dropped.sums(work)[0] != plain.sums(work)[0]


def test_dropout_is_drawn_anew_for_each_update_and_seed(write: Write) -> None:
    work = one_pass(make_documents(LENGTHS))
    run, other = Run(write(), DROPOUT), Run(write(), DROPOUT, seed=6)
    losses = {
        run.sums(work, update=1)[0],
        run.sums(work, update=2)[0],
        other.sums(work, update=1)[0],
    }
    assert len(losses) == 3
    assert run.sums(work, update=1)[0] in losses


# Relative to a whole adapter matrix' gradient, in the Euclidean norm. Forward and backward of two
# layers are about 60 roundings to the activation type, which add like a random walk to some 10
# ulps, and cancellation in small gradients (dP - rowsum(dO ∘ O), norms) loses two more bits. In
# fp32 the angles of rotary embeddings add to that: up to 19 radians, rounded twice, they are off by
# 30 ulps of 1 between a query and a key.
STORED_ULPS = {F32: 4 * (10 + 30), BF16: 4 * 10}


@pytest.mark.parametrize("activation", [F32, BF16], ids=str)
@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("kind", MODELS)
def test_cpu_agrees_with_the_reference(
    kind: str, isa: str, activation: DType, write: Write, use_cpu: Any
) -> None:
    model, work = write(kind, BF16), pack(make_documents(LENGTHS), 30)
    adapter = replace(DROPOUT, rank=4)
    modules = make_modules(model, adapter, activation)
    exact = Run(model, adapter, REFERENCE, modules)
    run = Run(model, adapter, use_cpu(isa), modules, activation)
    (want_loss, want), (loss, got) = exact.sums(work), run.sums(work)
    part = STORED_ULPS[activation] * activation.eps
    assert loss == pytest.approx(want_loss, rel=part / 4)
    wanted = exact.modules(want)
    for name, values in run.modules(got).items():
        off = np.linalg.norm(values - wanted[name]) / np.linalg.norm(wanted[name])
        assert off <= part, f"{name} is off by {off / part:.2f} of its allowance"


def test_the_head_alone_may_be_adapted(write: Write, use_cpu: Any) -> None:
    adapter, work = replace(ALL, targets=("lm_head",)), one_pass(make_documents(LENGTHS))
    exact, run = (Run(write("untied"), adapter, backend) for backend in (REFERENCE, use_cpu()))
    assert_close(run.sums(work), exact.sums(work), STORED_ULPS[F32] * F32.eps)


@pytest.mark.parametrize("stored", [F32, F16, BF16], ids=str)
def test_cpu_reads_weights_of_any_type(stored: DType, write: Write, use_cpu: Any) -> None:
    model, work = write("qwen3", stored), one_pass(make_documents(LENGTHS))
    part = STORED_ULPS[F32] * F32.eps
    assert_close(Run(model, backend=use_cpu()).sums(work), Run(model).sums(work), part)


@pytest.mark.parametrize("activation", [F32, BF16], ids=str)
@pytest.mark.parametrize("adapter", [ALL, DROPOUT, HEAD], ids=["plain", "dropout", "head"])
def test_recompute_changes_no_bit(
    adapter: AdapterConfig, activation: DType, write: Write, use_cpu: Any
) -> None:
    model, work, backend = (
        write("qwen3", num_hidden_layers=3),
        pack(make_documents(LENGTHS), 30),
        use_cpu(),
    )
    results = [
        Run(model, adapter, backend, activation=activation, recompute=r).sums(work)
        for r in RECOMPUTE
    ]
    for result in results[1:]:
        assert_same(result, results[0])


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("changed", [0, 2])
def test_documents_do_not_see_one_another(
    changed: int, kind: str, write: Write, use_cpu: Any
) -> None:
    run = Run(write(kind), DROPOUT, use_cpu())
    check_documents_do_not_see_one_another(run, (9, 14, 11), changed)


@pytest.mark.parametrize("kind", MODELS)
def test_no_token_sees_later_ones(kind: str, write: Write, use_cpu: Any) -> None:
    check_no_token_sees_later_ones(Run(write(kind), DROPOUT, use_cpu()), 33, 20)


def test_a_window_hides_what_lies_before_it(write: Write, use_cpu: Any) -> None:
    run = Run(write("window"), backend=use_cpu())
    check_a_window_hides_what_lies_before_it(run, 33, 20)


def numbered(passes: list[Pass], numbers: Sequence[int]) -> list[Pass]:
    """Passes whose documents carry other numbers within the update."""
    return [replace(p, document=np.asarray(numbers, np.int32)[p.document]) for p in passes]


@pytest.mark.parametrize("adapter", [ALL, DROPOUT], ids=["plain", "dropout"])
def test_packing_changes_the_order_of_sums_only(adapter: AdapterConfig, write: Write) -> None:
    """One pass, several, other neighbours, another order: dropout masks follow the documents."""
    run, examples = Run(write("qwen2"), adapter), make_documents(LENGTHS)
    together = run.sums(one_pass(examples))
    for capacity in (20, 23, 31):
        passes = pack(examples, capacity)
        assert len(passes) > 1
        assert_close(run.sums(passes), together, EXACT)
        assert_close(run.sums(passes[::-1]), together, EXACT)
    count = len(examples)
    reversed_pass = numbered(one_pass(examples[::-1]), range(count)[::-1])
    assert_close(run.sums(reversed_pass), together, EXACT)
    apart = [p for i, e in enumerate(examples) for p in numbered(one_pass([e]), [i])]
    assert_close(run.sums(apart), together, EXACT)
    # Only with dropout does a document's number matter.
    others = run.sums(numbered(one_pass(examples), range(1, count + 1)))
    assert (others[0] == together[0]) == (adapter.dropout == 0)


def test_a_batch_may_be_split(write: Write) -> None:
    run, examples = Run(write("untied")), make_documents(LENGTHS)
    halves = one_pass(examples[:2]) + one_pass(examples[2:])
    assert_close(run.sums(halves), run.sums(one_pass(examples)), EXACT)


def test_packing_on_the_cpu(write: Write, use_cpu: Any) -> None:
    """Tiles of keys begin elsewhere when a document does, so rounding differs throughout."""
    run, examples = Run(write(), DROPOUT, use_cpu()), make_documents(LENGTHS)
    together, apart = run.sums(one_pass(examples)), run.sums(pack(examples, 20))
    assert_close(apart, together, STORED_ULPS[F32] * F32.eps)


def test_masked_tokens_count_for_nothing(write: Write) -> None:
    """The sums over two masks that share no token are those over both."""
    run = Run(write("smollm3"), DROPOUT)
    (example,) = make_documents((25,), share=1.0)
    parts = [run.sums(one_pass([with_targets(example, range(i, 25, 2))])) for i in (1, 2)]
    loss, gradient = (sum(values) for values in zip(*parts, strict=True))
    whole = run.sums(one_pass([with_targets(example, range(1, 25))]))
    assert_close((loss, gradient), whole, EXACT)


def test_a_pass_without_targets_adds_nothing(write: Write, use_cpu: Any) -> None:
    for backend in (REFERENCE, use_cpu()):
        run = Run(write(), backend=backend)
        loss, gradient = run.sums(one_pass([with_targets(e, ()) for e in make_documents(LENGTHS)]))
        assert loss == 0 and not gradient.any()


@pytest.mark.parametrize("activation", [F32, BF16], ids=str)
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_capacity_and_what_memory_held_play_no_part(
    recompute: Recomputed, activation: DType, write: Write, use_cpu: Any
) -> None:
    """45 live tokens in 45, 64 and 96, the rest NaN and indices that point nowhere."""
    model, backend, work = write("qwen3"), use_cpu(), one_pass(make_documents(LENGTHS))
    results = []
    for tokens in (sum(LENGTHS), 64, 96):
        options = {"activation": activation, "tokens": tokens, "recompute": recompute}
        run = Run(model, DROPOUT, backend, **options)
        run.poison()
        results.append(run.sums(work))
        run.poison()
        results.append(run.sums(work))
    for result in results[1:]:
        assert_same(result, results[0])


def test_the_reference_reads_nothing_that_was_not_written(write: Write) -> None:
    run, work = Run(write("qwen3"), DROPOUT), one_pass(make_documents(LENGTHS))
    before = run.sums(work)
    run.poison()
    assert_same(run.sums(work), before)


@pytest.mark.parametrize("activation", [F32, BF16], ids=str)
def test_threads_and_repetition_change_no_bit(
    activation: DType, write: Write, use_cpu: Any
) -> None:
    """Sizes at which every kernel has work for three threads; ten updates to let a race show."""
    sizes = {"hidden_size": 136, "intermediate_size": 200, "vocab_size": 700}
    model = write("qwen3", BF16, **sizes)
    work = pack(make_documents((70, 41, 130, 17, 66), vocabulary=700), 256)
    results = []
    for threads in (1, 2, 3, 3):
        run = Run(
            model, replace(DROPOUT, rank=8), use_cpu(threads=threads), None, activation, tokens=256
        )
        first = run.sums(work)
        assert_same(run.sums(work), first)
        for update in range(1, 4):
            for part in work:
                run.session.accumulate(run.session.inputs_of(part, update))
            assert np.isfinite(run.session.update(hyper(update, 200))).all()
        results.append((*first, *run.session.state().values()))
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("adapter", [ALL, HEAD], ids=["plain", "head"])
@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_the_head_may_be_cut_into_chunks(
    device: str, adapter: AdapterConfig, write: Write, use_cpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six chunks of up to 11 labelled rows, the last ones empty, against one. Rows are computed
    alike; sums over them are rounded once more per chunk: six, and two bits for cancellation."""
    backend, part = (REFERENCE, EXACT) if device == "reference" else (use_cpu(), 24 * F32.eps)
    work = one_pass(make_documents(LENGTHS))
    whole = Run(write("untied"), adapter, backend)
    monkeypatch.setattr(training_programs, "LOGITS_BYTES", 0)
    monkeypatch.setattr(backend, "limits", replace(backend.limits, head_rows=11))
    cut = Run(write("untied"), adapter, backend)
    assert (whole.planned.programs.chunk, cut.planned.programs.chunk) == (64, 11)
    assert 11 < len(work[0].target) < 44
    assert_close(cut.sums(work), whole.sums(work), part)
    live = cut.memory.read(cut.planned.programs.inputs.live_chunk)
    assert live.sum() == len(work[0].target) and live.max() == 11
    assert cut.session.evaluate(work) == pytest.approx(whole.session.evaluate(work), rel=part)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_weights_that_lie_askew_are_held(
    tmp_path: Path, device: str, write: Write, use_cpu: Any
) -> None:
    """In a file whose header is two bytes longer, no float32 begins at a multiple of its size."""
    backend = REFERENCE if device == "reference" else use_cpu()
    work, given = one_pass(make_documents(LENGTHS)), write()
    models = (given, with_longer_header(given, tmp_path / "askew", 2))
    aligned, askew = (Run(model, DROPOUT, backend) for model in models)
    assert_same(askew.sums(work), aligned.sums(work))
    assert aligned.planned.accumulate.layout.mapped > askew.planned.accumulate.layout.mapped == 0


def base_loss(model: Model, backend: Any, work: Pass) -> float:
    """The loss of the model without any adapter, from the evaluation program alone."""
    weights = model.weights(backend.limits.mapped_alignment)
    programs = TrainingPrograms(Decoder(model.config, weights, {}, F32), work.live, head_rows=512)
    (planned,) = plan([programs.evaluate()], backend.kernels)
    memory, i, count = backend.allocate(planned.layout), programs.inputs, len(work.target)
    model.fill(weights, memory)
    for buffer, values in (
        (i.live, [work.live]), (i.live_targets, [count]), (i.live_chunk, [count]),
        (i.tokens, work.tokens), (i.position, work.position), (i.start[None], work.doc_start),
        (i.stop, np.arange(work.live) + 1), (i.target_row, work.target_row),
        (i.target, work.target),
    ):  # fmt: skip
        memory.write(buffer.rows(0, len(values)), np.asarray(values))
    backend.compile(planned, memory).run()
    return float(memory.read(programs.loss)[0])


@pytest.mark.parametrize("kind", ["llama", "untied"])
def test_adapters_start_as_the_base_model(kind: str, write: Write, use_cpu: Any) -> None:
    """B = 0 adds nothing, whatever A is: bit for bit on the CPU."""
    model, work = write(kind), one_pass(make_documents(LENGTHS))
    for backend in (REFERENCE, use_cpu()):
        adapter = replace(DROPOUT, targets=("q_proj", "down_proj", "gate_proj", "o_proj"))
        modules = {
            path: (a, np.zeros_like(b)) for path, (a, b) in make_modules(model, adapter).items()
        }
        run = Run(model, adapter, backend, modules)
        want = base_loss(model, backend, work[0])
        assert run.session.evaluate(work) == run.sums(work)[0] == want
        assert Run(model, adapter, backend).session.evaluate(work) != want


def test_positions_matter_only_relatively(write: Write) -> None:
    """Positions moved by 1000 leave every score as it was, up to the rounding of an angle."""
    run, work = Run(write("qwen3")), one_pass(make_documents(LENGTHS))
    moved = [replace(p, position=p.position + 1000) for p in work]
    stretched = [replace(p, position=3 * p.position) for p in work]
    assert_close(run.sums(moved), run.sums(work), 1e-10)
    assert run.sums(stretched)[0] != pytest.approx(run.sums(work)[0], rel=1e-3)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_rope_there_and_back(device: str, use_cpu: Any) -> None:
    if device == "reference":
        check_rope_there_and_back(REFERENCE, F32, np.finfo(np.float64).eps)
    else:
        check_rope_there_and_back(use_cpu(), F32, F32.eps)
