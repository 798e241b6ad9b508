"""Which backend computes, and in which type."""

import platform
import sys
from contextlib import suppress
from importlib.util import find_spec

from krnl.backends.base import Backend, Paper
from krnl.dtypes import BF16, F16, F32, DType
from krnl.errors import ConfigError

DEVICES = ("auto", "cpu", "metal", "cuda", "reference")
PRECISIONS = {"fp32": F32, "bf16": BF16, "fp16": F16}


def open_backend(device: str) -> Backend:
    """The backend of that name; `auto` takes Metal where it can be used, else the CPU. ConfigError
    for one that is not here."""
    if device == "auto" and _is_apple() and has_metal():
        with suppress(ConfigError):
            return open_backend("metal")
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
        raise ConfigError(
            "device is 'cuda', which this version of KRNL does not have yet; use cpu."
        )
    raise ConfigError(f"device is '{device}'; it must be one of {', '.join(DEVICES)}.")


def planning_device(device: str) -> Backend | Paper:
    """What `krnl plan` plans for: the backend of that name, or Metal on paper where it is not."""
    if device == "metal" and not has_metal():
        from krnl.backends.metal import ON_PAPER

        return ON_PAPER
    return open_backend(device)


def has_metal() -> bool:
    """Whether PyObjC's Metal is installed. It is not loaded for that."""
    if "Metal" in sys.modules:
        return True
    spec = find_spec("Metal")
    return spec is not None and spec.origin is not None  # None: any folder of that name


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
