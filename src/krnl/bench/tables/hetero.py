"""Section 7: the GPU and the CPU's matrix units, alone and at once, and how a product would be
divided between them. The division itself is not made yet."""

import threading
from collections.abc import Callable

from krnl.backends.cpu import CpuBackend
from krnl.bench.command import Bench
from krnl.bench.control import machine
from krnl.bench.gate import Measurement
from krnl.bench.products import Product
from krnl.bench.results import Entry, Result, timed
from krnl.bench.workloads import BlockShape
from krnl.dtypes import F32

SQUARE, QUICK_SQUARE = 2048, 256
FULL, QUICK = BlockShape(), BlockShape(tokens=64, width=256, ffn=512)
TILE = 32  # rows; a share of the rows is rounded to whole tiles
# GF/s of the report.
REPORTED = {
    "GPU alone": 3097.0,
    "GPU beside the CPU": 2965.0,
    "CPU alone": 1415.0,
    "CPU beside the GPU": 1711.0,
}
REPORTED_TOTAL = 4675.0
REPORTED_SHARES = {"forward": 0.77, "backward": 0.60}


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
            Entry(name, None, "GFLOP/s", reported=figure, note=note)
            for name, figure in {**REPORTED, "total at once": REPORTED_TOTAL}.items()
        ]
        for part, share in REPORTED_SHARES.items():
            name = f"CPU's share of the rows, {part}"
            entries.append(Entry(name, None, "of 1", reported=share, note=note))
        return Result("hetero", title, machine(bench.backend), None, tuple(entries))
    measured = bench.gate.measure(contestants(bench), bench.rounds)
    size = QUICK_SQUARE if bench.quick else SQUARE
    flops = 2 * size**3
    entries = [
        timed(measured, name, "GFLOP/s", lambda s: flops / s / 1e9, reported=figure)
        for name, figure in REPORTED.items()
    ]
    both = sum(flops / measured.median(f"{a} beside the {b}") for a, b in ENGINES) / 1e9
    gpu = flops / measured.median("GPU alone") / 1e9
    entries.append(
        Entry("total at once", both, "GFLOP/s", None, REPORTED_TOTAL, "the GPU alone", both / gpu)
    )
    rows = (QUICK if bench.quick else FULL).tokens
    entries += [_share(measured, part, rows) for part in REPORTED_SHARES]
    return Result("hetero", title, machine(bench.backend), measured, tuple(entries))


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


def _share(measured: Measurement, part: str, rows: int) -> Entry:
    """p from the times of one product. What the GPU does beside it is the other of the pair, gate
    for up, which is as large."""
    cpu, gpu = measured.median(f"{part}, CPU"), measured.median(f"{part}, GPU")
    share = cpu_share(cpu, gpu, gpu)
    note = (
        f"{cpu_rows(share, rows)} of {rows} rows: {1e3 * cpu:.2f} ms on the CPU, "
        f"{1e3 * gpu:.2f} on the GPU, which does another like it meanwhile"
    )
    name = f"CPU's share of the rows, {part}"
    return Entry(name, share, "of 1", reported=REPORTED_SHARES[part], note=note)
