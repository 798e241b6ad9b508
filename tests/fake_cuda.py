"""Stands in for NVIDIA's driver and compiler where there are none: memory is the host's, work is
done when it is waited for and not before, kernels are noted and compute nothing.

Names and arguments are those of cuda.bindings; of enums and structs there is what KRNL uses.
"""
# ruff: noqa: N802 (the names are NVIDIA's)

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from krnl.backends import cuda_driver


class Code(int):
    """A member of an enum."""

    name: str

    def __new__(cls, value: int, name: str) -> "Code":
        made = super().__new__(cls, value)
        made.name = name
        return made


class Enum:
    """Members by name, numbered as they are first named."""

    def __init__(self) -> None:
        self._members: dict[str, Code] = {}

    def __getattr__(self, name: str) -> Code:
        return self._members.setdefault(name, Code(len(self._members), name))


class Record:
    """A struct whose fields are made when they are first named."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self.__dict__[name] = Record()
        return self.__dict__[name]


SUCCESS = Code(0, "CUDA_SUCCESS")
# How far from where the host finds its memory the GPU finds it. On most machines both are the same.
HOST_SEEN_FROM_GPU = 1 << 52
FAILURES = {
    name: Code(number, f"CUDA_ERROR_{name}")
    for number, name in (
        (2, "OUT_OF_MEMORY"), (100, "NO_DEVICE"), (700, "ILLEGAL_ADDRESS"), (803, "MISMATCH"),
    )
}  # fmt: skip


class FakeDriver:
    """One GPU. `failing` has failures by the name of the function that is to tell them."""

    multiprocessors = 132

    def __init__(self, capability: int = 90, version: int = 13000, nbytes: int = 1 << 30):
        self.capability, self.version, self.nbytes = capability, version, nbytes
        self.failing: dict[str, str] = {}
        self.calls: list[str] = []  # every function that was called
        self.blocks: dict[int, Any] = {}
        self.host: dict[int, Any] = {}  # memory of the host's that the GPU can reach
        self.queue: list[Callable[[], None]] = []
        self.captured: list[Any] | None = None
        self.launched: list[Any] = []  # configurations, with `parameters`, as they ran
        self.maps: list[tuple[Any, ...]] = []
        self.held = 0  # how often the stream was kept from starting
        self.threads = 0  # that entered the context
        self._addresses = iter(range(1, 1 << 20))
        for name in (
            "CUdevice_attribute", "CUstream_flags", "CUevent_flags", "CUfunction_attribute",
            "CUstreamCaptureMode", "CUstreamWaitValue_flags", "CUlaunchAttributeID",
            "CUtensorMapDataType", "CUtensorMapInterleave", "CUtensorMapSwizzle",
            "CUtensorMapL2promotion", "CUtensorMapFloatOOBfill",
        ):  # fmt: skip
            setattr(self, name, Enum())
        self.CUlaunchConfig = self.CUlaunchAttribute = Record
        self.CU_MEMHOSTALLOC_PORTABLE, self.CU_MEMHOSTALLOC_DEVICEMAP = 1, 2

    def __getattr__(self, name: str) -> Any:
        """A function of the driver."""
        if not name.startswith("cu"):
            raise AttributeError(name)
        body = getattr(type(self), f"_{name}", lambda self, *arguments: None)

        def function(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if name in self.failing and name != "cuGetErrorString":
                return (FAILURES[self.failing[name]],)
            result = body(self, *arguments)
            if isinstance(result, Code):
                return (result,)
            values = result if isinstance(result, tuple) else () if result is None else (result,)
            return (SUCCESS, *values)

        return function

    def run_queue(self) -> None:
        while self.queue:
            self.queue.pop(0)()

    def _enqueue(self, work: Callable[[], None]) -> None:
        self.queue.append(work)

    def _memory(self, nbytes: int) -> int:
        block = ctypes.create_string_buffer(nbytes + 256)
        address = -(-ctypes.addressof(block) // 256) * 256
        self.blocks[address] = (block, nbytes)
        return address

    def _cuDriverGetVersion(self) -> int:
        return self.version

    def _cuGetErrorString(self, status: Code) -> bytes:
        return b"in the driver's words"

    def _cuDeviceGet(self, ordinal: int) -> int:
        return ordinal

    def _cuDeviceGetName(self, length: int, device: int) -> bytes:
        return b"Fake GPU" + bytes(length - 8)

    def _cuDeviceGetAttribute(self, attribute: Code, device: int) -> int:
        major, minor = divmod(self.capability, 10)
        known = {
            "CAPABILITY_MAJOR": major,
            "CAPABILITY_MINOR": minor,
            "BLOCK_OPTIN": (227 if self.capability == 90 else 99) << 10,
            "MULTIPROCESSOR_COUNT": self.multiprocessors,
        }
        return next(value for end, value in known.items() if attribute.name.endswith(end))

    def _cuDevicePrimaryCtxRetain(self, device: int) -> int:
        return 1

    def _cuCtxSetCurrent(self, context: int) -> None:
        self.threads += 1

    def _cuStreamCreate(self, flags: int) -> str:
        return "stream"

    def _cuEventCreate(self, flags: int) -> Record:
        return Record()

    def _cuMemGetInfo(self) -> tuple[int, int]:
        used = sum(nbytes for _, nbytes in self.blocks.values())
        return self.nbytes - used, self.nbytes

    def _cuMemAlloc(self, nbytes: int) -> Any:
        free, _ = self._cuMemGetInfo()
        return FAILURES["OUT_OF_MEMORY"] if nbytes > free else self._memory(nbytes)

    def _cuMemFree(self, address: int) -> None:
        self.run_queue()
        del self.blocks[address]

    def _cuMemHostAlloc(self, nbytes: int, flags: int) -> int:
        assert flags == self.CU_MEMHOSTALLOC_PORTABLE | self.CU_MEMHOSTALLOC_DEVICEMAP
        address = self._memory(nbytes)
        self.host[address] = self.blocks.pop(address)  # none of the GPU's memory
        ctypes.memset(address, 0xFF, nbytes)  # whatever lay there
        return address

    def _cuMemHostGetDevicePointer(self, address: int, flags: int) -> int:
        assert address in self.host and flags == 0
        return address + HOST_SEEN_FROM_GPU

    def _cuMemFreeHost(self, address: int) -> None:
        self.run_queue()
        del self.host[address]

    def _cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: str) -> None:
        self._enqueue(lambda: self._copy(target, source, nbytes))

    def _cuMemcpyDtoHAsync(self, target: int, source: int, nbytes: int, stream: str) -> None:
        self._enqueue(lambda: self._copy(target, source, nbytes))

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def _cuMemsetD8Async(self, target: int, value: int, nbytes: int, stream: str) -> None:
        self._enqueue(lambda: ctypes.memset(target, value, nbytes) and None)

    def _cuStreamSynchronize(self, stream: str) -> None:
        self.run_queue()

    def _cuEventRecord(self, event: Record, stream: str) -> None:
        def reach() -> None:
            event.reached = True

        event.reached = False
        self._enqueue(reach)

    def _cuEventSynchronize(self, event: Record) -> None:
        while "reached" in vars(event) and not event.reached:
            self.queue.pop(0)()

    def _cuEventElapsedTime(self, start: Record, end: Record) -> float:
        assert start.reached and end.reached
        return 1.5

    def _cuStreamWaitValue32(self, stream: str, address: int, value: int, flags: int) -> None:
        self.held += 1
        assert flags == int(self.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        flag = ctypes.c_uint32.from_address(address)

        def wait() -> None:
            assert flag.value >= value, "the host waits for a stream that waits for the host"

        self._enqueue(wait)

    def _cuModuleLoadData(self, image: bytes) -> bytes:
        return image

    def _cuModuleGetFunction(self, module: bytes, name: bytes) -> str:
        assert self.captured is None, "kernels are loaded before a graph is captured"
        return name.decode()

    def _cuFuncSetAttribute(self, function: str, attribute: Code, value: int) -> None:
        self.shared = {**getattr(self, "shared", {}), function: value}

    def _cuLaunchKernelEx(self, config: Any, function: str, pointers: int, extra: int) -> None:
        assert config.sharedMemBytes <= self.shared[function]
        assert config.numAttrs == len(config.attrs)
        config.function, config.pointers = function, pointers
        self._start([config])

    def _start(self, configs: list[Any]) -> None:
        if self.captured is not None:
            self.captured += configs
        else:
            self._enqueue(lambda: self.launched.extend(configs))

    def _cuStreamBeginCapture(self, stream: str, mode: int) -> None:
        self.captured = []

    def _cuStreamEndCapture(self, stream: str) -> tuple[Any, ...]:
        captured, self.captured = self.captured, None
        return (captured,)

    def _cuGraphInstantiate(self, graph: list[Any], flags: int) -> tuple[Any, ...]:
        return (list(graph),)

    def _cuGraphLaunch(self, graph: list[Any], stream: str) -> None:
        self._start(graph)

    def cuTensorMapEncodeTiled(self, target: Any, *arguments: Any) -> int:
        """Of the library itself. Writes 0x4D all over the map."""
        assert target.value % 64 == 0
        self.maps.append(arguments)
        ctypes.memset(target, 0x4D, 128)
        return 0


class FakeCompiler:
    """Compiles anything. `log` is what it says of it; `broken` whether it refuses."""

    def __init__(
        self, version: tuple[int, int] = (13, 0), offered: tuple[int, ...] = (80, 90, 120)
    ):
        self.version, self.offered = version, offered
        self.log, self.broken = "", False
        self.compiled: list[str] = []

    def nvrtcVersion(self) -> tuple[Any, ...]:
        return (SUCCESS, *self.version)

    def nvrtcGetSupportedArchs(self) -> tuple[Any, ...]:
        return SUCCESS, list(self.offered)

    def nvrtcCreateProgram(self, source: bytes, name: bytes, *headers: Any) -> tuple[Any, ...]:
        return SUCCESS, SimpleNamespace(name=name, expression=b"")

    def nvrtcAddNameExpression(self, program: Any, expression: bytes) -> tuple[Any, ...]:
        program.expression = expression
        return (SUCCESS,)

    def nvrtcCompileProgram(self, program: Any, count: int, options: Any) -> tuple[Any, ...]:
        assert count == len(options)
        self.compiled.append(program.expression.decode())
        return (Code(6, "NVRTC_ERROR_COMPILATION") if self.broken else SUCCESS,)

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        contents = {"ProgramLog": self.log.encode() + b"\0", "CUBIN": b"code of "}

        def size(program: Any) -> tuple[Any, ...]:
            return SUCCESS, len(contents[what])

        def fill(program: Any, target: bytes) -> tuple[Any, ...]:
            assert len(target) > 1, "bytes of one element are shared by the whole process"
            ctypes.memmove(target, contents[what], len(contents[what]))
            return (SUCCESS,)

        what = name.removeprefix("nvrtcGet").removesuffix("Size")
        if what in contents:
            return size if name.endswith("Size") else fill
        if name == "nvrtcGetLoweredName":
            return lambda program, expression: (SUCCESS, b"_Z" + expression)
        if name == "nvrtcDestroyProgram":
            return lambda program: (SUCCESS,)
        raise AttributeError(name)


@contextmanager
def installed(driver: FakeDriver, compiler: FakeCompiler | None = None) -> Iterator[FakeDriver]:
    """A machine that has them."""
    found = (driver, driver, compiler or FakeCompiler())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_driver, "_open_libraries", lambda: found)
        yield driver
