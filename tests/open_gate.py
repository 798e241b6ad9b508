"""Stands in for the gate where a test wants figures and does not mind what they are."""

from collections.abc import Callable, Mapping

from krnl.bench.condition import Condition
from krnl.bench.gate import Control, Measurement, Probe
from krnl.bench.reference import Reference

CONDITION = Condition(1.0, 2, 0.03, (), 0.5, "", False, "", False, "")


class OpenGate:
    """Lets everything through, with nothing between the rounds."""

    def __init__(self, trusted: bool = True):
        self._trusted = trusted
        self.joined: list[str] = []  # backends whose controls were asked for too

    def beside(self, probe: Probe) -> "OpenGate":
        self.joined.append(probe.backend)
        return self

    def learn(self) -> None:
        pass

    def measure(self, contestants: Mapping[str, Callable[[], float]], rounds: int) -> Measurement:
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(rounds):
            for name, contestant in contestants.items():
                seconds[name].append(contestant())
        return Measurement(
            seconds={name: tuple(times) for name, times in seconds.items()},
            controls=(Control("a device", "before the first round", 0.0, 1e12),),
            references={"a device": Reference(1e12, "2025-12-31T00:00:00+00:00")},
            condition=CONDITION,
            when="2026-01-01T00:00:00+00:00",
            trusted=self._trusted,
            notes=() if self._trusted else ("Forced, so not to be trusted. It was 3 % off.",),
        )
