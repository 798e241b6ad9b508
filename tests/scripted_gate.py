"""A gate on a machine that follows a script: its time, its controls and what it does are fakes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from krnl.bench.condition import Condition, Process
from krnl.bench.gate import Gate, Probe
from krnl.bench.reference import Key, Reference, ReferenceStore
from krnl.errors import Refused

G = 1e9
KEY = Key("Testium 9000", "Linux 6", "", "abcd", "nn 1024, 1")
NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
REFERENCE = Reference(1000 * G, "2025-12-31T00:00:00+00:00")
STEP = 0.5  # seconds of a fake control
WINDOW = 12  # runs of the control in a window of learning

QUIET = Condition(
    seconds=6.0,
    cores=8,
    others=0.02,
    heavy=(),
    load=0.3,
    thermal="",
    throttled=False,
    power="on mains power",
    saving=False,
    clocks="",
)
BUSY = replace(
    QUIET,
    others=1.75,
    heavy=(Process("cc1plus", 2, 1.2), Process("python3", 1, 0.55)),
    load=3.21,
    thermal="hottest sensor 95 °C",
    throttled=True,
    power="on battery (43 %)",
    saving=True,
)


class Bench:
    """A gate on a machine that follows a script. The control's rates, in GFLOP/s, come one after
    the other, the last one for ever; `events` is what ran."""

    def __init__(
        self,
        path: Path,
        rates: Sequence[float],
        condition: Condition = QUIET,
        force: bool = False,
        step: float = STEP,
    ):
        self.step = step
        self.time, self.rates, self.events = 0.0, list(rates), []
        self.rests: list[tuple[int, float]] = []  # behind how many events, and seconds
        self.store = ReferenceStore(path)
        self.condition = condition
        self.gate = Gate(
            [Probe("metal", KEY, self.control)], self.store, lambda: lambda: self.condition,
            lambda: self.time, lambda: NOON + timedelta(seconds=self.time), force,
            lambda seconds: self.rests.append((len(self.events), seconds)),
        )  # fmt: skip

    def control(self) -> float:
        self.time += self.step
        self.events.append("control")
        return G * (self.rates.pop(0) if len(self.rates) > 1 else self.rates[0])

    def contestant(self, name: str, seconds: Sequence[float]) -> Callable[[], float]:
        figures = iter(seconds)

        def run() -> float:
            self.events.append(name)
            return next(figures)

        return run

    def measure(self, rounds: int = 3):
        a = self.contestant("A", [1.0, 3.0, 2.0, 9.0, 4.0])
        b = self.contestant("B", [10.0, 20.0, 30.0, 40.0, 50.0])
        return self.gate.measure({"A": a, "B": b}, rounds)

    def refusal(self, rounds: int = 3) -> str:
        with pytest.raises(Refused) as refused:
            self.measure(rounds)
        return str(refused.value)
