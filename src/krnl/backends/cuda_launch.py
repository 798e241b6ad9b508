"""Launches on an NVIDIA GPU: kernels compiled and loaded, parameters packed as they take them."""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from krnl.backends.cuda_cache import Cubin
from krnl.backends.cuda_compiler import Compiler, Kernel, architecture
from krnl.backends.cuda_driver import Gpu
from krnl.backends.cuda_memory import CudaMemory
from krnl.dtypes import BF16, F16, F32, DType
from krnl.errors import BackendError, KrnlError
from krnl.formats.files import cache_folder
from krnl.kernels.launch import Argument, Launch, TensorMap
from krnl.plan.buffer import Buffer

HOPPER = 90  # the first with clusters, and with launches that begin before the last one has ended
# Element types of a tensor map, as the driver names them; bytes of one, and how it has to lie.
MAP_TYPES: dict[DType, str] = {
    dtype: f"CU_TENSOR_MAP_DATA_TYPE_{name}"
    for dtype, name in ((F16, "FLOAT16"), (BF16, "BFLOAT16"), (F32, "FLOAT32"))
}
MAP_BYTES, MAP_ALIGNMENT = 128, 64


@dataclass(frozen=True)
class BoundLaunch:
    """A launch with everything looked up. `pointers` is the address of an array of addresses, one
    for each parameter, in memory that `kept` holds."""

    launch: Launch
    function: Any
    pointers: int
    kept: tuple[Any, ...]


class Launcher:
    """The kernels on a GPU, and how they are launched."""

    def __init__(self, gpu: Gpu):
        self.gpu = gpu
        offered = gpu.nvrtc.nvrtcGetSupportedArchs()[1]
        compiled_for = architecture(gpu.capability, offered)
        self._compiler = Compiler(gpu.nvrtc, compiled_for, cache_folder() / "cuda")
        self._functions: dict[Kernel, Any] = {}
        self._shared: dict[Kernel, int] = {}  # the most that each may use, in bytes
        self._most_shared = gpu.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self._marks: list[Any] = []

    def prepare(self, launches: Sequence[Launch]) -> None:
        """Compiles and loads what these launches need and is not here yet."""
        missing = [k for k in map(Kernel.of, launches) if k not in self._functions]
        for kernel, cubin in self._compiler.compile(missing).items():
            with naming(kernel):
                self._functions[kernel] = self._load(cubin)
        for launch in launches:
            with naming(kernel := Kernel.of(launch)):
                self._allow_shared(kernel, launch.shared)

    @property
    def overlaps(self) -> bool:
        """Whether launches may begin before the last one has ended."""
        return self.gpu.capability >= HOPPER

    def bind(self, launch: Launch, memory: CudaMemory, beside: bool) -> BoundLaunch:
        """Parameters, packed as the kernel takes them. `beside`: it need not wait for the launch
        before, where launches overlap."""

        def encoded(map: TensorMap) -> bytes:
            return self._encoded(map, memory)

        values = parameters(launch, beside and self.overlaps, memory.address, encoded)
        kept = tuple(ctypes.create_string_buffer(value, len(value)) for value in values)
        pointers = (ctypes.c_void_p * len(kept))(*map(ctypes.addressof, kept))
        function = self._functions[Kernel.of(launch)]
        return BoundLaunch(launch, function, ctypes.addressof(pointers), (*kept, pointers))

    def launch(self, bound: BoundLaunch, overlap: bool = True) -> None:
        """Enqueues a launch. From Hopper on it may begin before the last one has ended, if it may
        `overlap`: kernels wait themselves."""
        api, launch = self.gpu.api, bound.launch
        config = api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.groups
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.threads, 1, 1
        config.sharedMemBytes = launch.shared
        config.hStream = self.gpu.stream
        attributes = []
        if overlap and self.overlaps:
            attributes.append(self._attribute("PROGRAMMATIC_STREAM_SERIALIZATION"))
            attributes[-1].value.programmaticStreamSerializationAllowed = 1
        if launch.cluster > 1:
            attributes.append(self._attribute("CLUSTER_DIMENSION"))
            size = attributes[-1].value.clusterDim
            size.x, size.y, size.z = launch.cluster, 1, 1
        config.attrs, config.numAttrs = attributes, len(attributes)
        with naming(Kernel.of(launch)):
            self.gpu("cuLaunchKernelEx", config, bound.function, bound.pointers, 0)

    def graph_of(self, launches: Iterable[BoundLaunch]) -> Any:
        """A graph that enqueues them one after the other. It is the caller's to destroy."""
        gpu = self.gpu
        # Whatever else the process does meanwhile has nothing to do with it.
        mode = gpu.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        gpu("cuStreamBeginCapture", gpu.stream, mode)
        try:
            for launch in launches:
                self.launch(launch)
        except KrnlError:
            with suppress(KrnlError):  # the reason is the one above
                gpu("cuStreamEndCapture", gpu.stream)
            raise
        drawn = gpu("cuStreamEndCapture", gpu.stream)
        try:
            return gpu("cuGraphInstantiate", drawn, 0)
        finally:
            gpu("cuGraphDestroy", drawn)

    def marks(self, count: int) -> list[Any]:
        """Events that note the time, to be used again and again."""
        while len(self._marks) < count:
            self._marks.append(self.gpu.event(timing=True))
        return self._marks[:count]

    def _load(self, cubin: Cubin) -> Any:
        module = self.gpu("cuModuleLoadData", cubin.image)
        self.gpu.on_end(self, "cuModuleUnload", module)
        return self.gpu("cuModuleGetFunction", module, cubin.entry.encode())

    def _allow_shared(self, kernel: Kernel, nbytes: int) -> None:
        """Shared memory beyond 48 KiB is had on request."""
        if nbytes > self._most_shared:
            raise BackendError(
                f"it takes {nbytes:,} bytes of shared memory, and this GPU has "
                f"{self._most_shared:,} for a block."
            )
        if nbytes > self._shared.get(kernel, -1):
            attribute = self.gpu.api.CUfunction_attribute
            key = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            # At least once for each: it also brings the kernel onto the GPU, which must not happen
            # while a graph is captured.
            self.gpu("cuFuncSetAttribute", self._functions[kernel], key, nbytes)
            self._shared[kernel] = nbytes

    def _attribute(self, name: str) -> Any:
        attribute = self.gpu.api.CUlaunchAttribute()
        identity = self.gpu.api.CUlaunchAttributeID
        attribute.id = getattr(identity, f"CU_LAUNCH_ATTRIBUTE_{name}")
        return attribute

    def _encoded(self, map: TensorMap, memory: CudaMemory) -> bytes:
        """The driver's form of a tensor map."""
        address, size = memory.address(map.buffer), map.buffer.dtype.size
        row = map.stride * size
        fits = map.box_columns * size <= 128 and max(map.box_rows, map.box_columns) <= 256
        if address % 16 or row % 16 or not fits:
            raise BackendError(
                f"{map.buffer} cannot be fetched in boxes of {map.box_rows} × {map.box_columns} "
                f"from rows of {row} bytes, the first at an address with remainder {address % 16} "
                "by 16."
            )
        content = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
        start = -ctypes.addressof(content) % MAP_ALIGNMENT
        api = self.gpu.api
        # Past the bindings, which do not align what they return.
        status = self.gpu.library.cuTensorMapEncodeTiled(
            ctypes.c_void_p(ctypes.addressof(content) + start),
            int(getattr(api.CUtensorMapDataType, MAP_TYPES[map.buffer.dtype])),
            2,
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * 2)(map.columns, map.rows),
            (ctypes.c_uint64 * 1)(row),
            (ctypes.c_uint32 * 2)(map.box_columns, map.box_rows),
            (ctypes.c_uint32 * 2)(1, 1),
            int(api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
            int(api.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B),
            int(api.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B),
            int(api.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        )
        if status != 0:
            raise BackendError(f"The driver makes no tensor map of {map} (status {status}).")
        return content.raw[start : start + MAP_BYTES]


@contextmanager
def naming(what: object) -> Iterator[None]:
    """What goes wrong with it is told with its name."""
    try:
        yield
    except BackendError as error:
        raise BackendError(f"{what}: {error}") from None


def parameters(
    launch: Launch,
    beside: bool,
    address: Callable[[Buffer], int],
    encoded: Callable[[TensorMap], bytes],
) -> list[bytes]:
    """What a launch hands to its kernel: its arguments, and `beside`."""
    given = [_packed(argument, address, encoded) for argument in launch.arguments]
    return [*given, int(beside).to_bytes(4, "little")]


def _packed(
    argument: Argument | tuple[Buffer | TensorMap | None, ...],
    address: Callable[[Buffer], int],
    encoded: Callable[[TensorMap], bytes],
) -> bytes:
    """A parameter as the kernel takes it: a pointer, a struct, a struct of pointers or of tensor
    maps. What is None is zero."""

    def one(value: Buffer | bytes | TensorMap) -> bytes:
        if isinstance(value, Buffer):
            return address(value).to_bytes(8, "little")
        return encoded(value) if isinstance(value, TensorMap) else value

    if isinstance(argument, tuple):
        empty = bytes(MAP_BYTES if any(isinstance(x, TensorMap) for x in argument) else 8)
        return b"".join(empty if x is None else one(x) for x in argument)
    return bytes(8) if argument is None else one(argument)
