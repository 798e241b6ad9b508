"""The GPU that tests run on, or the reason why they do not."""

from functools import cache

from krnl.backends.cuda import CudaBackend
from krnl.errors import ConfigError


@cache
def cuda_or_reason() -> CudaBackend | str:
    """One backend for all tests of a process."""
    try:
        return CudaBackend()
    except ConfigError as error:
        return str(error)


def cuda() -> CudaBackend:
    backend = cuda_or_reason()
    assert not isinstance(backend, str), backend
    return backend


def missing() -> str:
    """Why there is no GPU; empty if there is one."""
    backend = cuda_or_reason()
    return backend if isinstance(backend, str) else ""
