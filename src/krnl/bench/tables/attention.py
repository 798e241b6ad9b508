"""Section 8: attention over the number of tokens, by scores that lie in memory and by tiles that
never do. The report has no figures for it."""

from krnl.bench.command import Bench
from krnl.bench.results import Entry, Result, milliseconds
from krnl.bench.workloads import HeadShape, attention_alone
from krnl.devices import precision_name

SHAPE = HeadShape()
TOKENS = (512, 1024, 2048, 4096)
QUICK_SHAPE, QUICK_TOKENS = HeadShape(heads=4, kv_heads=2, size=32), (64, 128)

# How each backend computes attention. None has both ways so far.
ROUTES = {"tiled": ("cpu", "cuda"), "materialised": ("metal",)}
PASSES = {"forward": False, "forward and backward": True}


def run(bench: Bench) -> Result:
    backend = bench.backend
    shape, sizes = (QUICK_SHAPE, QUICK_TOKENS) if bench.quick else (SHAPE, TOKENS)
    activation = backend.limits.activations[0]
    contestants, flops = {}, {}
    for route in (route for route, backends in ROUTES.items() if backend.name in backends):
        for tokens in sizes:
            for passes, backward in PASSES.items():
                work = attention_alone(backend, activation, shape, tokens, backward)
                if tokens == sizes[0]:
                    work.check()  # in float64, all heads' scores at once: too large for more tokens
                name = f"{route}, {tokens:,} tokens, {passes}"
                contestants[name], flops[name] = work.turn, work.flops
    measured = bench.gate.measure(contestants, bench.rounds)
    entries = milliseconds(measured, flops, note="operations of the visible half")
    for route, backends in ROUTES.items():
        if backend.name not in backends:
            note = f"the {backend.name} backend has no {route} attention"
            entries.append(Entry(route, None, "ms", note=note))
    heads = f"{shape.heads} heads of {shape.size}, {shape.kv_heads} of keys"
    title = f"Causal attention in {precision_name(activation)}: {heads}"
    return bench.result("attention", title, measured, entries)
