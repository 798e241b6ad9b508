"""The Metal engine, through PyObjC: kernels are compiled when a program is, and a replay is encoded
anew into a few command buffers.

PyObjC's modules are imported when a device is opened, so that plans can be made on any machine.
"""

import ctypes
import platform
import struct
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from krnl.backends.base import Limits, Memory, Paper
from krnl.backends.metal_memory import MetalMemory, whole_pages
from krnl.dtypes import F16, F32
from krnl.errors import BackendError, ConfigError
from krnl.kernels.launch import Launch, launches
from krnl.kernels.metal.sources import libraries, source
from krnl.kernels.metal.table import TABLE
from krnl.plan.arena import Layout, Plan
from krnl.plan.buffer import Buffer
from krnl.plan.lower import Dispatch, Table

# Launches in a command buffer. Encoding one in Python takes some tens of microseconds, so the GPU
# starts after a millisecond, while the next buffer is being encoded.
LAUNCHES_PER_BUFFER = 32
OLDEST_MACOS = 14
# Lines of the compiler's words that are shown.
SHOWN_LINES = 12

# What a Mac allows is not known before its device is opened. Kernels read up to four elements of a
# weight at once.
ON_PAPER = Paper("metal", Limits(2**62, 2**62, 0, (F16, F32), 1, mapped_alignment=4), TABLE)


class MetalBackend:
    """Computes on the GPU of a Mac with Apple silicon."""

    name = "metal"

    def __init__(self, kernels: Table = TABLE, source: Callable[[str], str] = source) -> None:
        self.kernels = kernels
        self._gpu = _Gpu(source)
        device = self._gpu.device
        self.device_name = str(device.name())
        self.limits = Limits(
            memory=device.recommendedMaxWorkingSetSize(),
            largest_block=whole_pages(device.maxBufferLength()),
            scratch=0,
            activations=ON_PAPER.limits.activations,
            threads=1,
            mapped_alignment=ON_PAPER.limits.mapped_alignment,
        )

    def refused_libraries(self) -> list[str]:
        """Compiles every source of kernels; what Metal says of those that it refuses."""
        refusals = []
        for name in libraries():
            try:
                self._gpu.library(name)
            except BackendError as error:
                refusals.append(str(error))
        return refusals

    def most_threads(self, launch: Launch) -> int:
        """How many threads of this kernel the GPU allows in a threadgroup: fewer, the more
        registers it takes."""
        return int(self._gpu.pipeline(launch).maxTotalThreadsPerThreadgroup())

    def allocate(self, layout: Layout) -> MetalMemory:
        gpu = self._gpu
        shared = gpu.metal.MTLResourceStorageModeShared
        return MetalMemory(gpu.device, shared, gpu.wait, layout, self.limits)

    def compile(self, plan: Plan, memory: Memory) -> "MetalProgram":
        assert isinstance(memory, MetalMemory)
        return MetalProgram(self._gpu, plan, memory)


@dataclass(frozen=True)
class _BoundLaunch:
    """A launch with everything looked up. Buffers are (buffer, byte offset, index)."""

    pipeline: Any
    buffers: list[tuple[Any, int, int]]
    constants: list[tuple[bytes, int]]
    groups: Any  # MTLSize
    threads: Any


@dataclass(frozen=True)
class _BoundDispatch:
    label: str
    launches: list[_BoundLaunch]


class _Gpu:
    """A device: its queue, its compiled kernels, and what it has been given and not yet done."""

    def __init__(self, source: Callable[[str], str]):
        self.metal, self.objc = _import_pyobjc()
        version = platform.mac_ver()[0]
        if version and int(version.split(".")[0]) < OLDEST_MACOS:
            raise ConfigError(
                f"The metal device needs macOS {OLDEST_MACOS} or later, and this is {version}; use "
                "--device cpu."
            )
        self.device = self.metal.MTLCreateSystemDefaultDevice()
        if self.device is None:
            raise ConfigError("Metal finds no GPU on this machine; use --device cpu.")
        # An M1 is of family 7; the GPU of a virtual Mac owns up to 5, whatever lies beneath.
        if not self.device.supportsFamily_(self.metal.MTLGPUFamilyApple5):
            raise ConfigError(
                f"The metal device needs Apple silicon (M1 or later); this GPU is "
                f"'{self.device.name()}'. Use --device cpu."
            )
        self._source = source
        self._queue = self.device.newCommandQueue()
        self._libraries: dict[str, Any] = {}
        self._pipelines: dict[tuple[Any, ...], Any] = {}
        self._pending: deque[Any] = deque()

    def pipeline(self, launch: Launch) -> Any:
        """The compiled kernel of a launch, specialised by its constants."""
        constants = tuple(sorted(launch.constants.items()))
        types = tuple(type(v) for _, v in constants)  # since 1 equals True
        key = (launch.library, kernel_name(launch), constants, types)
        if key not in self._pipelines:
            function = self._function(launch)
            made, error = self.device.newComputePipelineStateWithFunction_error_(function, None)
            if made is None:
                raise BackendError(f"Metal makes no pipeline of {_name(launch)}: {_words(error)}")
            self._pipelines[key] = made
        pipeline = self._pipelines[key]
        most = pipeline.maxTotalThreadsPerThreadgroup()
        if launch.threads > most:
            raise BackendError(
                f"{_name(launch)} is launched with {launch.threads} threads per threadgroup; this "
                f"GPU runs at most {most} of it."
            )
        return pipeline

    def commit(self, dispatches: Sequence[_BoundDispatch]) -> Any:
        """Encodes dispatches into a command buffer and enqueues it; returns it."""
        with self.objc.autorelease_pool():
            options = self.metal.MTLCommandBufferDescriptor.alloc().init()
            # Tells after a failure which encoder it was in.
            options.setErrorOptions_(self.metal.MTLCommandBufferErrorOptionEncoderExecutionStatus)
            buffer = self._queue.commandBufferWithDescriptor_(options)
            buffer.setLabel_(f"{dispatches[0].label} to {dispatches[-1].label}")
            for dispatch in dispatches:
                # An encoder each, as failures are told by encoder. Its launches run in order.
                encoder = buffer.computeCommandEncoder()
                encoder.setLabel_(dispatch.label)
                for launch in dispatch.launches:
                    _encode(encoder, launch)
                encoder.endEncoding()
            buffer.commit()
        self._pending.append(buffer)
        return buffer

    def wait(self) -> None:
        """Returns when everything enqueued has run; BackendError if any of it failed."""
        failed = None
        while self._pending:
            buffer = self._pending[0]
            buffer.waitUntilCompleted()
            self._pending.popleft()
            if failed is None and buffer.status() == self.metal.MTLCommandBufferStatusError:
                failed = buffer
        if failed is not None:
            raise self._failure(failed)

    def _failure(self, buffer: Any) -> BackendError:
        metal, error = self.metal, buffer.error()
        infos = error.userInfo().objectForKey_(metal.MTLCommandBufferEncoderInfoErrorKey) or ()
        for state in (
            metal.MTLCommandEncoderErrorStateFaulted,
            metal.MTLCommandEncoderErrorStateAffected,
        ):
            labels = [str(info.label()) for info in infos if info.errorState() == state]
            if labels:
                break
        label = labels[0] if labels else f"One of {buffer.label()}"
        advice = {
            metal.MTLCommandBufferErrorTimeout: " It took too long. Lower --tokens.",
            metal.MTLCommandBufferErrorOutOfMemory: " Close other programs, or lower --tokens.",
        }
        return BackendError(
            f"{label} failed on the GPU: {_words(error)}{advice.get(error.code(), '')}"
        )

    def library(self, name: str) -> Any:
        if name not in self._libraries:
            options = self.metal.MTLCompileOptions.alloc().init()
            # The first with bfloat, which types.metal needs; it came with macOS 14.
            options.setLanguageVersion_(self.metal.MTLLanguageVersion3_1)
            # NaN and infinity must come through, and fast math may assume that there are none. It
            # would gain little: products run on the matrix units, other kernels wait for memory.
            # (macOS 15 has setMathMode: beside it, which macOS 14 lacks.)
            options.setFastMathEnabled_(False)
            made, error = self.device.newLibraryWithSource_options_error_(
                self._source(name), options, None
            )
            if made is None:
                raise BackendError(f"Metal does not compile {name}.metal:\n{_words(error)}")
            self._libraries[name] = made
        return self._libraries[name]

    def _function(self, launch: Launch) -> Any:
        library = self.library(launch.library)
        name = kernel_name(launch)
        names = [str(name) for name in library.functionNames()]
        if name not in names:
            raise BackendError(
                f"{launch.library}.metal has no kernel '{name}'; it has {', '.join(sorted(names))}."
            )
        values = self.metal.MTLFunctionConstantValues.alloc().init()
        for index, value in launch.constants.items():
            self._set_constant(values, index, value)
        function, error = library.newFunctionWithName_constantValues_error_(name, values, None)
        if function is None:
            raise BackendError(f"Metal does not specialise {_name(launch)}: {_words(error)}")
        return function

    def _set_constant(self, values: Any, index: int, value: bool | int | float) -> None:
        """In the source it is declared as bool, uint or float, as the value is."""
        metal = self.metal
        types = {
            bool: (metal.MTLDataTypeBool, "?"),
            int: (metal.MTLDataTypeUInt, "I"),
            float: (metal.MTLDataTypeFloat, "f"),
        }
        kind, form = types[type(value)]
        content = ctypes.create_string_buffer(struct.pack(form, value))
        # PyObjC knows nothing of this pointer and takes an address.
        values.setConstantValue_type_atIndex_(ctypes.addressof(content), kind, index)


def _encode(encoder: Any, launch: _BoundLaunch) -> None:
    encoder.setComputePipelineState_(launch.pipeline)
    for buffer, offset, index in launch.buffers:
        encoder.setBuffer_offset_atIndex_(buffer, offset, index)
    for content, index in launch.constants:
        encoder.setBytes_length_atIndex_(content, len(content), index)
    encoder.dispatchThreadgroups_threadsPerThreadgroup_(launch.groups, launch.threads)


class MetalProgram:
    """Launches looked up once, encoded at every run."""

    def __init__(self, gpu: _Gpu, plan: Plan, memory: MetalMemory):
        self._gpu = gpu
        self._memory = memory
        self._dispatches = [self._bind(dispatch) for dispatch in plan.dispatches]
        self._portions = _portions([d for d in self._dispatches if d.launches])

    def run(self) -> None:
        for portion in self._portions:
            self._gpu.commit(portion)

    def time(self) -> list[float]:
        """A command buffer for each dispatch, all enqueued at once: a GPU that waits in between
        lowers its clock. What they share keeps them from overlapping."""
        self._gpu.wait()
        buffers = [self._gpu.commit([d]) if d.launches else None for d in self._dispatches]
        self._gpu.wait()
        return [
            self._seconds(dispatch, buffer) if buffer is not None else 0.0
            for dispatch, buffer in zip(self._dispatches, buffers, strict=True)
        ]

    def _seconds(self, dispatch: _BoundDispatch, buffer: Any) -> float:
        start, end = float(buffer.GPUStartTime()), float(buffer.GPUEndTime())
        if not 0 < start <= end:
            raise BackendError(
                f"{dispatch.label}: {self._gpu.device.name()} does not tell when it began and "
                "ended, so it cannot be timed."
            )
        return end - start

    def _bind(self, dispatch: Dispatch) -> _BoundDispatch:
        label = dispatch.call.label
        try:
            return _BoundDispatch(label, [self._look_up(x) for x in launches(dispatch)])
        except BackendError as error:
            raise BackendError(f"{label}: {error}") from None

    def _look_up(self, launch: Launch) -> _BoundLaunch:
        size = self._gpu.metal.MTLSizeMake
        arguments = list(enumerate(launch.arguments))
        return _BoundLaunch(
            self._gpu.pipeline(launch),
            [(*self._memory.binding(a), i) for i, a in arguments if isinstance(a, Buffer)],
            [(a, i) for i, a in arguments if isinstance(a, bytes)],
            size(*launch.groups),
            size(launch.threads, 1, 1),
        )


def _portions(dispatches: Sequence[_BoundDispatch]) -> list[list[_BoundDispatch]]:
    """What each command buffer holds."""
    portions: list[list[_BoundDispatch]] = []
    count = LAUNCHES_PER_BUFFER
    for dispatch in dispatches:
        if count >= LAUNCHES_PER_BUFFER:
            portions.append([])
            count = 0
        portions[-1].append(dispatch)
        count += len(dispatch.launches)
    return portions


def kernel_name(launch: Launch) -> str:
    """What the kernel is called in its source: function_f16_f32."""
    return "_".join([launch.function, *map(str, launch.types)])


def _name(launch: Launch) -> str:
    return f"kernel '{kernel_name(launch)}' of {launch.library}.metal"


def _words(error: Any) -> str:
    """The first lines of what Metal says."""
    lines = str(error.localizedDescription()).strip().splitlines()
    more = ["…"] if len(lines) > SHOWN_LINES else []
    return "\n".join(lines[:SHOWN_LINES] + more)


def _import_pyobjc() -> tuple[Any, Any]:
    try:
        import Metal
        import objc
    except ImportError:
        if sys.platform != "darwin":
            raise ConfigError(
                "The metal device is the GPU of a Mac, and this machine is none; use --device cpu."
            ) from None
        raise ConfigError(
            "The metal device needs PyObjC: pip install pyobjc-framework-Metal."
        ) from None
    for selector, metadata in _OWNED.items():
        objc.registerMetaDataForSelector(b"NSObject", selector, metadata)
    return Metal, objc


# PyObjC (to version 12 at least, see its issue 690) retains what methods called new… return once
# too often, so that no buffer would ever be freed. What it is told here replaces all that it knows
# of a method.
_POINTER = {"type": b"^v", "type_modifier": b"n", "c_array_length_in_arg": 3}
_RETURNED = {"type": b"@", "already_retained": True}
_OWNED: dict[bytes, dict[str, Any]] = {
    b"newBufferWithLength:options:": {
        "retval": _RETURNED,
        "arguments": {2: {"type": b"Q"}, 3: {"type": b"Q"}},
    },
    b"newBufferWithBytesNoCopy:length:options:deallocator:": {
        "retval": _RETURNED,
        "arguments": {
            2: _POINTER,
            3: {"type": b"Q"},
            4: {"type": b"Q"},
            5: {
                "type": b"@?",
                "callable": {
                    "retval": {"type": b"v"},
                    "arguments": {0: {"type": b"^v"}, 1: {"type": b"^v"}, 2: {"type": b"Q"}},
                },
            },
        },
    },
}
