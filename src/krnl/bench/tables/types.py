"""Section 1 of the report: how fast a product is in each element type."""

from krnl.backends.base import Backend
from krnl.bench.command import Bench
from krnl.bench.lines import GFLOPS, PEOPLE, Line, experiments, measure, sized, square
from krnl.bench.products import BlasProduct, Product, blas_name
from krnl.bench.results import Result
from krnl.dtypes import BF16, F16, F32

ACCELERATE = 1588  # GF/s in fp32, on the report's machine


def run(bench: Bench) -> Result:
    size = square(bench.quick)
    title = sized("Matrix products by element type", size)
    return measure(bench, "types", title, GFLOPS, lines(bench.backend, size))


def lines(backend: Backend, size: int) -> list[Line]:
    return [*experiments(backend, 1, size), *_engine(backend, size), _library(size)]


def _engine(backend: Backend, size: int) -> list[Line]:
    """Activations and weights of every type, as KRNL multiplies them going forward."""
    return [
        Line(
            f"nt, {PEOPLE[activation]} activations, {PEOPLE[weight]} weights",
            Product("nt", size, size, size, activation, weight),
        )
        for activation in backend.limits.activations
        for weight in (F32, BF16, F16)
    ]


def _library(size: int) -> Line:
    note = "NumPy's library; the report has Accelerate"
    product = BlasProduct("nn", size, size, size)
    return Line(f"nn, fp32, {blas_name()} on the CPU", product, ACCELERATE, note)
