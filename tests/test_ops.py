"""Every op on every available instruction set of the CPU against its float64 reference."""

import os
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from krnl.backends.cpu import CpuBackend, available_isas
from krnl.backends.reference import ReferenceBackend
from krnl.dtypes import BF16, F32, DType
from krnl.ops import attention, gemm, loss, norm, optimizer, pointwise
from krnl.plan.op import Op
from op_bench import Bench
from op_cases import CASES, Case

EXAMPLES = int(os.environ.get("KRNL_TEST_EXAMPLES", "40"))


@cache
def backend(isa: str) -> CpuBackend:
    os.environ["KRNL_CPU_ISA"] = isa
    try:
        return CpuBackend()
    finally:
        del os.environ["KRNL_CPU_ISA"]


@pytest.mark.parametrize("activation", [F32, BF16], ids=str)
@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op.name)
def test_op_matches_its_reference(
    case: Case, isa: str, activation: DType, record_property: Any
) -> None:
    used: list[float] = []

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        used.append(Bench(case, data.draw, activation).check(backend(isa)))

    run()
    record_property("share_of_allowance", max(used))
    print(f"{case.op.name} {isa} {activation}: at most {max(used):.0%} of the allowance")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op.name)
def test_the_reference_backend_evaluates_the_definition(case: Case) -> None:
    @settings(
        max_examples=5,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        bench = Bench(case, data.draw, F32)
        bench.target = F32
        _, reference = bench.reference()
        for p, got, want in zip(
            bench.op.outputs, bench.run(ReferenceBackend()), reference, strict=True
        ):
            for g, w in zip(got, want if p.group else [want], strict=True):
                np.testing.assert_array_equal(g, np.broadcast_to(w, g.shape))

    run()


def test_every_op_has_a_case() -> None:
    modules = (attention, gemm, loss, norm, optimizer, pointwise)
    defined = {v.name for m in modules for v in vars(m).values() if isinstance(v, Op)}
    assert defined == {case.op.name for case in CASES}
