"""Section 5 of the report: the narrow products of adapters, whose sums the GPU cuts into chunks."""

from dataclasses import replace

from krnl.backends.base import Backend
from krnl.bench.command import Bench
from krnl.bench.product_table import MS, Line, experiment, measure
from krnl.bench.products import Product
from krnl.bench.results import Result, comparable
from krnl.bench.workloads import BlockShape
from krnl.devices import precision_name
from krnl.dtypes import F16
from krnl.kernels.cuda.variants import uncut
from krnl.kernels.metal.variants import BY_NAME

UNCUT = {"nn": BY_NAME["nn"], "nt": BY_NAME["nt_vector"]}  # the report's kernels, on Metal
QUICK = BlockShape(tokens=64, width=256, ffn=512)
DGA, FORWARD = (0.465, 0.095), (0.156, 0.051)  # ms in the report, in one and in chunks, fp16


def run(bench: Bench) -> Result:
    shape = QUICK if bench.quick else BlockShape()
    other = f" (the report: {_words(BlockShape())})" if bench.quick else ""
    precision = precision_name(bench.backend.limits.activations[0])
    title = f"Narrow products of adapters in {precision}; {_words(shape)}{other}"
    return measure(bench, "splitk", title, MS, lines(bench.backend, shape))


def _words(shape: BlockShape) -> str:
    return f"{shape.tokens} tokens, width {shape.width}, FFN {shape.ffn}, rank {shape.rank}"


def lines(backend: Backend, shape: BlockShape) -> list[Line]:
    n, c, f, r = shape.tokens, shape.width, shape.ffn, shape.rank
    dtype = backend.limits.activations[0]

    def reported(figures: tuple[float, float]) -> list[float | None]:
        return [comparable(figure, (BlockShape(), F16), (shape, dtype)) for figure in figures]

    dga, forward = (
        Product(layout, n, r, k, dtype, dtype, narrow=True) for layout, k in (("nn", f), ("nt", c))
    )
    return [
        *_both(backend, "bwd dGa = dG@B", dga, *reported(DGA)),
        *_both(backend, "fwd h@Aᵀ", forward, *reported(FORWARD)),
        # These have tiles enough.
        Line("bwd dA += vᵀ@h", Product("tn", r, c, n, dtype, dtype)),
        Line("bwd dB += dGᵀ@u", Product("tn", f, r, n, dtype, dtype, True)),
    ]


def _both(
    backend: Backend, name: str, product: Product, whole: float | None, cut: float | None
) -> list[Line]:
    """Without and with the sum cut, and the report's figures for these."""
    one, chunks = f"{name}, in one", f"{name}, in chunks"
    if backend.name == "metal":
        m, n, k = product.m, product.n, product.k
        line = experiment(backend, UNCUT[product.layout], f"{one}, the report's kernel", m, n, k)
        line = replace(line, reported=whole)
        return [line, Line(chunks, product, cut, against=line.name)]
    if table := uncut(backend.kernels):
        return [
            Line(one, replace(product, table=table), whole),
            Line(chunks, product, cut, against=one),
        ]
    note = f"on {backend.name} no product's sum is cut"
    return [Line(one, product, whole), Line(chunks, None, cut, note)]
