"""Single products: each is right before it is timed, on the CPU and on the Metal simulator, of
which no time is ever taken."""

import numpy as np
import pytest

from krnl.backends.base import Memory
from krnl.backends.cpu import CpuBackend, CpuMemory, CpuProgram
from krnl.bench.products import RUNS, BlasProduct, Experiment, Product
from krnl.dtypes import BF16, F16, F32, DType
from krnl.errors import BackendError
from krnl.kernels.metal.sources import source
from krnl.kernels.metal.variants import BY_NAME
from krnl.plan.arena import Plan
from metalsim.install import metal_backend

LAYOUTS = ("nn", "tn", "nt")
SMALL = 64  # a multiple of every experiment's tile


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", [F32, BF16], ids=str)
@pytest.mark.parametrize("weight", [F32, BF16, F16], ids=str)
def test_products_are_right_on_the_cpu(layout: str, activation: DType, weight: DType) -> None:
    """Sides that are no multiple of anything; `prepare` raises if they are wrong."""
    weight = activation if layout == "tn" else weight
    assert Product(layout, 37, 45, 53, activation, weight).prepare(CpuBackend())() > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_narrow_products_are_right_on_the_cpu(layout: str) -> None:
    product = Product(layout, 70, 8, 300, BF16, BF16, narrow=True)
    assert product.prepare(CpuBackend())() > 0
    assert product.flops == 2 * 70 * 8 * 300


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_librarys_products_are_right(layout: str) -> None:
    assert 0 < BlasProduct(layout, 37, 45, 53).prepare(CpuBackend())() < 1


def test_an_unknown_layout_is_a_bug() -> None:
    with pytest.raises(ValueError, match="layout is 'tt'"):
        Product("tt", 8, 8, 8, F32, F32).prepare(CpuBackend())


class Spoilt(CpuBackend):
    """Its programs put `value` into one element of every output, and must never be timed."""

    def __init__(self, value: float):
        super().__init__()
        self._value = value

    def compile(self, plan: Plan, memory: Memory) -> CpuProgram:
        program = super().compile(plan, memory)
        assert isinstance(memory, CpuMemory)
        (output,) = plan.dispatches[0].call.writes()
        run, value = program.run, self._value

        def wrong() -> None:
            run()
            view = memory.view(output)
            view[3, 5] += np.asarray(value, view.dtype)

        program.run = wrong  # type: ignore[method-assign]
        program.time = lambda: pytest.fail("it was timed")  # type: ignore[method-assign]
        return program


@pytest.mark.parametrize("value", [0.01, np.nan, np.inf])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_wrong_product_is_an_error_and_is_not_timed(layout: str, value: float) -> None:
    """In fp32, one element in two thousand being off by a hundredth of the others."""
    with pytest.raises(BackendError) as raised:
        Product(layout, 32, 64, 96, F32, F32).prepare(Spoilt(value))
    message = str(raised.value)
    assert f"{layout} 32×64×96, f32 × f32 on cpu: 1 of 2,048 elements are wrong" in message
    assert "The first, [3, 5], is" in message and "not timed" in message


def test_what_nobody_wrote_is_wrong() -> None:
    """The output is not taken for right because it was so before."""

    class Idle(CpuBackend):
        def compile(self, plan: Plan, memory: Memory) -> CpuProgram:
            program = super().compile(plan, memory)
            program.run = lambda: None  # type: ignore[method-assign]
            return program

    for layout in LAYOUTS:
        with pytest.raises(BackendError, match="elements are wrong"):
            Product(layout, 32, 64, 96, BF16, BF16).prepare(Idle())


def test_a_wrong_library_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "matmul", lambda a, b, out: out.fill(0))
    with pytest.raises(BackendError, match=r"'s nn: .* elements are wrong"):
        BlasProduct("nn", 8, 8, 8).prepare(CpuBackend())


def test_a_contestant_is_the_median_of_runs_after_the_first() -> None:
    calls = []

    class Scripted(CpuBackend):
        def compile(self, plan: Plan, memory: Memory) -> CpuProgram:
            program = super().compile(plan, memory)
            program.time = lambda: time(len(plan.dispatches))  # type: ignore[method-assign]
            return program

    def time(dispatches: int) -> list[float]:
        calls.append(dispatches)
        return [9.0, 0.001, 0.001, 0.001] if len(calls) == 1 else [0.003, 0.004, 0.005, 0.006]

    run = Product("nn", 8, 8, 8, F32, F32).prepare(Scripted())
    # 3 ms are too little, 21 enough; the 9 s do not count.
    assert run() == 0.003
    assert calls == [RUNS, RUNS]


def test_an_experiment_that_is_wrong_is_an_error() -> None:
    """Its K loop ends a step early."""
    broken = metal_backend("fast", source=_without_last_step, eager=True)
    with pytest.raises(BackendError, match=r"nn 64×64×64 on metal: .* elements are wrong"):
        Experiment(BY_NAME["nn"], SMALL, SMALL, SMALL).prepare(broken)


def _without_last_step(library: str) -> str:
    text = source(library)
    assert text.count("k < d.k") >= 1, "the loops of experiment.h are not as they were"
    return text.replace("k < d.k", "k + 8 < d.k")
