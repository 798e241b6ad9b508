"""What `nvidia-smi` tells of NVIDIA's GPUs. Nothing is said where it is not there, and what an
older driver does not know is left out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# Why the clocks of a GPU were lowered: the field of `nvidia-smi`, and what it means.
SLOWDOWNS = {
    "hw_thermal_slowdown": "heat",
    "sw_thermal_slowdown": "heat",
    "hw_power_brake_slowdown": "its power supply",
}
# Older cards say only this of the hardware's reasons.
UNSPECIFIC = {"hw_slowdown": "heat or its power supply"}
# Large products take a card there in quiet as well, and its reference was learnt so.
LIMIT = "sw_power_cap"
STATE = "clocks.sm,clocks.mem,temperature.gpu,power.draw,utilization.gpu"


@dataclass(frozen=True)
class Gpus:
    """All GPUs at one moment."""

    users: frozenset[int]  # numbers of the processes that hold one
    # Of each GPU by reason: microseconds that its clocks were lowered so far, if they are counted.
    lowered: tuple[Mapping[str, int], ...]


class Nvidia:
    """`nvidia-smi`, called through `run`, which gives what a program prints, or nothing if it is
    not there or fails."""

    def __init__(self, run: Callable[[Sequence[str]], str]):
        self._run = run

    def snapshot(self) -> Gpus:
        found = [fields[0] for fields in self._rows("--query-compute-apps=pid")]
        reasons = [*SLOWDOWNS, LIMIT]
        lowered = [
            {
                reason: int(time.removesuffix(" us"))
                for reason, time in zip(reasons, fields, strict=False)
                if time.removesuffix(" us").isdigit()
            }
            for fields in self._query("clocks_event_reasons_counters", reasons)
        ]
        return Gpus(frozenset(int(pid) for pid in found if pid.isdigit()), tuple(lowered))

    def slowdowns(self, first: Gpus, last: Gpus) -> list[str]:
        """What slowed GPUs down between two moments, or does so now where the driver does not count
        it: 'GPU 0 was slowed down for heat'."""
        words = {**SLOWDOWNS, **UNSPECIFIC}
        if any(last.lowered):
            found = [
                [reason for reason in SLOWDOWNS if _spent(before, after, reason) > 0]
                for before, after in zip(first.lowered, last.lowered, strict=False)
            ]
        else:
            # The name that older drivers have; newer ones know it too.
            answers = self._query("clocks_throttle_reasons", list(words))
            found = [
                [r for r, answer in zip(words, fields, strict=False) if answer == "Active"]
                for fields in answers
            ]
        return [
            f"GPU {i} was slowed down for {words[reasons[0]]}"
            for i, reasons in enumerate(found)
            if reasons
        ]

    def describe(self, first: Gpus, last: Gpus, seconds: float) -> str:
        """Clocks, temperature, power and use right now; how long of the `seconds` between two
        moments a GPU was held back by its power limit."""
        words = []
        for i, fields in enumerate(self._rows(f"--query-gpu={STATE}")):
            if len(fields) != 5:
                continue
            core, memory, degrees, watts, use = fields
            words.append(
                f"GPU {i} at {core}, its memory at {memory}, {degrees} °C, {watts}, in use {use}"
            )
            if i < min(len(first.lowered), len(last.lowered)):
                share = _spent(first.lowered[i], last.lowered[i], LIMIT) / (1e6 * seconds)
                words[-1] += f", at its power limit for {share:.0%} of the time" * (share > 0)
        return "; ".join(words)

    def _query(self, group: str, names: Sequence[str]) -> list[list[str]]:
        return self._rows("--query-gpu=" + ",".join(f"{group}.{name}" for name in names))

    def _rows(self, query: str) -> list[list[str]]:
        answer = self._run(["nvidia-smi", query, "--format=csv,noheader"])
        return [[field.strip() for field in line.split(",")] for line in answer.splitlines()]


def _spent(before: Mapping[str, int], after: Mapping[str, int], reason: str) -> int:
    """Microseconds; 0 where it is not counted."""
    return after[reason] - before[reason] if reason in before and reason in after else 0
