"""The tables of single products: what each holds, that it is right on the CPU and on the Metal
simulator, and that whatever cannot run says so by name."""

from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import pytest

from krnl.backends.base import Backend
from krnl.backends.cpu import THREADS_VARIABLE, CpuBackend
from krnl.bench import control, product_table
from krnl.bench.command import Bench
from krnl.bench.gate import NO_FIGURE, Measurement, Probe
from krnl.bench.product_table import Line
from krnl.bench.products import RUNS, BlasProduct, Experiment, Product
from krnl.bench.results import Tool, as_json
from krnl.bench.tables import gemm, nt, splitk, tiles, types
from krnl.bench.workloads import BlockShape
from krnl.dtypes import F32
from krnl.errors import Refused
from krnl.kernels.metal.variants import VARIANTS
from metalsim.install import SimulatedBackend, metal_backend
from open_gate import OpenGate
from timed_gate import TimedGate

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
    assert executed["gemm_reduce_f16"] == 2 * RUNS  # splitk's sums were cut


@pytest.mark.parametrize("name", ["cpu", "metal"])
def test_what_cannot_run_says_why_by_name(name: str) -> None:
    backend: Backend = CpuBackend() if name == "cpu" else simulator()
    for line in all_lines(backend):
        assert line.work is not None or line.note, line.name
    absent = {line.name: line.note for line in all_lines(backend) if line.work is None}
    assert absent["MPSGraph"] == "KRNL does not call it yet"
    assert absent["cuBLAS"] == "krnl bench shapes --against torch has it"
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
    found = [line.reported for line in table.lines(backend, 2048) if line.reported is not None]
    expected: list[float] = [
        v.reported for v in VARIANTS if v.section == TABLES[table] and v.reported
    ]
    expected += {types: [1588], gemm: [3660, 3759, 3678]}.get(table, [])
    assert sorted(found) == sorted(expected)


def test_the_reports_figures_stand_beside_its_own_sizes_and_types_only() -> None:
    for backend in (CpuBackend(), simulator()):
        assert {line.reported for line in all_lines(backend)} == {None}  # small sizes
    # On a CPU adapters are of another type than the report's fp16.
    assert {line.reported for line in splitk.lines(CpuBackend(), BlockShape())} == {None}


def test_a_ratio_is_of_equal_products_in_one_type() -> None:
    """Of NumPy's library there is float32 alone."""
    for backend in (CpuBackend(), simulator()):
        for line in all_lines(backend):
            if isinstance(line.work, Product) and "BLAS" in line.against.upper():
                assert line.work.activation is line.work.weight is F32
                assert "fp32" in line.name and "fp32" in line.against


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
    """Contestants are known by them, as are those that they are compared with."""
    backend: Backend = CpuBackend() if name == "cpu" else simulator()
    for made in (*(t.lines(backend, SMALL) for t in TABLES), splitk.lines(backend, NARROW)):
        names = [line.name for line in made]
        assert len(set(names)) == len(names)
        assert {line.against for line in made} <= {"", *names}


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


def bench(gate: Any, quick: bool = True) -> Bench:
    return Bench(CpuBackend(), gate, 3, quick, {})


@pytest.mark.parametrize("table", [*TABLES, splitk], ids=lambda t: t.__name__.split(".")[-1])
def test_tables_run_on_the_cpu(table: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_table, "QUICK_SIZE", SMALL)
    gate = TimedGate()
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
    result = product_table.measure(bench(TimedGate()), "x", "X", product_table.GFLOPS, made)
    first, second, third = result.entries
    rate = 2 * 64**3 / 1e-3 / 1e9
    assert first.value == pytest.approx(rate) and first.note == "small" and first.ratio is None
    assert first.spread == pytest.approx((rate, rate))
    # Three times the work in twice the time.
    assert second.value == pytest.approx(1.5 * rate) and second.ratio == pytest.approx(1.5)
    assert second.note == "ratio to a" and second.reported == 10.0
    assert (third.value, third.reported, third.note, third.unit) == (None, 3.0, "why", "GFLOP/s")
    times = product_table.measure(bench(TimedGate()), "x", "X", product_table.MS, made).entries
    assert [entry.value for entry in times] == [pytest.approx(1.0), pytest.approx(2.0), None]


@pytest.mark.parametrize(
    ("work", "joins"),
    [(BlasProduct("nn", 8, 8, 8), True), (Product("nn", 8, 8, 8, F32, F32), False)],
)
def test_numpys_library_is_judged_by_the_cpu(work: BlasProduct | Product, joins: bool) -> None:
    """On a GPU's machine its gate has a control on the CPU too, where a line is the CPU's."""

    backend, gate = CpuBackend(), OpenGate()
    backend.name = "metal"
    asked = replace(bench(gate), backend=backend)
    product_table.measure(asked, "x", "X", product_table.GFLOPS, [Line("a", work)])
    assert gate.joined == ["cpu"] * joins


class BusyGate(TimedGate):
    """That of a machine whose CPU is busy, and the device `busy` itself if that is not empty. Where
    all is learnt already, it is `measure` that refuses."""

    def __init__(self, busy: str = "", learnt: bool = False) -> None:
        super().__init__()
        self.busy, self.learnt = busy, learnt

    def beside(self, probe: Probe) -> "BusyGate":
        return BusyGate("the CPU", self.learnt)

    def learn(self) -> None:
        if self.busy and not self.learnt:
            raise Refused(
                f"What {self.busy} reaches cannot be learnt now: 9.5% off. Wait. Try again."
            )

    def measure(self, contestants: Any, rounds: int) -> Measurement:
        self.learn()
        if self.busy:
            raise Refused(f"{NO_FIGURE} {self.busy} is 9.5% off. Wait. Try again.")
        return super().measure(contestants, rounds)


@pytest.mark.parametrize(
    ("learnt", "reason"),
    [
        (False, "What the CPU reaches cannot be learnt now: 9.5% off"),
        (True, "the CPU is 9.5% off"),
    ],
)
def test_beside_a_gpu_numpys_library_is_left_out_where_the_cpu_is_busy(
    learnt: bool, reason: str
) -> None:
    backend = CpuBackend()
    backend.name = "metal"
    own, library = Product("nn", 64, 64, 64, F32, F32), BlasProduct("nn", 64, 64, 64)
    made = [Line("own", own, against="library"), Line("library", library, note="NumPy's")]
    asked = replace(bench(BusyGate(learnt=learnt)), backend=backend)
    result = product_table.measure(asked, "x", "X", product_table.GFLOPS, made)
    first, second = result.entries
    assert first.value is not None and (first.ratio, first.note) == (None, "")
    assert second.value is None
    assert second.note == reason
    assert result.tools == ()


@pytest.mark.parametrize("name", ["cpu", "metal"])
def test_a_busy_device_refuses_its_own_table(name: str) -> None:
    """It is not mistaken for the CPU beside it."""
    backend = CpuBackend()
    backend.name = name
    asked = replace(bench(BusyGate(name)), backend=backend)
    line = Line("library", BlasProduct("nn", 8, 8, 8))
    with pytest.raises(Refused, match=f"What {name} reaches cannot be learnt now"):
        product_table.measure(asked, "x", "X", product_table.GFLOPS, [line])


@pytest.mark.parametrize("threads", [1, 2])
def test_numpys_library_gets_the_threads_of_krnl(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """And the result says how many it took."""
    monkeypatch.setenv(THREADS_VARIABLE, str(threads))
    given: list[int] = []

    def spy(threads: int) -> Tool:
        given.append(threads)
        return Tool("blas", {}, threads)

    monkeypatch.setattr(product_table, "blas_with_threads", spy)
    asked = replace(bench(OpenGate()), backend=CpuBackend())
    line = Line("a", BlasProduct("nn", 8, 8, 8))
    result = product_table.measure(asked, "x", "X", product_table.GFLOPS, [line])
    assert given == [threads]
    assert result.tools == (Tool("blas", {}, threads),)


def test_titles_say_when_the_size_is_not_the_reports() -> None:
    assert product_table.sized("Tiles", 2048) == "Tiles; m = n = k = 2048"
    assert product_table.sized("Tiles", 512) == "Tiles; m = n = k = 512, where the report has 2048"
    assert product_table.square(quick=True) < product_table.square(quick=False) == 2048
    assert "(the report: 512 tokens" in splitk.run(bench(TimedGate())).title
