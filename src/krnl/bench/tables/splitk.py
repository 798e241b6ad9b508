"""Section 5 of the report: the narrow products of adapters, whose sums the GPU cuts into chunks."""

from dataclasses import replace

from krnl.backends.base import Backend
from krnl.bench.command import Bench
from krnl.bench.lines import MS, Line, experiment, measure
from krnl.bench.products import Product
from krnl.bench.results import Result
from krnl.bench.workloads import BlockShape
from krnl.kernels.metal.variants import BY_NAME

UNCUT = {"nn": BY_NAME["nn"], "nt": BY_NAME["nt_vector"]}  # the report's kernels, on Metal
QUICK = BlockShape(tokens=64, width=256, ffn=512)


def run(bench: Bench) -> Result:
    shape = QUICK if bench.quick else BlockShape()
    other = f" (the report: {_words(BlockShape())})" if bench.quick else ""
    title = f"Narrow products of adapters; {_words(shape)}{other}"
    return measure(bench, "splitk", title, MS, lines(bench.backend, shape))


def _words(shape: BlockShape) -> str:
    return f"{shape.tokens} tokens, width {shape.width}, FFN {shape.ffn}, rank {shape.rank}"


def lines(backend: Backend, shape: BlockShape) -> list[Line]:
    n, c, f, r = shape.tokens, shape.width, shape.ffn, shape.rank
    dtype = backend.limits.activations[0]
    return [
        *_both(backend, "bwd dGa = dG@B", Product("nn", n, r, f, dtype, dtype, True), 0.465, 0.095),
        *_both(backend, "fwd h@Aᵀ", Product("nt", n, r, c, dtype, dtype, True), 0.156, 0.051),
        # These have tiles enough.
        Line("bwd dA += vᵀ@h", Product("tn", r, c, n, dtype, dtype)),
        Line("bwd dB += dGᵀ@u", Product("tn", f, r, n, dtype, dtype, True)),
    ]


def _both(backend: Backend, name: str, product: Product, whole: float, cut: float) -> list[Line]:
    """Without and with the sum cut, and the report's figures for these."""
    one, chunks = f"{name}, in one", f"{name}, in chunks"
    if backend.name == "metal":
        m, n, k = product.m, product.n, product.k
        uncut = experiment(backend, UNCUT[product.layout], f"{one}, the report's kernel", m, n, k)
        uncut = replace(uncut, reported=whole)
        return [uncut, Line(chunks, product, cut, against=uncut.name)]
    note = f"on {backend.name} no product's sum is cut"
    return [Line(one, product, whole), Line(chunks, None, cut, note)]
