"""The simulated device: its memory, its kernels' functions, and their launches. Drives engine/ by
ctypes; the structures are those of engine/host.h."""

import ctypes
import struct
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char, c_char_p, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np

from krnl.kernels.launch import TensorMap
from metalsim.lines import LineTables

MOST_WAITS = 24
MAP_MARK, MAP_BYTES = 0x7E4501A9, 128
ALIGNMENT = 64  # of parameters: a tensor map's
SECONDS = 120  # that a launch may take
# Orders in which threads, warps and blocks run: as numbered; backwards; from 2 on shuffled.
FORWARD, BACKWARD = 0, 1


class KernelError(AssertionError):
    """Something wrong in a launch. `kind` is a word or two, the text says where and what."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class _Index(Structure):
    _fields_ = (("x", c_uint32), ("y", c_uint32), ("z", c_uint32))


class _Place(Structure):
    _fields_ = (("inner", c_uint64), ("outer", c_uint64))


class _Waiting(Structure):
    _fields_ = (
        ("place", _Place),
        ("first", c_uint32),
        ("count", c_uint32),
        ("block", c_uint32),
        ("what", c_char * 116),
    )


class _Report(Structure):
    _fields_ = (
        ("kind", c_char * 32),
        ("message", c_char * 320),
        ("place", _Place),
        ("block", _Index),
        ("thread", c_uint32),
        ("wait_count", c_uint32),
        ("waits", _Waiting * MOST_WAITS),
    )


class _Launch(Structure):
    _fields_ = (
        ("kernel", c_void_p),
        ("arguments", c_void_p),
        ("grid", _Index),
        ("threads", c_uint32),
        ("shared", c_uint32),
        ("cluster", c_uint32),
        ("order", c_uint32),
        ("seconds", c_uint32),
        ("beside", c_uint32),
        ("report", _Report),
    )


@cache
def _engine(path: Path) -> ctypes.CDLL:
    # Kernels' libraries find its functions by name.
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.cudasim_allocate.restype = c_void_p
    library.cudasim_allocate.argtypes = [c_uint64, c_char_p]
    library.cudasim_free.argtypes = [c_void_p]
    library.cudasim_launch.argtypes = [POINTER(_Launch)]
    library.cudasim_launch.restype = ctypes.c_bool
    library.cudasim_image_base.argtypes = [c_void_p]
    library.cudasim_image_base.restype = library.cudasim_layout.restype = c_uint64
    sizes = [library.cudasim_layout(i) for i in range(2)]
    if sizes != [ctypes.sizeof(_Report), ctypes.sizeof(_Launch)]:
        raise RuntimeError("device.py and engine/host.h differ: they describe the same structures.")
    return library


class Memory:
    """Memory of the device: `nbytes` of 0xFF, between pages that nobody may touch. Arrays over
    `bytes` keep it."""

    def __init__(self, engine: Path, nbytes: int, name: str = "") -> None:
        owner = _Owner(_engine(engine), nbytes, name)
        self.address = owner.address
        self.bytes = np.asarray(owner)


class _Owner:
    def __init__(self, engine: ctypes.CDLL, nbytes: int, name: str) -> None:
        self.address = 0
        self._engine = engine
        address = engine.cudasim_allocate(nbytes, name.encode())
        if not address:
            raise MemoryError(f"There is no memory for '{name}', {nbytes:,} bytes.")
        self.address = int(address)
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
        }

    def __del__(self) -> None:
        if self.address:
            self._engine.cudasim_free(self.address)


class Function:
    """One kernel, in a library of its own."""

    def __init__(self, path: Path, engine: Path) -> None:
        self._engine = _engine(engine)
        self._code = ctypes.CDLL(str(path))
        self._address = ctypes.cast(self._code.cudasim_kernel, c_void_p).value
        self._lines = LineTables(path)

    def launch(
        self,
        arguments: Sequence[bytes],
        groups: tuple[int, int, int],
        threads: int,
        shared: int = 0,
        cluster: int = 1,
        order: int = FORWARD,
        seconds: int = SECONDS,
        beside: bool = False,
    ) -> None:
        """Runs the kernel over a grid to its end. `arguments` are its parameters' bytes; `beside`:
        one of them tells it so, and it need not wait before it touches memory. KernelError says
        what went wrong."""
        if threads % 32 or not 0 < threads <= 1024:
            raise KernelError("launch", f"{threads} threads are no whole warps, or too many")
        if groups[0] % cluster or not 1 <= cluster <= 16:
            raise KernelError("launch", f"{groups[0]} blocks do not make clusters of {cluster}")
        if groups[0] >= 2**31 or max(groups[1:]) > 65535:
            raise KernelError("launch", f"a grid of {groups} is too large")
        packed = [_aligned(argument) for argument in arguments]
        pointers = (c_void_p * max(len(packed), 1))(*(address for address, _ in packed))
        launch = _Launch(
            self._address, ctypes.addressof(pointers), _Index(*groups), threads, shared, cluster,
            order, seconds, beside,
        )  # fmt: skip
        if not self._engine.cudasim_launch(ctypes.byref(launch)):
            raise self._fault(launch.report)

    def _fault(self, report: _Report) -> KernelError:
        block = (report.block.x, report.block.y, report.block.z)
        where = self._place(report.place)
        text = report.message.decode(errors="replace")
        if where:
            text += f", at {where}"
        if not report.wait_count:
            text += f" (thread {report.thread} of block {block})"
        for waiting in report.waits[: report.wait_count]:
            text += (
                f"\n  {waiting.count} threads from {waiting.first} on, of block {waiting.block} of "
                f"the cluster: {waiting.what.decode()}, at {self._place(waiting.place)}"
            )
        return KernelError(report.kind.decode(), text)

    def _place(self, place: _Place) -> str:
        """file:line of a call, and of the call to the function around it."""
        base = self._engine.cudasim_image_base(self._address)
        found = []
        for address in (place.inner, place.outer):
            if address and self._engine.cudasim_image_base(address) == base:
                found.append(self._lines.place(address - 1, base))
        own = ("cuda.h", "ptx.h", "launch")  # the simulator's
        return ", from ".join(x for x in found if x and x.partition(":")[0] not in own)


def _aligned(value: bytes) -> tuple[int, ctypes.Array[c_char]]:
    """Where a copy of it begins, and what holds it."""
    content = ctypes.create_string_buffer(len(value) + ALIGNMENT)
    address = ctypes.addressof(content)
    address += -address % ALIGNMENT
    ctypes.memmove(address, value, len(value))
    return address, content


def encoded(map: TensorMap, address: int) -> bytes:
    """A tensor map as the engine reads it. A KernelError where the driver would refuse it."""
    size = map.buffer.dtype.size
    row, box = map.stride * size, (map.box_rows, map.box_columns)
    if address % 16 or row % 16 or max(box) > 256 or map.box_columns * size > 128:
        raise KernelError(
            "tensor map",
            f"boxes of {box} cannot be fetched from rows of {row} bytes at an address with "
            f"remainder {address % 16} by 16: {map.buffer}",
        )
    if min(map.rows, map.columns) < 1 or map.stride < map.columns:
        raise KernelError(
            "tensor map", f"{map.rows} rows of {map.columns} elements, {row} bytes apart"
        )
    numbers = (address, row, map.rows, map.columns, *box, size, MAP_MARK)
    return struct.pack("<2Q6I", *numbers).ljust(MAP_BYTES, b"\0")
