"""What the simulator's checks find: every kind of report, provoked once, names the right line."""

import platform
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from metalsim import abi, build
from metalsim.device import Buffer, Library, Report

SOURCE = Path(build.__file__).parent / "samples" / "wrong.metal"

# kernel -> kind of report, sizes of its buffers in floats, threadgroups, threads
CASES = {
    "reads_beyond": ("out of bounds", (64, 64), 1, 64),
    "writes_before": ("out of bounds", (62,), 1, 62),
    "leaves_array": ("out of bounds", (32,), 1, 32),
    "forgets_barrier": ("race", (64,), 1, 64),
    "overwrites_early": ("race", (64,), 1, 64),
    "orders_nothing": ("race", (64,), 1, 64),
    "orders_other_memory": ("race", (64,), 1, 64),
    "trusts_simdgroup_barrier": ("race", (64,), 1, 64),
    "trusts_lockstep": ("race", (32,), 1, 32),
    "shares_output": ("race between threadgroups", (34,), 2, 32),
    "reads_neighbour": ("race between threadgroups", (65,), 2, 32),
    "mixes_atomics": ("race", (32,), 1, 32),
    "forgets_to_write": ("uninitialised threadgroup read", (64,), 1, 64),
    "misaligns": ("misaligned", (66, 64), 1, 64),
    "diverges_at_barrier": ("divergent barrier", (64,), 1, 64),
    "meets_elsewhere": ("divergent barrier", (64,), 1, 64),
    "diverges_at_simdgroup_barrier": ("divergent barrier", (32,), 1, 32),
    "diverges_in_simdgroup": ("partial simdgroup", (32,), 1, 32),
    "splits_product": ("deadlock", (64,), 1, 32),
    "multiplies_in_small": ("partial simdgroup", (64,), 1, 16),
    "follows_nothing": ("out of bounds", (2, 1), 1, 1),
    "takes_too_much": ("threadgroup memory", (32,), 1, 32),
    "lends_own": ("stack escape", (32,), 1, 32),
    "indexes_beyond": ("array index", (4, 32), 1, 32),
}


@cache
def library(mode: str = "checked") -> Library:
    return build.library(SOURCE, mode)


@cache
def lines() -> list[str]:
    return SOURCE.read_text().split("\n")


def marks(name: str, mark: str) -> list[str]:
    """The lines that bear this mark of a kernel."""
    comments = [line.partition("// ")[2].split() for line in lines()]
    return [f"wrong.metal:{n}" for n, c in enumerate(comments, 1) if name in c and mark in c]


def place(name: str, mark: str = "here") -> str:
    (only_one,) = marks(name, mark)
    return only_one


def launch(name: str, **settings: int) -> list[Report]:
    _, sizes, groups, threads = CASES[name]
    buffers = [Buffer(np.zeros(size, np.float32)) for size in sizes]
    return library().launch(name, buffers, groups, threads, **settings).reports


def only(reports: list[Report], kind: str) -> Report:
    assert [r.kind for r in reports] == [kind], [str(r) for r in reports]
    return reports[0]


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("name", CASES)
def test_a_wrong_kernel_is_reported_at_its_line(name: str, seed: int) -> None:
    involved = {place(name), *marks(name, "earlier")}
    reports = launch(name, seed=seed)
    assert {r.location for r in reports} <= involved, [str(r) for r in reports]
    # Which of two accesses comes second, and whether a read finds memory still unwritten as well,
    # depends on the order of threads.
    named = [{r.location, *(w for w in r.other.split() if ":" in w)} for r in reports]
    kinds = [r.kind for r in reports]
    assert (CASES[name][0], involved) in zip(kinds, named, strict=True), [str(r) for r in reports]


def test_a_race_names_both_threads() -> None:
    found = launch("forgets_barrier")[-1]
    assert found.location == place("forgets_barrier")
    assert found.other == place("forgets_barrier", "earlier") + " thread 31"
    assert (found.kind, found.thread, found.times) == ("race", 32, 32)
    assert found.message == (
        "read of 4 bytes at byte 124 of threadgroup array 'a' is not ordered after a write"
    )


def test_a_race_between_threadgroups_names_both() -> None:
    found = only(launch("shares_output", workers=1), "race between threadgroups")
    assert (found.threadgroup, found.thread, found.times) == (1, 0, 31)
    assert found.other == place("shares_output") + " thread 1 of threadgroup 0"


@pytest.mark.parametrize("seed", range(4))
def test_diverged_lanes_take_turns_and_meet_again(seed: int) -> None:
    """As hardware that runs one branch after the other."""
    y = Buffer(128)
    reports = library().launch("diverges_three_ways", [y], 1, 32, seed=seed).reports
    assert [r.kind for r in reports] == ["partial simdgroup"] * 3
    branches = np.float32([11 * 1, 11 * 10, 10 * 100])
    assert (y.view(np.float32) == 320000 + branches[np.arange(32) % 3]).all()


def test_an_overrun_says_where_of_what() -> None:
    found = only(launch("reads_beyond"), "out of bounds")
    assert found.message == "read of 4 bytes at byte 256 of buffer 'x' of 256 bytes"
    assert (found.thread, found.threadgroup) == (63, 0)
    found = only(launch("writes_before"), "out of bounds")
    assert found.message == "write of 4 bytes at byte -4 of buffer 'y' of 248 bytes"
    found = only(launch("leaves_array"), "out of bounds")
    assert found.message == "read of 4 bytes at byte 128 of threadgroup array 'a' of 128 bytes"


def test_writes_to_read_only_memory() -> None:
    held = Buffer(np.zeros(4, np.float32), "weights", readonly=True)
    for argument in (held, bytes(16)):
        reports = library().launch("writes_input", [argument], 1, 1).reports
        assert only(reports, "write to constant").location == place("writes_input")
    found = only(library("fast").launch("writes_input", [held], 1, 1).reports, "fault")
    assert found.message == "write to byte 0 of buffer 'weights' of 16 bytes, which is read-only"
    reports = library().launch("casts_const_away", [Buffer(16)], 1, 1).reports
    assert only(reports, "write to constant").location == place("casts_const_away")


def test_faults_of_fast_builds_are_reported_and_the_process_lives_on() -> None:
    fast = library("fast")
    for name, size, message in (
        ("reads_beyond", 256, "access at byte 256 of buffer 'x' of 256 bytes"),
        ("follows_nothing", 8, "access at address 0, in no buffer"),
    ):
        found = only(fast.launch(name, [Buffer(size), Buffer(size)], 1, 64).reports, "fault")
        assert found.message == message
        assert found.location == place(name)
    if platform.machine() == "x86_64":  # arm64 gives zero
        found = only(fast.launch("divides_by_zero", [Buffer(8)], 1, 1).reports, "fault")
        assert found.location == place("divides_by_zero")
    assert not fast.launch("reads_beyond", [Buffer(260), Buffer(256)], 1, 64).reports


def test_too_deep_a_stack_is_a_fault() -> None:
    shallow, deep = (Buffer(np.array([1, n], np.float32)) for n in (3, 1e6))
    assert not library("fast").launch("falls_deep", [shallow], 1, 1).reports
    found = only(library("fast").launch("falls_deep", [deep], 1, 1).reports, "fault")
    assert "the thread's own memory is full" in found.message


@pytest.mark.parametrize("workers", [1, 2])
def test_a_launch_that_does_not_end_is_stopped(workers: int) -> None:
    run = library().launch("waits_forever", [Buffer(4)], 2, 32, workers=workers, seconds=1)
    assert run.reports[0].kind == "deadlock"
    assert run.reports[0].message == "the launch still ran after 1 s"
    assert not library().launch("reads_beyond", [Buffer(260), Buffer(256)], 1, 64).reports


def test_a_threadgroup_argument_needs_a_length_and_has_bounds() -> None:
    found = only(library().launch("takes_argument", [], 1, 32).reports, "unbound buffer")
    assert found.message == "takes_argument: no length is set for threadgroup argument 0, 'a'"
    run = library().launch("takes_argument", [], 1, 32, threadgroup_bytes={0: 128})
    found = only(run.reports, "out of bounds")
    assert found.message == "write of 4 bytes at byte 128 of threadgroup array 'a' of 128 bytes"
    assert found.location == place("takes_argument")


def test_an_unbound_argument_stops_a_launch() -> None:
    run = library().launch("reads_beyond", [None, Buffer(4)], 1, 1)
    found = only(run.reports, "unbound buffer")
    assert found.message == "reads_beyond: nothing is bound to argument 0, 'x'"
    assert (found.location, found.thread) == ("", -1)
    assert run.counters["threadgroups"] == 0


def test_an_argument_that_is_too_small_is_reported() -> None:
    found = only(
        library().launch("reads_beyond", [bytes(2), Buffer(4)], 1, 1).reports, "out of bounds"
    )
    assert found.message == "reads_beyond: argument 0, 'x', has 2 of the 4 bytes it needs"


def test_a_buffer_that_is_not_bound_is_out_of_bounds() -> None:
    other = Buffer(np.ones(4, np.float32), "other")
    pointer = Buffer(np.array([other.address], np.uint64))
    run = library().launch("follows_nothing", [pointer, Buffer(4)], 1, 1)
    found = only(run.reports, "out of bounds")
    assert "buffer 'other', which this launch does not bind" in found.message


def test_neighbouring_bytes_are_told_apart() -> None:
    """Cells of two bytes never take two threads' bytes for one, but may forget the first writer."""
    y = Buffer(64)
    for granularity in (1, 2):
        settings = {"threadgroup_bytes": {0: 64}, "granularity": granularity}
        assert not library().launch("writes_bytes", [y], 1, 64, **settings).reports
        reports = library().launch("reads_bytes", [y], 1, 64, **settings).reports
        assert (only(reports, "race").times, granularity) in ((64, 1), (32, 2))


def test_every_kind_of_report_is_provoked_here() -> None:
    elsewhere = {"fault", "write to constant", "unbound buffer"}
    assert {kind for kind, *_ in CASES.values()} | elsewhere == set(abi.KINDS)
