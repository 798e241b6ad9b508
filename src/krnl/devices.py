"""Which backend computes, and in which type."""

from krnl.backends.base import Backend
from krnl.dtypes import BF16, F16, F32, DType
from krnl.errors import ConfigError

DEVICES = ("auto", "cpu", "metal", "cuda", "reference")
PRECISIONS = {"fp32": F32, "bf16": BF16, "fp16": F16}


def open_backend(device: str) -> Backend:
    """The backend of that name; `auto` takes the best one here."""
    if device in ("auto", "cpu"):
        from krnl.backends.cpu import CpuBackend

        return CpuBackend()
    if device == "reference":
        from krnl.backends.reference import ReferenceBackend

        return ReferenceBackend()
    if device in ("metal", "cuda"):
        raise ConfigError(
            f"device is '{device}', which this version of KRNL does not have yet; use cpu."
        )
    raise ConfigError(f"device is '{device}'; it must be one of {', '.join(DEVICES)}.")


def activation_type(backend: Backend, precision: str) -> DType:
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
