"""What the tables of whole steps time: right on the CPU and on the Metal simulator, or an error."""

import numpy as np
import pytest

from krnl.backends.cpu import CpuBackend
from krnl.backends.reference import ReferenceBackend
from krnl.bench.baselines import AGREEMENT
from krnl.bench.models import SHAPES
from krnl.bench.tables import layer, step
from krnl.bench.workloads import (
    BlockShape,
    HeadShape,
    attention_alone,
    decoder_layer,
    mlp_block,
)
from krnl.dtypes import BF16, F16, F32, DType
from krnl.errors import BackendError
from krnl.models.config import parse
from metalsim.install import SimulatedBackend, metal_backend

TINY = BlockShape(tokens=13, width=24, ffn=36, rank=3)


def test_the_block_is_that_of_the_report() -> None:
    assert BlockShape().flops == pytest.approx(72.4e9, rel=1e-3)
    assert mlp_block(CpuBackend(), F32, step.QUICK).flops == pytest.approx(
        step.QUICK.flops, rel=2e-3
    )


@pytest.mark.parametrize("activation", [F32, BF16])
def test_a_right_block_passes_its_check(activation: DType) -> None:
    block = mlp_block(CpuBackend(), activation, TINY)
    block.check()
    assert block.run() > 0
    block.run()
    block.check()  # gradients add up over runs, and are counted from zero


@pytest.mark.parametrize("wrong", ["dx", "gate_proj.dA", "up_proj.dB"])
def test_a_wrong_block_is_not_timed(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    block = mlp_block(CpuBackend(), F32, TINY)
    right = block.results

    def off() -> dict[str, np.ndarray]:
        results = right()
        return {**results, wrong: results[wrong] * np.float32(1.001)}

    monkeypatch.setattr(block, "results", off)
    with pytest.raises(BackendError, match=f"the MLP block: {wrong} is off by .* not timed"):
        block.check()


def test_numbers_that_are_none_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    block = mlp_block(CpuBackend(), F32, TINY)
    right = block.results
    monkeypatch.setattr(block, "results", lambda: {n: v * np.nan for n, v in right().items()})
    with pytest.raises(BackendError, match="is off by nan"):
        block.check()


@pytest.mark.parametrize(
    "part", ["gate_proj.weight", "up_proj.weight", "down_proj.weight", "adapter", "x", "dy"]
)
def test_every_part_of_the_block_has_a_say(part: str) -> None:
    """Norms that hardly move without a part could not tell that another tool leaves it out."""
    block = mlp_block(ReferenceBackend(), F32, TINY)
    full = block.norms()
    (buffer,) = (b for b in block.inputs if b.name == part)
    block.memory.write(buffer, np.zeros(buffer.shape))
    moved = max(abs(norm / full[name] - 1) for name, norm in block.norms().items())
    assert moved > 3 * AGREEMENT


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("activation", [F32, BF16])
def test_attention_alone_is_right(backward: bool, activation: DType) -> None:
    work = attention_alone(CpuBackend(), activation, HeadShape(4, 2, 10), 37, backward)
    work.check()
    assert work.run() > 0


# On Metal, in the simulator: what would be timed is right. Times are nobody's there.


@pytest.fixture(scope="module")
def simulated() -> SimulatedBackend:
    return metal_backend("fast")


@pytest.mark.parametrize("activation", [F16, F32])
def test_metal_computes_what_is_timed(simulated: SimulatedBackend, activation: DType) -> None:
    mlp_block(simulated, activation, TINY).check()
    attention_alone(simulated, activation, HeadShape(4, 2, 10), 37, backward=True).check()
    shape = {**SHAPES[layer.MODEL], "num_hidden_layers": 1, **layer.QUICK_SIZES}
    decoder_layer(simulated, activation, parse(shape, "tiny"), 37, 3).check()
    simulated.simulation.expect_clean()
