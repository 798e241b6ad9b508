"""PyObjC's module `Metal` on the simulator: what computing on Apple silicon needs of it.

`metal_module` makes a module to put in the place of the real one. Names come from metal_names.json:
constants have Metal's values, and a name that Metal does not have raises AttributeError.
"""
# ruff: noqa: N802

import mmap
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from . import device
from .commands import CommandQueue, expect
from .names import NAMES, MetalObject, NSError, Properties
from .resources import (
    PRIVATE,
    FunctionConstantValues,
    SimBuffer,
    SimFunction,
    SimLibrary,
    SimPipeline,
    Simulation,
    compile_source,
)

DEVICE_NAME = "KRNL Metal simulator"
MOST_COMMAND_BUFFERS = 64  # of a queue, if it is not told otherwise
STORAGE_SHIFT = NAMES["constants"]["MTLResourceStorageModeShift"]


class MTLSize(NamedTuple):
    width: int
    height: int
    depth: int


class CompileOptions(Properties):
    class_name = "MTLCompileOptions"


class CommandBufferDescriptor(Properties):
    class_name = "MTLCommandBufferDescriptor"


class Device(MetalObject):
    class_name = "MTLDevice"

    def __init__(self, simulation: Simulation):
        self._simulation = simulation

    def name(self) -> str:
        return DEVICE_NAME

    def registryID(self) -> int:
        return 1

    def hasUnifiedMemory(self) -> bool:
        return True

    def maxBufferLength(self) -> int:
        return self._simulation.largest_buffer

    def recommendedMaxWorkingSetSize(self) -> int:
        return self._simulation.working_set

    def maxThreadsPerThreadgroup(self) -> MTLSize:
        return MTLSize(*[self._simulation.most_threads] * 3)

    def maxThreadgroupMemoryLength(self) -> int:
        return self._simulation.threadgroup_memory

    def supportsFamily_(self, family: int) -> bool:
        constants = NAMES["constants"]
        if family in (constants["MTLGPUFamilyMac2"], constants["MTLGPUFamilyMetal3"]):
            return True
        return constants["MTLGPUFamilyApple1"] <= family <= self._simulation.families

    def newBufferWithLength_options_(self, length: int, options: int) -> SimBuffer | None:
        expect(length > 0, "A buffer of no bytes.")
        if length > self._simulation.largest_buffer:
            return None
        return SimBuffer(self, device.Buffer(length), length, options)

    def newBufferWithBytes_length_options_(
        self, content: Any, length: int, options: int
    ) -> SimBuffer | None:
        buffer = self.newBufferWithLength_options_(length, options)
        if buffer is not None:
            buffer._memory.contents[:] = _bytes(content, length)
        return buffer

    def newBufferWithBytesNoCopy_length_options_deallocator_(
        self, content: Any, length: int, options: int, deallocator: None
    ) -> SimBuffer | None:
        memory = _bytes(content, length)
        address = memory.ctypes.data
        expect(options >> STORAGE_SHIFT & 0xF != PRIVATE, "Host memory cannot be private.")
        expect(address % mmap.PAGESIZE == 0, f"Address {address:#x} is no start of a page.")
        expect(length % mmap.PAGESIZE == 0, f"{length} bytes are no whole pages.")
        expect(length > 0, "A buffer of no bytes.")
        if length > self._simulation.largest_buffer:
            return None
        return SimBuffer(self, device.Buffer.adopt(memory), length, options)

    def newLibraryWithSource_options_error_(
        self, source: str, options: CompileOptions | None, error: None
    ) -> tuple[SimLibrary | None, NSError | None]:
        library, problem = compile_source(source, self._simulation)
        return (SimLibrary(self, library) if library else None), problem

    def newComputePipelineStateWithFunction_error_(
        self, function: SimFunction, error: None
    ) -> tuple[SimPipeline | None, NSError | None]:
        problem = function._problem()
        if problem:
            return None, NSError("MTLLibraryErrorDomain", 3, problem)
        return SimPipeline(self, function, self._simulation), None

    def newCommandQueue(self) -> CommandQueue:
        return self.newCommandQueueWithMaxCommandBufferCount_(MOST_COMMAND_BUFFERS)

    def newCommandQueueWithMaxCommandBufferCount_(self, count: int) -> CommandQueue:
        return CommandQueue(self, self._simulation, count)


def _bytes(content: Any, length: int) -> np.ndarray:
    """The memory of an argument that PyObjC takes as a buffer; it looks at the length itself."""
    memory = np.frombuffer(content, np.uint8)
    if length > memory.size:
        raise ValueError(f"Requesting buffer of {length}, have buffer of {memory.size}")
    return memory[:length]


CLASSES = {
    cls.class_name: cls for cls in (CompileOptions, CommandBufferDescriptor, FunctionConstantValues)
}


class MetalModule(ModuleType):
    """Has the names of PyObjC's module and no others."""

    def __init__(self, simulation: Simulation):
        super().__init__("Metal")
        self.MTLSize = self.MTLSizeMake = MTLSize
        self._devices = [Device(simulation)] if simulation.has_device else []

    def MTLCreateSystemDefaultDevice(self) -> Device | None:
        return self._devices[0] if self._devices else None

    def MTLCopyAllDevices(self) -> list[Device]:
        return list(self._devices)

    def __getattr__(self, name: str) -> Any:
        if name in NAMES["constants"]:
            return NAMES["constants"][name]
        if name in NAMES["strings"]:
            return name
        if name in CLASSES:
            return CLASSES[name]
        known = name in NAMES["classes"]
        raise AttributeError(f"{'The simulator' if known else 'Metal'} has no {name}.")


def metal_module(simulation: Simulation) -> ModuleType:
    """A module to stand in for `Metal`."""
    return MetalModule(simulation)
