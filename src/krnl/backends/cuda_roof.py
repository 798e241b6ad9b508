"""The most that an NVIDIA GPU does: a large product in each type, and a long copy."""

import statistics

import numpy as np

from krnl.backends.base import Backend, Roof
from krnl.backends.cuda_driver import Gpu
from krnl.dtypes import I32, DType
from krnl.ops.gemm import lora_linear
from krnl.plan.arena import plan
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.op import LIVE
from krnl.plan.step import Step

SIZE = 4096  # of the square product: several tiles for every multiprocessor
COPIED = 2**30  # bytes: many times what caches hold
RUNS = 5


def measure(backend: Backend, gpu: Gpu) -> Roof:
    """Medians of some runs, a few milliseconds each."""
    flops = {dtype: _product(backend, dtype) for dtype in backend.limits.activations}
    return Roof(flops, _copy(gpu))


def _product(backend: Backend, dtype: DType) -> float:
    """Operations a second. On random numbers: zeros take less power, and are multiplied faster."""
    x, w = (Buffer(name, (SIZE, SIZE), dtype, Kind.INPUT) for name in "xw")
    step = Step("roof", dtype, Buffer(LIVE, (1,), I32, Kind.INPUT))
    step(lora_linear, x, (w,), None, None, None, None)
    (planned,) = plan([step], backend.kernels, backend.limits.largest_block)
    memory = backend.allocate(planned.layout)
    random = np.random.default_rng(0)
    for buffer in (x, w):
        memory.write(buffer, random.standard_normal(buffer.shape, np.float32))
    assert step.live is not None
    memory.write(step.live, np.array([SIZE]))
    program = backend.compile(planned, memory)
    program.time()
    return planned.flops / statistics.median(sum(program.time()) for _ in range(RUNS))


def _copy(gpu: Gpu) -> float:
    """Bytes a second, those read and those written."""
    source, target = (gpu("cuMemAlloc", COPIED) for _ in range(2))
    marks = [gpu("cuEventCreate", int(gpu.api.CUevent_flags.CU_EVENT_DEFAULT)) for _ in range(2)]
    seconds: list[float] = []
    try:
        for _ in range(RUNS + 1):
            gpu("cuEventRecord", marks[0], gpu.stream)
            gpu("cuMemcpyDtoDAsync", target, source, COPIED, gpu.stream)
            gpu("cuEventRecord", marks[1], gpu.stream)
            gpu.wait()
            seconds.append(gpu("cuEventElapsedTime", *marks) / 1e3)
    finally:
        for mark in marks:
            gpu("cuEventDestroy", mark)
        for address in (source, target):
            gpu("cuMemFree", address)
    return 2 * COPIED / float(statistics.median(seconds[1:]))
