"""Section 4 of the report: tiles of several sizes, and ways to store them."""

from krnl.backends.base import Backend
from krnl.bench.command import Bench
from krnl.bench.product_table import GFLOPS, Line, experiments, measure, sized, square
from krnl.bench.results import Result


def run(bench: Bench) -> Result:
    size = square(bench.quick)
    return measure(bench, "tiles", sized("Tiles", size), GFLOPS, lines(bench.backend, size))


def lines(backend: Backend, size: int) -> list[Line]:
    return experiments(backend, 4, size)
