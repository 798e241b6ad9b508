"""The blocks of a layout in a GPU's own memory, and the way of the host's arrays into it. Tables of
which a pass needs few rows lie in the host's memory, where the GPU reads them."""

import ctypes
from collections.abc import Iterator

import numpy as np

from krnl.backends.cuda_driver import Gpu, GpuMemoryError
from krnl.errors import PlanError
from krnl.plan.arena import Layout
from krnl.plan.buffer import Buffer, Kind

# Of each of the two stagings: long enough for full speed, and for what some hundred steps are fed.
STAGING = 16 * 2**20
PURPOSES = {
    Kind.WEIGHT: "weights",
    Kind.STATE: "adapter, its copy and moments",
    Kind.GRAD: "gradients",
    Kind.INPUT: "inputs",
    Kind.TEMP: "activations and temporaries",
}


class Staging:
    """Host memory that the GPU copies from while the host goes on: two halves, each filled from its
    start on, and again as soon as the GPU has read it."""

    def __init__(self, gpu: Gpu):
        self._gpu = gpu
        self._halves = _content(gpu.pinned(2 * STAGING), 2 * STAGING).reshape(2, STAGING)
        self._read = [gpu.event(timing=False) for _ in range(2)]
        self._half, self._used = 0, 0

    def take(self, nbytes: int) -> np.ndarray:
        """Room for up to STAGING bytes, uint8[nbytes]. What lies in it is to be copied before more
        is taken."""
        if self._used + nbytes > STAGING:
            # Behind every copy from this half; and every copy from the other must be over.
            self._gpu("cuEventRecord", self._read[self._half], self._gpu.stream)
            self._half, self._used = 1 - self._half, 0
            self._gpu("cuEventSynchronize", self._read[self._half])
        start = self._used
        self._used += -(-nbytes // 64) * 64
        half: np.ndarray = self._halves[self._half]
        return half[start : start + nbytes]


class CudaMemory:
    """The blocks of a layout, allocated. PlanError if they do not fit."""

    def __init__(self, gpu: Gpu, staging: Staging, layout: Layout):
        assert not any(block.file for block in layout.blocks), "files are not mapped on this device"
        self._gpu = gpu
        self._staging = staging
        self._layout = layout
        self._blocks: list[int] = []  # where the GPU finds each
        self._hosted: dict[int, np.ndarray] = {}  # contents of those in the host's memory
        for block in layout.blocks:
            allocate = self._allocate_on_host if block.host else self._allocate
            self._blocks.append(allocate(max(block.nbytes, 1)))

    def poison(self) -> None:
        """Fills the temps with NaN, so that a kernel which reads what nothing wrote is found
        out."""
        for block, address in zip(self._layout.blocks, self._blocks, strict=True):
            if block.kind is Kind.TEMP:
                self._gpu("cuMemsetD8Async", address, 0xFF, block.nbytes, self._gpu.stream)

    def address(self, buffer: Buffer) -> int:
        """Where a buffer or view begins."""
        place = self._layout.place(buffer)
        return self._blocks[place.block] + place.offset

    def write(self, buffer: Buffer, values: np.ndarray) -> None:
        """Takes its place behind what was enqueued. The host waits only where much is written, or
        where the GPU reads the host's memory."""
        if (hosted := self._view(buffer)) is not None:
            self._gpu.wait()
            hosted[...] = values
            return
        address = self.address(buffer)
        for part in _portions(np.broadcast_to(values, buffer.shape), buffer.dtype.numpy):
            staged = self._staging.take(part.size * buffer.dtype.size)
            if part.dtype == buffer.dtype.numpy:
                staged[:] = part.view(np.uint8)
            else:
                staged.view(buffer.dtype.numpy)[:] = part
            source = staged.ctypes.data
            self._gpu("cuMemcpyHtoDAsync", address, source, staged.size, self._gpu.stream)
            address += staged.size

    def read(self, buffer: Buffer) -> np.ndarray:
        if (hosted := self._view(buffer)) is not None:
            self._gpu.wait()
            return hosted.copy()
        values = np.empty(buffer.shape, buffer.dtype.numpy)
        if values.nbytes:
            source = self.address(buffer)
            target = values.ctypes.data
            self._gpu("cuMemcpyDtoHAsync", target, source, values.nbytes, self._gpu.stream)
        self._gpu.wait()
        return values

    def _allocate(self, nbytes: int) -> int:
        gpu = self._gpu
        try:
            address = gpu("cuMemAlloc", nbytes)
        except GpuMemoryError:
            raise PlanError(_too_much(gpu, self._layout, len(self._blocks))) from None
        gpu.on_end(self, "cuMemFree", address)
        # As on other devices: rows of a cache that were never written are no NaN.
        gpu("cuMemsetD8Async", address, 0, nbytes, gpu.stream)
        return int(address)

    def _allocate_on_host(self, nbytes: int) -> int:
        try:
            address = self._gpu.pinned(nbytes, owner=self)
        except GpuMemoryError:
            raise PlanError(
                f"{nbytes / 2**30:.2f} GiB of weights are to lie in the host's memory, where the "
                "GPU reads them, and the host has no room for that. End what else uses its memory, "
                "or take a smaller model."
            ) from None
        content = _content(address, nbytes)
        content[:] = 0
        self._hosted[len(self._blocks)] = content
        return int(self._gpu("cuMemHostGetDevicePointer", address, 0))

    def _view(self, buffer: Buffer) -> np.ndarray | None:
        """The host's array of a buffer that lies in its memory."""
        place = self._layout.place(buffer)
        content = self._hosted.get(place.block)
        if content is None:
            return None
        return np.ndarray(buffer.shape, buffer.dtype.numpy, content, place.offset)


def _content(address: int, nbytes: int) -> np.ndarray:
    """The host's memory from an address on, uint8[nbytes]."""
    return np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address))


def _portions(values: np.ndarray, dtype: np.dtype) -> Iterator[np.ndarray]:
    """The values in order, as arrays of one axis whose elements fill a staging in type `dtype`."""
    flat = np.ascontiguousarray(values).reshape(-1)
    count = STAGING // dtype.itemsize
    for start in range(0, flat.size, count):
        yield flat[start : start + count]


def _too_much(gpu: Gpu, layout: Layout, allocated: int) -> str:
    """What was wanted, of which the first `allocated` blocks were had, and what to do about it."""
    free, total = gpu("cuMemGetInfo")
    parts = ", ".join(
        f"{layout.reserved(kind) / 2**30:.2f} GiB of {purpose}"
        for kind, purpose in PURPOSES.items()
        if layout.reserved(kind)
    )
    needed, taken = (
        sum(block.nbytes for block in blocks if not block.host)
        for blocks in (layout.blocks, layout.blocks[:allocated])
    )
    return (
        f"This takes {needed / 2**30:.2f} GiB of the GPU's memory ({parts}), and "
        f"{(free + taken) / 2**30:.2f} of {total / 2**30:.2f} GiB are free. Lower --tokens, train "
        "with a --memory-limit below that, end what else uses the GPU, or take a smaller model."
    )
