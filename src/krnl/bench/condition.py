"""What the machine does beside us while something is measured. `systems.py` and `nvidia.py` read
it."""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from krnl.backends.cpu import usable_cores
from krnl.bench.nvidia import Nvidia
from krnl.bench.systems import Linux, Mac, Snapshot, System, Usage, run

HEAVY = 0.05  # of one core; processes below are not named
NAMED = 5  # at most
# The kernel counts the whole machine's time in samples and a process's exactly: only a difference
# above this share of all cores means processes that cannot be seen from here. Errors of many cores
# even out; what is passed over for them is never more than so much of one core.
SAMPLING, PASSED_OVER = 0.05, 0.1
# What takes time and cannot be closed from here.
UNSEEN = "processes that cannot be seen from here"
STOLEN = "other virtual machines on this host"


@dataclass(frozen=True)
class Process:
    """Processes of one name, and what they took: 1.0 is one core."""

    name: str
    count: int
    share: float


@dataclass(frozen=True)
class Condition:
    """The machine over a window of time, this process and what it started left out. Texts are empty
    where the system does not tell."""

    seconds: float
    cores: int  # that this process may run on
    others: float  # what other processes took in all; 1.0 is one core
    heavy: tuple[Process, ...]  # the heaviest first
    load: float | None  # average of the last minute
    thermal: str
    throttled: bool  # slowed down for heat or power, by what the system or a GPU says
    power: str
    saving: bool  # on battery, or told to save power
    clocks: str
    on_gpu: tuple[str, ...] = ()  # other processes that hold a GPU, at work or not
    quota: str = ""  # on a quota of processor time that held us up

    @property
    def slowed(self) -> bool:
        """Whether the machine was kept below what it can do."""
        return self.throttled or bool(self.quota)

    def describe(self) -> str:
        """Half a sentence, for after a comma or beside a table."""
        named = ", ".join(_counted(p) + f" {p.share:.0%}" for p in self.heavy)
        parts = [f"other processes took {self.others:.0%} of one core"]
        if named:
            parts[0] += f" ({named})"
        if self.on_gpu:
            parts.append(f"on the GPU: {', '.join(self.on_gpu)}")
        if self.load is not None:
            parts.append(f"load {self.load:.2f} on {self.cores} cores")
        parts += [t for t in (self.thermal, self.quota, self.power, self.clocks) if t]
        return "; ".join(parts)

    def remedies(self) -> list[str]:
        """What the user can do: 'close cc1plus ×2, python3', 'plug the machine in'."""
        found = []
        own = [_counted(p) for p in self.heavy if p.name not in (UNSEEN, STOLEN)]
        if own or self.on_gpu:
            found.append(f"close {', '.join(dict.fromkeys((*own, *self.on_gpu)))}")
        if outside := [p.name for p in self.heavy if p.name in (UNSEEN, STOLEN)]:
            found.append(f"wait for {' and '.join(outside)} to rest")
        if self.saving:
            found.append("plug the machine in and leave its low-power mode")
        if self.throttled:
            found.append("let it cool")
        if self.quota:
            found.append("lift the quota, or set KRNL_THREADS to the cores that it allows")
        return found


# Begins a window; what it returns ends it.
Watch: TypeAlias = Callable[[], Callable[[], Condition]]


def watch() -> Callable[[], Condition]:
    """The Watch of this machine."""
    system: System = Mac() if sys.platform == "darwin" else Linux()
    return watch_with(system, time.monotonic, os.getpid(), Nvidia(run))


def watch_with(
    system: System, clock: Callable[[], float], me: int, nvidia: Nvidia
) -> Callable[[], Condition]:
    """Begins a window beside process `me`; what it returns ends it."""
    start, first, first_gpus = clock(), system.snapshot(), nvidia.snapshot()

    def end() -> Condition:
        seconds, last = max(clock() - start, 1e-3), system.snapshot()
        others, heavy = shares(first, last, seconds, me)
        (thermal, hot), (power, saving) = system.heat(), system.supply()
        last_gpus = nvidia.snapshot()
        slowed = nvidia.slowdowns(first_gpus, last_gpus)
        if last.throttles > first.throttles:
            slowed.insert(0, "cores were slowed down for their heat")
        load = None
        with suppress(OSError):
            load = os.getloadavg()[0]
        gpu_clocks = nvidia.describe(first_gpus, last_gpus, seconds)
        return Condition(
            seconds=seconds,
            cores=usable_cores(),
            others=others,
            heavy=heavy,
            load=load,
            thermal="; ".join(filter(None, (thermal, *slowed))),
            throttled=hot or bool(slowed),
            power=power,
            saving=saving,
            clocks="; ".join(filter(None, (system.clocks(), gpu_clocks))),
            on_gpu=_foreign(first_gpus.users | last_gpus.users, first, last, me),
            quota=_held_up(last.stops - first.stops),
        )

    return end


def _foreign(users: Iterable[int], first: Snapshot, last: Snapshot, me: int) -> tuple[str, ...]:
    """The names of those that are not ours. A number that the system does not show is left out: it
    may be ours as it is called outside this container."""
    shown = {**first.processes, **last.processes}
    mine = _family(first.processes, me) | _family(last.processes, me)
    names = Counter(shown[pid].name for pid in users if pid in shown and pid not in mine)
    return tuple(_counted(Process(name, count, 0.0)) for name, count in sorted(names.items()))


def shares(
    first: Snapshot, last: Snapshot, seconds: float, me: int
) -> tuple[float, tuple[Process, ...]]:
    """What others took between two moments, in all and by name. The time of a process that ended is
    its parent's once it is buried, so nothing is lost or counted twice."""
    before, after = first.processes, last.processes
    mine = _family(before, me) | _family(after, me)
    buried = _buried(before, after)
    spent: dict[str, list[float]] = {}
    for pid, now in after.items():
        if pid in mine:
            continue
        then = before.get(pid)
        if then is None or then.own > now.own:  # new, maybe under an old number
            then = Usage(now.name, now.parent, 0.0)
        own, children = now.own - then.own, now.reaped - then.reaped - buried.get(pid, 0.0)
        spent.setdefault(now.name, []).append(own)
        spent.setdefault(f"what {now.name} started", []).append(max(0.0, children))
    total = sum(map(sum, spent.values()))
    if first.busy is not None and last.busy is not None:
        ours = _total(after, mine) - _total(before, mine)
        unseen = last.busy - first.busy - total - ours
        if unseen > seconds * min(SAMPLING * (os.cpu_count() or 1), PASSED_OVER):
            spent[UNSEEN] = [unseen]
            total += unseen
    if stolen := last.stolen - first.stolen:
        spent[STOLEN] = [stolen]
        total += stolen
    heavy = [
        Process(name, sum(took > 0 for took in times), sum(times) / seconds)
        for name, times in spent.items()
        if sum(times) >= HEAVY * seconds
    ]
    heavy.sort(key=lambda process: -process.share)
    return total / seconds, tuple(heavy[:NAMED])


def _buried(before: Mapping[int, Usage], after: Mapping[int, Usage]) -> dict[int, float]:
    """What processes that ended meanwhile had spent before, by the forebear that has it now."""
    found: dict[int, float] = {}
    for pid, usage in before.items():
        if pid not in after:
            heir = usage.parent
            while heir in before and heir not in after:
                heir = before[heir].parent
            found[heir] = found.get(heir, 0.0) + usage.own + usage.reaped
    return found


def _family(processes: Mapping[int, Usage], me: int) -> set[int]:
    """A process and all that descend from it."""
    family = {me}
    while more := {pid for pid, u in processes.items() if u.parent in family} - family:
        family |= more
    return family


def _total(processes: Mapping[int, Usage], chosen: Iterable[int]) -> float:
    return sum(processes[p].own + processes[p].reaped for p in chosen if p in processes)


def _held_up(times: int) -> str:
    count = f"{times:,} time{'s' * (times > 1)}"
    return f"a quota of processor time held us up {count}" if times > 0 else ""


def _counted(process: Process) -> str:
    return process.name if process.count < 2 else f"{process.name} ×{process.count}"
