"""Section 1 of the report: how fast a product is in each element type."""

from krnl.backends.base import Backend
from krnl.bench.blas import blas_name
from krnl.bench.command import Bench
from krnl.bench.product_table import GFLOPS, SIZE, Line, experiments, measure, sized, square
from krnl.bench.products import BlasProduct, Product
from krnl.bench.results import Result, comparable
from krnl.devices import precision_name
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
            f"nt, {precision_name(activation)} activations, {precision_name(weight)} weights",
            Product("nt", size, size, size, activation, weight),
        )
        for activation in backend.limits.activations
        for weight in (F32, BF16, F16)
    ]


def _library(size: int) -> Line:
    note = "NumPy's library; the report has Accelerate"
    product = BlasProduct("nn", size, size, size)
    reported = comparable(ACCELERATE, (SIZE,), (size,))
    return Line(f"nn, fp32, {blas_name()} on the CPU", product, reported, note)
