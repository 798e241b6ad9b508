"""The CPU with an instruction set that a test chooses."""

import os
from functools import cache

from krnl.backends.cpu import CpuBackend


@cache
def cpu(isa: str) -> CpuBackend:
    """One backend for all tests of a process."""
    os.environ["KRNL_CPU_ISA"] = isa
    try:
        return CpuBackend()
    finally:
        del os.environ["KRNL_CPU_ISA"]
