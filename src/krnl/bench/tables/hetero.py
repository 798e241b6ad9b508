"""Section 7: the GPU and the CPU's matrix units, alone and at once, and how a product would be
divided between them. The division itself is not made yet."""

import threading
from collections.abc import Callable

from krnl.backends.cpu import CpuBackend
from krnl.bench.command import Bench
from krnl.bench.control import with_cpu
from krnl.bench.gate import Measurement
from krnl.bench.products import Product
from krnl.bench.results import Entry, Result, comparable, timed
from krnl.bench.workloads import BlockShape
from krnl.dtypes import F16, F32

SQUARE, QUICK_SQUARE = 2048, 256
FULL, QUICK = BlockShape(), BlockShape(tokens=64, width=256, ffn=512)
TILE = 32  # rows; a share of the rows is rounded to whole tiles
# GF/s of the report, the GPU in fp16.
REPORTED = {
    "GPU alone": 3097.0,
    "GPU beside the CPU": 2965.0,
    "CPU alone": 1415.0,
    "CPU beside the GPU": 1711.0,
}
REPORTED_TOTAL = 4675.0
REPORTED_SHARES = {"forward": 0.77, "backward": 0.60}
REPORTED_ROWS = {"forward": 384, "backward": 320}


def cpu_share(cpu: float, gpu: float, other: float) -> float:
    """The share p of a product's rows with which both engines end together: p T_cpu = O + (1 - p)
    T_gpu. `cpu` and `gpu` are seconds of the whole product on each, `other` what the GPU has to do
    beside it."""
    return min(1.0, (other + gpu) / (cpu + gpu))


def cpu_rows(share: float, rows: int) -> int:
    """That share in whole tiles."""
    return min(rows, round(share * rows / TILE) * TILE)


def beside(run: Callable[[], float], other: Callable[[], float]) -> float:
    """Seconds of `run` while `other` is run again and again by another thread."""
    busy, enough = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def keep_busy() -> None:
        try:
            while not enough.is_set():
                other()
                busy.set()
        except BaseException as error:  # raised below, in the thread that waits
            failures.append(error)
            busy.set()

    thread = threading.Thread(target=keep_busy)
    thread.start()
    try:
        busy.wait()
        seconds = run()
    finally:
        enough.set()
        thread.join()
    if failures:
        raise failures[0]
    return seconds


def run(bench: Bench) -> Result:
    title = "GPU and CPU alone and at once"
    if bench.backend.name == "cpu":
        note = "there is one engine here, the CPU; this table needs a GPU beside it"
        entries = [
            *(Entry(name, None, "GFLOP/s", note=note) for name in (*REPORTED, "total at once")),
            *(Entry(_share_of(part), None, "of 1", note=note) for part in REPORTED_SHARES),
        ]
        return bench.result("hetero", title, None, entries)
    gate = with_cpu(bench.gate, bench.backend)
    measured = gate.measure(contestants(bench), bench.rounds)
    size = QUICK_SQUARE if bench.quick else SQUARE
    flops = 2 * size**3
    entries = [
        timed(
            measured,
            name,
            "GFLOP/s",
            lambda s: flops / s / 1e9,
            reported=reported(bench, figure),
        )
        for name, figure in REPORTED.items()
    ]
    both = sum(flops / measured.median(f"{a} beside the {b}") for a, b in ENGINES) / 1e9
    gpu = flops / measured.median("GPU alone") / 1e9
    total = reported(bench, REPORTED_TOTAL)
    entries.append(
        Entry("total at once", both, "GFLOP/s", None, total, "the GPU alone", both / gpu)
    )
    entries += [entry for part in REPORTED_SHARES for entry in _division(bench, measured, part)]
    return bench.result("hetero", title, measured, entries)


def reported(bench: Bench, figure: float) -> float | None:
    """A figure of the report, where sizes and the GPU's type are the report's."""
    size, block = (QUICK_SQUARE, QUICK) if bench.quick else (SQUARE, FULL)
    half = bench.backend.limits.activations[0]
    return comparable(figure, (SQUARE, FULL, F16), (size, block, half))


ENGINES = (("GPU", "CPU"), ("CPU", "GPU"))


def contestants(bench: Bench) -> dict[str, Callable[[], float]]:
    """Both engines at a square product, and at the block's up projection and its gradient. The CPU
    computes in float32, as the report's does."""
    size = QUICK_SQUARE if bench.quick else SQUARE
    block = QUICK if bench.quick else FULL
    half, cpu = bench.backend.limits.activations[0], CpuBackend()
    gpu_square = Product("nn", size, size, size, half, half).prepare(bench.backend)
    cpu_square = Product("nn", size, size, size, F32, F32).prepare(cpu)
    made: dict[str, Callable[[], float]] = {
        "GPU alone": gpu_square,
        "CPU alone": cpu_square,
        "GPU beside the CPU": lambda: beside(gpu_square, cpu_square),
        "CPU beside the GPU": lambda: beside(cpu_square, gpu_square),
    }
    for part, layout, n, k in (
        ("forward", "nt", block.ffn, block.width),
        ("backward", "nn", block.width, block.ffn),
    ):
        sizes = (layout, block.tokens, n, k)
        made[f"{part}, GPU"] = Product(*sizes, half, half).prepare(bench.backend)
        made[f"{part}, CPU"] = Product(*sizes, F32, F32).prepare(cpu)
    return made


def _share_of(part: str) -> str:
    return f"CPU's share of the rows, {part}"


def _division(bench: Bench, measured: Measurement, part: str) -> list[Entry]:
    """One product on each engine, and p from their times. What the GPU does beside it is the other
    of the pair, gate for up, which is as large."""
    engines = [
        timed(measured, f"{part}, {engine}", "ms", lambda s: 1e3 * s) for engine in ("CPU", "GPU")
    ]
    cpu, gpu = (measured.median(entry.name) for entry in engines)
    share, rows = cpu_share(cpu, gpu, gpu), (QUICK if bench.quick else FULL).tokens
    return [
        *engines,
        Entry(
            _share_of(part),
            share,
            "of 1",
            reported=reported(bench, REPORTED_SHARES[part]),
            note="the GPU does another like it meanwhile",
        ),
        Entry(
            f"CPU's rows of {rows}, {part}",
            cpu_rows(share, rows),
            "rows",
            reported=reported(bench, REPORTED_ROWS[part]),
        ),
    ]
