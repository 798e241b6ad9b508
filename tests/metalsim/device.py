"""The simulated device: its buffers, compiled libraries and launches. Drives engine/ by ctypes.

    library = build.library("rows.metal", "checked")
    y = Buffer(4096)
    run = library.launch("scale", [Buffer(x), y, np.float32(2)], groups=4, threads=256)
    run.reports     # what the checks found; empty when all is well
    y.view(np.float32)

build.py makes a Library of a compiled source. The library has a table of its own that says which
kernels and constants there are (engine/engine.h, SimLibrary).
"""

import ctypes
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from . import abi
from .lines import LineTables
from .source import Source

Size = int | Sequence[int]  # threads or threadgroups in x, y, z
LARGEST = 1024  # threads of a threadgroup
SECONDS = 120  # a checked launch may take: a kernel that has lost its way may never end


class Buffer:
    """Device memory in a slot of its own, between pages that nothing may touch.

    `source` is an array, which is copied, or a number of bytes, which are zero. Kernels that write
    to a read-only buffer are reported or, in fast builds, fault.
    """

    def __init__(self, source: np.ndarray | int, name: str = "", readonly: bool = False) -> None:
        if isinstance(source, (int, np.integer)):
            size, content = int(source), None
        else:
            content = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
            size = content.size
        why = ctypes.c_char_p()
        address = abi.engine().sim_allocate(size, name.encode(), ctypes.byref(why))
        self._memory = _Memory(address, size, name, why)
        self.contents = np.asarray(self._memory)
        if content is not None:
            self.contents[:] = content
        if readonly:
            abi.engine().sim_protect(address, 1)

    @classmethod
    def adopt(cls, memory: np.ndarray, name: str = "") -> "Buffer":
        """A buffer that is `memory` itself, which must lie in one piece. Without guard pages: only
        checked builds see an overrun."""
        self = cls.__new__(cls)
        self.contents = memory.reshape(-1).view(np.uint8)
        size, why = self.contents.size, ctypes.c_char_p()
        address = abi.engine().sim_adopt(
            self.contents.ctypes.data, size, name.encode(), ctypes.byref(why)
        )
        self._memory = _Memory(address, size, name, why)
        return self

    def view(self, dtype: Any, shape: Any = None) -> np.ndarray:
        """The memory itself, as elements of `dtype`."""
        elements: np.ndarray = self.contents.view(dtype)
        return elements if shape is None else elements.reshape(shape)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.contents.size

    @property
    def address(self) -> int:
        return self._memory.address


class _Memory:
    """What the engine has allocated. Arrays over it keep it alive."""

    def __init__(self, address: int | None, size: int, name: str, why: ctypes.c_char_p) -> None:
        self.address = 0
        if not address:
            reason = (why.value or b"").decode()
            raise MemoryError(f"No buffer '{name}' of {size} bytes: {reason}.")
        self.address = address
        self.__array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
        }

    def __del__(self) -> None:
        if self.address:
            abi.engine().sim_free(self.address)


@dataclass(frozen=True)
class Report:
    """Something wrong in a launch. `kind` is one of abi.KINDS. Threads are linear indices within
    their threadgroup, threadgroups within the grid; -1: the launch as a whole."""

    kind: str
    message: str
    location: str  # "rows.metal:79", or "" where it is not known
    thread: int
    threadgroup: int
    other: str  # where and by whom the access was made that this one collides with, or ""
    times: int = 1  # that it happened; only the first one is described

    def __str__(self) -> str:
        who = (
            f", thread {self.thread} of threadgroup {self.threadgroup}" if self.thread >= 0 else ""
        )
        other = f" ({self.other})" if self.other else ""
        return f"{self.kind} at {self.location or '?'}{who}: {self.message}{other}"


@dataclass(frozen=True)
class Run:
    """What a launch did. Counters are those of engine/host.h and engine/engine.h; accesses are
    counted in checked builds only."""

    counters: dict[str, int]
    reports: list[Report]


@dataclass(frozen=True)
class Resources:
    """What a kernel has used in the launches so far; zeros where there was none."""

    threadgroup_bytes: int = 0  # arrays declared in the kernel, and [[threadgroup(n)]] arguments
    accumulators: int = 0  # simdgroup matrices that products were added to
    matrices: int = 0  # and those loaded or filled (checked builds only)
    max_threads: int = LARGEST


@dataclass(frozen=True)
class Constant:
    """A function constant. A launch need not set it unless it is `needed`."""

    name: str
    type: str
    index: int
    needed: bool


class Library:
    """One compiled source: the shared library at `path`, what the source pass found in the source,
    and the engine's library to run it with."""

    def __init__(self, path: Path, source: Source, mode: str, engine: Path) -> None:
        abi.load(engine)  # first: it has the functions that the library needs
        self.path, self.source, self.mode = path, source, mode
        self._code = ctypes.CDLL(str(path))
        table = self._table = abi.SimLibrary.in_dll(self._code, "sim_library")
        self._kernels = {k.name.decode(): k for k in table.kernels[: table.kernel_count]}
        self._constants = {c.index: c for c in table.constants[: table.constant_count]}
        self._lines = LineTables(path)
        self._used: dict[Any, Resources] = {}

    @property
    def functions(self) -> list[str]:
        """Host names."""
        return list(self._kernels)

    @property
    def constants(self) -> dict[str, int]:
        """Function constants: name -> index."""
        return {c.name.decode(): index for index, c in self._constants.items()}

    def constants_of(self, function: str) -> list[Constant]:
        """The function constants that a function may read."""
        self._kernel(function)
        used = next(f.constants for f in self.source.functions if f.host_name == function)
        needed = {c.name: c.needed for c in self.source.constants}
        return [
            Constant(name, c.type.decode(), index, needed[name])
            for index, c in self._constants.items()
            if (name := c.name.decode()) in used
        ]

    def missing(
        self,
        function: str,
        constants: Mapping[int | str, Any] | None,
        buffers: Collection[int],
        threadgroup: Collection[int] | None = None,
    ) -> list[str]:
        """Names of the arguments that this specialisation declares and nothing is bound for;
        `threadgroup` arguments count when their indices are given."""
        values = _ConstantValues(self, constants)
        abi.engine().sim_specialise(ctypes.byref(self._table), *values.arguments)
        kernel = self._kernel(function)
        bound = [set(buffers), None if threadgroup is None else set(threadgroup)]
        return [
            argument.name.decode()
            for argument in kernel.arguments[: kernel.argument_count]
            if not argument.exists or argument.exists[0]
            if (indices := bound[argument.kind]) is not None and argument.index not in indices
        ]

    def resources(
        self, function: str, constants: Mapping[int | str, Any] | None = None
    ) -> Resources:
        kernel = self._kernel(function)
        unknown = Resources(max_threads=kernel.max_threads or LARGEST)
        return self._used.get((function, _ConstantValues(self, constants).key), unknown)

    def launch(
        self,
        function: str,
        arguments: Sequence[Any] | Mapping[int, Any],
        groups: Size,
        threads: Size,
        constants: Mapping[int | str, Any] | None = None,
        threadgroup_bytes: Mapping[int, int] | None = None,
        threads_total: bool = False,
        seed: int = 0,
        workers: int | None = None,
        sum_order: int = 0,
        flush_to_zero: bool = False,
        granularity: int = 2,
        seconds: int | None = None,
    ) -> Run:
        """Runs a kernel to its end, over `groups` threadgroups of `threads` threads.

        arguments        by buffer index: a Buffer, (Buffer, byte offset), bytes or a NumPy value,
                         of which the kernel gets a read-only copy, or None
        constants        function constants, by index or name
        threads_total    `groups` counts threads instead; threadgroups at the edges are smaller
        seed             0: lanes, simdgroups and threadgroups in order; else shuffled (1: only
                         backwards, and lanes shuffled)
        workers          OS threads; by default up to one per core, as there is work for them
        sum_order        0 to 31: another order of sums over lanes and within matrix products
        flush_to_zero    denormal floats are zero
        granularity      bytes of memory that the race check tells apart: 2, or 1 for kernels whose
                         threads write neighbouring bytes
        seconds          a launch may take, then it is a "deadlock"; 0: any time
        """
        kernel = self._kernel(function)
        grid, size = _three(groups), _three(threads)
        most = kernel.max_threads or LARGEST
        if not 0 < prod(size) <= min(most, LARGEST):
            raise ValueError(f"{function} takes 1 to {most} threads in a threadgroup, got {size}.")
        if not threads_total:
            grid = [g * s for g, s in zip(grid, size, strict=True)]
        values = _ConstantValues(self, constants)
        launch, kept = abi.Launch(), []
        launch.library = ctypes.pointer(self._table)
        launch.kernel = ctypes.pointer(kernel)
        given = arguments if isinstance(arguments, Mapping) else dict(enumerate(arguments))
        for index, value in given.items():
            if value is None:
                continue
            buffer, offset = _as_buffer(value, f"argument {index}")
            kept.append(buffer)
            launch.buffers[index] = buffer.address + offset
            launch.buffer_bytes[index] = buffer.size - offset
        for index, length in (threadgroup_bytes or {}).items():
            launch.threadgroup_bytes[index] = length
        launch.constant_indices, launch.constant_values, launch.constant_count = values.arguments
        launch.threads_per_grid[:], launch.threads_per_threadgroup[:] = grid, size
        launch.workers = workers or _cores()
        launch.at_once = workers is not None
        launch.seed, launch.sum_order, launch.granularity = seed, sum_order, granularity
        launch.flush_to_zero = flush_to_zero
        launch.time_limit = (
            (SECONDS if self.mode == "checked" else 0) if seconds is None else seconds
        )
        abi.engine().sim_launch(ctypes.byref(launch))
        counters = dict(zip(abi.COUNTERS, launch.counters, strict=True))
        self._note_resources(function, values.key, launch, counters)
        return Run(counters, [self._report(r) for r in launch.reports[: launch.report_count]])

    def _kernel(self, function: str) -> Any:
        if function not in self._kernels:
            known = ", ".join(self.functions)
            raise ValueError(f"{self.path.name} has no kernel '{function}'; it has {known}.")
        return self._kernels[function]

    def _note_resources(
        self, function: str, key: Any, launch: Any, counters: dict[str, int]
    ) -> None:
        before = self._used.get((function, key), Resources())
        self._used[function, key] = Resources(
            max(before.threadgroup_bytes, counters["threadgroup_memory"]),
            max(before.accumulators, launch.accumulators),
            max(before.matrices, launch.matrices),
            launch.kernel.contents.max_threads or LARGEST,
        )

    def _report(self, found: Any) -> Report:
        other = []
        if found.other_address:
            other.append(self._place(found.other_address))
        if found.other_thread != abi.NOBODY:
            other.append(f"thread {found.other_thread}")
            if found.other_threadgroup not in (abi.NOBODY, found.threadgroup):
                other[-1] += f" of threadgroup {found.other_threadgroup}"
        location = found.location.decode()
        return Report(
            abi.KINDS[found.kind],
            found.message.decode(),
            Path(location).name if location else self._place(found.address),
            -1 if found.thread == abi.NOBODY else found.thread,
            -1 if found.threadgroup == abi.NOBODY else found.threadgroup,
            " ".join(other),
            found.times,
        )

    def _place(self, address: int) -> str:
        """Of the instruction before an address of code, which may lie outside the library."""
        base = _image_base(ctypes.addressof(self._table))
        if not address or _image_base(address) != base:
            return ""
        return self._lines.place(address - 1, base)


class _ConstantValues:
    """Function constants of a launch, as the engine wants them."""

    def __init__(self, library: Library, given: Mapping[int | str, Any] | None) -> None:
        names = library.constants
        values: dict[int, Any] = {}
        for key, value in (given or {}).items():
            index = names.get(key, -1) if isinstance(key, str) else key
            if index not in library._constants:
                known = ", ".join(f"{name} ({index})" for name, index in names.items()) or "none"
                raise ValueError(
                    f"{library.path.name} has no function constant {key}; it has {known}."
                )
            values[index] = abi.constant(library._constants[index], value)
        self.key = tuple((index, bytes(value)) for index, value in sorted(values.items()))
        self._kept = values
        addresses = [ctypes.addressof(value) for value in values.values()]
        self.arguments = (
            (ctypes.c_int32 * len(values))(*values.keys()),
            (ctypes.c_void_p * len(values))(*addresses),
            len(values),
        )


@cache
def _image_base(address: int) -> int:
    return int(abi.engine().sim_image_base(address))


@cache
def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _three(size: Size) -> list[int]:
    sizes = [int(size)] if isinstance(size, (int, np.integer)) else [int(s) for s in size]
    return sizes + [1] * (3 - len(sizes))


def _as_buffer(value: Any, name: str) -> tuple[Buffer, int]:
    """The buffer and byte offset that an argument of a launch stands for."""
    if isinstance(value, Buffer):
        return value, 0
    if isinstance(value, tuple):
        buffer, offset = value
        if not 0 <= offset <= buffer.size:
            raise ValueError(f"{name}: offset {offset} is not in a buffer of {buffer.size} bytes.")
        return buffer, int(offset)
    if isinstance(value, (bytes, bytearray)):
        return Buffer(np.frombuffer(value, np.uint8), name, readonly=True), 0
    if isinstance(value, (np.generic, np.ndarray)):
        return Buffer(np.asarray(value), name, readonly=True), 0
    raise TypeError(f"{name}: {type(value).__name__}; give a Buffer, bytes or a NumPy value.")
