"""The engine's structures and functions for ctypes: engine/engine.h and engine/host.h in Python."""

import ctypes
from ctypes import POINTER, Structure, c_bool, c_char, c_char_p, c_int, c_int64, c_void_p
from ctypes import c_uint32 as u32
from ctypes import c_uint64 as u64
from pathlib import Path
from typing import Any

import numpy as np

BUFFERS = 31
NOBODY = 0xFFFFFFFF
MAX_REPORTS = 100
# In the order of enum ReportKind.
KINDS = (
    "out of bounds",
    "race",
    "race between threadgroups",
    "uninitialised threadgroup read",
    "misaligned",
    "divergent barrier",
    "deadlock",
    "fault",
    "threadgroup memory",
    "write to constant",
    "stack escape",
    "array index",
    "partial simdgroup",
    "unbound buffer",
)
# In the order of SIM_MATRIX_… and enum Counter.
COUNTERS = (
    "matrix_loads",
    "matrix_transposed_loads",
    "matrix_stores",
    "matrix_multiplies",
    "matrix_multiplies_other",
    "device_loads",
    "device_stores",
    "device_bytes_read",
    "device_bytes_written",
    "threadgroup_loads",
    "threadgroup_stores",
    "threadgroup_bytes_read",
    "threadgroup_bytes_written",
    "atomic_operations",
    "threadgroup_barriers",
    "simdgroup_barriers",
    "simd_operations",
    "threadgroups",
    "threadgroup_memory",
)
SCALARS = {
    "bool": "?",
    "half": "<f2",
    "float": "<f4",
    "bfloat": "bfloat",
    **{name: f"<i{size}" for name, size in (("char", 1), ("short", 2), ("int", 4), ("long", 8))},
    **{f"u{name}": f"<u{n}" for name, n in (("char", 1), ("short", 2), ("int", 4), ("long", 8))},
}
SPELLINGS = {
    **{f"{sign}int{8 * n}_t": f"<{sign or 'i'}{n}" for sign in ("", "u") for n in (1, 2, 4, 8)},
    "unsigned": "<u4",
    "unsigned int": "<u4",
    "size_t": "<u8",
}


class SimArgument(Structure):
    _fields_ = (
        ("name", c_char_p),
        ("kind", c_int),
        ("index", c_int),
        ("bytes", u32),
        ("writable", c_int),
        ("exists", POINTER(c_bool)),
    )


class SimKernel(Structure):
    _fields_ = (
        ("name", c_char_p),
        ("run", c_void_p),
        ("arguments", POINTER(SimArgument)),
        ("argument_count", c_int),
        ("max_threads", c_int),
    )


class SimConstant(Structure):
    _fields_ = (
        ("name", c_char_p),
        ("type", c_char_p),
        ("index", c_int),
        ("bytes", u32),
        ("value", c_void_p),
        ("defined", POINTER(c_bool)),
    )


class SimLibrary(Structure):
    _fields_ = (
        ("kernels", POINTER(SimKernel)),
        ("kernel_count", c_int),
        ("constants", POINTER(SimConstant)),
        ("constant_count", c_int),
        ("derive", c_void_p),
        ("checked", c_int),
    )


class Report(Structure):
    _fields_ = (
        ("kind", u32),
        ("thread", u32),
        ("threadgroup", u32),
        ("other_thread", u32),
        ("other_threadgroup", u32),
        ("times", u32),
        ("address", u64),
        ("other_address", u64),
        ("location", c_char * 128),
        ("message", c_char * 256),
    )


class Launch(Structure):
    _fields_ = (
        ("library", POINTER(SimLibrary)),
        ("kernel", POINTER(SimKernel)),
        ("buffers", c_void_p * BUFFERS),
        ("constant_indices", POINTER(c_int)),
        ("constant_values", POINTER(c_void_p)),
        ("buffer_bytes", u64 * BUFFERS),
        ("threadgroup_bytes", u32 * BUFFERS),
        ("threads_per_grid", u32 * 3),
        ("threads_per_threadgroup", u32 * 3),
        ("constant_count", u32),
        ("workers", u32),
        ("at_once", u32),
        ("seed", u32),
        ("sum_order", u32),
        ("flush_to_zero", u32),
        ("granularity", u32),
        ("time_limit", u32),
        ("report_count", u32),
        ("accumulators", u32),
        ("matrices", u32),
        ("counters", c_int64 * len(COUNTERS)),
        ("reports", Report * MAX_REPORTS),
    )


def constant(declared: Any, value: Any) -> Any:
    """A function constant's value in memory, as MSL lays out its type."""
    spelling = declared.type.decode()
    kind = SCALARS.get(spelling) or SPELLINGS.get(spelling)
    if kind is None:
        raise ValueError(
            f"Function constant {declared.name.decode()} is of type {spelling}; "
            "only scalars can be set."
        )
    if kind == "bfloat":
        raw = (np.float32(value).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    else:
        raw = np.array(value, kind).tobytes()
    return (c_char * len(raw)).from_buffer_copy(raw)


_loaded: list[ctypes.CDLL] = []  # one: kernel libraries find its functions by name


def engine() -> ctypes.CDLL:
    """The engine's library, compiled when it is first needed."""
    if not _loaded:
        from . import build  # which needs device.Library, and that needs this

        load(build.engine())
    return _loaded[0]


def load(path: Path) -> None:
    """Makes the library at `path` this process's engine, unless it has one: any serves."""
    if _loaded:
        return
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.sim_allocate.restype = library.sim_adopt.restype = c_void_p
    library.sim_allocate.argtypes = [u64, c_char_p, POINTER(c_char_p)]
    library.sim_adopt.argtypes = [c_void_p, u64, c_char_p, POINTER(c_char_p)]
    library.sim_protect.argtypes = [c_void_p, c_int]
    library.sim_free.argtypes = [c_void_p]
    library.sim_launch.argtypes = [POINTER(Launch)]
    library.sim_specialise.argtypes = [
        POINTER(SimLibrary), POINTER(c_int), POINTER(c_void_p), u32
    ]  # fmt: skip
    library.sim_image_base.argtypes = [c_void_p]
    library.sim_image_base.restype = library.sim_layout.restype = u64
    layout = [library.sim_layout(i) for i in range(3)]
    if layout != [ctypes.sizeof(Report), ctypes.sizeof(Launch), len(COUNTERS)]:
        raise RuntimeError("abi.py and engine/host.h differ: they describe the same structures.")
    _loaded.append(library)
