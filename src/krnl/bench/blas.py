"""The library behind NumPy's products: what it is, and how many threads it takes."""

import ctypes
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from krnl.bench.results import Tool

# What its functions may be called: as they are, or as NumPy's wheels rename them.
_NAMES = ("scipy_openblas_{}64_", "scipy_openblas_{}", "openblas_{}64_", "openblas_{}")


def blas_name() -> str:
    return str(_built()["name"])


def blas_with_threads(threads: int) -> Tool:
    """Gives the library so many threads from now on, if it is OpenBLAS, which is the one that can
    be told; and says what it then has. Another keeps its own default."""
    linked = import_module("numpy.linalg._umath_linalg").__file__
    library = ctypes.CDLL(linked)  # finds names in what this part of NumPy is linked to
    granted = None
    for name in _NAMES:
        if hasattr(library, name.format("set_num_threads")):
            getattr(library, name.format("set_num_threads"))(threads)
            granted = int(getattr(library, name.format("get_num_threads"))())
    versions = {"numpy": np.__version__, blas_name(): str(_built()["version"])}
    return Tool(blas_name(), versions, granted)


@cache
def _built() -> dict[str, Any]:
    built: Any = np.show_config(mode="dicts")
    return dict(built["Build Dependencies"]["blas"])
