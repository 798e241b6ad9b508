"""What is read from NVIDIA's program, and from older ones that know less."""

import pytest

from krnl.bench.nvidia import Gpus
from scripted_smi import INVALID, smi

NO_GPUS = Gpus(frozenset(), ())


def test_without_it_nothing_is_said():
    for there in (smi(), smi(state="No devices were found\n", apps="No devices were found\n")):
        assert there.snapshot() == NO_GPUS
        assert there.slowdowns(NO_GPUS, NO_GPUS) == []
        assert there.describe(NO_GPUS, NO_GPUS, 1.0) == ""


def test_nvidia_clocks():
    there = smi(state="345 MHz, 3201 MHz, 37, 82.42 W, 0 %\n1200 MHz, 2619 MHz, 84, [N/A], 97 %\n")
    words = [
        "GPU 0 at 345 MHz, its memory at 3201 MHz, 37 °C, 82.42 W, in use 0 %",
        "GPU 1 at 1200 MHz, its memory at 2619 MHz, 84 °C, [N/A], in use 97 %",
    ]
    assert there.describe(NO_GPUS, NO_GPUS, 4.0) == "; ".join(words)
    first = Gpus(frozenset(), ({"sw_power_cap": 1000}, {"sw_power_cap": 0}))
    last = Gpus(frozenset(), ({"sw_power_cap": 1000}, {"sw_power_cap": 3_000_000}))
    words[1] += ", at its power limit for 75% of the time"
    assert there.describe(first, last, 4.0) == "; ".join(words)


def test_nvidia_users():
    assert smi(apps="454\n1207\n").snapshot().users == {454, 1207}
    assert smi(apps="[N/A]\n454\n").snapshot().users == {454}


@pytest.mark.parametrize(
    ("answer", "lowered"),
    [
        (INVALID, ()),
        ("0 us, 0 us, 0 us, 0 us\n", ([0, 0, 0, 0],)),
        ("1 us, 22 us, 0 us, 31415926535 us\n5 us, 0 us, 0 us, 0 us\n",
         ([1, 22, 0, 31415926535], [5, 0, 0, 0])),
    ],
)  # fmt: skip
def test_nvidia_counts_why_clocks_were_lowered(answer, lowered):
    names = (
        "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown", "sw_power_cap"
    )  # fmt: skip
    wanted = tuple(dict(zip(names, times, strict=True)) for times in lowered)
    assert smi(counted=answer).snapshot().lowered == wanted


def test_what_nvidia_does_not_count_is_left_out():
    seen = smi(counted="[N/A], 7 us, [Not Supported], 9 us\n").snapshot().lowered
    assert seen == ({"sw_thermal_slowdown": 7, "sw_power_cap": 9},)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("0 us, 0 us, 0 us, 0 us", "0 us, 0 us, 0 us, 99 us", []),
        ("5 us, 6 us, 7 us, 8 us", "5 us, 6 us, 7 us, 8 us", []),
        ("5 us, 6 us, 7 us, 8 us", "9 us, 6 us, 7 us, 8 us", ["heat"]),
        ("5 us, 6 us, 7 us, 8 us", "5 us, 9 us, 7 us, 8 us", ["heat"]),
        ("5 us, 6 us, 7 us, 8 us", "5 us, 6 us, 9 us, 8 us", ["its power supply"]),
        (INVALID, "5 us, 6 us, 9 us, 8 us", []),
    ],
)
def test_nvidia_slowdowns_are_those_of_the_window(before, after, words):
    """Those of another time do not matter, nor does a card's power limit, which it meets in quiet
    too."""
    then = smi(counted=before)
    now = smi(counted=after, flagged="Active, Active, Active, Active")
    slowed = now.slowdowns(then.snapshot(), now.snapshot())
    assert slowed == [f"GPU 0 was slowed down for {word}" for word in words]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (INVALID, []),
        ("Not Active, Not Active, Not Active, Not Active", []),
        ("Active, Not Active, Not Active, Active", ["GPU 0 was slowed down for heat"]),
        ("Not Active, Active, Not Active, Not Active", ["GPU 0 was slowed down for heat"]),
        ("[N/A], [N/A], [N/A], Active", ["GPU 0 was slowed down for heat or its power supply"]),
        ("[N/A], [N/A], [N/A], [N/A]\nNot Active, Not Active, Active, Not Active",
         ["GPU 1 was slowed down for its power supply"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("counted", [INVALID, "[N/A], [N/A], [N/A], [N/A]"])
def test_drivers_that_do_not_count_tell_what_slows_them_now(flags, words, counted):
    there = smi(counted=counted, flagged=flags)
    assert there.slowdowns(there.snapshot(), there.snapshot()) == words
