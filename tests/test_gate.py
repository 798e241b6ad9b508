"""The gate: what it prints, refuses and learns. Time, control and machine are fakes that follow a
script; the last test puts a real load on this machine."""

import json
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from krnl.bench.condition import Condition, Process, watch
from krnl.bench.control import control, control_product
from krnl.bench.gate import Gate
from krnl.bench.reference import Key, Reference, ReferenceStore, default_path, kernel_hash
from krnl.devices import open_backend
from krnl.errors import BackendError, ConfigError, FormatError, Refused

G = 1e9
KEY = Key("Testium 9000", "Linux 6", "", "abcd", "nn 1024, 1")
NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
STEP = 0.5  # seconds of a fake control: a warm-up and a control are one run each
WINDOW = 13  # runs of the control in a window of learning, the warm-up included

QUIET = Condition(
    seconds=6.0,
    cores=8,
    others=0.02,
    heavy=(),
    load=0.3,
    thermal="",
    throttled=False,
    power="on mains power",
    saving=False,
    clocks="",
)
BUSY = replace(
    QUIET,
    others=1.75,
    heavy=(Process("cc1plus", 2, 1.2), Process("python3", 1, 0.55)),
    load=3.21,
    thermal="hottest sensor 95 °C",
    throttled=True,
    power="on battery (43 %)",
    saving=True,
)


class Bench:
    """A gate on a machine that follows a script. The control's rates, in GFLOP/s, come one after
    the other, the last one for ever; `events` is what ran."""

    def __init__(
        self, path: Path, rates: Sequence[float], condition: Condition = QUIET, force: bool = False
    ):
        self.time, self.rates, self.events = 0.0, list(rates), []
        self.store = ReferenceStore(path)
        self.condition = condition
        self.gate = Gate(
            KEY, self.store, self.control, lambda: lambda: self.condition, lambda: self.time,
            lambda: NOON + timedelta(seconds=self.time), force,
        )  # fmt: skip
        # In the script there is one run of the control for each that is read, and one to warm up.
        self.gate._settle = lambda: self.events.append("settle")  # type: ignore[method-assign]

    def control(self) -> float:
        self.time += STEP
        self.events.append("control")
        return G * (self.rates.pop(0) if len(self.rates) > 1 else self.rates[0])

    def contestant(self, name: str, seconds: Sequence[float]) -> Callable[[], float]:
        figures = iter(seconds)

        def run() -> float:
            self.events.append(name)
            return next(figures)

        return run

    def measure(self, rounds: int = 3):
        a = self.contestant("A", [1.0, 3.0, 2.0, 9.0, 4.0])
        b = self.contestant("B", [10.0, 20.0, 30.0, 40.0, 50.0])
        return self.gate.measure({"A": a, "B": b}, rounds)

    def refusal(self, rounds: int = 3) -> str:
        with pytest.raises(Refused) as refused:
            self.measure(rounds)
        return str(refused.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "references.json"


@pytest.fixture
def known(path: Path) -> Path:
    """A machine that is known to reach 1,000 GFLOP/s."""
    ReferenceStore(path).raise_to(KEY, 1000 * G, "2025-12-31T00:00:00+00:00")
    return path


def test_in_quiet_it_prints(known):
    measurement = Bench(known, [1000]).measure()
    assert measurement.trusted and measurement.notes == ()
    assert measurement.reference == 1000 * G
    assert measurement.condition is QUIET
    assert measurement.when == "2026-01-01T12:00:00+00:00"
    assert [c.rate for c in measurement.controls] == pytest.approx([1000 * G] * 4)
    assert [c.place for c in measurement.controls] == [
        "before the first round", "after round 1 of 3", "after round 2 of 3", "after the last round"
    ]  # fmt: skip
    assert [c.at for c in measurement.controls] == [0.5, 1.0, 1.5, 2.0]


def test_contestants_take_turns_and_controls_lie_between(known):
    bench = Bench(known, [1000])
    bench.measure(2)
    assert bench.events == [
        "control", "control", "A", "B", "settle", "control", "A", "B", "settle", "control"
    ]  # fmt: skip


def test_medians_and_quartiles(known):
    measurement = Bench(known, [1000]).measure(5)
    assert measurement.seconds["A"] == (1.0, 3.0, 2.0, 9.0, 4.0)
    assert measurement.median("A") == 3.0 and measurement.spread("A") == (2.0, 4.0)
    assert measurement.median("B") == 30.0 and measurement.spread("B") == (20.0, 40.0)
    single = Bench(known, [1000]).measure(1)
    assert single.spread("A") == (1.0, 1.0)


def test_a_control_is_all_operations_by_all_of_their_time(known, monkeypatch):
    """Half of the operations at 1,500 and half at 750 GFLOP/s are 1,000 in all."""
    monkeypatch.setattr("krnl.bench.gate.CONTROL_SECONDS", 2 * STEP)
    measurement = Bench(known, [1000, 1500, 750] + [1000] * 9).measure(1)
    assert measurement.controls[0].rate == pytest.approx(1000 * G)


@pytest.mark.parametrize(
    ("slow", "place", "ran"),
    [
        (0, "before the first round", ""),
        (1, "after round 1 of 3", "AB"),
        (2, "after round 2 of 3", "ABAB"),
        (3, "after the last round", "ABABAB"),
    ],
)
def test_busy_is_refused_wherever_it_is_seen(known, slow, place, ran):
    bench = Bench(known, [1000] * (1 + slow) + [890, 1000], BUSY)
    text = bench.refusal()
    assert f"The control {place}" in text
    assert "".join(e for e in bench.events if e in "AB") == ran


@pytest.mark.parametrize(("rate", "passes"), [(901, True), (899, False)])
def test_ten_percent_below_is_allowed(known, rate, passes):
    bench = Bench(known, [1000, 1000, rate, 1000])
    if passes:
        assert bench.measure().trusted
    else:
        assert "10% below the 1,000 GFLOP/s" in bench.refusal()
    assert bench.store.read(KEY).rate == 1000 * G


def test_what_a_refusal_says(known):
    text = Bench(known, [1000, 1000, 512], BUSY).refusal()
    assert "\n" not in text
    assert text.startswith("No figure is printed. ")
    assert "after round 1 of 3 (12:00:01 UTC) ran at 512 GFLOP/s, 49% below" in text
    assert "in order: 1,000 GFLOP/s, 512 GFLOP/s." in text
    assert "other processes took 175% of one core (cc1plus ×2 120%, python3 55%)" in text
    assert "load 3.21 on 8 cores; hottest sensor 95 °C; on battery (43 %)" in text
    assert "Close cc1plus ×2, python3, plug the machine in and" in text
    assert "let it cool, and try again." in text
    assert "--force prints the figures all the same, marked untrusted." in text


def test_a_slow_machine_that_nothing_explains_may_be_learnt_anew(known):
    text = Bench(known, [700]).refusal()
    assert "No process explains it" in text and "`--relearn`" in text


def test_faster_than_the_reference_raises_it(known):
    bench = Bench(known, [1300])
    measurement = bench.measure()
    assert measurement.trusted
    assert measurement.reference == pytest.approx(1300 * G)
    assert measurement.notes == ("The reference was raised from 1,000 GFLOP/s to 1,300 GFLOP/s.",)
    assert bench.store.read(KEY) == Reference(
        pytest.approx(1300 * G), "2026-01-01T12:00:01+00:00", 2
    )


def test_the_run_is_judged_by_the_raised_reference(known):
    """The third control would have been right for the old one."""
    bench = Bench(known, [1300, 1300, 1300, 1000])
    text = bench.refusal()
    assert "ran at 1,000 GFLOP/s, 23% below the 1,300 GFLOP/s" in text
    assert "The reference was raised from 1,000 GFLOP/s to 1,300 GFLOP/s." in text
    assert bench.store.read(KEY).rate == pytest.approx(1300 * G)


def test_one_fast_control_alone_raises_nothing(known):
    bench = Bench(known, [1000, 1000, 5000, 1000])
    assert "ran at 5e+03" not in (text := bench.refusal())
    assert "ran at 5,000 GFLOP/s, 400% above the 1,000 GFLOP/s" in text
    assert bench.store.read(KEY).rate == 1000 * G


def test_a_reference_is_learnt_from_a_quiet_window_first(path):
    bench = Bench(path, [900, *[1000, 1020] * 6, 1010])
    measurement = bench.measure()
    assert bench.store.read(KEY) == Reference(
        pytest.approx(1010 * G), "2026-01-01T12:00:06+00:00", 1
    )
    assert measurement.trusted and measurement.reference == pytest.approx(1010 * G)
    assert measurement.notes == ("The reference was learnt just before: 1,010 GFLOP/s.",)
    assert bench.events[:WINDOW] == ["control"] * WINDOW and bench.events[WINDOW + 2] == "A"


@pytest.mark.parametrize(
    ("rates", "condition", "why"),
    [
        ([1000, 1031], QUIET, "the control varied by 3.1%, from 1,000 GFLOP/s to 1,031 GFLOP/s"),
        ([1000, 1000], replace(QUIET, others=0.1), "other processes took 10% of one core"),
        ([1000, 1000], replace(QUIET, seconds=2.9), "12 controls in 2.9 s are too few"),
    ],
)
def test_nothing_is_learnt_in_a_window_that_is_not_quiet(path, rates, condition, why):
    bench = Bench(path, rates * 40, condition)
    text = bench.refusal()
    assert "cannot be learnt now" in text and why in text and "\n" not in text
    assert bench.events == ["control"] * (4 * WINDOW)
    assert bench.store.read(KEY) is None and not path.exists()


def test_a_later_window_may_be_the_quiet_one(path):
    bench = Bench(path, [1000, 900] * 6 + [1000])
    assert bench.measure().reference == pytest.approx(1000 * G)


def test_a_slow_first_window_cannot_poison(path):
    """A machine held at half of its speed looks quiet. The next runs find out."""
    assert Bench(path, [500]).measure().reference == pytest.approx(500 * G)
    assert Bench(path, [1000]).measure().reference == pytest.approx(1000 * G)
    text = Bench(path, [500]).refusal()
    assert "50% below the 1,000 GFLOP/s" in text


def test_a_window_that_was_a_little_slow_is_put_right_by_a_quiet_run(known):
    """Twelve controls are a quiet window; fewer, or beside others, are not."""
    rounds = {name: lambda: 1.0 for name in "AB"}
    assert Bench(known, [1050]).gate.measure(rounds, 10).reference == 1000 * G
    noisy = replace(QUIET, others=0.2)
    assert Bench(known, [1050], noisy).gate.measure(rounds, 11).reference == 1000 * G
    assert Bench(known, [950]).gate.measure(rounds, 11).reference == 1000 * G
    raised = Bench(known, [1050]).gate.measure(rounds, 11)
    assert raised.reference == pytest.approx(1050 * G) and "raised" in raised.notes[0]


def test_only_relearning_lowers(known):
    bench = Bench(known, [600])
    bench.refusal()
    assert bench.store.read(KEY).rate == 1000 * G
    said = bench.gate.relearn()
    assert said == ("The reference of Testium 9000 was lowered from 1,000 GFLOP/s to 600 GFLOP/s.")
    assert bench.store.read(KEY).rate == pytest.approx(600 * G)
    assert bench.measure().trusted
    assert "raised from 600 GFLOP/s to 800 GFLOP/s" in Bench(known, [800]).gate.relearn()


def test_relearning_needs_quiet_too(known):
    with pytest.raises(Refused, match="cannot be learnt now"):
        Bench(known, [600], BUSY).gate.relearn()
    assert ReferenceStore(known).read(KEY).rate == 1000 * G


def test_relearning_what_was_never_learnt(path):
    assert Bench(path, [55.5]).gate.relearn().endswith("was learnt: 55.5 GFLOP/s.")


def test_force_prints_what_is_not_trusted(known):
    measurement = Bench(known, [512], BUSY, force=True).measure()
    assert not measurement.trusted
    assert measurement.seconds["B"] == (10.0, 20.0, 30.0)
    assert "Forced" in measurement.notes[0] and "49% below" in measurement.notes[0]
    assert "No figure is printed" not in measurement.notes[0]


@pytest.mark.parametrize("rate", [1000, 2000])
def test_force_is_never_trusted_and_teaches_nothing(known, rate):
    measurement = Bench(known, [rate], force=True).measure()
    assert not measurement.trusted and measurement.reference == 1000 * G
    assert ReferenceStore(known).read(KEY).rate == 1000 * G


def test_force_does_not_wait_to_learn(path):
    bench = Bench(path, [1000], force=True)
    measurement = bench.measure()
    assert measurement.reference is None and not measurement.trusted
    assert "never been learnt" in measurement.notes[0]
    assert not path.exists() and bench.events[2] == "A"


@pytest.mark.parametrize("force", [False, True])
def test_a_simulator_is_refused_by_name(path, force):
    def never() -> float:
        raise AssertionError("it ran")

    key = replace(KEY, device="Apple M1 (KRNL Simulator)")
    with pytest.raises(Refused, match=r"'Apple M1 \(KRNL Simulator\)' is a simulator"):
        Gate(key, ReferenceStore(path), never, never, never, never, force)


@pytest.mark.parametrize("figure", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_cannot_be_is_no_figure(known, figure):
    with pytest.raises(BackendError, match="The time of A came out as"):
        Bench(known, [1000]).gate.measure({"A": lambda: figure}, 1)


def test_at_least_one_round(known):
    with pytest.raises(ConfigError, match="rounds is 0"):
        Bench(known, [1000]).measure(0)


# References


def test_references_are_kept_apart_by_every_part_of_the_key(known):
    store = ReferenceStore(known)
    for part in ("device", "system", "driver", "kernels", "control"):
        other = replace(KEY, **{part: "other"})
        assert store.read(other) is None
        store.raise_to(other, 5 * G, "now")
        assert store.read(other).rate == 5 * G
    assert store.read(KEY).rate == 1000 * G
    assert len(json.loads(known.read_text())["references"]) == 6


def test_a_lower_rate_never_replaces_a_higher(known):
    store = ReferenceStore(known)
    kept = store.raise_to(KEY, 10 * G, "later")
    assert kept == store.read(KEY) == Reference(1000 * G, "2025-12-31T00:00:00+00:00", 2)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "\0\0", '{"version": 99, "references": {}}', '{"version": 1}',
     '{"version": 1, "references": []}'],
)  # fmt: skip
def test_garbage_for_a_file_is_a_sentence(path, content):
    path.parent.mkdir()
    path.write_text(content)
    for use in (Bench(path, [1000]).measure, Bench(path, [1000]).gate.relearn):
        with pytest.raises(FormatError, match=r"references\.json .*\. Delete it: "):
            use()
    assert path.read_text() == content


@pytest.mark.parametrize(
    "entry",
    [None, 7, {}, {"rate": 1e9}, {"rate": "x", "learnt": "", "windows": 1},
     {"rate": -1.0, "learnt": "", "windows": 1}, {"rate": 1e9, "learnt": [], "windows": 1},
     {"rate": 1e9, "learnt": "", "windows": 1.5}],
)  # fmt: skip
def test_garbage_for_one_reference_leaves_the_others(known, entry):
    content = json.loads(known.read_text())
    bad = replace(KEY, device="bad")
    content["references"][str(bad)] = entry
    known.write_text(json.dumps(content))
    store = ReferenceStore(known)
    with pytest.raises(FormatError, match=r"damaged at the reference of 'bad .*Delete it: "):
        store.read(bad)
    assert store.raise_to(KEY, 2000 * G, "now").rate == store.read(KEY).rate == 2000 * G


def test_an_infinity_in_another_reference_is_a_sentence(known):
    content = json.loads(known.read_text())
    content["references"]["other"] = {"rate": float("inf")}
    known.write_text(json.dumps(content))
    with pytest.raises(FormatError, match="damaged"):
        ReferenceStore(known).raise_to(KEY, 2000 * G, "now")
    assert "Infinity" in known.read_text()


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(FormatError, match="cannot be"):
        ReferenceStore(tmp_path / "cache" / "references.json").raise_to(KEY, G, "now")


def test_a_crash_while_writing_leaves_the_old_file(known, monkeypatch):
    def crash(*_: object) -> None:
        raise OSError("power cut")

    before = known.read_text()
    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(FormatError, match="power cut"):
        ReferenceStore(known).raise_to(KEY, 2000 * G, "now")
    assert known.read_text() == before


def _write_many(path: Path, device: str) -> None:
    store = ReferenceStore(path)
    for i in range(1, 26):
        store.raise_to(replace(KEY, device=device), i * G, "now")
        store.raise_to(KEY, i * G, "now")


def test_two_processes_at_once_lose_nothing(path):
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_many, args=(path, name)) for name in ("one", "two")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    store = ReferenceStore(path)
    assert store.read(KEY) == Reference(25 * G, "now", 50)
    for name in ("one", "two"):
        assert store.read(replace(KEY, device=name)) == Reference(25 * G, "now", 25)


def test_the_file_lies_in_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "krnl" / "references.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_path().is_relative_to(Path.home())


def test_kernels_have_a_hash_of_their_own():
    assert kernel_hash("cpu") == kernel_hash("cpu") != kernel_hash("metal")


# This machine


@pytest.fixture
def tenants(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Starts busy processes, two for each core, that are not ours: their parent ends at once. Each
    ends by itself after a minute of processor time."""
    shell = tmp_path / "heavytenant"
    shell.symlink_to("/bin/sh")
    pids: list[int] = []

    def start() -> None:
        for _ in range(2 * (os.cpu_count() or 1)):
            burn = f"ulimit -t 60; '{shell}' -c 'while :; do :; done' >/dev/null 2>&1 & echo $!"
            answer = subprocess.run(["/bin/sh", "-c", burn], stdout=subprocess.PIPE, check=True)
            pids.append(int(answer.stdout))
        time.sleep(0.5)

    yield start
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_a_real_load_is_named_and_refused(path, tenants):
    """The control's own best before the load is its reference, so that this holds on a machine that
    is busy anyway."""
    backend = open_backend("cpu")
    run = control(control_product(backend), backend)
    rate = max(run() for _ in range(20))
    store = ReferenceStore(path)
    store.raise_to(KEY, rate, "before the load")
    gate = Gate(KEY, store, run, watch, time.perf_counter, lambda: datetime.now(timezone.utc))
    tenants()
    with pytest.raises(Refused) as refused:
        gate.measure({"control": lambda: 1 / run()}, 3)
    text = str(refused.value)
    assert "below the" in text
    seen, _, advice = text.partition("Meanwhile")[2].partition("Close ")
    assert "heavytenant ×" in seen and "heavytenant ×" in advice


def test_the_machine_settles_before_a_control(known):
    """For half a second, one run of this control, what contestants left behind may pass."""
    bench = Bench(known, [1000])
    del bench.gate._settle
    bench.measure(1)
    assert bench.events == ["control", "control", "A", "B", "control", "control"]
