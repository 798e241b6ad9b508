"""Section 3 of the report: ways to read the transposed operand, and whether its stride matters."""

from krnl.backends.base import Backend
from krnl.bench.command import Bench
from krnl.bench.product_table import GFLOPS, Line, experiment, experiments, measure, sized, square
from krnl.bench.products import Product
from krnl.bench.results import Result
from krnl.devices import precision_name
from krnl.dtypes import BF16, F16, F32
from krnl.kernels.metal.variants import BY_NAME

PADDING = 32  # more of K: rows are then no power of two apart, and miss one another in the cache
PADDED = ("nt_naive", "nt_vector")


def run(bench: Bench) -> Result:
    size = square(bench.quick)
    title = sized("The transposed operand, nt", size)
    return measure(bench, "nt", title, GFLOPS, lines(bench.backend, size))


def lines(backend: Backend, size: int) -> list[Line]:
    return [*experiments(backend, 3, size), *_padded(backend, size), *_engine(backend, size)]


def _padded(backend: Backend, size: int) -> list[Line]:
    """The report gives no figures for these: no change at all, it says."""
    k = size + PADDING
    variants = [BY_NAME[name] for name in PADDED]
    return [experiment(backend, v, f"{v.title}, k = {k}", size, size, k) for v in variants]


def _engine(backend: Backend, size: int) -> list[Line]:
    """KRNL's own, with weights of every type, and with rows that are no power of two apart."""
    activation = backend.limits.activations[0]
    products = [Product("nt", size, size, size, activation, weight) for weight in (F32, BF16, F16)]
    products.append(Product("nt", size, size, size + PADDING, activation, activation))
    ours = precision_name(activation)
    return [
        Line(f"KRNL, {ours} activations, {precision_name(p.weight)} weights, k = {p.k}", p)
        for p in products
    ]
