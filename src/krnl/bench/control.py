"""The control product of a backend, and the gate that it guards."""

import platform
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from krnl import __version__
from krnl.backends.base import Backend
from krnl.backends.cpu import CpuBackend
from krnl.bench.condition import watch
from krnl.bench.gate import Gate, refuse_simulator
from krnl.bench.products import Product
from krnl.bench.reference import Key, ReferenceStore, default_path, kernel_hash, this_system
from krnl.bench.results import Machine
from krnl.errors import ConfigError

VERSION = 1  # of the control: raised when it measures something else
CPU_SIZE, GPU_SIZE = 1024, 2048


def open_gate(backend: Backend, force: bool, path: Path | None = None) -> Gate:
    """The gate of a backend. Refused, before anything runs, if it is simulated. `path`: where
    references are kept, if not in the user's cache folder."""
    if backend.name == "reference":
        raise ConfigError("device is 'reference', whose times say nothing; give another.")
    name = device_name(backend)
    refuse_simulator(name)
    product = control_product(backend)
    key = Key(
        name, this_system(), driver(backend), kernel_hash(backend.name), f"{product}, {VERSION}"
    )
    return Gate(
        key,
        ReferenceStore(path or default_path()),
        control(product, backend),
        watch,
        time.perf_counter,
        lambda: datetime.now(timezone.utc),
        force,
    )


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
        backend.name, device_name(backend), platform.platform(), driver(backend), __version__
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
