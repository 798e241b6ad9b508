"""Section 6: one step of the report's MLP block, forward and backward with the gradient at its
input, beside MLX and PyTorch."""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

from krnl.bench.baselines import (
    AGREEMENT,
    Worker,
    check_agreement,
    script,
    settings,
    tools,
)
from krnl.bench.command import Bench
from krnl.bench.results import Result, comparable, timed
from krnl.bench.workloads import BlockShape, mlp_block
from krnl.devices import precision_name
from krnl.errors import ConfigError

FULL = BlockShape()
QUICK = BlockShape(tokens=64, width=512, ffn=1408, rank=8)
MOST_LENGTH = 2**16  # tokens: the check takes 20 GiB of the host's memory for these
# ms of FULL, fp16: KRNL's and MLX's of the report.
REPORTED = {"krnl": 24.89, "mlx": 18.51}


def run(bench: Bench) -> Result:
    shape = QUICK if bench.quick else FULL
    if bench.length is not None:
        if bench.length > MOST_LENGTH:
            raise ConfigError(
                f"length is {bench.length:,}, and a block has at most {MOST_LENGTH:,} tokens here."
            )
        shape = replace(shape, tokens=bench.length)
    activation = bench.backend.limits.activations[0]
    precision = precision_name(activation)
    ours = f"krnl {precision}"
    block = mlp_block(bench.backend, activation, shape)
    block.check()
    contestants = {ours: block.turn}
    figures = {ours: reported("krnl", shape, precision)}
    peers: list[tuple[str, Worker]] = []
    with ExitStack() as stack:
        for peer, python in bench.against.items():
            path = script(f"{peer}_block.py")
            wanted = settings(peer, bench.backend, activation, bench.variants, bench.adapters)
            for setting in wanted:
                name = setting.title(peer)
                given = [*arguments(shape), "--repeats", str(block.repeats)]
                worker = setting.start(python, path, given, bench.backend, first={"norms": dict})
                stack.enter_context(worker)
                check_norms(name, worker.hello["norms"], block.norms())
                contestants[name] = worker.seconds
                figures[name] = reported(peer, shape, setting.precision)
                peers.append((peer, worker))
        measured = bench.gate.measure(contestants, bench.rounds)
    seconds = measured.median(ours)
    entries = []
    for name in contestants:
        entries.append(
            timed(
                measured,
                name,
                "ms",
                lambda s: 1e3 * s,
                reported=figures[name],
                ratio=None if name == ours else seconds / measured.median(name),
                note="" if name == ours else f"times as fast as {ours}",
                flops=shape.flops,
            )
        )
    sizes = f"{shape.tokens} tokens, {shape.width} to {shape.ffn}, rank {shape.rank}"
    return bench.result(
        "step",
        f"An MLP block, forward and backward: {sizes}, {shape.flops / 1e9:.1f} GFLOP",
        measured,
        entries,
        tools(peers),
    )


def reported(contestant: str, shape: BlockShape, precision: str) -> float | None:
    """The report's ms of KRNL or MLX, where size and type are the report's."""
    return comparable(REPORTED.get(contestant), (BlockShape(), "fp16"), (shape, precision))


def check_norms(name: str, theirs: Mapping[str, float], ours: Mapping[str, float]) -> None:
    """BackendError where a peer's gradients have other norms."""
    for result, norm in ours.items():
        said = theirs.get(result, math.nan)
        check_agreement(name, f"the norm of {result}", said, norm, AGREEMENT)


def arguments(shape: BlockShape) -> list[str]:
    """For bench/torch_block.py and bench/mlx_block.py."""
    sizes = {
        "tokens": shape.tokens, "width": shape.width, "ffn": shape.ffn, "rank": shape.rank,
    }  # fmt: skip
    return [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
