"""Section 6: one step of the report's MLP block, forward and backward with the gradient at its
input, beside MLX and PyTorch."""

from contextlib import ExitStack

from krnl.bench.baselines import PRECISIONS, Worker, check_agreement, script, title, variants
from krnl.bench.command import Bench
from krnl.bench.control import machine
from krnl.bench.results import Result, timed
from krnl.bench.workloads import BlockShape, mlp_block

FULL = BlockShape()
QUICK = BlockShape(tokens=64, width=512, ffn=1408, rank=8)
# ms of FULL, fp16: KRNL's and MLX's of the report.
REPORTED = {"krnl": 24.89, "mlx": 18.51}


def run(bench: Bench) -> Result:
    shape = QUICK if bench.quick else FULL
    activation = bench.backend.limits.activations[0]
    precision = PRECISIONS[activation.name]
    ours = f"krnl {precision}"
    block = mlp_block(bench.backend, activation, shape)
    block.check()
    contestants = {ours: block.run}
    peers: dict[str, str] = {}
    with ExitStack() as stack:
        for peer, python in bench.against.items():
            for base, adapters in variants(peer, bench.backend, activation):
                name = title(peer, base, adapters)
                given = arguments(shape, base, adapters, bench.backend.name)
                worker = stack.enter_context(Worker(python, script(f"{peer}_block.py"), given))
                check_agreement(name, worker.hello["norms"], block.norms())
                contestants[name] = worker.seconds
                peers[name] = peer
        measured = bench.gate.measure(contestants, bench.rounds)
    seconds = measured.median(ours)
    entries = []
    for name in contestants:
        rate = f"{shape.flops / measured.median(name) / 1e9:,.0f} GFLOP/s"
        peer = peers.get(name, "krnl")
        entries.append(
            timed(
                measured,
                name,
                "ms",
                lambda s: 1e3 * s,
                reported=None if bench.quick else REPORTED.get(peer),
                ratio=None if name == ours else seconds / measured.median(name),
                note=rate if name == ours else f"{rate}; times as fast as {ours}",
            )
        )
    sizes = f"{shape.tokens} tokens, {shape.width} to {shape.ffn}, rank {shape.rank}"
    return Result(
        "step",
        f"An MLP block, forward and backward: {sizes}, {shape.flops / 1e9:.1f} GFLOP",
        machine(bench.backend),
        measured,
        tuple(entries),
    )


def arguments(shape: BlockShape, precision: str, adapters: str, backend: str) -> list[str]:
    """For bench/torch_block.py and bench/mlx_block.py."""
    sizes = {
        "tokens": shape.tokens,
        "width": shape.width,
        "ffn": shape.ffn,
        "rank": shape.rank,
        "precision": precision,
        "adapters": adapters,
        "device": "cpu" if backend == "cpu" else "gpu",
    }
    return [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
