"""The gate where there are contestants on two devices: each is judged by its own control."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from krnl.backends.cpu import CpuBackend
from krnl.bench.condition import Condition
from krnl.bench.control import probe, with_cpu
from krnl.bench.gate import Probe
from krnl.bench.reference import ReferenceStore
from krnl.errors import Refused
from scripted_gate import KEY, QUIET, REFERENCE, STEP, WINDOW, Bench, G

CPU = replace(KEY, device="Slowium")
DEVICES = (KEY.device, CPU.device)


pytestmark = pytest.mark.usefixtures("warm")


class TwoDevices(Bench):
    """A GPU, the device of the other tests, and a CPU with a control of its own."""

    def __init__(
        self,
        path: Path,
        rates: Sequence[float],
        cpu_rates: Sequence[float],
        condition: Condition = QUIET,
        force: bool = False,
    ):
        super().__init__(path, rates, condition, force)
        self.cpu_rates = list(cpu_rates)
        self.alone = self.gate
        self.gate = self.alone.beside(Probe("cpu", CPU, self.cpu_control))

    def cpu_control(self) -> float:
        self.time += STEP
        self.events.append("cpu control")
        return G * (self.cpu_rates.pop(0) if len(self.cpu_rates) > 1 else self.cpu_rates[0])


@pytest.fixture
def both(known: Path) -> Path:
    """A machine whose CPU is known to reach 100 GFLOP/s, its GPU 1,000."""
    ReferenceStore(known).raise_to(CPU, 100 * G, REFERENCE.learnt)
    return known


def test_each_device_has_its_control_and_its_reference(both):
    bench = TwoDevices(both, [1000], [100])
    measurement = bench.measure(1)
    assert measurement.trusted and measurement.notes == ()
    assert bench.events == [
        "control", "cpu control", "A", "B", "control", "cpu control"
    ]  # fmt: skip
    assert [(c.device, c.at, c.rate) for c in measurement.controls] == [
        ("Testium 9000", 0.0, pytest.approx(1000 * G)), ("Slowium", 0.5, pytest.approx(100 * G)),
        ("Testium 9000", 1.0, pytest.approx(1000 * G)), ("Slowium", 1.5, pytest.approx(100 * G)),
    ]  # fmt: skip
    assert {d: r.rate for d, r in measurement.references.items()} == {
        "Testium 9000": 1000 * G, "Slowium": 100 * G
    }  # fmt: skip


@pytest.mark.parametrize(
    ("gpu", "cpu", "named", "silent", "command"),
    [
        ([1000, 850], [100], "Testium 9000", "Slowium", "metal"),
        ([1000], [100, 85], "Slowium", "Testium 9000", "cpu"),
    ],
)
def test_each_device_alone_can_refuse(both, gpu, cpu, named, silent, command):
    text = TwoDevices(both, gpu, cpu).refusal()
    assert f"The control of {named} after round 1 of 3" in text and "15% below" in text
    assert f"what is reached: `krnl bench --device {command} --relearn`." in text
    assert silent not in text


def test_both_devices_can_refuse_at_once(both):
    text = TwoDevices(both, [850], [80]).refusal()
    assert "15% below the 1,000" in text and "20% below the 100" in text
    assert "`krnl bench --device metal --relearn` and `krnl bench --device cpu --relearn`." in text


def test_a_device_that_is_not_known_is_learnt_and_the_other_left(known):
    bench = TwoDevices(known, [1000], [100])
    measurement = bench.measure(1)
    assert bench.events[:WINDOW] == ["cpu control"] * WINDOW
    assert measurement.notes == ("The reference of Slowium was learnt just before.",)
    assert bench.store.read(CPU).rate == pytest.approx(100 * G)
    assert bench.store.read(KEY) == REFERENCE


def test_one_device_raises_its_own_reference(both):
    bench = TwoDevices(both, [1000], [120])
    bench.measure()
    assert bench.store.read(CPU).rate == pytest.approx(120 * G)
    assert bench.store.read(KEY) == REFERENCE


def test_what_was_learnt_is_told_once_whichever_gate_measures(path):
    """Before another control joined, or by both until the other device was found busy."""
    bench = TwoDevices(path, [1000], [100])
    bench.alone.learn()
    notes = [gate.measure({"A": lambda: 1.0}, 1).notes for gate in (bench.gate, bench.alone)]
    learnt = [f"The reference of {device} was learnt just before." for device in DEVICES]
    assert notes == [tuple(learnt), ()]
    busy = TwoDevices(path.with_name("other.json"), [1000], [100, 50] * 40)
    with pytest.raises(Refused, match="What Slowium reaches in quiet cannot be learnt now"):
        busy.gate.learn()
    assert busy.alone.measure({"A": lambda: 1.0}, 1).notes == (learnt[0],)


def test_relearning_says_it_of_each(both):
    assert TwoDevices(both, [900], [110]).gate.relearn() == (
        "The reference of Testium 9000 was lowered from 1,000 GFLOP/s to 900 GFLOP/s. "
        "The reference of Slowium was raised from 100 GFLOP/s to 110 GFLOP/s."
    )


def test_a_forced_gate_stays_forced_beside_another_control(known):
    measurement = TwoDevices(known, [1000], [100], force=True).measure()
    assert not measurement.trusted and set(measurement.references) == {"Testium 9000"}
    assert "What Slowium reaches in quiet has never been learnt." in measurement.notes[0]


def test_the_cpu_joins_only_where_the_backend_is_another(path):
    class Asked:
        def beside(self, joining: Probe) -> Probe:
            return joining

    backend, asked = CpuBackend(), Asked()
    assert with_cpu(asked, backend) is asked
    backend.name = "metal"
    joined = with_cpu(asked, backend)
    assert joined.backend == "cpu" and joined.key == probe(CpuBackend()).key
    assert joined.control() > 0
