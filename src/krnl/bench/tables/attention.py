"""Section 8: attention over the number of tokens, by scores that lie in memory and by tiles that
never do. The report has no figures for it. On CUDA also the size that others tell theirs by."""

from collections.abc import Callable

from krnl.bench.command import Bench
from krnl.bench.gate import Measurement
from krnl.bench.results import Entry, Result, milliseconds
from krnl.bench.workloads import HeadShape, attention_alone
from krnl.devices import precision_name

SHAPE = HeadShape()
TOKENS = (512, 1024, 2048, 4096)
QUICK_SHAPE, QUICK_TOKENS = HeadShape(heads=4, kv_heads=2, size=32), (64, 128)
LONG_SHAPE, LONG_TOKENS = HeadShape(size=128), 16384  # of CUDA: in memory, scores would take 16 GiB

# How each backend computes attention. None has both ways so far.
ROUTES = {"tiled": ("cpu", "cuda"), "materialised": ("metal",)}
PASSES = {"forward": False, "forward and backward": True}


def run(bench: Bench) -> Result:
    backend = bench.backend
    activation = backend.limits.activations[0]
    shape, sizes = (QUICK_SHAPE, QUICK_TOKENS) if bench.quick else (SHAPE, TOKENS)
    cases: dict[HeadShape, tuple[int, ...]] = {shape: sizes}
    if backend.name == "cuda" and not bench.quick:
        cases[LONG_SHAPE] = (LONG_TOKENS,)
    contestants: dict[str, Callable[[], float]] = {}
    flops: dict[str, int] = {}
    (route,) = (route for route, backends in ROUTES.items() if backend.name in backends)
    for heads, lengths in cases.items():
        for backward in PASSES.values():
            # In float64, all heads' scores at once: too large for more tokens.
            attention_alone(backend, activation, heads, sizes[0], backward).check()
        for tokens in lengths:
            for passes, backward in PASSES.items():
                work = attention_alone(backend, activation, heads, tokens, backward)
                name = f"{route}, {_size(heads, tokens)}, {passes}"
                contestants[name], flops[name] = work.turn, work.flops
    measured = bench.gate.measure(contestants, bench.rounds)
    entries = milliseconds(measured, flops, note="operations of the visible half")
    if LONG_SHAPE in cases:
        entries.append(_backward(measured, flops, f"{route}, {_size(LONG_SHAPE, LONG_TOKENS)}"))
    for other, backends in ROUTES.items():
        if backend.name not in backends:
            note = f"the {backend.name} backend has no {other} attention"
            entries.append(Entry(other, None, "ms", note=note))
    of_sizes = " and ".join(str(heads.size) for heads in cases)
    title = f"Causal attention in {precision_name(activation)}: {shape.heads} heads of {of_sizes}"
    return bench.result("attention", f"{title}, {shape.kv_heads} of keys", measured, entries)


def _size(heads: HeadShape, tokens: int) -> str:
    of_size = f"heads of {heads.size}, " if heads == LONG_SHAPE else ""
    return f"{of_size}{tokens:,} tokens"


def _backward(measured: Measurement, flops: dict[str, int], name: str) -> Entry:
    """The backward pass, which never runs alone."""
    forward, both = (f"{name}, {passes}" for passes in PASSES)
    seconds = measured.median(both) - measured.median(forward)
    rate = (flops[both] - flops[forward]) / seconds
    return Entry(f"{name}, backward", 1e3 * seconds, "ms", rate=rate, note="both less forward")
