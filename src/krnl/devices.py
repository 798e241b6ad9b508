"""Which backend computes, and in which type."""

import platform
import sys
from importlib.util import find_spec

from krnl.backends.base import Backend, Paper
from krnl.dtypes import BF16, F16, F32, DType
from krnl.errors import ConfigError

DEVICES = ("auto", "cpu", "metal", "cuda", "reference")
PRECISIONS = {"fp32": F32, "bf16": BF16, "fp16": F16}


def open_backend(device: str) -> Backend:
    """The backend of that name; `auto` takes Metal where it is, else the CPU. ConfigError for one
    that is not here."""
    if device == "auto":
        apple = sys.platform == "darwin" and platform.machine() == "arm64"
        device = "metal" if apple and has_metal() else "cpu"
    if device == "cpu":
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
    return "Metal" in sys.modules or find_spec("Metal") is not None


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
