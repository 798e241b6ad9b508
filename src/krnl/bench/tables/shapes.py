"""The products that the layers of models are made of, beside the platform's library by way of
PyTorch, with operands that come from memory and not from a cache."""

import math
import statistics
from collections.abc import Callable, Mapping
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
    workers: list[tuple[str, Worker]] = []
    with ExitStack() as stack:
        for shape in found:
            product = Product(shape.layout, shape.m, shape.n, shape.k, activation, activation)
            rotation = Rotation(product, backend)
            contestants[shape.ours] = rotation.turn
            if python is not None:
                path, given = script("torch_products.py"), arguments(shape, rotation, precision)
                worker = start("torch", python, path, given, backend, first=SAID)
                stack.enter_context(worker)
                check(shape.theirs, worker.hello, rotation)
                contestants[shape.theirs] = _product_seconds(worker, rotation.calls)
                workers.append(("torch", worker))
        measured = bench.gate.measure(contestants, bench.rounds)
    entries: list[Entry] = []
    ratios: dict[Shape, float] = {}
    for shape in found:
        notes = ["added to a sum in fp32"] if shape.layout == "tn" else []
        if python is not None:
            ratios[shape] = measured.median(shape.theirs) / measured.median(shape.ours)
            notes.append("ratio to torch")
        note = "; ".join(notes)
        entries.append(_entry(measured, shape, shape.ours, note, ratios.get(shape)))
        if python is not None:
            entries.append(_entry(measured, shape, shape.theirs))
    entries += means(ratios)
    title = f"Products of models' layers in {precision}, m × n × k, operands from memory"
    return bench.result("shapes", title, measured, entries, tools(workers))


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


def means(ratios: Mapping[Shape, float]) -> list[Entry]:
    """Of each group and of all; nothing without a peer."""
    groups: dict[str, list[float]] = {}
    for shape, ratio in ratios.items():
        groups.setdefault(shape.group, []).append(ratio)
    if len(groups) > 1:
        groups["all"] = list(ratios.values())
    return [
        Entry(
            f"mean ratio, {name}",
            statistics.mean(values),
            "of torch's speed",
            note=f"{len(values)} shapes",
        )
        for name, values in groups.items()
    ]


def _product_seconds(worker: Worker, calls: int) -> Callable[[], float]:
    return lambda: worker.seconds() / calls


def _entry(
    measured: Measurement, shape: Shape, name: str, note: str = "", ratio: float | None = None
) -> Entry:
    return timed(measured, name, "GFLOP/s", lambda s: shape.flops / s / 1e9, note=note, ratio=ratio)
