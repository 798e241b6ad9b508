"""What the report names as its next step: a whole decoder layer, attention included."""

from krnl.bench.command import Bench
from krnl.bench.models import SHAPES
from krnl.bench.results import Result, milliseconds
from krnl.bench.workloads import decoder_layer
from krnl.devices import precision_name
from krnl.models.config import parse

MODEL, RANK = "llama-3.2-1b", 32
TOKENS = (512, 2048)
QUICK_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
}
QUICK_TOKENS = (64, 128)


def run(bench: Bench) -> Result:
    shape = {**SHAPES[MODEL], "num_hidden_layers": 1}
    if bench.quick:
        shape |= QUICK_SIZES
    config = parse(shape, MODEL)
    contestants, flops = {}, {}
    activation = bench.backend.limits.activations[0]
    sizes = QUICK_TOKENS if bench.quick else TOKENS
    for tokens in sizes:
        layer = decoder_layer(bench.backend, activation, config, tokens, RANK)
        if tokens == sizes[0]:
            layer.check()  # in float64, all heads' scores at once: too large for more tokens
        name = f"{tokens:,} tokens, {precision_name(activation)}"
        contestants[name], flops[name] = layer.turn, layer.flops
    measured = bench.gate.measure(contestants, bench.rounds)
    title = f"A decoder layer of {MODEL}, forward and backward, rank {RANK} on every linear layer"
    if bench.quick:
        title += ", shrunk"
    return bench.result("layer", title, measured, milliseconds(measured, flops))
