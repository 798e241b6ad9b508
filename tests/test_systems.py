"""What systems tell: read from stored samples of what they say."""

import os
import sys
from pathlib import Path

import pytest

from krnl.bench.systems import Linux, Mac, Snapshot, Usage, run

# Linux, from a tree of files


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def stat(pid: int, name: str, parent: int, user: int, system: int, cu: int, cs: int) -> str:
    return f"{pid} ({name}) S {parent} 1 1 0 -1 4194560 9 9 0 0 {user} {system} {cu} {cs} 20 0 1 0"


def test_linux_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_CLK_TCK": 100}[name])
    throttle = "sys/devices/system/cpu/cpu{}/thermal_throttle/{}_throttle_count"
    write(tmp_path, {
        "proc/stat": "cpu  1000 200 300 9999 50 30 20 70 400 0\ncpu0 1 1 1 1 1 1 1 1 1 1",
        "proc/7/stat": stat(7, "web) (content", 3, 150, 50, 1000, 24),
        "proc/7/cmdline": "",
        "proc/8/stat": stat(8, "a_very_long_nam", 7, 1, 0, 0, 0),
        "proc/8/cmdline": "/opt/a_very_long_name_indeed\0--flag",
        "proc/9/stat": stat(9, "fifteen_letters", 7, 1, 0, 0, 0),
        "proc/9/cmdline": "other\0",
        "proc/10/stat": stat(10, "odd\x1b[31m", 7, 1, 0, 0, 0),
        "proc/11/comm": "ended, or another's",
        "proc/self/stat": stat(1, "self", 1, 1, 1, 1, 1),
        throttle.format(0, "core"): "3", throttle.format(1, "package"): "4",
    })  # fmt: skip
    seen = Linux(tmp_path).snapshot()
    assert seen.processes == {
        7: Usage("web) (content", 3, 2.0, 10.24),
        8: Usage("a_very_long_name_indeed", 7, 0.01),
        9: Usage("fifteen_letters", 7, 0.01),
        10: Usage("odd?[31m", 7, 0.01),
    }
    assert (seen.busy, seen.stolen, seen.throttles) == (pytest.approx(15.5), 0.7, 7)


CPU_STAT = "usage_usec 1\nnr_periods 9\nnr_throttled {}\nthrottled_usec 7"


@pytest.mark.parametrize(
    ("groups", "tree"),
    [
        ("0::/user/box", ""),
        ("7:memory:/other\n4:cpu,cpuacct:/user/box\n0::/none", "cpu/"),
        ("4:cpuacct,cpu:/user/box", "cpu/"),
    ],
)
def test_linux_quotas(tmp_path, groups, tree):
    """Of both versions of control groups: of the one that we are in, and of those around it."""
    write(tmp_path, {"proc/self/cgroup": groups})
    assert Linux(tmp_path).snapshot().stops == 0
    for i, group in enumerate(("", "user/", "user/box/", "other/", "user/box/below/")):
        text = CPU_STAT.format(10**i)
        write(tmp_path, {f"sys/fs/cgroup/{tree}{group}cpu.stat": text})
    write(tmp_path, {"sys/fs/cgroup/memory/other/cpu.stat": CPU_STAT.format(10**6)})
    assert Linux(tmp_path).snapshot().stops == 111


def test_a_linux_container_that_sees_no_other_groups(tmp_path):
    """It is told the host's name of its group, and sees that group as the only one."""
    write(tmp_path, {"proc/self/cgroup": "0::/docker/0123abc"})
    write(tmp_path, {"sys/fs/cgroup/cpu.stat": CPU_STAT.format(3)})
    assert Linux(tmp_path).snapshot().stops == 3


def test_linux_heat_and_clocks(tmp_path):
    linux = Linux(tmp_path)
    assert linux.heat() == ("", False) and linux.clocks() == ""
    write(tmp_path, {
        "proc/cpuinfo": "processor\t: 0\ncpu MHz\t\t: 2596.122\n\ncpu MHz\t\t: 2400.0",
        "sys/class/thermal/thermal_zone0/temp": "41000",
        "sys/class/thermal/thermal_zone1/temp": "87500",
    })  # fmt: skip
    assert linux.heat() == ("hottest sensor 88 °C", False)
    assert linux.clocks() == "cores at 2,498 MHz"
    for core, khz in enumerate((1200000, 3400000, 3500000)):
        folder = f"sys/devices/system/cpu/cpu{core}/cpufreq"
        write(tmp_path, {f"{folder}/scaling_cur_freq": str(khz)})
        write(tmp_path, {f"{folder}/scaling_governor": "powersave"})
    assert linux.clocks() == "cores at 3,400 MHz (governor powersave)"


def test_linux_power(tmp_path):
    linux, supply = Linux(tmp_path), "sys/class/power_supply"
    assert linux.supply() == ("", False)
    write(tmp_path, {
        f"{supply}/mouse/type": "Battery", f"{supply}/mouse/scope": "Device",
        f"{supply}/mouse/status": "Discharging", f"{supply}/mouse/capacity": "5",
    })  # fmt: skip
    assert linux.supply() == ("", False)
    write(tmp_path, {
        f"{supply}/BAT0/type": "Battery", f"{supply}/BAT0/status": "Discharging",
        f"{supply}/BAT0/capacity": "43", f"{supply}/AC/type": "Mains", f"{supply}/AC/online": "0",
    })  # fmt: skip
    assert linux.supply() == ("on battery (43 %)", True)
    write(tmp_path, {f"{supply}/AC/online": "1"})
    assert linux.supply() == ("on mains power", False)


# macOS, from what its programs print

PS = """\
    1     0   3:05.27 /sbin/launchd
  388     1 101:00.50 /System/Library/PrivateFrameworks/SkyLight.framework/Resources/WindowServer
  812     1   0:00.00 (sh)
 1207   812 1-02:03:04 /Applications/Xcode.app/Contents/MacOS/Xcode
 1300     1   0:12.34 /Applications/Some App.app/Contents/MacOS/Some App
"""
NOMINAL = """\
Note: No thermal warning level has been recorded
Note: No performance warning level has been recorded
Note: No CPU power status has been recorded
"""
LIMITED = """\
Note: No thermal warning level has been recorded
2024-05-06 10:11:12 +0200 CPU Power notify
\tCPU_Scheduler_Limit \t= 100
\tCPU_Available_CPUs \t= 8
\tCPU_Speed_Limit \t= 62
"""
WARNED = "2024-05-06 10:11:12 +0200 Thermal Warning Level = 2\n"
AC = """\
Now drawing from 'AC Power'
 -InternalBattery-0 (id=4653155)\t100%; charged; 0:00 remaining present: true
"""
DESKTOP = "Now drawing from 'AC Power'\n"
BATTERY = """\
Now drawing from 'Battery Power'
 -InternalBattery-0 (id=4653155)\t43%; discharging; 3:21 remaining present: true
"""
SETTINGS = """\
System-wide power settings:
Currently in use:
 standby              1
 lowpowermode         {}
 womp                 0
"""


def mac(therm: str = "", batt: str = "", settings: str = "", ps: str = "") -> Mac:
    answers = {("therm",): therm, ("batt",): batt, (): settings}

    def answer(command):
        return ps if command[0] == "ps" else answers[tuple(command[2:])]

    return Mac(answer)


def test_mac_processes():
    assert mac(ps=PS).snapshot() == Snapshot({
        1: Usage("launchd", 0, 185.27),
        388: Usage("WindowServer", 1, 6060.5),
        812: Usage("(sh)", 1, 0.0),
        1207: Usage("Xcode", 812, 93784.0),
        1300: Usage("Some App", 1, 12.34),
    })  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words", "slow"),
    [
        ("", "", False),
        (NOMINAL, "thermal state nominal", False),
        (LIMITED, "the system holds the processor at 62 % for its heat", True),
        (LIMITED.replace("62", "100"), "thermal state nominal", False),
        (WARNED, "the system warns of heat (level 2)", True),
        (WARNED.replace("2\n", "0\n"), "thermal state nominal", False),
    ],
)
def test_mac_heat(text, words, slow):
    assert mac(therm=text).heat() == (words, slow)


@pytest.mark.parametrize(
    ("batt", "low", "words", "saving"),
    [
        ("", 0, "", False),
        (AC, 0, "on mains power", False),
        (DESKTOP, 0, "on mains power", False),
        (AC, 1, "on mains power, low-power mode", True),
        (BATTERY, 0, "on battery (43 %)", True),
        (BATTERY, 1, "on battery (43 %), low-power mode", True),
    ],
)
def test_mac_power(batt, low, words, saving):
    assert mac(batt=batt, settings=SETTINGS.format(low)).supply() == (words, saving)


def test_a_program_that_is_not_there_says_nothing():
    assert run(["no-such-program-here"]) == ""
    assert run([sys.executable, "-c", "print('half'); raise SystemExit(1)"]) == ""
    assert run([sys.executable, "-c", "import os; print(os.environ['LC_ALL'])"]) == "C\n"
