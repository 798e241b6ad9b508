"""The tables of single products: each product is right before it is timed, on the CPU and on the
Metal simulator (of which no time is ever taken), and whatever cannot run says so by name."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from krnl.backends.base import Backend, Memory
from krnl.backends.cpu import THREADS_VARIABLE, CpuBackend, CpuMemory, CpuProgram
from krnl.backends.reference import ReferenceBackend
from krnl.bench import control, lines
from krnl.bench.command import Bench
from krnl.bench.condition import Condition
from krnl.bench.gate import Gate, Measurement
from krnl.bench.lines import Line
from krnl.bench.products import RUNS, BlasProduct, Experiment, Product
from krnl.bench.results import as_json
from krnl.bench.tables import gemm, nt, splitk, tiles, types
from krnl.bench.workloads import BlockShape
from krnl.dtypes import BF16, F16, F32, DType
from krnl.errors import BackendError, ConfigError, Refused
from krnl.kernels.metal.sources import source
from krnl.kernels.metal.variants import BY_NAME, VARIANTS
from krnl.plan.arena import Plan
from metalsim.install import SimulatedBackend, metal_backend

LAYOUTS = ("nn", "tn", "nt")
TABLES: dict[ModuleType, int] = {types: 1, gemm: 2, nt: 3, tiles: 4}  # and the report's sections
SMALL = 64  # a multiple of every experiment's tile
# Sums long enough to be cut.
NARROW = BlockShape(tokens=32, width=512, ffn=544, rank=32)


@cache
def simulator() -> SimulatedBackend:
    return metal_backend("checked", eager=True)


def all_lines(backend: Backend) -> list[Line]:
    made = [line for table in TABLES for line in table.lines(backend, SMALL)]
    return made + splitk.lines(backend, NARROW)


# Products.


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


# What each table holds.


def test_every_product_of_every_table_is_right_on_the_cpu() -> None:
    backend = CpuBackend()
    made = all_lines(backend)
    ran = [line for line in made if line.work is not None]
    assert len(ran) >= 20
    for line in ran:
        assert line.work is not None and line.work.prepare(backend)() > 0, line.name


def test_every_product_of_every_table_is_right_in_the_simulator() -> None:
    """The report's kernels, and the engine's; nothing of them is timed."""
    backend = simulator()
    for line in all_lines(backend):
        if line.work is not None:
            line.work.prepare(backend)
    backend.simulation.expect_clean()
    executed = backend.simulation.executed
    assert {variant.function for variant in VARIANTS} <= set(executed)
    assert executed["gemm_reduce_f16"] == 2  # splitk's sums were cut


def test_an_experiment_that_is_wrong_is_an_error() -> None:
    """Its K loop ends a step early."""
    broken = metal_backend("fast", source=_without_last_step, eager=True)
    with pytest.raises(BackendError, match=r"nn 64×64×64 on metal: .* elements are wrong"):
        Experiment(BY_NAME["nn"], SMALL, SMALL, SMALL).prepare(broken)


def _without_last_step(library: str) -> str:
    text = source(library)
    assert text.count("k < d.k") >= 1, "the loops of experiment.h are not as they were"
    return text.replace("k < d.k", "k + 8 < d.k")


@pytest.mark.parametrize("name", ["cpu", "metal"])
def test_what_cannot_run_says_why_by_name(name: str) -> None:
    backend: Backend = CpuBackend() if name == "cpu" else simulator()
    for line in all_lines(backend):
        assert line.work is not None or line.note, line.name
    absent = {line.name: line.note for line in all_lines(backend) if line.work is None}
    assert absent["MPSGraph"] == absent["cuBLAS"] == "KRNL does not call it yet"
    if name == "cpu":
        reason = "nn_64x64_f16 is a Metal kernel: --device metal"
        assert absent["64×64, four simdgroups, 32×32 output scratch each"] == reason
        assert absent["fwd h@Aᵀ, in chunks"] == "on cpu no product's sum is cut"
    else:
        assert all("MPS" in title or title == "cuBLAS" for title in absent)


@pytest.mark.parametrize("name", ["cpu", "metal"])
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__.split(".")[-1])
def test_every_figure_of_the_report_is_in_its_table(table: ModuleType, name: str) -> None:
    backend: Backend = CpuBackend() if name == "cpu" else simulator()
    found = [line.reported for line in table.lines(backend, SMALL) if line.reported is not None]
    expected: list[float] = [
        v.reported for v in VARIANTS if v.section == TABLES[table] and v.reported
    ]
    expected += {types: [1588], gemm: [3660, 3759, 3678]}.get(table, [])
    assert sorted(found) == sorted(expected)


def test_splitks_figures_are_the_reports() -> None:
    shapes = {}
    for line in splitk.lines(simulator(), BlockShape()):
        work: Any = line.work
        how = work.variant.layout if isinstance(work, Experiment) else (work.layout, work.narrow)
        shapes[line.name] = (work.m, work.n, work.k), how, line.reported
    assert shapes == {
        "bwd dGa = dG@B, in one, the report's kernel": ((512, 32, 5632), "nn", 0.465),
        "bwd dGa = dG@B, in chunks": ((512, 32, 5632), ("nn", True), 0.095),
        "fwd h@Aᵀ, in one, the report's kernel": ((512, 32, 2048), "nt", 0.156),
        "fwd h@Aᵀ, in chunks": ((512, 32, 2048), ("nt", True), 0.051),
        "bwd dA += vᵀ@h": ((32, 2048, 512), ("tn", False), None),
        "bwd dB += dGᵀ@u": ((5632, 32, 512), ("tn", True), None),
    }


@pytest.mark.parametrize("name", ["cpu", "metal"])
def test_names_are_different_in_a_table(name: str) -> None:
    """Contestants are known by them."""
    backend: Backend = CpuBackend() if name == "cpu" else simulator()
    for table in TABLES:
        names = [line.name for line in table.lines(backend, SMALL)]
        assert len(set(names)) == len(names)


def test_threads_of_a_threadgroup_are_told_where_the_backend_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def most_threads(self: SimulatedBackend, launch: Any) -> int:
        return 384 if launch.function == "nn_32x64_f16" else 1024

    assert not any("threads" in line.note for line in tiles.lines(CpuBackend(), SMALL))
    monkeypatch.setattr(SimulatedBackend, "most_threads", most_threads, raising=False)
    told = {line.name: line.note for line in tiles.lines(simulator(), SMALL)}
    wide = "32×64 in one simdgroup, 32 accumulators"
    assert told.pop(wide) == "at most 384 threads in a threadgroup"
    assert set(told.values()) == {"at most 1024 threads in a threadgroup"}


# From a table to a result.


class FakeGate:
    """Runs each contestant once and says it took a millisecond, the second one two, and so on."""

    def __init__(self) -> None:
        self.rounds = 0

    def measure(self, contestants: Mapping[str, Callable[[], float]], rounds: int) -> Measurement:
        self.rounds = rounds
        for contestant in contestants.values():
            assert contestant() > 0
        seconds = {name: ((i + 1) / 1e3,) * rounds for i, name in enumerate(contestants)}
        condition = Condition(1.0, 2, 0.0, (), None, "", False, "", False, "")
        return Measurement(seconds, (), 1e12, condition, "2026-11-30T12:00:00+00:00", True, ())


def bench(gate: Any, quick: bool = True) -> Bench:
    return Bench(CpuBackend(), gate, 3, quick, {})


@pytest.mark.parametrize("table", [*TABLES, splitk], ids=lambda t: t.__name__.split(".")[-1])
def test_tables_run_on_the_cpu(table: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "QUICK_SIZE", SMALL)
    gate = FakeGate()
    result = table.run(bench(gate))
    assert result.command == table.__name__.split(".")[-1]
    assert result.machine == control.machine(CpuBackend())
    if table is tiles:
        assert result.measurement is None and gate.rounds == 0
        assert all(entry.value is None for entry in result.entries)
        return
    assert gate.rounds == 3
    assert any(entry.value is not None for entry in result.entries)
    made = table.lines(CpuBackend(), SMALL if table is not splitk else splitk.QUICK)
    for line, entry in zip(made, result.entries, strict=True):
        assert (line.name, line.reported) == (entry.name, entry.reported)
        assert (line.work is None) == (entry.value is None)
    as_json(result)


def test_rates_times_and_ratios() -> None:
    a, b = Product("nn", 64, 64, 64, F32, F32), Product("nn", 64, 64, 192, F32, F32)
    made = [
        Line("a", a, note="small"),
        Line("b", b, 10.0, against="a"),
        Line("c", None, 3.0, "why"),
    ]
    result = lines.measure(bench(FakeGate()), "x", "X", lines.GFLOPS, made)
    first, second, third = result.entries
    rate = 2 * 64**3 / 1e-3 / 1e9
    assert first.value == pytest.approx(rate) and first.note == "small" and first.ratio is None
    assert first.spread == pytest.approx((rate, rate))
    # Three times the work in twice the time.
    assert second.value == pytest.approx(1.5 * rate) and second.ratio == pytest.approx(1.5)
    assert second.note == "ratio to a" and second.reported == 10.0
    assert (third.value, third.reported, third.note, third.unit) == (None, 3.0, "why", "GFLOP/s")
    times = lines.measure(bench(FakeGate()), "x", "X", lines.MS, made).entries
    assert [entry.value for entry in times] == [pytest.approx(1.0), pytest.approx(2.0), None]


def test_titles_say_when_the_size_is_not_the_reports() -> None:
    assert lines.sized("Tiles", 2048) == "Tiles; m = n = k = 2048"
    assert lines.sized("Tiles", 512) == "Tiles; m = n = k = 512, where the report has 2048"
    assert lines.square(quick=True) < lines.square(quick=False) == 2048
    assert "(the report: 512 tokens" in splitk.run(bench(FakeGate())).title


# The control and its gate.


def test_the_control_takes_a_while_and_is_of_the_preferred_type() -> None:
    backend = CpuBackend()
    product = control.control_product(backend)
    assert product.activation is product.weight is backend.limits.activations[0]
    assert (product.layout, product.m) == ("nn", 1024)
    assert control.control_product(simulator()).m == 2048
    small = Product("nn", 64, 64, 64, F32, F32)
    assert control.control(small, backend)() > 1e6


def test_the_control_is_operations_in_a_second() -> None:
    class Timed(CpuBackend):
        def compile(self, plan: Plan, memory: Memory) -> CpuProgram:
            program = super().compile(plan, memory)
            program.time = lambda: [0.5]  # type: ignore[method-assign]
            return program

    assert control.control(Product("nn", 8, 16, 32, F32, F32), Timed())() == 4 * 8 * 16 * 32


def test_the_simulator_gets_no_gate(tmp_path: Path) -> None:
    """Not by force either, and before anything has run."""
    backend = simulator()
    before = sum(backend.simulation.executed.values())
    for force in (False, True):
        with pytest.raises(Refused, match="simulator"):
            control.open_gate(backend, force, tmp_path / "references.json")
    assert sum(backend.simulation.executed.values()) == before


def test_the_reference_backend_gets_no_gate(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device is 'reference'"):
        control.open_gate(ReferenceBackend(), True, tmp_path / "references.json")


def test_a_gate_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its key names what the control depends on."""
    keys = []
    gate = Gate.__init__

    def spy(self: Gate, key: Any, *rest: Any) -> None:
        keys.append(key)
        gate(self, key, *rest)

    monkeypatch.setattr(Gate, "__init__", spy)
    for threads in ("1", "2"):
        monkeypatch.setenv(THREADS_VARIABLE, threads)
        control.open_gate(CpuBackend(), False, tmp_path / "references.json")
    one, two = keys
    assert one != two and "1 thread)" in one.device and "2 threads" in two.device
    assert CpuBackend().isa in one.device
    assert "nn 1024×1024×1024" in one.control and one.driver == ""
    assert not (tmp_path / "references.json").exists()  # nothing was measured yet


def test_a_device_is_called_as_it_calls_itself() -> None:
    assert control.device_name(simulator()) == "KRNL Metal simulator"
    assert control.machine(simulator()).backend == "metal"
    assert control.driver(CpuBackend()) == ""

    class Driven(CpuBackend):
        driver = "570.1"

    assert control.machine(Driven()).driver == "570.1"
