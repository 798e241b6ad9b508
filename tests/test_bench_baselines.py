"""Other tools as processes: what they are given, what they answer, and what is said when they
cannot."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from bench_worker import BENCH, write_worker
from krnl.backends.cpu import CpuBackend
from krnl.bench import baselines, trainer
from krnl.bench.baselines import (
    NEEDS_CUDA,
    NUMBER,
    THREAD_VARIABLES,
    Setting,
    Worker,
    check_agreement,
    script,
    settings,
    start,
    tools,
)
from krnl.bench.blas import blas_name, blas_with_threads
from krnl.bench.models import SHAPES
from krnl.bench.products import Product, drawn
from krnl.bench.results import Tool
from krnl.bench.trainer import Rows
from krnl.bench.workloads import BlockShape, mlp_block
from krnl.dtypes import BF16, F16, F32, DType
from krnl.errors import BackendError, ConfigError
from krnl.models.config import linear_paths, parse

TINY = BlockShape(tokens=13, width=24, ffn=36, rank=3)


# What peers are given


def of_bench(name: str) -> ModuleType:
    """A module of the bench folder that needs NumPy alone."""
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def test_peers_draw_the_numbers_that_krnl_draws() -> None:
    theirs = of_bench("block").drawn(TINY.tokens, TINY.width, TINY.ffn, TINY.rank)
    work = mlp_block(CpuBackend(), F32, TINY)
    ours = {buffer.name: values for buffer, values in work.inputs.items()}
    np.testing.assert_array_equal(ours["gate_proj.weight"], theirs.gate)
    np.testing.assert_array_equal(ours["up_proj.weight"], theirs.up)
    np.testing.assert_array_equal(ours["down_proj.weight"], theirs.down)
    np.testing.assert_array_equal(ours["x"], theirs.x)
    np.testing.assert_array_equal(ours["dy"], theirs.dy)
    a_gate, b_gate, a_up, b_up = (values.ravel() for values in theirs.adapters)
    np.testing.assert_array_equal(ours["adapter"], np.concatenate([a_gate, a_up, b_gate, b_up]))


@pytest.mark.parametrize("layout", ["nn", "tn", "nt"])
def test_peers_multiply_the_numbers_that_krnl_multiplies(layout: str) -> None:
    (call,) = Product(layout, 5, 7, 11, F32, F32).step().calls
    ours = {buffer.name: drawn(buffer, 5) for buffer in call.reads()}
    for name, values in zip("ab", of_bench("products").drawn(layout, 5, 7, 11), strict=True):
        np.testing.assert_array_equal(ours[name], values)
    assert abs(ours["a"].ravel()[:35] - ours["b"].ravel()[:35]).max() > 1  # not the same twice


@pytest.mark.parametrize("chat", [False, True])
def test_peers_train_on_the_rows_that_krnl_trains_on(chat: bool) -> None:
    rows = Rows(5, 33, chat)
    theirs = of_bench("training").batch(101, 5, 33, chat)
    ours = rows.drawn(101)
    assert len(theirs) == len(ours) == 5
    for (ids, labels), (our_ids, our_labels) in zip(theirs, ours, strict=True):
        np.testing.assert_array_equal(our_ids, ids)
        np.testing.assert_array_equal(our_labels, labels)
    assert rows.tokens == sum(len(ids) for ids, _ in theirs)
    assert len({len(ids) for ids, _ in theirs}) > 1 or not chat


@pytest.mark.parametrize("chat", [False, True])
def test_rows_are_packed_whole_and_labelled_as_drawn(chat: bool) -> None:
    rows = Rows(4, 20, chat)
    work, drawn = rows.packed(50), rows.drawn(50)
    np.testing.assert_array_equal(work.tokens, np.concatenate([ids for ids, _ in drawn]))
    wanted = np.concatenate([labels[1:][labels[1:] >= 0] for _, labels in drawn])
    np.testing.assert_array_equal(work.target, wanted)


def test_peers_begin_with_the_adapters_and_the_optimizer_of_krnl() -> None:
    config = parse({**SHAPES["smollm2-135m"], "num_hidden_layers": 2}, "small")
    training, shapes = of_bench("training"), linear_paths(config)
    modules = trainer.first_modules(config)
    assert len(modules) == 14
    for path, (a, b) in modules.items():
        their_a, their_b = training.adapter(path, *shapes[path])
        np.testing.assert_array_equal(a, their_a)
        np.testing.assert_array_equal(b, their_b)
        assert np.abs(b).min() > 0
    assert (trainer.ADAPTER.rank, trainer.ADAPTER.alpha) == (training.RANK, training.ALPHA)
    for name in ("RATE", "BETAS", "EPS", "WEIGHT_DECAY", "CLIP"):
        assert getattr(trainer, name) == getattr(training, name), name


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
    found = settings(peer, CpuBackend(), activation, ["eager"])
    assert [setting.title(peer) for setting in found] == wanted


def device(name: str) -> Any:
    return type("Device", (), {"name": name, "limits": CpuBackend().limits})()


def test_mlx_runs_in_16_bits_on_a_gpu() -> None:
    found = settings("mlx", device("metal"), F16, ["eager"])
    assert found == [Setting("mlx", "fp16", "16"), Setting("mlx", "fp16", "fp32")]


def test_one_type_of_adapters_will_do() -> None:
    for peer, adapters in (("mlx", "16"), ("torch", "fp32")):
        found = settings(peer, device("cuda"), F16, ["eager"], adapters)
        assert [s.adapters for s in found] == [adapters]
    assert settings("mlx", CpuBackend(), F16, ["eager"], "16") == [Setting("mlx", "fp32", "fp32")]


def test_variants_are_pytorchs() -> None:
    variants = ("eager", "compile")
    found = [s.title("peft") for s in settings("torch", CpuBackend(), F32, variants)]
    assert found == ["peft fp32, adapters fp32", "peft fp32, adapters fp32, compile"]
    assert len(settings("mlx", CpuBackend(), F32, variants)) == 1


@pytest.mark.parametrize("variant", NEEDS_CUDA)
def test_some_variants_need_cuda(variant: str) -> None:
    with pytest.raises(ConfigError, match=f"names {variant}, which needs --device cuda; this is c"):
        settings("torch", CpuBackend(), F32, [variant])
    assert settings("torch", device("cuda"), F32, [variant])


@pytest.mark.parametrize(
    ("variant", "said", "keeps"),
    [("", [], True), ("compile", ["--variant", "compile"], True), ("untuned", ["eager"], False)],
)
def test_a_worker_is_told_how_to_run(
    tmp_path: Path, variant: str, said: list[str], keeps: bool
) -> None:
    """Device, types, and on the CPU as many threads as KRNL has, also to the libraries below."""
    body = """
        import os
        told = {"argv": sys.argv, "environment": dict(os.environ)}
        serve(options, dict, describe=lambda: told)
        """
    setting = Setting("torch", "bf16", "16", variant)
    backend = CpuBackend()
    path = write_worker(tmp_path, body)
    with setting.start(sys.executable, path, ["--rows", "3"], backend) as worker:
        argv, environment = worker.hello["argv"], worker.hello["environment"]
    threads = str(backend.limits.threads)
    for given in (["--rows", "3"], ["--precision", "bf16"], ["--device", "cpu"], said):
        assert " ".join(given) in " ".join(argv)
    assert argv[argv.index("--threads") + 1] == threads
    for library in ("OMP", "OPENBLAS", "MKL"):
        assert environment[f"{library}_NUM_THREADS"] == threads
    assert environment["VECLIB_MAXIMUM_THREADS"] == threads
    assert ("GLIBC_TUNABLES" in environment) == keeps


@pytest.mark.parametrize(("name", "said"), [("metal", "mps"), ("cuda", "cuda")])
def test_beside_a_gpu_a_tool_decides_on_its_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, said: str
) -> None:
    """KRNL takes one there, and the host's side of others, and their compilers, take more."""
    for variable in THREAD_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    body = """
        import os
        told = {"argv": sys.argv, "environment": dict(os.environ)}
        serve(options, dict, threads=lambda: 7, describe=lambda: told)
        """
    path = write_worker(tmp_path, body)
    with start("torch", sys.executable, path, [], device(name)) as worker:
        argv, environment = worker.hello["argv"], worker.hello["environment"]
        assert argv[1:] == ["--device", said]
        assert not set(THREAD_VARIABLES) & set(environment)
        assert tools([("torch", worker)])[0].threads == 7


@pytest.mark.parametrize(
    ("theirs", "agrees"),
    [(10.05, True), (9.95, True), (9.8, False), (10.2, False), (float("nan"), False)],
)
def test_a_peer_that_computes_something_else_is_not_compared(theirs: float, agrees: bool) -> None:
    if agrees:
        check_agreement("peft", "the norm of dx", theirs, 10.0, 0.01)
        return
    with pytest.raises(
        BackendError, match=rf"something else than KRNL: the norm of dx is {theirs}"
    ):
        check_agreement("peft", "the norm of dx", theirs, 10.0, 0.01)


# Workers


def test_a_worker_steps_when_it_is_asked(tmp_path: Path) -> None:
    body = """
        count = 0
        def step():
            global count
            count += 1
            print("noise")
            return {"loss": float(count)}
        serve(options, step, ["numpy"], lambda: options.threads, describe=lambda: {"said": "hello"})
        """
    with Worker(sys.executable, write_worker(tmp_path, body), threads=3) as worker:
        assert (worker.hello["loss"], worker.hello["said"]) == (1.0, "hello")
        assert (worker.hello["versions"], worker.hello["threads"]) == (
            {"numpy": np.__version__},
            3,
        )
        answer = worker.ask()
        assert (answer["loss"], answer["seconds"] >= 0) == (2.0, True)
        assert answer["peak"] > 1 << 20


def test_a_workers_turn_is_a_step_that_nobody_times_and_one_that_counts(tmp_path: Path) -> None:
    body = """
        import time
        count = 0
        def step():
            global count
            count += 1
            time.sleep(0.0 if count % 2 else 0.05)
            return {"loss": float(count)}
        step()
        serve(options, step)
        """
    with Worker(sys.executable, write_worker(tmp_path, body)) as worker:
        assert worker.turn()["loss"] == 4.0
        assert worker.seconds() >= 0.05
        assert worker.ask()["loss"] == 7.0


def test_steps_that_are_repeated_are_waited_for_once(tmp_path: Path) -> None:
    """Each step takes 10 ms here, and what it started another 50 at the end. Seconds are a
    step's."""
    body = """
        import time
        done = []
        def step():
            done.append("step")
            time.sleep(0.01)
            return {"steps": done.count("step")}
        def finish():
            done.append("finish")
            time.sleep(0.05)
        serve(options, step, describe=lambda: {"done": list(done)}, finish=finish)
        """
    path = write_worker(tmp_path, body)
    with Worker(sys.executable, path, ["--repeats", "5"]) as worker:
        assert worker.hello["done"] == ["step", "finish"]
        answer = worker.ask()
        assert answer["steps"] == 6
        assert 0.02 <= answer["seconds"] < 0.06
    with Worker(sys.executable, path) as worker:
        answer = worker.ask()
        assert answer["steps"] == 2 and answer["seconds"] >= 0.06


def test_tools_are_told_once_with_all_their_packages() -> None:
    def worker(**versions: str) -> Any:
        return type("W", (), {"hello": {"versions": versions, "threads": 2}})()

    found = tools([("peft", worker(torch="2")), ("mlx", worker()), ("peft", worker(liger="1"))])
    assert found == [Tool("peft", {"torch": "2", "liger": "1"}, 2), Tool("mlx", {}, 2)]


def test_the_library_behind_numpy_gets_threads() -> None:
    try:
        tool = blas_with_threads(1)
        assert tool.name == blas_name()
        assert tool.versions["numpy"] == np.__version__
        assert tool.threads in ((1,) if "openblas" in blas_name() else (1, None))
    finally:
        blas_with_threads(CpuBackend().limits.threads)


def test_a_worker_alone_does_the_steps_it_was_told(tmp_path: Path) -> None:
    path = write_worker(tmp_path, 'serve(options, lambda: {"loss": 7.0})')
    command = [sys.executable, str(path), "--steps", "2"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [sorted(line) for line in lines] == [
        ["loss", "peak", "threads", "versions"],
        *[["loss", "peak", "seconds"]] * 2,
    ]


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    path = write_worker(tmp_path, "import a_framework_that_is_not_here")
    with pytest.raises(ConfigError, match=r"with .* ended with 1, saying 'ModuleNotFoundError"):
        Worker(sys.executable, path)
    with pytest.raises(ConfigError, match="does not start: No such file"):
        Worker(str(tmp_path / "python"), path)


OTHER_TYPES = '{"versions": {}, "threads": "2", "peak": 1, "x": {}, "seconds": "2", "loss": 1}'


@pytest.mark.parametrize(
    "line",
    ["Setting up.", "1", "[]", "{}", "\\xff", "", '{"threads": 2}', '{"seconds": 2}', OTHER_TYPES],
)
def test_what_is_no_answer_is_quoted(tmp_path: Path, line: str) -> None:
    """Of a program that is no worker, or a wrapper that prints: first, or after a first step."""
    first = 'print(json.dumps({"versions": {}, "threads": None, "peak": 1}), flush=True)'
    said = f"sys.stdout.buffer.write(b'{line}\\n'); sys.stdout.flush()"
    path = tmp_path / "worker.py"
    quoted = re.escape(line.replace("\\xff", "\ufffd"))
    path.write_text(f"import sys\n{said}\n")
    wanted = f"said '{quoted}' where a worker says a line of JSON with versions, threads, peak, x"
    with pytest.raises(ConfigError, match=wanted):
        Worker(sys.executable, path, first={"x": dict})
    path.write_text(f"import json, sys\n{first}\nsys.stdin.readline()\n{said}\n")
    wanted = f"said '{quoted}' where a worker says a line of JSON with seconds, peak, loss"
    with (
        Worker(sys.executable, path, each={"loss": NUMBER}) as worker,
        pytest.raises(ConfigError, match=wanted),
    ):
        worker.ask()


def test_a_program_that_is_no_worker_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"worker\.py with /bin/echo said '.*worker\.py' where"):
        Worker("/bin/echo", tmp_path / "worker.py")


def test_a_worker_that_dies_says_so(tmp_path: Path) -> None:
    body = """
        import os
        count = 0
        def step():
            global count
            count += 1
            if count > 1: os._exit(9)
            return {}
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
