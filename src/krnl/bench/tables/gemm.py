"""Section 2 of the report: the three products of a training step, beside the platform's library."""

from krnl.backends.base import Backend
from krnl.bench.blas import blas_name
from krnl.bench.command import Bench
from krnl.bench.product_table import GFLOPS, SIZE, Line, experiment, measure, sized, square
from krnl.bench.products import BlasProduct, Product
from krnl.bench.results import Result, comparable
from krnl.devices import precision_name
from krnl.dtypes import F32
from krnl.kernels.metal.variants import BY_NAME

MPS = {"nn": 3660, "tn": 3759, "nt": 3678}  # GF/s of MPSMatrixMultiplication in the report
NOT_YET = "KRNL does not call it yet"


def run(bench: Bench) -> Result:
    size = square(bench.quick)
    title = sized("Products nn, tn and nt", size)
    return measure(bench, "gemm", title, GFLOPS, lines(bench.backend, size))


def lines(backend: Backend, size: int) -> list[Line]:
    found = [line for layout in MPS for line in _layout(backend, layout, size)]
    others = {"MPSGraph": NOT_YET, "cuBLAS": "krnl bench shapes --against torch has it"}
    return found + [Line(name, None, note=note) for name, note in others.items()]


def _layout(backend: Backend, layout: str, size: int) -> list[Line]:
    """The report's kernel, KRNL's in each of its types, and the libraries."""
    sizes = (size, size, size)
    blas = f"{layout}, fp32, {blas_name()} on the CPU"
    mps = comparable(MPS[layout], (SIZE,), (size,))
    return [
        experiment(backend, BY_NAME[layout], f"{layout}, fp16, the report's kernel", *sizes),
        *(
            Line(
                f"{layout}, {precision_name(dtype)}",
                Product(layout, *sizes, dtype, dtype),
                note="added to a sum in fp32" if layout == "tn" else "",
                against=blas if dtype is F32 else "",
            )
            for dtype in backend.limits.activations
        ),
        Line(blas, BlasProduct(layout, *sizes), note="NumPy's library"),
        Line(f"{layout}, fp16, MPSMatrixMultiplication", None, mps, NOT_YET),
    ]
