"""Which device a name stands for here, and on machines that are not here."""

import platform
import re
import shutil
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from krnl import devices, doctor
from krnl.backends import cuda, cuda_driver
from krnl.backends.base import Backend, Limits, Paper
from krnl.backends.cpu import CpuBackend
from krnl.backends.metal import ON_PAPER
from krnl.backends.reference import ReferenceBackend
from krnl.devices import activation_type, has_metal, open_backend, planning_device
from krnl.dtypes import BF16, F16, F32, DType
from krnl.errors import BackendError, ConfigError
from krnl.model import Model
from krnl.planning import plan_run, print_plan
from krnl.training.config import TrainConfig
from runs import krnl_process, settings
from tiny import with_longer_header, write_model

MIB = 2**20


class FakeMetal(ReferenceBackend):
    """Computes, and calls itself metal."""

    name = "metal"
    device_name = "a GPU of [brackets]"
    limits = Limits(8 * 2**30, 2**30, 0, (F16, F32), 1, 4)

    def __init__(self) -> None:
        super().__init__(rounds=True)

    def refused_libraries(self) -> list[str]:
        return []


class FakeCuda(ReferenceBackend):
    """Computes, and calls itself cuda."""

    name = "cuda"
    device_name = "a GPU of [brackets]"
    driver = "CUDA 13.0, NVRTC 13.0"
    limits = replace(cuda.ON_PAPER.limits, memory=8 * 2**30, largest_block=9 * 2**30)

    def __init__(self) -> None:
        super().__init__(rounds=True)


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's GPU, if it has one, plays no part."""
    monkeypatch.setattr(devices, "has_driver", lambda: False)


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's driver and packages are installed, and open FakeCuda."""
    monkeypatch.setattr(devices, "has_driver", lambda: True)
    monkeypatch.setattr(devices, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr("krnl.backends.cuda.CudaBackend", FakeCuda)


@pytest.fixture
def with_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyObjC's Metal is installed, and opens FakeMetal."""
    monkeypatch.setitem(sys.modules, "Metal", ModuleType("Metal"))
    monkeypatch.setattr("krnl.backends.metal.MetalBackend", FakeMetal)


@pytest.fixture
def without_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyObjC's Metal is not installed."""
    monkeypatch.delitem(sys.modules, "Metal", raising=False)
    monkeypatch.setattr(devices, "find_spec", lambda name: None)


def on(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)


def test_auto_takes_metal_on_apple_silicon(monkeypatch, with_metal):
    on(monkeypatch, "darwin", "arm64")
    assert isinstance(open_backend("auto"), FakeMetal)
    assert activation_type(open_backend("auto"), "auto") is F16
    assert isinstance(open_backend("cpu"), CpuBackend)


@pytest.mark.parametrize(("system", "machine"), [("darwin", "x86_64"), ("linux", "aarch64")])
def test_auto_takes_the_cpu_elsewhere(monkeypatch, with_metal, system, machine):
    on(monkeypatch, system, machine)
    assert isinstance(open_backend("auto"), CpuBackend)
    assert isinstance(open_backend("metal"), FakeMetal)


def test_auto_takes_the_cpu_where_metal_cannot_be_used(monkeypatch, with_metal):
    def refuse() -> None:
        raise ConfigError("too old")

    on(monkeypatch, "darwin", "arm64")
    monkeypatch.setattr("krnl.backends.metal.MetalBackend", refuse)
    assert isinstance(open_backend("auto"), CpuBackend)
    with pytest.raises(ConfigError, match="too old"):
        open_backend("metal")


def test_auto_takes_cuda_where_it_can_be_used(monkeypatch, with_cuda):
    on(monkeypatch, "linux", "x86_64")
    assert isinstance(open_backend("auto"), FakeCuda)
    assert activation_type(open_backend("auto"), "auto") is BF16
    assert isinstance(open_backend("cpu"), CpuBackend)

    def refuse() -> None:
        raise ConfigError("too old")

    monkeypatch.setattr("krnl.backends.cuda.CudaBackend", refuse)
    assert isinstance(open_backend("auto"), CpuBackend)
    with pytest.raises(ConfigError, match="too old"):
        open_backend("cuda")


def test_cuda_needs_a_driver_and_packages(monkeypatch, with_cuda):
    assert devices.has_cuda()
    monkeypatch.setattr(devices, "has_driver", lambda: False)
    assert not devices.has_cuda()
    monkeypatch.setattr(devices, "has_driver", lambda: True)
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    assert not devices.has_cuda()

    def no_parent(name: str) -> None:
        raise ModuleNotFoundError("No module named 'cuda'")

    monkeypatch.setattr(devices, "find_spec", no_parent)
    assert not devices.has_cuda()


def test_a_folder_called_metal_is_not_pyobjc(monkeypatch, without_metal, tmp_path):
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "Metal", raising=False)
    (tmp_path / "Metal").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not has_metal()


def test_auto_takes_the_cpu_without_pyobjc(monkeypatch, without_metal):
    on(monkeypatch, "darwin", "arm64")
    assert not has_metal()
    assert isinstance(open_backend("auto"), CpuBackend)


def test_plans_are_made_on_paper_where_metal_is_not(without_metal):
    paper = planning_device("metal")
    assert isinstance(paper, Paper)
    assert activation_type(paper, "auto") is F16
    with pytest.raises(ConfigError, match=r"'bf16', in which the metal device does not compute"):
        activation_type(paper, "bf16")
    assert isinstance(planning_device("cpu"), CpuBackend)


def test_plans_are_made_on_paper_where_cuda_is_not():
    paper = planning_device("cuda")
    assert isinstance(paper, Paper) and paper.name == "cuda"
    assert [activation_type(paper, p) for p in ("auto", "fp16", "fp32")] == [BF16, F16, F32]


def test_plans_are_of_the_device_where_it_is(with_metal):
    assert isinstance(planning_device("metal"), FakeMetal)


def test_plans_are_of_the_gpu_where_it_is(with_cuda):
    assert isinstance(planning_device("cuda"), FakeCuda)


@pytest.mark.parametrize("kind", ["llama", "untied"])
def test_a_plan_for_cuda_counts_the_gpus_memory(kind, tmp_path, capsys):
    """The weights are in it, be their files here or not; what the host holds is not, to which an
    embedding belongs that is no head."""
    model = write_model(tmp_path / "model", kind, dtype=BF16)
    (tmp_path / "config").mkdir()
    shutil.copy(model.folder / "config.json", tmp_path / "config")
    paper = planning_device("cuda")
    uses = []
    for folder in (model.folder, tmp_path / "config"):
        planned = plan_run(TrainConfig(model=str(folder)), paper, BF16)
        print_plan(planned, Console(width=160), dispatches=False)
        said, layout = capsys.readouterr().out, planned.plan.training.accumulate.layout
        assert "cuda is not on this machine: the plan is right" in said
        uses.append(planned.plan.use)
        of_gpu = [block.nbytes for block in layout.blocks if not block.host]
        assert uses[-1].total - uses[-1].engine == sum(of_gpu)
        assert not any(block.file for block in layout.blocks)
        line = re.search(r"peak .*\nweights, in the host's memory +([\d.]+) MiB", said)
        if kind == "untied":
            assert line and float(line[1]) == pytest.approx(uses[-1].hosted / 2**20, abs=0.05)
        else:
            assert "in the host's memory" not in said
    sizes = {name: tensor.nbytes for name, tensor in model.checkpoint.tensors.items()}
    table = sizes["model.embed_tokens.weight"] if kind == "untied" else 0
    assert uses[0].hosted == table
    assert uses[0] == uses[1] and uses[0].held >= sum(sizes.values()) - table
    assert uses[0].mapped == uses[0].process == uses[0].saving == 0


def said_of(
    model: Path, data: Path, backend: object, activation: DType, capsys, **given: object
) -> str:
    config = settings(model, data, Path("out"), **given)
    planned = plan_run(config, backend, activation)  # type: ignore[arg-type]
    print_plan(planned, Console(width=160), dispatches=False)
    return capsys.readouterr().out


def test_a_plan_says_whether_the_memory_suffices(model, data, capsys):
    cpu = CpuBackend()
    said = said_of(model, data, cpu, F32, capsys)
    assert "on this machine" not in said and "computed again" not in said
    cpu.limits = Limits(3 * MIB, 2**40, 0, (F32, BF16), 1, 1)
    said = said_of(model, data, cpu, F32, capsys)
    assert "more than cpu may use on this machine (3.0 MiB)" in said
    paper = Paper("metal", cpu.limits, cpu.kernels)
    assert "metal is not on this machine" in said_of(model, data, paper, F32, capsys)


def test_of_a_device_on_paper_the_limit_is_what_is_known(model, data, capsys):
    """Whether the memory suffices is not known, unless it was said how much there is."""
    unknown = "whether the memory there suffices is not known"
    for limit, short in ((None, False), (0.001, True), (8.0, False)):
        said = " ".join(said_of(model, data, ON_PAPER, F16, capsys, memory_limit=limit).split())
        assert "metal is not on this machine" in said
        assert (unknown in said) == (limit is None)
        assert ("more than --memory-limit" in said) == short


def test_a_plan_counts_weights_that_lie_askew(tmp_path):
    """Two elements of bf16 deeper in the file: the CPU maps such weights, Metal holds them."""
    aligned = write_model(tmp_path / "model", dtype=BF16)
    askew = with_longer_header(aligned, tmp_path / "askew", 4)

    def weights(model: Model, backend: Backend | Paper) -> tuple[int, int]:
        use = plan_run(TrainConfig(model=str(model.folder)), backend, F32).plan.use
        assert use.parts()["weights, held in memory"] == use.held
        return use.mapped, use.held

    mapped, held = weights(aligned, ON_PAPER)
    assert mapped > held > 0
    for model in (aligned, askew):
        assert weights(model, CpuBackend()) == (mapped, held)
    assert weights(askew, ON_PAPER)[0] == 0
    # Each lies at a multiple of 64 bytes.
    more = weights(askew, ON_PAPER)[1] - held - mapped
    assert 0 <= more < 64 * len(askew.checkpoint.tensors)


@pytest.mark.parametrize(
    ("device", "here", "precision", "opening"),
    [
        ("metal", has_metal, "f16", "krnl: The metal device "),
        ("cuda", cuda_driver.has_driver, "bf16",
         "krnl: The cuda device needs an NVIDIA GPU and its driver"),
    ],
)  # fmt: skip
def test_a_gpu_elsewhere_as_commands(model, data, tmp_path, device, here, precision, opening):
    """A plan, and one sentence for anything that would compute."""
    if here():
        pytest.skip(f"this machine has {device}")
    plan = krnl_process("plan", model, "--device", device, "--tokens", 64)
    assert plan.returncode == 0, plan.stderr
    assert f"on {device} in {precision}: passes of up to 64 tokens" in plan.stdout
    assert f"{device} is not on this machine" in plan.stdout
    for command in (
        ("train", "--model", model, "--data", data, "--out", tmp_path / "out"),
        ("generate", model, "Cora"),
        ("profile", model),
    ):
        ended = krnl_process(*command, "--device", device)
        assert ended.returncode == 2, ended.stderr
        assert len(ended.stderr.splitlines()) == 1
        assert ended.stderr.startswith(opening)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def one_isa(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor looks at one instruction set, as it has others to look at."""
    monkeypatch.setattr(doctor, "available_isas", lambda: ["plain"])


def examined(capsys: pytest.CaptureFixture[str]) -> tuple[bool, str]:
    passed = doctor.examine(Console(width=200))
    return passed, capsys.readouterr().out


def test_the_doctor_examines_metal(with_metal, one_isa, capsys):
    passed, said = examined(capsys)
    assert passed, said
    assert "metal: a GPU of [brackets], may use 8.0 GiB, at most 1.0 GiB in one piece" in said
    assert "pass one step on metal in f16" in said
    assert "pass one step on metal in f32" in said


def test_the_doctor_says_what_metal_needs(without_metal, one_isa, capsys):
    passed, said = examined(capsys)
    assert passed, said
    assert "metal: not here; it needs a Mac with Apple silicon and PyObjC" in said


@pytest.mark.parametrize("where", ["__init__", "compile"])
def test_a_metal_that_fails_does_not_end_the_examination(
    monkeypatch, with_metal, one_isa, capsys, where
):
    def fails(*arguments: object) -> None:
        raise BackendError("kernel 'gemm' [f16] is broken.")

    monkeypatch.setattr(FakeMetal, where, fails)
    passed, said = examined(capsys)
    assert not passed
    assert said.count("FAIL") == (1 if where == "__init__" else 2)
    assert "kernel 'gemm' [f16] is broken." in said
    assert "pass one step on cpu (plain) in f32" in said


def test_the_doctor_examines_cuda(with_cuda, one_isa, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "has_metal", lambda: False)
    passed, said = examined(capsys)
    assert passed, said
    assert "cuda: a GPU of [brackets], CUDA 13.0, NVRTC 13.0, 8.0 of 9.0 GiB free" in said
    for activation in ("bf16", "f16", "f32"):
        assert f"pass one step on cuda in {activation}" in said


def test_the_doctor_says_what_cuda_needs(without_metal, one_isa, capsys):
    passed, said = examined(capsys)
    assert passed, said
    assert "cuda: not here; it needs an NVIDIA GPU (Ampere or later), its driver, and pip " in said


@pytest.mark.parametrize("where", ["__init__", "compile"])
def test_a_gpu_that_fails_does_not_end_the_examination(
    monkeypatch, with_cuda, one_isa, capsys, where
):
    def fails(*arguments: object) -> None:
        raise BackendError("'f<bf16>' of gemm.cu is broken.")

    monkeypatch.setattr(doctor, "has_metal", lambda: False)
    monkeypatch.setattr(FakeCuda, where, fails)
    passed, said = examined(capsys)
    assert not passed
    assert said.count("FAIL") == (1 if where == "__init__" else 3)
    assert "'f<bf16>' of gemm.cu is broken." in said
    assert "pass one step on cpu (plain) in f32" in said
