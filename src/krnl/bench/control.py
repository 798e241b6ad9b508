"""The control product of a backend, and the gate in which it tells how fast the device is."""

import hashlib
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

import krnl.kernels
from krnl import __version__
from krnl.backends.base import Backend
from krnl.backends.cpu import CpuBackend, library_path
from krnl.bench.condition import watch
from krnl.bench.gate import Gate, Probe, refuse_simulator
from krnl.bench.products import Product
from krnl.bench.reference import Key, ReferenceStore, default_path, this_system
from krnl.bench.results import Machine
from krnl.errors import ConfigError

VERSION = 1  # of the control: raised when it measures something else
CPU_SIZE, GPU_SIZE = 1024, 2048
SOURCES = (".metal", ".cu", ".h")  # of GPUs' kernels


def open_gate(backend: Backend, force: bool, path: Path | None = None) -> Gate:
    """The gate of a backend. Refused, before anything runs, if it is simulated. `path`: where
    references are kept, if not in the user's cache folder."""
    if backend.name == "reference":
        raise ConfigError(
            "device is 'reference', whose times say nothing: it computes definitions. Give cpu, "
            "metal or cuda."
        )
    refuse_simulator(device_name(backend))
    store = ReferenceStore(path or default_path())
    if not force:
        store.check_writable()
    return Gate(
        [probe(backend)],
        store,
        watch,
        time.perf_counter,
        lambda: datetime.now(timezone.utc),
        force,
    )


def with_cpu(gate: Gate, backend: Backend) -> Gate:
    """The gate of `backend`, with a control on the CPU too: for a table that has contestants on
    both."""
    return gate if backend.name == "cpu" else gate.beside(probe(CpuBackend()))


def probe(backend: Backend) -> Probe:
    """The control of a backend, ready to run, and what its reference is kept under."""
    product = control_product(backend)
    key = Key(
        device_name(backend),
        this_system(),
        driver(backend),
        kernel_hash(backend),
        f"{product}, {VERSION}",
    )
    return Probe(backend.name, key, control(product, backend))


def control_product(backend: Backend) -> Product:
    """nn in the type that the backend prefers."""
    size = CPU_SIZE if backend.name == "cpu" else GPU_SIZE
    activation = backend.limits.activations[0]
    return Product("nn", size, size, size, activation, activation)


def control(product: Product, backend: Backend) -> Callable[[], float]:
    """Runs once; operations a second."""
    run = product.prepare(backend)
    return lambda: product.flops / run()


def machine(backend: Backend) -> Machine:
    """For a result."""
    return Machine(
        backend.name,
        device_name(backend),
        _system(),
        driver(backend),
        __version__,
        kernel_hash(backend),
        backend.limits.threads,
    )


def device_name(backend: Backend) -> str:
    """As the system calls it; the CPU with all that its speed depends on."""
    if isinstance(backend, CpuBackend):
        threads = backend.limits.threads
        return f"{_processor()} ({backend.isa}, {threads} thread{'s' * (threads > 1)})"
    return str(getattr(backend, "device_name", backend.name))


def driver(backend: Backend) -> str:
    """Its version, where there is one beside the operating system."""
    return str(getattr(backend, "driver", ""))


def kernel_hash(backend: Backend) -> str:
    """Of what runs: the library that the CPU's kernels are compiled into, or the sources that a
    GPU's are compiled from. How they are launched is not in it: a control that is launched in
    another way has another VERSION."""
    digest = hashlib.sha256()
    for path in _kernel_files(backend):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _kernel_files(backend: Backend) -> list[Path]:
    if isinstance(backend, CpuBackend):
        return [library_path(backend.isa)]
    folder = Path(krnl.kernels.__file__).parent / backend.name
    return sorted(path for path in folder.rglob("*") if path.suffix in SOURCES)


def _system() -> str:
    """As Python calls it; of the kernel's release two numbers, without the name of a build."""
    release = platform.release()
    numbers = re.match(r"\d+\.\d+", release)
    return platform.platform().replace(release, numbers[0] if numbers else release)


def _processor() -> str:
    """The model of this machine's processor."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
