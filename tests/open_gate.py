"""Stands in for the gate where a test wants figures and does not mind what they are."""

from collections.abc import Callable, Mapping

from krnl.bench.condition import Condition
from krnl.bench.gate import Control, Measurement

CONDITION = Condition(1.0, 2, 0.03, (), 0.5, "", False, "", False, "")


class OpenGate:
    """Lets everything through, with nothing between the rounds."""

    def __init__(self, trusted: bool = True):
        self._trusted = trusted

    def measure(self, contestants: Mapping[str, Callable[[], float]], rounds: int) -> Measurement:
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(rounds):
            for name, contestant in contestants.items():
                seconds[name].append(contestant())
        return Measurement(
            seconds={name: tuple(times) for name, times in seconds.items()},
            controls=(Control("before the first round", 0.0, 1e12),),
            reference=1e12,
            condition=CONDITION,
            when="2026-01-01T00:00:00+00:00",
            trusted=self._trusted,
            notes=() if self._trusted else ("Forced, so not to be trusted. It was 3 % off.",),
        )
