"""The table of two engines at once."""

import threading
import time
from typing import Any

import pytest

from krnl.backends.cpu import CpuBackend
from krnl.bench.command import Bench
from krnl.bench.tables import hetero
from krnl.errors import BackendError
from metalsim.install import SimulatedBackend, metal_backend
from open_gate import OpenGate
from timed_gate import TimedGate


@pytest.fixture(scope="module")
def simulated() -> SimulatedBackend:
    return metal_backend("fast")


def test_both_engines_compute_what_is_timed_of_them(simulated: SimulatedBackend) -> None:
    gate: Any = OpenGate()
    assert "GPU beside the CPU" in hetero.contestants(Bench(simulated, gate, 1, True, {}))


def test_shares_are_those_of_the_report() -> None:
    forward = hetero.cpu_share(cpu=6.73, gpu=4.0, other=4.3)
    backward = hetero.cpu_share(cpu=9.70, gpu=3.5, other=4.46)
    assert (round(forward, 2), round(backward, 2)) == (0.77, 0.60)
    assert (hetero.cpu_rows(forward, 512), hetero.cpu_rows(backward, 512)) == (384, 320)


def test_both_engines_end_together() -> None:
    cpu, gpu, other = 5.0, 3.0, 1.0
    share = hetero.cpu_share(cpu, gpu, other)
    assert share * cpu == pytest.approx(other + (1 - share) * gpu)


def test_a_gpu_with_enough_to_do_leaves_all_rows_to_the_cpu() -> None:
    assert hetero.cpu_share(cpu=1.0, gpu=1.0, other=5.0) == 1.0
    assert hetero.cpu_rows(1.0, 500) == 500


def test_one_engine_runs_while_the_other_is_busy() -> None:
    runs: list[str] = []

    def other() -> float:
        time.sleep(0.01)
        runs.append("other")
        return 0.0

    def run() -> float:
        assert runs, "the other engine was not busy yet"
        time.sleep(0.1)
        assert len(runs) > 2, "it does not go on meanwhile"
        return 42.0

    threads = threading.active_count()
    assert hetero.beside(run, other) == 42.0
    assert threading.active_count() == threads


def test_an_engine_that_fails_beside_the_other_is_heard() -> None:
    def fail() -> float:
        raise BackendError("the GPU is gone")

    with pytest.raises(BackendError, match="the GPU is gone"):
        hetero.beside(lambda: 1.0, fail)
    with pytest.raises(BackendError, match="the GPU is gone"):
        hetero.beside(fail, lambda: 1.0)


def test_two_engines_need_a_gpu() -> None:
    gate: Any = OpenGate()
    result = hetero.run(Bench(CpuBackend(), gate, 2, True, {}))
    assert result.measurement is None
    assert {entry.value for entry in result.entries} == {None}
    assert all("needs a GPU" in entry.note for entry in result.entries)


def test_two_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a second CPU engine in the GPU's place."""
    gpu = CpuBackend()
    gpu.name = "metal"
    gate: Any = OpenGate()
    result = hetero.run(Bench(gpu, gate, 1, True, {}))
    assert gate.joined == ["cpu"]
    entries = {entry.name: entry for entry in result.entries}
    assert entries["total at once"].value is not None
    for part in ("forward", "backward"):
        share = entries[f"CPU's share of the rows, {part}"].value
        assert share is not None
        assert 0 < share <= 1
        rows = entries[f"CPU's rows of {hetero.QUICK.tokens}, {part}"]
        assert rows.value == hetero.cpu_rows(share, hetero.QUICK.tokens)
        assert {entries[f"{part}, {engine}"].unit for engine in ("CPU", "GPU")} == {"ms"}


def test_rates_times_and_shares_are_those_of_the_seconds() -> None:
    """Contestants take one millisecond, two, and so on, in their order."""
    gpu = CpuBackend()
    gpu.name = "metal"
    gate: Any = TimedGate()
    result = hetero.run(Bench(gpu, gate, 1, True, {}))
    gflop = 2 * 256**3 / 1e9
    total = gflop / 3e-3 + gflop / 4e-3
    assert {entry.name: (entry.value, entry.unit) for entry in result.entries} == {
        "GPU alone": (pytest.approx(gflop / 1e-3), "GFLOP/s"),
        "CPU alone": (pytest.approx(gflop / 2e-3), "GFLOP/s"),
        "GPU beside the CPU": (pytest.approx(gflop / 3e-3), "GFLOP/s"),
        "CPU beside the GPU": (pytest.approx(gflop / 4e-3), "GFLOP/s"),
        "total at once": (pytest.approx(total), "GFLOP/s"),
        "forward, GPU": (pytest.approx(5), "ms"),
        "forward, CPU": (pytest.approx(6), "ms"),
        "CPU's share of the rows, forward": (pytest.approx(10 / 11), "of 1"),
        "CPU's rows of 64, forward": (64, "rows"),
        "backward, GPU": (pytest.approx(7), "ms"),
        "backward, CPU": (pytest.approx(8), "ms"),
        "CPU's share of the rows, backward": (pytest.approx(14 / 15), "of 1"),
        "CPU's rows of 64, backward": (64, "rows"),
    }
    (both,) = (entry for entry in result.entries if entry.name == "total at once")
    assert both.ratio == pytest.approx(total / (gflop / 1e-3))


def test_the_reports_figures_stand_beside_full_sizes_in_fp16_only(
    simulated: SimulatedBackend,
) -> None:
    gate: Any = OpenGate()
    for backend, quick, figure in (
        (simulated, False, 4675.0),
        (simulated, True, None),
        (CpuBackend(), False, None),
    ):
        assert hetero.reported(Bench(backend, gate, 1, quick, {}), 4675.0) == figure
