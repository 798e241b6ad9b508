"""Memory that the host and a Metal GPU share: reserved blocks, and mapped checkpoint files."""

import ctypes
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from krnl.backends.base import Limits
from krnl.errors import BackendError, PlanError
from krnl.plan.arena import Layout
from krnl.plan.buffer import Buffer, Kind


@dataclass(frozen=True)
class Region:
    """A buffer of the device, the same bytes as the host sees them, and where in its block they
    begin."""

    buffer: Any
    content: np.ndarray
    start: int = 0


class MetalMemory:
    """The blocks of a layout on `device` (an MTLDevice). `wait` returns when everything enqueued
    has run."""

    def __init__(
        self, device: Any, shared: int, wait: Callable[[], None], layout: Layout, limits: Limits
    ):
        self._device = device
        self._shared = shared  # the option for memory that host and GPU share
        self._wait = wait
        self._layout = layout
        self._largest = limits.largest_block
        assert limits.mapped_alignment is not None
        self._alignment = limits.mapped_alignment
        _check_fits(layout, limits.memory)
        self._own: dict[Buffer, Region] = {}  # weights with a region of their own
        self._blocks = [
            self._map(index, block.file) if block.file else self._reserve(block.nbytes)
            for index, block in enumerate(layout.blocks)
        ]

    def poison(self) -> None:
        """Fills the temps with NaN, so that a kernel which reads what nothing wrote is found
        out."""
        self._wait()
        for block, region in zip(self._layout.blocks, self._blocks, strict=True):
            if block.kind is Kind.TEMP and region is not None:
                region.content[:] = 0xFF

    def view(self, buffer: Buffer) -> np.ndarray:
        """The buffer's own memory, shaped. What was enqueued may still be writing it."""
        region, offset = self._locate(buffer)
        return np.ndarray(buffer.shape, buffer.dtype.numpy, region.content, offset)

    def binding(self, buffer: Buffer) -> tuple[Any, int]:
        """The device's buffer, and a byte offset in it."""
        region, offset = self._locate(buffer)
        return region.buffer, offset

    def write(self, buffer: Buffer, values: np.ndarray) -> None:
        # The GPU reads the very same bytes: what was enqueued before must not see them change.
        self._wait()
        self.view(buffer)[...] = values

    def read(self, buffer: Buffer) -> np.ndarray:
        self._wait()
        return self.view(buffer).copy()

    def _locate(self, buffer: Buffer) -> tuple[Region, int]:
        place = self._layout.place(buffer)
        region = self._own.get(buffer.root) or self._blocks[place.block]
        assert region is not None
        # A buffer of no bytes may lie at the very end, where Metal takes no offset.
        return region, place.offset - region.start if buffer.nbytes else 0

    def _reserve(self, nbytes: int) -> Region:
        if nbytes > self._largest:
            raise PlanError(
                f"A block of {nbytes:,} bytes is {nbytes - self._largest:,} more than this GPU "
                "allows in one piece. Lower --tokens."
            )
        buffer = self._device.newBufferWithLength_options_(max(nbytes, 1), self._shared)
        if buffer is None:
            raise BackendError(
                f"Metal grants no {nbytes:,} bytes. Close other programs, or lower --tokens."
            )
        return Region(buffer, np.frombuffer(buffer.contents().as_buffer(nbytes), np.uint8))

    def _map(self, index: int, path: Path) -> Region | None:
        """A file's block as one region. Where the GPU does not allow that much in one piece there
        is none, and every weight gets a region of its own."""
        with open(path, "rb") as file:
            content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        whole = self._window(content, 0, self._layout.blocks[index].nbytes)
        for weight, place in self._layout.places.items():
            if place.block != index:
                continue
            askew = place.offset % (self._alignment * weight.dtype.size)
            assert not askew, f"{weight} lies askew in {path}, and was planned to be mapped."
            if whole is None:
                window = self._window(content, place.offset, place.offset + weight.nbytes)
                if window is None:
                    raise PlanError(
                        f"{weight} of {path} takes {weight.nbytes:,} bytes; this GPU allows "
                        f"{self._largest:,} in one piece."
                    )
                self._own[weight] = window
        return whole

    def _window(self, content: np.ndarray, start: int, stop: int) -> Region | None:
        """Bytes start ≤ i < stop of a mapped file, out to whole pages; None if they are too many
        for the GPU. The region keeps the mapping alive."""
        first = whole_pages(start)
        nbytes = whole_pages(stop + mmap.PAGESIZE - 1) - first
        if nbytes > self._largest:
            return None
        # The last page is there in full, though NumPy's view ends where the file does.
        pages = (ctypes.c_ubyte * nbytes).from_address(content.ctypes.data + first)
        buffer = self._device.newBufferWithBytesNoCopy_length_options_deallocator_(
            pages, nbytes, self._shared, None
        )
        # A virtual Mac has been seen to give a buffer of no length.
        if buffer is None or buffer.length() < nbytes:
            raise BackendError(f"Metal does not map {nbytes:,} bytes of a checkpoint file.")
        return Region(buffer, content[first:], first)


def whole_pages(nbytes: int) -> int:
    """Rounded down to the pages of this machine."""
    return nbytes // mmap.PAGESIZE * mmap.PAGESIZE


def _check_fits(layout: Layout, limit: int) -> None:
    nbytes = layout.mapped + sum(block.nbytes for block in layout.blocks if not block.file)
    if nbytes > limit:
        raise PlanError(
            f"This takes {nbytes / 2**30:.2f} GiB, and Metal lets the GPU use "
            f"{limit / 2**30:.2f} GiB of this machine's memory: {(nbytes - limit) / 2**30:.2f} GiB "
            "too much. Lower --tokens, or take a smaller model."
        )
