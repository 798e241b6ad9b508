"""The control of a device: what it runs, what its reference is kept under, when its gate opens."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import krnl.bench.control as control
import krnl.kernels
from krnl.backends.base import Memory
from krnl.backends.cpu import THREADS_VARIABLE, CpuBackend, CpuProgram, library_path
from krnl.backends.reference import ReferenceBackend
from krnl.bench.control import kernel_hash, open_gate
from krnl.bench.gate import Gate, Probe
from krnl.bench.products import Product
from krnl.dtypes import F32
from krnl.errors import ConfigError, FormatError, Refused
from krnl.plan.arena import Plan
from metalsim.install import SimulatedBackend, metal_backend


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A backend whose kernels' folder may be changed."""
    monkeypatch.setattr(krnl.kernels, "__file__", str(tmp_path / "__init__.py"))
    folder = tmp_path / "metal"
    (folder / "more").mkdir(parents=True)
    (folder / "gemm.metal").write_text("a kernel")
    (folder / "more" / "tile.h").write_text("a header")
    (folder / "table.py").write_text("a table")
    yield SimpleNamespace(name="metal", folder=folder)


def test_of_the_cpu_it_is_the_library_that_runs(tmp_path, monkeypatch):
    """Wherever that lies, and nothing beside it."""
    backend = CpuBackend()
    before = kernel_hash(backend)
    other = tmp_path / library_path(backend.isa).name
    other.write_bytes(library_path(backend.isa).read_bytes())
    monkeypatch.setattr(control, "library_path", lambda isa: other)
    assert kernel_hash(backend) == before
    other.write_bytes(other.read_bytes() + b" ")
    assert kernel_hash(backend) != before


@pytest.mark.parametrize(
    ("name", "text", "differs"),
    [
        ("gemm.metal", "another kernel", True),
        ("more/tile.h", "another header", True),
        ("new.cu", "a new kernel", True),
        ("table.py", "another table", False),
        ("notes.txt", "new", False),
    ],
)
def test_of_a_gpu_it_is_all_that_kernels_are_compiled_from(gpu, name, text, differs):
    before = kernel_hash(gpu)
    (gpu.folder / name).write_text(text)
    assert (kernel_hash(gpu) != before) == differs


@pytest.mark.parametrize("name", ["metal", "cuda"])
def test_gpus_have_sources(name):
    """Where they are looked for, there are some: each kind has a hash of its own."""
    nothing = kernel_hash(SimpleNamespace(name="nowhere"))
    assert kernel_hash(SimpleNamespace(name=name)) not in (nothing, kernel_hash(CpuBackend()))


def test_a_gate_that_could_learn_nothing_does_not_open(tmp_path, monkeypatch):
    """Before anything is prepared; a forced one learns nothing anyway."""
    (tmp_path / "cache").write_text("")
    path = tmp_path / "cache" / "references.json"
    open_gate(CpuBackend(), force=True, path=path)
    monkeypatch.setattr(control, "probe", lambda backend: pytest.fail("it was prepared"))
    with pytest.raises(FormatError, match="set XDG_CACHE_HOME to a folder that can be written"):
        open_gate(CpuBackend(), force=False, path=path)


@cache
def simulator() -> SimulatedBackend:
    return metal_backend("checked", eager=True)


def test_the_control_takes_a_while_and_is_of_the_preferred_type() -> None:
    backend = CpuBackend()
    product = control.control_product(backend)
    assert product.activation is product.weight is backend.limits.activations[0]
    assert (product.layout, product.m) == ("nn", 1024)
    assert control.control_product(simulator()).m == 2048
    small = Product("nn", 64, 64, 64, F32, F32)
    assert control.control(small, backend)() > 1e6


def test_the_control_is_operations_in_a_second() -> None:
    class Timed(CpuBackend):
        def compile(self, plan: Plan, memory: Memory) -> CpuProgram:
            program = super().compile(plan, memory)
            program.time = lambda: [0.5]  # type: ignore[method-assign]
            return program

    assert control.control(Product("nn", 8, 16, 32, F32, F32), Timed())() == 4 * 8 * 16 * 32


def test_the_simulator_gets_no_gate(tmp_path: Path) -> None:
    """Not by force either, and before anything has run."""
    backend = simulator()
    before = sum(backend.simulation.executed.values())
    for force in (False, True):
        with pytest.raises(Refused, match="simulator"):
            open_gate(backend, force, tmp_path / "references.json")
    assert sum(backend.simulation.executed.values()) == before


def test_the_reference_backend_gets_no_gate(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"device is 'reference', .* Give cpu, metal or cuda\."):
        open_gate(ReferenceBackend(), True, tmp_path / "references.json")


def test_a_gate_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its key names what the control depends on."""
    keys = []
    gate = Gate.__init__

    def spy(self: Gate, probes: list[Probe], *rest: Any) -> None:
        keys.extend(probe.key for probe in probes)
        gate(self, probes, *rest)

    monkeypatch.setattr(Gate, "__init__", spy)
    for threads in ("1", "2"):
        monkeypatch.setenv(THREADS_VARIABLE, threads)
        open_gate(CpuBackend(), False, tmp_path / "references.json")
    one, two = keys
    assert one != two and "1 thread)" in one.device and "2 threads" in two.device
    assert CpuBackend().isa in one.device
    assert "nn 1024×1024×1024" in one.control and one.driver == ""
    assert not (tmp_path / "references.json").exists()  # nothing was measured yet


@pytest.mark.parametrize(
    ("platform", "release", "told"),
    [
        ("Linux-6.8.12-mine-v6-x86_64-with-glibc2.39", "6.8.12-mine-v6", None),
        ("Linux-6.8-rc1-x86_64-with-glibc2.39", "6.8-rc1", None),
        ("macOS-14.5-arm64-arm-64bit", "23.5.0", "macOS-14.5-arm64-arm-64bit"),
        ("Odd-x-y", "x", "Odd-x-y"),
    ],
)
def test_a_system_is_called_without_the_name_of_its_build(
    monkeypatch: pytest.MonkeyPatch, platform: str, release: str, told: str | None
) -> None:
    monkeypatch.setattr(control.platform, "platform", lambda: platform)
    monkeypatch.setattr(control.platform, "release", lambda: release)
    found = control.machine(simulator()).system
    assert found == (told or "Linux-6.8-x86_64-with-glibc2.39")


def test_a_device_is_called_as_it_calls_itself() -> None:
    assert control.device_name(simulator()) == "KRNL Metal simulator"
    assert control.machine(simulator()).backend == "metal"
    assert control.driver(CpuBackend()) == ""

    class Driven(CpuBackend):
        driver = "570.1"

    assert control.machine(Driven()).driver == "570.1"
