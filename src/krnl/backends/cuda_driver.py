"""One NVIDIA GPU: the driver's functions, the stream on which everything runs in order, and
failures in sentences.

NVIDIA's Python packages are imported when a device is opened, so that plans can be made on any
machine.
"""

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Timer, local
from typing import Any

from krnl.errors import BackendError, ConfigError, KrnlError, PlanError

LIBRARY = "libcuda.so.1"
HELD_SECONDS = 10.0  # far longer than it takes to enqueue what is to be timed
OLDEST_CAPABILITY = 80  # the first with bfloat16 and asynchronous copies
PACKAGES = "pip install 'krnl-lora[cuda]'"
STEPWISE_VARIABLE = "KRNL_CUDA_STEPWISE"  # 1: dispatches run one by one, and each is waited for
# With which the GPU ends whatever was running. Nothing more can be done with it in this process.
FAULTS = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ASSERT",
        "ECC_UNCORRECTABLE",
        "HARDWARE_STACK_ERROR",
        "ILLEGAL_ADDRESS",
        "ILLEGAL_INSTRUCTION",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "LAUNCH_FAILED",
        "LAUNCH_TIMEOUT",
        "MISALIGNED_ADDRESS",
    )
)


class GpuMemoryError(PlanError):
    """A function of the driver that found too little memory."""


class DriverError(BackendError):
    """A function of the driver that failed; `status` is the driver's name of the reason."""

    def __init__(self, message: str, status: str):
        super().__init__(message)
        self.status = status


class Gpu:
    """The first GPU that the process may see. ConfigError if there is none that can be used.

    Called with the name of a function of the driver and its arguments, it returns what the function
    gives: None, a value, or a tuple; GpuMemoryError or DriverError if it fails. `running` holds
    names of what was enqueued and may not have ended yet: a fault is told by the first call after
    it, whichever that is.
    """

    def __init__(self) -> None:
        self.library, self.api, self.nvrtc = _open_libraries()
        self.running: list[str] = []
        self._thread = local()
        self._context: Any = None
        self._start()
        device = self("cuDeviceGet", 0)
        name = self("cuDeviceGetName", 128, device)
        self.name = name.split(b"\0")[0].decode()
        self._device = device
        major, minor = (self.attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        self.capability = 10 * major + minor
        if self.capability < OLDEST_CAPABILITY:
            raise ConfigError(
                f"The cuda device needs a GPU of compute capability 8.0 or later (Ampere); this is "
                f"'{self.name}' with {major}.{minor}. Use --device cpu."
            )
        self.multiprocessors = self.attribute("MULTIPROCESSOR_COUNT")
        self._context = self("cuDevicePrimaryCtxRetain", device)
        # Ordered with nothing but itself.
        flags = self.api.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.stream = self("cuStreamCreate", int(flags))
        self.on_end(self, "cuStreamDestroy", self.stream)
        self._held = self.pinned(4)

    def __call__(self, function: str, *arguments: Any) -> Any:
        # Threads other than the one that opened the device have no context yet.
        if self._context is not None and not hasattr(self._thread, "entered"):
            self._thread.entered = True
            self("cuCtxSetCurrent", self._context)
        status, *values = getattr(self.api, function)(*arguments)
        if int(status) != 0:
            raise self._error(function, status)
        return tuple(values) if len(values) > 1 else values[0] if values else None

    def attribute(self, name: str) -> int:
        """A number that the driver knows of the GPU."""
        key = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self("cuDeviceGetAttribute", key, self._device))

    @property
    def versions(self) -> str:
        """Of all that its speed depends on beside the GPU."""
        return f"CUDA {_dotted(self.driver_version)}, NVRTC {_dotted(self.nvrtc_version)}"

    def wait(self) -> None:
        """Returns when everything enqueued has run; BackendError if any of it failed."""
        self("cuStreamSynchronize", self.stream)
        self.running.clear()

    def pinned(self, nbytes: int, owner: Any = None) -> int:
        """The address of host memory that the GPU can reach, and which it may read while the host
        goes on. It lives as long as its owner, by default as the device is open."""
        flags = self.api.CU_MEMHOSTALLOC_PORTABLE | self.api.CU_MEMHOSTALLOC_DEVICEMAP
        address = int(self("cuMemHostAlloc", nbytes, flags))
        self.on_end(owner or self, "cuMemFreeHost", address)
        return address

    def event(self, timing: bool) -> Any:
        """A mark in the stream, which may note the time. It lives as long as the device is open."""
        name = "CU_EVENT_DEFAULT" if timing else "CU_EVENT_DISABLE_TIMING"
        made = self("cuEventCreate", int(getattr(self.api.CUevent_flags, name)))
        self.on_end(self, "cuEventDestroy", made)
        return made

    @contextmanager
    def held(self) -> Iterator[None]:
        """What is enqueued in this block starts when the block ends, and then runs without gaps in
        which the GPU waits for the host. The driver's queue takes about a thousand commands.
        BackendError if what is enqueued waits for the GPU itself."""
        self.wait()
        flag = ctypes.c_uint32.from_address(self._held)
        flag.value = 0
        when = self.api.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        self("cuStreamWaitValue32", self.stream, self._held, 1, int(when))
        late = Timer(HELD_SECONDS, setattr, (flag, "value", 1))
        late.daemon = True
        late.start()
        try:
            yield
            if flag.value:
                raise BackendError(
                    "Nothing can be timed while the host waits for each launch, as "
                    "CUDA_LAUNCH_BLOCKING=1 and some debugging tools make it."
                )
        finally:
            late.cancel()
            flag.value = 1

    def on_end(self, owner: Any, function: str, handle: Any) -> None:
        """Calls a function that gives a handle back when its owner is gone."""
        weakref.finalize(owner, _give_back, self.api, self._context, function, handle)

    def _start(self) -> None:
        try:
            self("cuInit", 0)
        except DriverError as error:
            if error.status == "CUDA_ERROR_NO_DEVICE":
                raise ConfigError(
                    "The NVIDIA driver finds no GPU (see nvidia-smi, and whether "
                    "CUDA_VISIBLE_DEVICES hides it); use --device cpu."
                ) from None
            raise ConfigError(
                f"The NVIDIA driver does not start: {error} Use --device cpu."
            ) from None
        self.driver_version = divmod(int(self("cuDriverGetVersion")) // 10, 100)
        status, *version = self.nvrtc.nvrtcVersion()
        if int(status) != 0:
            raise ConfigError(f"NVRTC does not start: {status.name}. {PACKAGES}.")
        self.nvrtc_version = (int(version[0]), int(version[1]))
        # A driver runs what compilers of its own major version make, and of earlier ones.
        if self.driver_version[0] < self.nvrtc_version[0]:
            raise ConfigError(
                f"The NVIDIA driver here is for CUDA {_dotted(self.driver_version)}, and the "
                f"installed compiler (NVRTC) is of CUDA {_dotted(self.nvrtc_version)}: update the "
                "driver, or use --device cpu."
            )

    def _error(self, function: str, status: Any) -> KrnlError:
        told, words = self.api.cuGetErrorString(status)
        words = words.decode() if int(told) == 0 and words else "unknown error"
        if status.name == "CUDA_ERROR_OUT_OF_MEMORY":
            return GpuMemoryError(
                f"{function} fails: {words} ({status.name}). Lower --tokens, train with a lower "
                "--memory-limit, end what else uses the GPU, or take a smaller model."
            )
        if status.name in FAULTS and self.running:
            names = ", ".join(dict.fromkeys(self.running))
            return DriverError(
                f"{names} failed on the GPU: {words} ({status.name}). Set {STEPWISE_VARIABLE}=1 "
                "to learn in which dispatch.",
                status.name,
            )
        return DriverError(f"{function} fails: {words} ({status.name}).", status.name)


def _give_back(api: Any, context: Any, function: str, handle: Any) -> None:
    """After a fault nothing can be given back, and nothing needs to be."""
    api.cuCtxSetCurrent(context)
    getattr(api, function)(handle)


def has_driver() -> bool:
    """Whether NVIDIA's driver is installed. It is not started for that."""
    with suppress(OSError):
        ctypes.CDLL(LIBRARY)
        return True
    return False


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _open_libraries() -> tuple[Any, Any, Any]:
    """The driver itself, and the modules `driver` and `nvrtc` of cuda.bindings."""
    if not has_driver():
        raise ConfigError(
            "The cuda device needs an NVIDIA GPU and its driver, and this machine has no driver; "
            "use --device cpu."
        )
    try:
        from cuda.bindings import driver, nvrtc

        nvrtc.nvrtcVersion()  # loads the library itself
    # The second: a library that one of the packages should have brought.
    except (ImportError, RuntimeError):
        raise ConfigError(f"The cuda device needs NVIDIA's Python packages: {PACKAGES}.") from None
    return ctypes.CDLL(LIBRARY), driver, nvrtc
