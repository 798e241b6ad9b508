"""What the machine does beside us, in a window of time."""

import os
import subprocess
import time
from dataclasses import replace

import pytest

from krnl.backends.cpu import usable_cores
from krnl.bench.condition import STOLEN, UNSEEN, Condition, Process, shares, watch, watch_with
from krnl.bench.nvidia import Nvidia
from krnl.bench.systems import Mac, Snapshot, Usage
from scripted_smi import smi

ME = 100


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


@pytest.mark.parametrize(("cores", "passed_over"), [(1, 0.05), (2, 0.1), (64, 0.1), (512, 0.1)])
def test_what_cannot_be_seen_counts_and_sampling_does_not(monkeypatch, cores, passed_over):
    """Never more than a tenth of one core is passed over, however many there are."""
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    seen = processes(_5=Usage("seen", 1, 1.0)), processes(_5=Usage("seen", 1, 2.0))
    first = Snapshot(seen[0], busy=1000.0)
    within, beyond = (
        Snapshot(seen[1], busy=1001.0 + 10 * (passed_over + more)) for more in (-0.01, 0.01)
    )
    assert shares(first, within, 10.0, ME) == (0.1, (Process("seen", 1, 0.1),))
    total, heavy = shares(first, beyond, 10.0, ME)
    assert total == pytest.approx(0.1 + passed_over + 0.01)
    assert Process(UNSEEN, 1, pytest.approx(passed_over + 0.01)) in heavy


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
    hindered = replace(CONDITION, saving=True, throttled=True, quota="a quota held us up")
    assert hindered.remedies() == [
        "plug the machine in and leave its low-power mode", "let it cool",
        "lift the quota, or set KRNL_THREADS to the cores that it allows",
    ]  # fmt: skip


# The window


class Moments(Mac):
    """A system that is seen twice."""

    def __init__(self, first: Snapshot, last: Snapshot) -> None:
        super().__init__(lambda command: "")
        self.moments = [first, last]

    def snapshot(self) -> Snapshot:
        return self.moments.pop(0)


def seen(first: Snapshot, last: Snapshot, nvidia: Nvidia) -> Condition:
    times = iter([10.0, 14.0])
    return watch_with(Moments(first, last), lambda: next(times), ME, nvidia)()


def test_a_window_is_what_lies_between():
    """A core is slowed down for its heat in it."""
    busy = Snapshot(processes(_5=Usage("busy", 1, 3.0)), throttles=2)
    condition = seen(Snapshot(processes(), throttles=1), busy, smi())
    assert (condition.seconds, condition.others) == (4.0, 0.75)
    assert condition.heavy == (Process("busy", 1, 0.75),)
    assert condition.throttled and not condition.saving
    assert condition.thermal == "cores were slowed down for their heat"


@pytest.mark.parametrize(("stops", "words"), [(0, ""), (1, "1 time"), (1200, "1,200 times")])
def test_a_quota_that_held_us_up_slows_the_machine(stops, words):
    condition = seen(Snapshot({}, stops=5), Snapshot({}, stops=5 + stops), smi())
    assert condition.slowed == bool(stops) and not condition.throttled
    assert condition.quota == (words and f"a quota of processor time held us up {words}")
    assert condition.quota in condition.describe()


def test_cores_are_those_that_we_may_run_on(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert seen(Snapshot({}), Snapshot({}), smi()).cores == usable_cores()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
    assert seen(Snapshot({}), Snapshot({}), smi()).cores == 3


def test_others_on_the_gpu_are_named_and_ours_left_out():
    """Ours are process 100 and its child 101. Number 777 is shown by no system: it may be ours."""
    first = processes(_5=Usage("python3", 1, 1.0), _6=Usage("python3", 1, 1.0))
    last = processes(_5=Usage("python3", 1, 1.0), _7=Usage("jupyter", 1, 0.0))
    condition = seen(Snapshot(first), Snapshot(last), smi(apps="100\n101\n5\n6\n7\n777\n"))
    assert condition.on_gpu == ("jupyter", "python3 ×2")
    assert "; on the GPU: jupyter, python3 ×2" in condition.describe()
    assert condition.remedies() == ["close jupyter, python3 ×2"]
    both = replace(condition, heavy=(Process("cc1plus", 1, 0.3), Process("jupyter", 1, 0.1)))
    assert both.remedies() == ["close cc1plus, jupyter, python3 ×2"]


def test_a_gpu_that_is_slowed_down_now_slows_the_machine():
    there = smi(flagged="Not Active, Active, Not Active, Not Active")
    condition = seen(Snapshot({}), Snapshot({}), there)
    assert condition.throttled and condition.thermal == "GPU 0 was slowed down for heat"
    assert not seen(Snapshot({}), Snapshot({}), smi()).throttled


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
    assert 0.5 < condition.seconds < 60 and condition.cores == usable_cores()
    assert 0 <= condition.others <= 1.1 * (os.cpu_count() or 1)
    assert condition.describe().startswith("other processes took ")
    assert "ourtenant" not in condition.describe()
