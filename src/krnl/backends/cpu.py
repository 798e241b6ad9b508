"""The CPU engine: the plan becomes an array of records, and a replay is one call into C++."""

import ctypes
import mmap
import os
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

from krnl.backends.base import Limits, Memory, Roof
from krnl.dtypes import BF16, F16, F32, I32
from krnl.errors import BackendError, ConfigError
from krnl.kernels.cpu.table import TABLE, THREAD_SCRATCH
from krnl.plan.arena import Layout, Plan
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.lower import Dispatch, Table
from krnl.plan.step import Argument

ISA_VARIABLE = "KRNL_CPU_ISA"
THREADS_VARIABLE = "KRNL_THREADS"
ISAS = ("plain", "avx2", "avx512", "avx512bf16")

# The layouts of Argument and Dispatch in kernel.h.
_ARGUMENT = np.dtype([("data", "u8"), ("shape", "i8", 3), ("type", "i4"), ("dimensions", "i4")])
_DISPATCH = np.dtype(
    [
        ("kernel", "u8"),
        ("arguments", "u8"),
        ("attributes", "u8"),
        ("workspace", "u8"),
        ("workspace_bytes", "i8"),
        ("argument_count", "i4"),
        ("group", "i4"),
    ]
)
_TYPE_CODES = {F32: 0, F16: 1, BF16: 2, I32: 3}


# A library's threads serve one caller at a time.
_POOL = threading.Lock()


def library_path(isa: str) -> Path:
    """The compiled kernels of an instruction set."""
    return Path(__file__).parent.parent / "kernels" / "cpu" / f"krnl_cpu_{isa}.so"


@cache
def _library(isa: str) -> ctypes.CDLL:
    path = library_path(isa)
    if not path.exists():
        raise BackendError(
            f"The CPU kernels for '{isa}' are not where they should be ({path}). Install KRNL "
            "again."
        )
    library = ctypes.CDLL(str(path))
    library.krnl_find.restype = ctypes.c_void_p
    library.krnl_best_isa.restype = ctypes.c_char_p
    library.krnl_run.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    for name in ("krnl_peak_flops_f32", "krnl_peak_flops_bf16", "krnl_peak_bytes"):
        getattr(library, name).restype = ctypes.c_double
    library.krnl_threads.restype = ctypes.c_int
    os.register_at_fork(after_in_child=library.krnl_forget_threads)
    library.krnl_time.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    return library


def available_isas() -> tuple[str, ...]:
    """The instruction sets that this processor runs, the most capable last."""
    best = _library("plain").krnl_best_isa().decode()
    return ISAS[: ISAS.index(best) + 1]


def _chosen_isa() -> str:
    isas = available_isas()
    isa = os.environ.get(ISA_VARIABLE) or isas[-1]
    if isa not in isas:
        raise ConfigError(f"{ISA_VARIABLE} is '{isa}'; this processor can run {', '.join(isas)}.")
    return isa


def usable_cores() -> int:
    """Those that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _chosen_threads() -> int:
    text = os.environ.get(THREADS_VARIABLE)
    if text is None:
        return usable_cores()
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1024):
        raise ConfigError(
            f"{THREADS_VARIABLE} is '{text}'; it must be a number of threads from 1 to 1024."
        )
    return int(text)


class CpuMemory:
    """Anonymous blocks, and checkpoint files mapped read-only."""

    def __init__(self, layout: Layout):
        self._layout = layout
        self._blocks = [_map(b.file) if b.file else _reserve(b.nbytes) for b in layout.blocks]

    def poison(self) -> None:
        """Fills the temps with NaN, so that a kernel which reads what nothing wrote is found
        out."""
        for block, memory in zip(self._layout.blocks, self._blocks, strict=True):
            if block.kind is Kind.TEMP:
                memory[:] = 0xFF

    def view(self, buffer: Buffer) -> np.ndarray:
        """The buffer's own memory, shaped."""
        place = self._layout.place(buffer)
        return np.ndarray(buffer.shape, buffer.dtype.numpy, self._blocks[place.block], place.offset)

    def address(self, buffer: Buffer) -> int:
        place = self._layout.place(buffer)
        return int(self._blocks[place.block].ctypes.data) + place.offset if buffer.nbytes else 0

    def write(self, buffer: Buffer, values: np.ndarray) -> None:
        self.view(buffer)[...] = values

    def read(self, buffer: Buffer) -> np.ndarray:
        return self.view(buffer).copy()


def _reserve(nbytes: int) -> np.ndarray:
    # Private pages in large units where the system gives them: the arena is touched whole, and
    # reused every step.
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # some kernels are built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _map(path: Path) -> np.ndarray:
    with open(path, "rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


class CpuProgram:
    """Dispatch records, kept alive with everything that they point to."""

    def __init__(self, library: ctypes.CDLL, plan: Plan, memory: CpuMemory):
        self._library = library
        self._memory = memory
        self._records = np.zeros(len(plan.dispatches), _DISPATCH)
        self._parts: list[np.ndarray] = []
        for record, dispatch in zip(self._records, plan.dispatches, strict=True):
            self._fill(record, dispatch)

    def run(self) -> None:
        with _POOL:
            self._library.krnl_run(self._records.ctypes.data, len(self._records))

    def time(self) -> list[float]:
        seconds = np.zeros(len(self._records))
        with _POOL:
            self._library.krnl_time(
                self._records.ctypes.data, len(self._records), seconds.ctypes.data
            )
        return [float(s) for s in seconds]

    def _fill(self, record: np.void, dispatch: Dispatch) -> None:
        call = dispatch.call
        kernel = self._library.krnl_find(dispatch.row.name.encode())
        if not kernel:
            raise BackendError(
                f"{call.label}: the CPU library has no kernel '{dispatch.row.name}'."
            )
        slots: list[Buffer | None] = []
        for parameter, argument in zip(
            call.op.inputs + call.op.outputs, call.inputs + call.outputs, strict=True
        ):
            slots += _slots(argument, call.group if parameter.group else 1)
        arguments = np.zeros(len(slots), _ARGUMENT)
        arguments["shape"] = 1
        for entry, buffer in zip(arguments, slots, strict=True):
            if buffer is not None:
                entry["data"] = self._memory.address(buffer)
                entry["shape"][: len(buffer.shape)] = buffer.shape
                entry["type"] = _TYPE_CODES[buffer.dtype]
                entry["dimensions"] = len(buffer.shape)
        attributes = np.array([call.attributes[name] for name in call.op.attributes], np.float64)
        self._parts += [arguments, attributes]
        record["kernel"] = kernel
        record["arguments"] = arguments.ctypes.data
        record["attributes"] = attributes.ctypes.data
        if dispatch.workspace is not None:
            record["workspace"] = self._memory.address(dispatch.workspace)
            record["workspace_bytes"] = dispatch.workspace.nbytes
        record["argument_count"] = len(slots)
        record["group"] = call.group


def _slots(argument: Argument, count: int) -> list[Buffer | None]:
    if argument is None:
        return [None] * count
    return list(argument) if isinstance(argument, tuple) else [argument]


class CpuBackend:
    """Computes on this machine's processor cores. `KRNL_CPU_ISA` forces an instruction set,
    `KRNL_THREADS` the number of threads (all cores that this process may use)."""

    name = "cpu"
    kernels: Table = TABLE

    def __init__(self) -> None:
        self.isa = _chosen_isa()
        wanted = _chosen_threads()
        self._library = _library(self.isa)
        with _POOL:
            threads = int(self._library.krnl_threads(wanted))
        if threads < wanted:
            raise BackendError(
                f"The system grants {threads} of {wanted} threads. Set {THREADS_VARIABLE}."
            )
        native = (BF16, F32) if self.isa == "avx512bf16" else (F32, BF16)
        self.limits = Limits(
            memory=_physical_memory(),
            largest_block=2**62,
            scratch=threads * THREAD_SCRATCH,
            activations=native,
            threads=threads,
            mapped_alignment=1,
        )

    def measure_roof(self) -> Roof:
        """Takes about half a second of all threads."""
        with _POOL:
            flops = {
                F32: self._library.krnl_peak_flops_f32(),
                BF16: self._library.krnl_peak_flops_bf16(),
            }
            return Roof(flops, self._library.krnl_peak_bytes())

    def allocate(self, layout: Layout) -> CpuMemory:
        return CpuMemory(layout)

    def compile(self, plan: Plan, memory: Memory) -> CpuProgram:
        assert isinstance(memory, CpuMemory)
        return CpuProgram(self._library, plan, memory)


def _physical_memory() -> int:
    """Bytes of this machine, or of the container that the process is confined to."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        return min(physical, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return physical
