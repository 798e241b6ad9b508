"""What the machine does beside us: read from stored samples of what systems say, and from this
machine."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from krnl.bench.condition import (
    STOLEN,
    UNSEEN,
    Condition,
    Linux,
    Mac,
    Process,
    Snapshot,
    Usage,
    nvidia_words,
    run,
    shares,
    watch,
    watch_with,
)

ME = 100
CORES = os.cpu_count() or 1


def processes(**others: Usage) -> dict[int, Usage]:
    """Ours (process 100, its child 101), and others under the numbers in their names."""
    ours = {ME: Usage("krnl", 1, 50.0, 2.0), 101: Usage("baseline", ME, 7.0)}
    return {**ours, **{int(name[1:]): usage for name, usage in others.items()}}


def test_others_are_named_by_share_and_ours_left_out():
    first = processes(
        _1=Usage("init", 0, 5.0), _7=Usage("cc1plus", 1, 1.0), _8=Usage("cc1plus", 1, 2.0)
    )
    last = processes(
        _1=Usage("init", 0, 5.01), _7=Usage("cc1plus", 1, 3.0), _8=Usage("cc1plus", 1, 3.0),
        _9=Usage("firefox", 1, 0.4),
    )  # fmt: skip
    last[ME], last[101] = Usage("krnl", 1, 58.0, 2.0), Usage("baseline", ME, 11.0)
    total, heavy = shares(Snapshot(first), Snapshot(last), 4.0, ME)
    assert heavy == (Process("cc1plus", 2, 0.75), Process("firefox", 1, 0.1))
    assert total == pytest.approx((3.0 + 0.4 + 0.01) / 4)


def test_grandchildren_and_children_that_end_are_ours():
    first = processes(_102=Usage("sh", 101, 1.0), _103=Usage("ps", 102, 30.0))
    last = processes(_104=Usage("worker", 101, 25.0))
    total, heavy = shares(Snapshot(first), Snapshot(last), 1.0, ME)
    assert (total, heavy) == (0.0, ())


def test_what_ended_meanwhile_is_its_parents():
    """A compiler that had 3 s before the window and 2 in it, and one that lived inside it for 1."""
    first = processes(_5=Usage("make", 1, 0.0, 10.0), _6=Usage("cc1plus", 5, 3.0))
    last = processes(_5=Usage("make", 1, 0.0, 16.0))
    total, heavy = shares(Snapshot(first), Snapshot(last), 3.0, ME)
    assert total == pytest.approx(1.0) and heavy == (Process("what make started", 1, 1.0),)


def test_so_is_what_their_children_had_spent():
    """The compiler's 30 s from before went to the shell first, and both to make."""
    first = processes(
        _5=Usage("make", 1, 0.0), _6=Usage("sh", 5, 1.0), _7=Usage("cc1plus", 6, 30.0)
    )
    last = processes(_5=Usage("make", 1, 0.0, 33.0))
    total, heavy = shares(Snapshot(first), Snapshot(last), 4.0, ME)
    assert total == pytest.approx(0.5) and heavy == (Process("what make started", 1, 0.5),)


def test_children_that_nobody_waits_for_take_nothing_away():
    """Their time is lost with them; what they had spent before is not taken from others."""
    first = processes(_5=Usage("server", 1, 0.0), _6=Usage("cgi", 5, 30.0))
    last = processes(_5=Usage("server", 1, 2.0))
    total, heavy = shares(Snapshot(first), Snapshot(last), 4.0, ME)
    assert total == 0.5 and heavy == (Process("server", 1, 0.5),)


def test_a_number_used_again_is_a_new_process():
    first, last = processes(_5=Usage("old", 1, 90.0)), processes(_5=Usage("new", 1, 2.0))
    assert shares(Snapshot(first), Snapshot(last), 4.0, ME)[1] == (Process("new", 1, 0.5),)


def test_what_cannot_be_seen_counts_and_sampling_does_not():
    seen = processes(_5=Usage("seen", 1, 1.0)), processes(_5=Usage("seen", 1, 2.0))
    first = Snapshot(seen[0], busy=1000.0)
    within = Snapshot(seen[1], busy=1001.0 + 0.04 * 10 * CORES)
    beyond = Snapshot(seen[1], busy=1001.0 + 0.5 * 10 * CORES)
    assert shares(first, within, 10.0, ME) == (0.1, (Process("seen", 1, 0.1),))
    total, heavy = shares(first, beyond, 10.0, ME)
    assert total == pytest.approx(0.1 + 0.5 * CORES)
    assert heavy[0] == Process(UNSEEN, 1, pytest.approx(0.5 * CORES))


def test_time_withheld_by_the_host_counts():
    first, last = Snapshot(processes(), stolen=5.0), Snapshot(processes(), stolen=6.0)
    total, heavy = shares(first, last, 2.0, ME)
    assert total == 0.5 and heavy == (Process(STOLEN, 1, 0.5),)


def test_five_are_named_at_most():
    first = {n: Usage(f"p{n}", 1, 0.0) for n in range(1, 10)}
    last = {n: Usage(f"p{n}", 1, float(n)) for n in range(1, 10)}
    total, heavy = shares(Snapshot(first), Snapshot(last), 1.0, ME)
    assert [p.name for p in heavy] == ["p9", "p8", "p7", "p6", "p5"] and total == 45


CONDITION = Condition(3.0, 8, 0.02, (), None, "", False, "", False, "")


def test_words_of_a_quiet_machine():
    assert CONDITION.describe() == "other processes took 2% of one core"
    assert CONDITION.remedies() == []
    told = replace(CONDITION, load=0.5, power="on mains power", clocks="cores at 3,000 MHz")
    assert told.describe() == (
        "other processes took 2% of one core; load 0.50 on 8 cores; on mains power; "
        "cores at 3,000 MHz"
    )


def test_what_can_be_done():
    assert replace(CONDITION, heavy=(Process("a", 3, 1.0), Process("b", 1, 0.1))).remedies() == [
        "close a ×3, b"
    ]
    outside = (Process("a", 1, 1.0), Process(UNSEEN, 1, 0.5), Process(STOLEN, 1, 0.1))
    assert replace(CONDITION, heavy=outside).remedies() == [
        "close a",
        "wait for processes that cannot be seen from here and other virtual machines on this host "
        "to rest",
    ]
    assert replace(CONDITION, saving=True, throttled=True).remedies() == [
        "plug the machine in and leave its low-power mode", "let it cool"
    ]  # fmt: skip


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


# NVIDIA


def test_nvidia():
    assert nvidia_words("") == "" == nvidia_words("No devices were found\n")
    answer = "1980 MHz, 2619 MHz, 31, 117.35 W, 0 %\n1200 MHz, 2619 MHz, 84, [N/A], 97 %\n"
    assert nvidia_words(answer) == (
        "GPU 0 at 1980 MHz, its memory at 2619 MHz, 31 °C, 117.35 W, in use 0 %; "
        "GPU 1 at 1200 MHz, its memory at 2619 MHz, 84 °C, [N/A], in use 97 %"
    )


# The window


def test_a_window_is_what_lies_between():
    class System(Mac):
        """Two moments; a core is slowed down for its heat between them."""

        def __init__(self) -> None:
            super().__init__(lambda command: "")
            busy = processes(_5=Usage("busy", 1, 3.0))
            self.moments = [Snapshot(processes(), throttles=1), Snapshot(busy, throttles=2)]

        def snapshot(self) -> Snapshot:
            return self.moments.pop(0)

    times = iter([10.0, 14.0])
    condition = watch_with(System(), lambda: next(times), ME)()
    assert (condition.seconds, condition.others) == (4.0, 0.75)
    assert condition.heavy == (Process("busy", 1, 0.75),)
    assert condition.throttled and not condition.saving


def test_a_program_that_is_not_there_says_nothing():
    assert run(["no-such-program-here"]) == ""
    assert run([sys.executable, "-c", "print('half'); raise SystemExit(1)"]) == ""
    assert run([sys.executable, "-c", "import os; print(os.environ['LC_ALL'])"]) == "C\n"


def test_this_machine_and_what_we_start_on_it(tmp_path):
    """Busy children of ours are not others, while they live and after."""
    shell = tmp_path / "ourtenant"
    shell.symlink_to("/bin/sh")
    burn = "i=0; while [ $i -lt {} ]; do i=$((i+1)); done"
    end = watch()
    with subprocess.Popen([shell, "-c", burn.format(10**9)]) as living:
        subprocess.run([shell, "-c", burn.format(10**6)], check=True)
        time.sleep(0.5)
        condition = end()
        living.kill()
    assert 0.5 < condition.seconds < 60 and condition.cores == CORES
    assert 0 <= condition.others <= 1.1 * CORES
    assert condition.describe().startswith("other processes took ")
    assert "ourtenant" not in condition.describe()
