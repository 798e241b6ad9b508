"""Which backend computes, and in which type."""

import platform
import sys
from contextlib import suppress
from importlib.util import find_spec

from krnl.backends.base import Backend, Paper
from krnl.backends.cuda_driver import has_driver
from krnl.dtypes import BF16, F16, F32, DType
from krnl.errors import ConfigError

DEVICES = ("auto", "cpu", "metal", "cuda", "reference")
PRECISIONS = {"fp32": F32, "bf16": BF16, "fp16": F16}


def open_backend(device: str) -> Backend:
    """The backend of that name; `auto` takes Metal or CUDA where it can be used, else the CPU.
    ConfigError for one that is not here."""
    if device == "auto":
        for name, there in (("metal", _is_apple() and has_metal()), ("cuda", has_cuda())):
            with suppress(ConfigError):
                if there:
                    return open_backend(name)
    if device in ("auto", "cpu"):
        from krnl.backends.cpu import CpuBackend

        return CpuBackend()
    if device == "reference":
        from krnl.backends.reference import ReferenceBackend

        return ReferenceBackend()
    if device == "metal":
        from krnl.backends.metal import MetalBackend

        return MetalBackend()
    if device == "cuda":
        from krnl.backends.cuda import CudaBackend

        return CudaBackend()
    raise ConfigError(f"device is '{device}'; it must be one of {', '.join(DEVICES)}.")


def planning_device(device: str) -> Backend | Paper:
    """What `krnl plan` plans for: the backend of that name, or Metal or CUDA on paper where it is
    not."""
    if device == "metal" and not has_metal():
        from krnl.backends import metal

        return metal.ON_PAPER
    if device == "cuda" and not has_cuda():
        from krnl.backends import cuda

        return cuda.ON_PAPER
    return open_backend(device)


def has_metal() -> bool:
    """Whether PyObjC's Metal is installed. It is not loaded for that."""
    if "Metal" in sys.modules:
        return True
    spec = find_spec("Metal")
    return spec is not None and spec.origin is not None  # None: any folder of that name


def has_cuda() -> bool:
    """Whether NVIDIA's driver and its Python packages are installed. Neither is started for that,
    nor imported."""
    with suppress(ModuleNotFoundError):  # without the package that `bindings` would be in
        return find_spec("cuda.bindings") is not None and has_driver()
    return False


def precision_name(activation: DType) -> str:
    """What --precision calls a type."""
    return next(name for name, dtype in PRECISIONS.items() if dtype is activation)


def _is_apple() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"


def activation_type(backend: Backend | Paper, precision: str) -> DType:
    """The type of activations for a precision; `auto` takes the one the device computes fastest."""
    offered = backend.limits.activations
    if precision == "auto":
        return offered[0]
    dtype = PRECISIONS.get(precision)
    if dtype is None:
        raise ConfigError(
            f"precision is '{precision}'; it must be one of auto, {', '.join(PRECISIONS)}."
        )
    if dtype not in offered:
        names = ", ".join(name for name, offer in PRECISIONS.items() if offer in offered)
        raise ConfigError(
            f"precision is '{precision}', in which the {backend.name} device does not compute; it "
            f"has {names}."
        )
    return dtype
