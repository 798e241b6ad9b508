"""What the machine does beside us while something is measured.

Linux is read from /proc and /sys, macOS through `ps` and `pmset`, NVIDIA through `nvidia-smi`.
"""

import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

HEAVY = 0.05  # of one core; processes below are not named
NAMED = 5  # at most
# The kernel counts the whole machine's time in samples and a process's exactly: only a difference
# above this share of all cores means processes that cannot be seen from here.
SAMPLING = 0.05
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
    cores: int
    others: float  # what other processes took in all; 1.0 is one core
    heavy: tuple[Process, ...]  # the heaviest first
    load: float | None  # average of the last minute
    thermal: str
    throttled: bool
    power: str
    saving: bool  # on battery, or told to save power
    clocks: str

    def describe(self) -> str:
        """Half a sentence, for after a comma or beside a table."""
        named = ", ".join(_counted(p) + f" {p.share:.0%}" for p in self.heavy)
        parts = [f"other processes took {self.others:.0%} of one core"]
        if named:
            parts[0] += f" ({named})"
        if self.load is not None:
            parts.append(f"load {self.load:.2f} on {self.cores} cores")
        parts += [text for text in (self.thermal, self.power, self.clocks) if text]
        return "; ".join(parts)

    def remedies(self) -> list[str]:
        """What the user can do: 'close cc1plus ×2, python3', 'plug the machine in'."""
        found = []
        if own := [_counted(p) for p in self.heavy if p.name not in (UNSEEN, STOLEN)]:
            found.append(f"close {', '.join(own)}")
        if outside := [p.name for p in self.heavy if p.name in (UNSEEN, STOLEN)]:
            found.append(f"wait for {' and '.join(outside)} to rest")
        if self.saving:
            found.append("plug the machine in and leave its low-power mode")
        if self.throttled:
            found.append("let it cool")
        return found


# Begins a window; what it returns ends it.
Watch: TypeAlias = Callable[[], Callable[[], Condition]]


@dataclass(frozen=True)
class Usage:
    """A process: seconds of processor time, its own and that of children that it has buried."""

    name: str
    parent: int
    own: float
    reaped: float = 0.0


@dataclass(frozen=True)
class Snapshot:
    """All processes at one moment, and what the whole machine has spent so far where that is
    known."""

    processes: Mapping[int, Usage]
    busy: float | None = None  # seconds of all cores, whoever spent them
    stolen: float = 0.0  # seconds that the cores were withheld from this virtual machine
    throttles: int = 0  # times that a core was slowed down for its heat


class System(Protocol):
    def snapshot(self) -> Snapshot: ...

    def heat(self) -> tuple[str, bool]:
        """Words on the thermal state; whether it slows the machine down."""

    def supply(self) -> tuple[str, bool]:
        """Words on the power supply; whether power is saved."""

    def clocks(self) -> str: ...


def watch() -> Callable[[], Condition]:
    """The Watch of this machine."""
    system: System = Mac() if sys.platform == "darwin" else Linux()
    return watch_with(system, time.monotonic, os.getpid())


def watch_with(system: System, clock: Callable[[], float], me: int) -> Callable[[], Condition]:
    """Begins a window beside process `me`; what it returns ends it."""
    start, first = clock(), system.snapshot()

    def end() -> Condition:
        seconds, last = max(clock() - start, 1e-3), system.snapshot()
        others, heavy = shares(first, last, seconds, me)
        (thermal, hot), (power, saving) = system.heat(), system.supply()
        load = None
        with suppress(OSError):
            load = os.getloadavg()[0]
        return Condition(
            seconds=seconds,
            cores=os.cpu_count() or 1,
            others=others,
            heavy=heavy,
            load=load,
            thermal=thermal,
            throttled=hot or last.throttles > first.throttles,
            power=power,
            saving=saving,
            clocks="; ".join(filter(None, (system.clocks(), nvidia(run)))),
        )

    return end


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
        if unseen > SAMPLING * seconds * (os.cpu_count() or 1):
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


def _counted(process: Process) -> str:
    return process.name if process.count < 2 else f"{process.name} ×{process.count}"


def run(command: Sequence[str]) -> str:
    """What a program prints; nothing if it is not there or fails."""
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, "LC_ALL": "C"},
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.decode(errors="replace")


class Linux:
    """/proc and /sys, below `root`."""

    def __init__(self, root: Path = Path("/")):
        self._proc, self._sys = root / "proc", root / "sys"
        self._tick = os.sysconf("SC_CLK_TCK")

    def snapshot(self) -> Snapshot:
        processes = {}
        for folder in self._proc.iterdir():
            if folder.name.isdigit():
                with suppress(OSError, ValueError):  # it has ended meanwhile
                    processes[int(folder.name)] = self._usage(folder)
        busy, stolen = None, 0.0
        fields = _read(self._proc / "stat").partition("\n")[0].split()[1:]
        if len(fields) >= 8:
            user, nice, system, _, _, irq, softirq, steal = (
                int(f) / self._tick for f in fields[:8]
            )
            busy, stolen = user + nice + system + irq + softirq, steal
        throttles = self._sys.glob("devices/system/cpu/cpu*/thermal_throttle/*_throttle_count")
        return Snapshot(processes, busy, stolen, sum(int(_read(path) or 0) for path in throttles))

    def _usage(self, folder: Path) -> Usage:
        # The name stands in brackets and may hold spaces and brackets itself.
        head, _, rest = (folder / "stat").read_text(errors="replace").rpartition(")")
        fields = rest.split()
        user, system, buried_user, buried_system = (int(f) / self._tick for f in fields[11:15])
        name = head.partition("(")[2]
        if len(name) == 15:  # cut there; the whole may be in the command line
            program = Path(_read(folder / "cmdline").partition("\0")[0]).name
            name = program if program.startswith(name) else name
        return Usage(_printable(name), int(fields[1]), user + system, buried_user + buried_system)

    def heat(self) -> tuple[str, bool]:
        zones = [_read(p) for p in self._sys.glob("class/thermal/thermal_zone*/temp")]
        degrees = [int(zone) / 1000 for zone in zones if re.fullmatch(r"-?\d+", zone)]
        return (f"hottest sensor {max(degrees):.0f} °C" if degrees else ""), False

    def supply(self) -> tuple[str, bool]:
        supplies = [p for p in self._sys.glob("class/power_supply/*")]
        if any(_read(p / "online") == "1" for p in supplies):
            return "on mains power", False
        for path in supplies:
            own = _read(path / "type") == "Battery" and _read(path / "scope") != "Device"
            if own and _read(path / "status") == "Discharging":
                return f"on battery ({_read(path / 'capacity')} %)", True
        return "", False

    def clocks(self) -> str:
        folders = sorted(self._sys.glob("devices/system/cpu/cpu*/cpufreq"))
        found = [_read(folder / "scaling_cur_freq") for folder in folders]
        megahertz = [int(f) / 1000 for f in found if f.isdigit()]
        if not megahertz:
            lines = re.findall(r"^cpu MHz\s*: ([\d.]+)$", _read(self._proc / "cpuinfo"), re.M)
            megahertz = [float(line) for line in lines]
        if not megahertz:
            return ""
        text = f"cores at {statistics.median(megahertz):,.0f} MHz"
        governors = sorted({_read(folder / "scaling_governor") for folder in folders} - {""})
        return text + (f" (governor {', '.join(governors)})" if governors else "")


class Mac:
    """`ps` and `pmset`, called through `run`. Processes that begin and end inside a window are not
    seen: `ps` does not tell what a parent's children took."""

    def __init__(self, run: Callable[[Sequence[str]], str] = run):
        self._run = run

    def snapshot(self) -> Snapshot:
        processes = {}
        for line in self._run(["ps", "-A", "-o", "pid=,ppid=,time=,comm="]).splitlines():
            if found := re.match(r"\s*(\d+)\s+(\d+)\s+([\d:.-]+)\s+(.*\S)", line):
                pid, parent, spent, path = found.groups()
                name = _printable(path.rpartition("/")[2] or path)
                processes[int(pid)] = Usage(name, int(parent), _seconds(spent))
        return Snapshot(processes)

    def heat(self) -> tuple[str, bool]:
        text = self._run(["pmset", "-g", "therm"])
        limits = re.findall(r"CPU_(Speed|Scheduler)_Limit\s*=\s*(\d+)", text)
        low = min((int(percent) for _, percent in limits), default=100)
        if low < 100:
            return f"the system holds the processor at {low} % for its heat", True
        levels = re.findall(r"(?:thermal|performance) warning level\s*[=:]\s*(\d+)", text, re.I)
        if any(int(level) > 0 for level in levels):
            return f"the system warns of heat (level {max(map(int, levels))})", True
        return ("thermal state nominal" if text else ""), False

    def supply(self) -> tuple[str, bool]:
        text = self._run(["pmset", "-g", "batt"])
        source = re.search(r"Now drawing from '(.*?)'", text)
        if source is None:
            return "", False
        percent = re.search(r"(\d+)%", text)
        low_power = bool(re.search(r"^\s*(low)?powermode\s+1\b", self._run(["pmset", "-g"]), re.M))
        mode = ", low-power mode" if low_power else ""
        if source[1] == "Battery Power":
            charge = f" ({percent[1]} %)" if percent else ""
            return f"on battery{charge}{mode}", True
        return f"on mains power{mode}", low_power

    def clocks(self) -> str:
        return ""  # only root may ask


def nvidia(run: Callable[[Sequence[str]], str]) -> str:
    """Clocks, temperature, power and use of NVIDIA's GPUs right now; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return ""
    return nvidia_words(run(["nvidia-smi", f"--query-gpu={_NVIDIA}", "--format=csv,noheader"]))


_NVIDIA = "clocks.sm,clocks.mem,temperature.gpu,power.draw,utilization.gpu"


def nvidia_words(answer: str) -> str:
    """From what `nvidia-smi` answers."""
    words = []
    for i, line in enumerate(answer.splitlines()):
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 5:
            core, memory, degrees, watts, use = fields
            words.append(
                f"GPU {i} at {core}, its memory at {memory}, {degrees} °C, {watts}, in use {use}"
            )
    return "; ".join(words)


def _seconds(time: str) -> float:
    """Of [[days-]hours:]minutes:seconds."""
    days, _, rest = time.rpartition("-")
    total = 0.0
    for part in rest.split(":"):
        total = 60 * total + float(part)
    return total + 86400 * int(days or 0)


def _printable(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in name) or "?"


def _read(path: Path) -> str:
    """A short text of the system; empty if it does not give it."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
