"""One op on the simulated Metal device: checked against its reference, or run on arrays as they
are, bits in and bits out."""

from functools import cache
from typing import Any

import numpy as np

from krnl.dtypes import BY_NAME, F32, I32, DType
from krnl.kernels.metal.rows import ROWS
from krnl.plan.arena import plan
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.lower import Table
from krnl.plan.op import Op
from krnl.plan.step import Step
from metalsim.install import SimulatedBackend, metal_backend
from op_bench import Bench

TABLE = Table("metal", tuple(ROWS))
TYPES = {dtype.numpy: dtype for dtype in BY_NAME.values()}


@cache
def _backend(mode: str, table: Table, settings: tuple[tuple[str, Any], ...]) -> SimulatedBackend:
    return metal_backend(mode, table, **dict(settings))


def backend(mode: str = "checked", table: Table = TABLE, **settings: Any) -> SimulatedBackend:
    """One for each way to build, with its counters at zero."""
    made = _backend(mode, table, tuple(sorted(settings.items())))
    made.simulation.counters.clear()
    return made


def buffer(array: np.ndarray, name: str, start: int = 0) -> Buffer:
    """A buffer for the array, `start` elements behind the beginning of its memory."""
    root = Buffer(name, (start + array.size,), TYPES[array.dtype], Kind.STATE)
    return root.part(name, start, array.shape)


def run(
    device: SimulatedBackend,
    definition: Op,
    inputs: list[np.ndarray | None],
    outputs: list[np.ndarray],
    *,
    activation: DType = F32,
    live: int | None = None,
    start: int = 0,
    **attributes: float,
) -> list[np.ndarray]:
    """The outputs, given with their old contents, after the op. Buffers begin `start` elements
    behind an aligned address."""
    step = Step("test", activation)
    given = [None if a is None else buffer(a, f"in{i}", start) for i, a in enumerate(inputs)]
    into = tuple(buffer(a, f"out{i}", start) for i, a in enumerate(outputs))
    count = Buffer("live", (1,), I32, Kind.INPUT)
    keywords = {"live": count} if live is not None else {}
    step(definition, *given, into=into if len(into) > 1 else into[0], **keywords, **attributes)
    (planned,) = plan([step], device.kernels)
    memory = device.allocate(planned.layout)
    memory.poison()
    if live is not None:
        memory.write(count, np.array([live]))
    for target, array in [*zip(given, inputs, strict=True), *zip(into, outputs, strict=True)]:
        if target is not None:
            memory.write(target, array)
    device.compile(planned, memory).run()
    results = [memory.read(target) for target in into]
    device.simulation.expect_clean()
    return results


def check(bench: Bench, device: SimulatedBackend) -> float:
    """The share of the allowance that was used. A report is what fails, if there is one."""
    device.simulation.reports.clear()
    try:
        return bench.check(device)
    finally:
        device.simulation.expect_clean()


def drawn(seed: int, *shape: int, dtype: DType = F32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype.numpy)


def bits(array: np.ndarray) -> np.ndarray:
    return array.view({2: np.uint16, 4: np.uint32}[array.itemsize])
