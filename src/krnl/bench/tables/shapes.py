"""The products that the layers of models are made of, beside the platform's library by way of
PyTorch, with operands that come from memory and not from a cache."""

import math
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from krnl.backends.base import Backend
from krnl.bench.baselines import (
    AGREEMENT,
    NUMBER,
    Keys,
    Worker,
    check_agreement,
    script,
    start,
    tools,
)
from krnl.bench.command import Bench
from krnl.bench.gate import Measurement
from krnl.bench.products import Product
from krnl.bench.results import Entry, Result, timed
from krnl.bench.rotation import Rotation
from krnl.devices import precision_name

# Layout, n and k at some number of rows. The report's block: gate and up at once, the gradient
# through down, down, the gradient through gate and up; and a projection of attention.
LAYERS = (
    ("nt", 11264, 2048), ("nn", 5632, 2048), ("nt", 2048, 5632), ("nn", 2048, 11264),
    ("nt", 2048, 2048),
)  # fmt: skip
ROWS = (512, 4096)  # the first alone on a CPU
# Layout, m, n, k: squares, and the gradient of a projection over 4,096 tokens.
OTHERS = (
    ("tn", 4096, 4096, 4096), ("nt", 4096, 4096, 4096), ("nn", 4096, 4096, 4096),
    ("nt", 8192, 8192, 8192), ("tn", 2048, 2048, 4096),
)  # fmt: skip
QUICK = 16  # sides are so many times smaller
SAID: Keys = {"norm": NUMBER, "row": list}  # by bench/torch_products.py, of its first step


@dataclass(frozen=True)
class Shape:
    """A line of the table, and the group that its ratio is averaged in."""

    group: str
    layout: str
    m: int
    n: int
    k: int

    @property
    def ours(self) -> str:
        return f"{self.layout}, {self.m} × {self.n} × {self.k}, krnl"

    @property
    def theirs(self) -> str:
        return f"{self.layout}, {self.m} × {self.n} × {self.k}, torch"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


def run(bench: Bench) -> Result:
    backend = bench.backend
    activation = backend.limits.activations[0]
    precision, found = precision_name(activation), shapes(backend, bench.quick)
    python = bench.against.get("torch")
    contestants: dict[str, Callable[[], float]] = {}
    # All are built before any worker is there to disturb the timing of what a turn is made of.
    rotations = {
        shape: Rotation(
            Product(shape.layout, shape.m, shape.n, shape.k, activation, activation), backend
        )
        for shape in found
    }
    workers: dict[Shape, Worker] = {}
    with ExitStack() as stack:
        if python is not None:
            workers = _started(stack, python, rotations, backend, precision)
        for shape, rotation in rotations.items():
            contestants[shape.ours] = rotation.turn
            if shape in workers:
                check(shape.theirs, workers[shape].hello, rotation)
                contestants[shape.theirs] = _product_seconds(workers[shape], rotation.calls)
        measured = bench.gate.measure(contestants, bench.rounds)
    entries: list[Entry] = []
    ratios: dict[Shape, float] = {}
    for shape in found:
        ours, theirs = notes(shape, backend, precision)
        ratio = None
        if shape in workers:
            ratio = measured.median(shape.theirs) / measured.median(shape.ours)
            ours = "; ".join(filter(None, (ours, "ratio to torch")))
            if alike(shape, backend):
                ratios[shape] = ratio
            else:
                ours += ", which is in no mean"
        entries.append(_entry(measured, shape, shape.ours, ours, ratio))
        if shape in workers:
            entries.append(_entry(measured, shape, shape.theirs, theirs))
    entries += means(ratios)
    title = f"Products of models' layers in {precision}, m × n × k, operands from memory"
    took_part = [("torch", worker) for worker in workers.values()]
    return bench.result("shapes", title, measured, entries, tools(took_part))


def shapes(backend: Backend, quick: bool) -> list[Shape]:
    """All that are measured on a device: a CPU takes minutes for the larger ones."""
    scale = QUICK if quick else 1
    found = []
    for rows in (rows // scale for rows in (ROWS[:1] if backend.name == "cpu" else ROWS)):
        for layout, n, k in LAYERS:
            found.append(Shape(f"{rows:,} rows", layout, rows, n // scale, k // scale))
    for layout, *sides in () if backend.name == "cpu" else OTHERS:
        m, n, k = (side // scale for side in sides)
        found.append(Shape("squares and a gradient", layout, m, n, k))
    return found


def arguments(shape: Shape, rotation: Rotation, precision: str) -> list[str]:
    """For bench/torch_products.py."""
    sizes = {
        "m": shape.m, "n": shape.n, "k": shape.k, "copies": rotation.copies,
        "calls": rotation.calls, "repeats": rotation.repeats,
    }  # fmt: skip
    given = ["--layout", shape.layout, "--precision", precision]
    return given + [text for name, value in sizes.items() for text in (f"--{name}", str(value))]


def check(name: str, hello: Mapping[str, Any], rotation: Rotation) -> None:
    """BackendError where a peer's product has another norm, or another first row: the norm of
    random numbers is much the same whichever are multiplied."""
    check_agreement(name, "the norm of the product", hello["norm"], rotation.norm, AGREEMENT)
    theirs, ours = hello["row"], rotation.row[: len(hello["row"])]
    length = math.hypot(*ours)
    along = sum(a * b for a, b in zip(theirs, ours, strict=True)) / length
    check_agreement(name, "its first row, along KRNL's,", along, length, AGREEMENT)


def alike(shape: Shape, backend: Backend) -> bool:
    """Whether both sides do the same: only on CUDA does PyTorch add a product to a sum in fp32."""
    return shape.layout != "tn" or backend.name == "cuda"


def notes(shape: Shape, backend: Backend, precision: str) -> tuple[str, str]:
    """What KRNL and what PyTorch does with a product of this layout, where that is to be said."""
    if shape.layout != "tn":
        return "", ""
    added = "added to a sum in fp32"
    return added, added if alike(shape, backend) else f"written once, in {precision}"


def means(ratios: Mapping[Shape, float]) -> list[Entry]:
    """Geometric ones, of each group and of all; nothing without a peer."""
    groups: dict[str, list[float]] = {}
    for shape, ratio in ratios.items():
        groups.setdefault(shape.group, []).append(ratio)
    if len(groups) > 1:
        groups["all"] = list(ratios.values())
    return [
        Entry(
            f"mean ratio, {name}",
            statistics.geometric_mean(values),
            "of torch's speed",
            note=f"geometric, of {len(values)} shapes",
        )
        for name, values in groups.items()
    ]


def _started(
    stack: ExitStack,
    python: str,
    rotations: Mapping[Shape, Rotation],
    backend: Backend,
    precision: str,
) -> dict[Shape, Worker]:
    """A worker for each shape, all of them closed with `stack`. They start side by side: each takes
    seconds until it has what it imports."""
    path = script("torch_products.py")
    starting: dict[Shape, Future[Worker]] = {}
    with ThreadPoolExecutor(max_workers=len(rotations)) as pool:
        for shape, rotation in rotations.items():
            given = arguments(shape, rotation, precision)
            future = pool.submit(start, "torch", python, path, given, backend, first=SAID)
            stack.callback(_close, future)
            starting[shape] = future
    return {shape: future.result() for shape, future in starting.items()}


def _close(starting: Future[Worker]) -> None:
    """Ends a worker, if it ever began."""
    if not starting.cancel() and starting.exception() is None:
        starting.result().close()


def _product_seconds(worker: Worker, calls: int) -> Callable[[], float]:
    return lambda: worker.seconds() / calls


def _entry(
    measured: Measurement, shape: Shape, name: str, note: str = "", ratio: float | None = None
) -> Entry:
    return timed(measured, name, "GFLOP/s", lambda s: shape.flops / s / 1e9, note=note, ratio=ratio)
