"""Stands in for the gate where a test wants to know the seconds that figures are made of."""

from collections.abc import Callable, Mapping

from krnl.bench.gate import Measurement, Probe
from open_gate import CONDITION


class TimedGate:
    """Runs each contestant once, and says that the first took a millisecond every time, the second
    two, and so on."""

    def __init__(self) -> None:
        self.rounds = 0

    def beside(self, probe: Probe) -> "TimedGate":
        return self

    def learn(self) -> None:
        pass

    def measure(self, contestants: Mapping[str, Callable[[], float]], rounds: int) -> Measurement:
        self.rounds = rounds
        for contestant in contestants.values():
            assert contestant() > 0
        seconds = {name: ((i + 1) / 1e3,) * rounds for i, name in enumerate(contestants)}
        return Measurement(seconds, (), {}, CONDITION, "2026-11-30T12:00:00+00:00", True, ())
