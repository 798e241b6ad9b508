"""Every op on the Metal backend, in the simulator, against its float64 reference: the cases and
allowances of the CPU. Small calls run in a checked build, which reports races, reads of what was
never written and accesses out of bounds; large ones in a fast build."""

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest

from krnl.dtypes import BF16, F16, F32, DType
from krnl.kernels.launch import GpuRow, Launch
from krnl.kernels.metal.sources import FOLDER, source
from krnl.kernels.metal.table import TABLE
from krnl.kernels.metal.variants import VARIANTS, Variant, launch
from krnl.plan.arena import plan
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.lower import Table
from krnl.plan.op import op
from krnl.plan.step import Call, Step
from metal_call import check
from metalsim import build
from metalsim.install import SimulatedBackend, metal_backend
from op_bench import EXAMPLES, SIZES, Bench, check_drawn, chosen, of_every_type
from op_cases import CASE

# A call of more arithmetic or more elements than this takes seconds in a checked build.
CHECKED_FLOPS, CHECKED_ELEMENTS = 4e6, 4e4
# Ops and what their activations are: float32 or float16; a cast takes bf16 as well.
CALLS = [(name, dtype) for name in CASE for dtype in (F32, F16)] + [("cast", BF16)]
# In these, numbers must hold as well: Metal's fast math assumes that there are neither infinities
# nor NaN, and a GPU may take subnormal floats for zero.
ARITHMETIC: dict[str, dict[str, Any]] = {
    "fast-math": {"flags": ("-ffast-math",)},
    "flush-to-zero": {"flush_to_zero": True},
}


@cache
def backend(mode: str, arithmetic: str = "") -> SimulatedBackend:
    """Runs at once what is enqueued: the order in which a queue works is test_backend_metal's."""
    return metal_backend(mode, eager=True, **ARITHMETIC.get(arithmetic, {}))


def backend_for(bench: Bench) -> SimulatedBackend:
    elements = sum(np.size(v) for value in bench.values.values() for v in _arrays(value))
    small = bench.op.flops(bench.dims) <= CHECKED_FLOPS and elements <= CHECKED_ELEMENTS
    return backend("checked" if small else "fast")


def _arrays(value: Any) -> list[np.ndarray]:
    if isinstance(value, np.ndarray):
        return [value]
    return value if isinstance(value, list) else []


every_call = pytest.mark.parametrize(("name", "activation"), CALLS, ids=str)


@every_call
def test_op_matches_its_reference(name: str, activation: DType) -> None:
    used = check_drawn(
        CASE[name],
        activation,
        max(1, EXAMPLES // 4),
        lambda bench, draw: check(bench, backend_for(bench)),
    )
    print(f"{name} metal {activation}: at most {used:.0%} of the allowance")


@pytest.mark.parametrize("arithmetic", ARITHMETIC)
@every_call
def test_op_matches_in_other_arithmetic(name: str, activation: DType, arithmetic: str) -> None:
    device = backend("fast", arithmetic)
    check_drawn(
        CASE[name], activation, max(1, EXAMPLES // 12), lambda bench, draw: check(bench, device)
    )


@cache
def sweep(name: str, activation: DType) -> frozenset[str]:
    """Runs an op on all chosen sizes with every type of weight and output; the kernels it took."""
    device = backend("checked")
    before = Counter(device.simulation.executed)
    for bench in of_every_type(CASE[name], activation, SIZES.values()):
        check(bench, device)
    return frozenset(device.simulation.executed - before)


@every_call
def test_op_on_every_type_of_weight_and_output(name: str, activation: DType) -> None:
    assert sweep(name, activation)


@every_call
def test_the_order_of_threads_changes_no_bit(name: str, activation: DType) -> None:
    device = backend("fast")
    for sizes in SIZES.values():
        bench, results = chosen(CASE[name], sizes, activation), []
        for seed in (0, 1, 2):
            device.simulation.seed = seed
            results.append(bench.run(device))
        device.simulation.seed = 0
        for other in results[1:]:
            np.testing.assert_equal(other, results[0])


def test_every_op_has_a_row_and_every_row_an_op() -> None:
    assert {row.op for row in TABLE.rows} == set(CASE)


@op("a[p] b[q] -> c[s]:any")
def experiment(a: Any, b: Any) -> Any:
    """Stands for a product whose numbers are judged by test_metal_variants."""


def run_variant(variant: Variant) -> frozenset[str]:
    """One of the report's experiments, on 64×64 tiles of 64 steps; the kernels it took."""
    size = 64

    def launches(call: Call, workspace: Buffer | None) -> list[Launch]:
        a, b = call.reads()
        (c,) = call.writes()
        return [launch(variant, a, b, c, size, size, size)]

    device = metal_backend("fast", Table("metal", [GpuRow("experiment", launches=launches)]))
    a, b = (Buffer(name, (size * size,), variant.operand, Kind.INPUT) for name in "ab")
    c = Buffer("c", (size * size,), variant.output, Kind.STATE)
    step = Step("experiment", variant.output)
    step(experiment, a, b, into=c)
    (planned,) = plan([step], device.kernels)
    memory = device.allocate(planned.layout)
    device.compile(planned, memory).run()
    memory.read(c)
    return frozenset(device.simulation.executed)


def test_every_kernel_was_executed() -> None:
    """By an op's test above, or as an experiment of the report."""
    executed = {function for call in CALLS for function in sweep(*call)}
    executed |= {f for variant in VARIANTS for f in run_variant(variant)}
    there = {
        function
        for path in sorted(FOLDER.glob("*.metal"))
        for function in build.library(source(path.stem), "fast").functions
    }
    assert there - executed == set()
