"""What systems tell of their processes, their heat and their power: Linux through /proc and /sys,
macOS through `ps` and `pmset`."""

import os
import re
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Protocol


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
    stops: int = 0  # times that a quota of processor time held up a group that we are in


class System(Protocol):
    def snapshot(self) -> Snapshot: ...

    def heat(self) -> tuple[str, bool]:
        """Words on the thermal state; whether it slows the machine down."""

    def supply(self) -> tuple[str, bool]:
        """Words on the power supply; whether power is saved."""

    def clocks(self) -> str: ...


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
        throttled = sum(int(_read(path) or 0) for path in throttles)
        stops = sum(_stops(folder) for folder in self._groups())
        return Snapshot(processes, busy, stolen, throttled, stops)

    def _groups(self) -> Iterator[Path]:
        """The control groups that we are in, any of which may have a quota."""
        for line in _read(self._proc / "self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            folder = self._sys / "fs/cgroup"
            if controllers:  # the older version, with a tree for each controller
                if "cpu" not in controllers.split(","):
                    continue
                folder /= "cpu"
            inside = PurePath(path.lstrip("/"))  # of the host, if we do not see its tree
            for group in (inside, *inside.parents):
                yield folder / group

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


def _stops(group: Path) -> int:
    found = re.search(r"^nr_throttled (\d+)$", _read(group / "cpu.stat"), re.M)
    return int(found[1]) if found else 0


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
