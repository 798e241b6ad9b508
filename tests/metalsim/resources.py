"""What a simulated device holds: buffers, libraries, functions and pipelines."""
# ruff: noqa: N802

import ctypes
import mmap
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from . import build, device
from .names import NAMES, Labelled, MetalMisuseError, MetalObject, NSDictionary, NSError
from .source import SourceError

if TYPE_CHECKING:
    from .commands import Dispatch

CONSTANTS = NAMES["constants"]
SHARED, PRIVATE = CONSTANTS["MTLStorageModeShared"], CONSTANTS["MTLStorageModePrivate"]
# A function constant's type in Metal's source, in Metal's API, and in memory.
DATA_TYPES = {
    CONSTANTS[name]: (spelling, ctype)
    for name, spelling, ctype in (
        ("MTLDataTypeBool", "bool", ctypes.c_bool),
        ("MTLDataTypeInt", "int", ctypes.c_int32),
        ("MTLDataTypeUInt", "uint", ctypes.c_uint32),
        ("MTLDataTypeFloat", "float", ctypes.c_float),
        ("MTLDataTypeShort", "short", ctypes.c_int16),
        ("MTLDataTypeUShort", "ushort", ctypes.c_uint16),
    )
}
BY_SPELLING = {spelling: number for number, (spelling, _) in DATA_TYPES.items()}


@dataclass
class Simulation:
    """How the simulated device behaves, and what it has seen."""

    mode: str = "checked"  # or "fast": see build.py
    eager: bool = False  # run at commit, not when waited for
    flags: tuple[str, ...] = ()  # of the compiler
    seed: int = 0  # of the order of threads; 0: in order
    sum_order: int = 0  # of sums over lanes; see device.py
    flush_to_zero: bool = False  # denormal floats
    has_device: bool = True
    families: int = CONSTANTS["MTLGPUFamilyApple7"]  # this Apple family and all before it
    working_set: int = 16 << 30  # bytes
    largest_buffer: int = 8 << 30
    most_threads: int = 1024  # per threadgroup
    threadgroup_memory: int = 32 << 10
    reports: list[tuple[str, Any]] = field(default_factory=list)  # (dispatch's label, Report)
    counters: Counter[str] = field(default_factory=Counter)
    executed: Counter[str] = field(default_factory=Counter)  # launches, by function

    def run(self, dispatch: "Dispatch", label: str, fatal: Mapping[str, int]) -> Any:
        """Runs a dispatch and notes what happened; returns a report that a GPU would not survive,
        or None."""
        pipeline = dispatch.pipeline
        result = pipeline._library.launch(
            pipeline._name,
            {
                index: bound if isinstance(bound, bytes) else (bound[0]._memory, bound[1])
                for index, bound in dispatch.arguments.items()
            },
            dispatch.groups,
            dispatch.threads,
            constants=pipeline._constants,
            threadgroup_bytes=dispatch.threadgroup_bytes or None,
            threads_total=dispatch.counts_threads,
            seed=self.seed,
            sum_order=self.sum_order,
            flush_to_zero=self.flush_to_zero,
        )
        self.executed[pipeline._name] += 1
        self.counters.update(result.counters)
        self.reports += [(label, report) for report in result.reports]
        return next((report for report in result.reports if report.kind in fatal), None)

    def expect_clean(self) -> None:
        """Fails if a check reported anything."""
        lines = [f"{label}: {r.kind}: {r.message} at {r.location}" for label, r in self.reports]
        assert not lines, "\n".join([f"{len(lines)} reports", *lines[:10]])


class Contents:
    """What PyObjC makes of a pointer to memory of unknown length (objc.varlist)."""

    def __init__(self, memory: np.ndarray):
        self._memory = memory

    def as_buffer(self, count: int) -> memoryview:
        # PyObjC does not look at the length either; but then a program reads whatever lies there.
        if count > self._memory.size:
            raise MetalMisuseError(f"{count} bytes of a buffer of {self._memory.size}.")
        return memoryview(self._memory[:count])


class SimBuffer(Labelled):
    class_name = "MTLBuffer"

    def __init__(self, owner: Any, memory: device.Buffer, length: int, options: int):
        self._device, self._memory, self._length = owner, memory, length
        self._options = options
        if self.storageMode() not in (SHARED, PRIVATE):
            raise MetalMisuseError(f"Storage mode {self.storageMode()}: use shared or private.")

    def device(self) -> Any:
        return self._device

    def length(self) -> int:
        return self._length

    def allocatedSize(self) -> int:
        return -(-self._length // mmap.PAGESIZE) * mmap.PAGESIZE

    def resourceOptions(self) -> int:
        return self._options

    def storageMode(self) -> int:
        return self._options >> CONSTANTS["MTLResourceStorageModeShift"] & 0xF

    def contents(self) -> Contents | None:
        return None if self.storageMode() == PRIVATE else Contents(self._memory.contents)


class FunctionConstantValues(MetalObject):
    class_name = "MTLFunctionConstantValues"

    def __init__(self) -> None:
        self._values: dict[int, tuple[int, Any]] = {}  # index -> (data type, value)

    def setConstantValue_type_atIndex_(self, address: int, kind: int, index: int) -> None:
        """PyObjC is told nothing of this pointer, and takes an address as a number."""
        if not isinstance(address, int):
            raise ValueError(f"depythonifying 'pointer', got '{type(address).__name__}'")
        if kind not in DATA_TYPES:
            raise MetalMisuseError(f"The simulator has no function constants of data type {kind}.")
        self._values[index] = (kind, DATA_TYPES[kind][1].from_address(address).value)

    def reset(self) -> None:
        self._values.clear()


class FunctionConstant(MetalObject):
    class_name = "MTLFunctionConstant"

    def __init__(self, constant: Any):
        self._constant = constant

    def name(self) -> str:
        return self._constant.name

    def type(self) -> int:
        return BY_SPELLING[self._constant.type]

    def index(self) -> int:
        return int(self._constant.index)

    def required(self) -> bool:
        return self._constant.needed


class SimLibrary(Labelled):
    class_name = "MTLLibrary"

    def __init__(self, owner: Any, library: device.Library):
        self._device, self._library = owner, library

    def device(self) -> Any:
        return self._device

    def functionNames(self) -> tuple[str, ...]:
        return tuple(self._library.functions)

    def newFunctionWithName_(self, name: str) -> "SimFunction | None":
        return SimFunction(self._library, name, None) if name in self.functionNames() else None

    def newFunctionWithName_constantValues_error_(
        self, name: str, values: FunctionConstantValues, error: None
    ) -> "tuple[SimFunction | None, NSError | None]":
        if name not in self.functionNames():
            return None, _library_error(f"no function '{name}'")
        function = SimFunction(self._library, name, values._values)
        problem = function._problem()
        return (None, _library_error(problem)) if problem else (function, None)


class SimFunction(Labelled):
    class_name = "MTLFunction"

    def __init__(
        self, library: device.Library, name: str, values: dict[int, tuple[int, Any]] | None
    ):
        self._library, self._name, self._values = library, name, values

    def name(self) -> str:
        return self._name

    def functionType(self) -> int:
        return 3  # MTLFunctionTypeKernel

    def functionConstantsDictionary(self) -> NSDictionary:
        used = self._used()
        return NSDictionary({constant.name: FunctionConstant(constant) for constant in used})

    def _used(self) -> list[Any]:
        return self._library.constants_of(self._name)

    def _problem(self) -> str | None:
        """Why these values do not specialise the function."""
        values = self._values or {}
        for constant in self._used():
            index = int(constant.index)
            if index not in values:
                if constant.needed:
                    return f"function constant '{constant.name}' (index {index}) has no value"
            elif values[index][0] != BY_SPELLING[constant.type]:
                given = DATA_TYPES[values[index][0]][0]
                return f"function constant '{constant.name}' is {constant.type}, not {given}"
        return None


class SimPipeline(MetalObject):
    class_name = "MTLComputePipelineState"

    def __init__(self, owner: Any, function: SimFunction, simulation: Simulation):
        self._device, self._simulation = owner, simulation
        self._library, self._name = function._library, function._name
        used = {int(constant.index) for constant in function._used()}
        values = function._values or {}
        self._constants = {i: value for i, (_, value) in values.items() if i in used}
        self._resources = self._library.resources(self._name, self._constants)

    def maxTotalThreadsPerThreadgroup(self) -> int:
        return min(self._simulation.most_threads, self._resources.max_threads or 1024)

    def threadExecutionWidth(self) -> int:
        return 32

    def staticThreadgroupMemoryLength(self) -> int:
        return self._resources.threadgroup_bytes

    def _missing(self, buffers: Collection[int], threadgroup: Collection[int]) -> list[str]:
        """Names of the arguments that nothing is bound for."""
        return self._library.missing(self._name, self._constants, buffers, threadgroup)


def _library_error(text: str) -> NSError:
    return NSError("MTLLibraryErrorDomain", CONSTANTS["MTLLibraryErrorCompileFailure"], text)


@cache
def _library(text: str, mode: str, flags: tuple[str, ...]) -> device.Library:
    return build.library(text, mode, flags)


def compile_source(
    text: str, simulation: Simulation
) -> tuple[device.Library | None, NSError | None]:
    try:
        return _library(text, simulation.mode, simulation.flags), None
    except (SourceError, build.CompileError) as error:
        return None, _library_error(str(error))
