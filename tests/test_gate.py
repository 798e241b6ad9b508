"""The gate: what it prints, refuses and learns."""

import re
from dataclasses import replace

import pytest

from krnl.bench.condition import Process
from krnl.bench.gate import WARM_UP_SECONDS, Gate, Measurement, Probe
from krnl.bench.reference import Reference, ReferenceStore
from krnl.errors import BackendError, ConfigError, Refused
from runs import krnl_process
from scripted_gate import BUSY, KEY, QUIET, REFERENCE, STEP, WINDOW, Bench, G

pytestmark = pytest.mark.usefixtures("warm")


def reference(measurement: Measurement) -> float:
    (only,) = measurement.references.values()
    return only.rate


def test_in_quiet_it_prints(known):
    measurement = Bench(known, [1000]).measure()
    assert measurement.trusted and measurement.notes == ()
    assert measurement.references == {"Testium 9000": REFERENCE}
    assert measurement.condition is QUIET
    assert measurement.when == "2026-01-01T12:00:00+00:00"
    assert [c.rate for c in measurement.controls] == pytest.approx([1000 * G] * 4)
    assert [c.place for c in measurement.controls] == [
        "before the first round", "after round 1 of 3", "after round 2 of 3", "after the last round"
    ]  # fmt: skip
    assert [c.at for c in measurement.controls] == [0.0, 0.5, 1.0, 1.5]
    assert {c.device for c in measurement.controls} == {"Testium 9000"}


def test_contestants_take_turns_and_controls_lie_between(known):
    bench = Bench(known, [1000])
    bench.measure(2)
    assert bench.events == ["control", "A", "B", "control", "B", "A", "control"]


def test_everybody_rests_before_a_turn(known):
    """Else threads that look for work are in the way of whoever comes next, and a GPU at its power
    limit is slower for those who come after others."""
    bench = Bench(known, [1000])
    bench.measure(3)
    turns = [i for i, event in enumerate(bench.events) if event in ("A", "B")]
    assert [place for place, _ in bench.rests] == turns
    assert min(seconds for _, seconds in bench.rests) >= 0.03


@pytest.mark.parametrize("names", ["", "A", "AB", "ABC", "ABCDE"])
def test_each_contestant_takes_each_place(known, names):
    """What runs first finds other caches and clocks than what runs after it."""
    bench = Bench(known, [1000])
    contestants = {name: bench.contestant(name, [1.0] * 10) for name in names}
    bench.gate.measure(contestants, 2 * max(1, len(names)))
    rounds = [part.split() for part in " ".join(bench.events).split("control") if part.strip()]
    for place in range(len(names)):
        assert sorted(ran[place] for ran in rounds) == sorted(2 * names)
    assert all(sorted(ran) == sorted(names) for ran in rounds)


def test_figures_stay_with_their_contestant_whatever_the_order(known):
    seconds = Bench(known, [1000]).measure(4).seconds
    assert seconds == {"A": (1.0, 3.0, 2.0, 9.0), "B": (10.0, 20.0, 30.0, 40.0)}


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
    measurement = Bench(known, [1500, 750] + [1000] * 9).measure(1)
    assert measurement.controls[0].rate == pytest.approx(1000 * G)


@pytest.mark.parametrize(
    ("slow", "place", "ran"),
    [
        (0, "before the first round", ""),
        (1, "after round 1 of 3", "AB"),
        (2, "after round 2 of 3", "ABBA"),
        (3, "after the last round", "ABBAAB"),
    ],
)
def test_busy_is_refused_wherever_it_is_seen(known, slow, place, ran):
    bench = Bench(known, [1000] * slow + [890, 1000], BUSY)
    text = bench.refusal()
    assert f"The control of Testium 9000 {place} (" in text
    assert "".join(e for e in bench.events if e in "AB") == ran


@pytest.mark.parametrize(("rate", "passes"), [(901, True), (899, False)])
def test_ten_percent_below_is_allowed(known, rate, passes):
    bench = Bench(known, [1000, rate, 1000])
    if passes:
        assert bench.measure().trusted
    else:
        assert "10% below the 1,000 GFLOP/s" in bench.refusal()
    assert bench.store.read(KEY).rate == 1000 * G


def test_what_a_refusal_says(known):
    text = Bench(known, [1000, 1000, 512], BUSY).refusal()
    assert "\n" not in text
    assert text.startswith("No figure is printed. ")
    assert "after round 2 of 3 (12:00:01 UTC) ran at 512 GFLOP/s, 49% below" in text
    assert "the 1,000 GFLOP/s that it reaches in quiet (learnt 2025-12-31)" in text
    assert "in order: 1,000 GFLOP/s, 1,000 GFLOP/s, 512 GFLOP/s." in text
    assert "took more than the 50% of one core that are allowed on 8 cores." in text
    assert "The system slowed the machine down." in text
    assert "other processes took 175% of one core (cc1plus ×2 120%, python3 55%)" in text
    assert "load 3.21 on 8 cores; hottest sensor 95 °C; on battery (43 %)" in text
    assert "Close cc1plus ×2, python3, plug the machine in and" in text
    assert "let it cool, and try again." in text
    assert "--force prints the figures all the same, marked untrusted." in text
    assert "relearn" not in text  # it would be refused


def test_a_slow_machine_that_nothing_explains_may_be_learnt_anew(known):
    text = Bench(known, [700]).refusal()
    assert "No process explains it: let the machine cool and try again." in text
    assert "learn anew what is reached: `krnl bench --device metal --relearn`." in text


def test_the_command_that_a_refusal_names_is_one(known):
    found = re.search("`krnl (bench [^`]*)`", Bench(known, [700]).refusal())
    assert found is not None
    assert krnl_process(*found[1].split(), "--help").returncode == 0


def test_what_always_runs_a_little_does_not_hide_that_it_may_be_learnt_anew(known):
    small = replace(QUIET, others=0.06, heavy=(Process("sshd", 1, 0.06),))
    text = Bench(known, [700], small).refusal()
    assert "Close sshd, and try again." in text and "--relearn" in text


@pytest.mark.parametrize(
    ("cores", "others", "allowed"),
    [(1, 0.11, 0.10), (2, 0.21, 0.20), (4, 0.41, 0.40), (8, 0.51, 0.50), (128, 0.51, 0.50)],
)
def test_what_others_take_is_refused_though_controls_are_right(known, cores, others, allowed):
    """In bursts between the controls, or on some of many cores."""
    burner = (Process("burner", 1, others),)
    loud = replace(QUIET, cores=cores, others=others, heavy=burner)
    text = Bench(known, [1000], loud).refusal()
    assert text.startswith(
        f"No figure is printed. Other processes took more than the {allowed:.0%} of one core that "
        f"are allowed on {cores} cores. Meanwhile, other processes took {others:.0%} of one core "
        f"(burner {others:.0%})"
    )
    assert "Close burner, and try again. --force prints" in text
    assert Bench(known, [1000], replace(loud, others=allowed)).measure().trusted
    forced = Bench(known, [1000], loud, force=True).measure()
    assert not forced.trusted and "Close burner" in forced.notes[0]


def test_many_small_processes_are_an_explanation_too(known):
    text = Bench(known, [1000], replace(QUIET, others=0.9)).refusal()
    assert "Close what is not needed (no process alone took much), and try again." in text


def test_a_machine_that_was_slowed_down_is_refused_though_controls_are_right(known):
    hot = replace(QUIET, throttled=True, thermal="GPU 0 was slowed down for heat")
    text = Bench(known, [1000], hot).refusal()
    assert text.startswith("No figure is printed. The system slowed the machine down. Meanwhile, ")
    assert "GPU 0 was slowed down for heat" in text and "Let it cool, and try again." in text


def test_a_quota_is_refused_though_controls_are_right(known, path):
    """They are held up as well, and were when their reference was learnt."""
    quota = replace(QUIET, quota="a quota of processor time held us up 7 times")
    text = Bench(known, [1000], quota).refusal()
    assert text.startswith("No figure is printed. The system slowed the machine down. Meanwhile, ")
    assert "; a quota of processor time held us up 7 times; " in text
    assert "Lift the quota, or set KRNL_THREADS to the cores that it allows, and try again." in text
    assert "relearn" not in Bench(known, [700], quota).refusal()


def test_on_battery_is_no_reason_and_is_told(known):
    measurement = Bench(known, [1000], replace(QUIET, power="on battery", saving=True)).measure()
    assert measurement.trusted and "on battery" in measurement.condition.describe()


def test_faster_than_the_reference_raises_it(known):
    bench = Bench(known, [1300])
    measurement = bench.measure()
    assert measurement.trusted
    raised = Reference(pytest.approx(1300 * G), "2026-01-01T12:00:01+00:00")
    assert measurement.references == {"Testium 9000": raised}
    words = "of Testium 9000 was raised from 1,000 GFLOP/s to 1,300 GFLOP/s."
    assert measurement.notes == (f"The reference {words}",)
    assert bench.store.read(KEY) == raised


def test_the_run_is_judged_by_the_raised_reference(known):
    """The last control would have been right for the old one."""
    bench = Bench(known, [1300, 1300, 1000])
    text = bench.refusal()
    assert "ran at 1,000 GFLOP/s, 23% below the 1,300 GFLOP/s" in text
    assert "The reference of Testium 9000 was raised from 1,000 GFLOP/s to 1,300 GFLOP/s." in text
    assert bench.store.read(KEY).rate == pytest.approx(1300 * G)


def test_one_fast_control_alone_raises_nothing(known):
    bench = Bench(known, [1000, 5000, 1000])
    assert "ran at 5e+03" not in (text := bench.refusal())
    assert "ran at 5,000 GFLOP/s, 400% above the 1,000 GFLOP/s" in text
    assert bench.store.read(KEY).rate == 1000 * G


def test_a_reference_is_learnt_from_a_quiet_window_first(path):
    bench = Bench(path, [*[1000, 1020] * 6, 1010])
    measurement = bench.measure()
    assert bench.store.read(KEY) == Reference(pytest.approx(1010 * G), "2026-01-01T12:00:06+00:00")
    assert measurement.trusted and reference(measurement) == pytest.approx(1010 * G)
    assert measurement.notes == ("The reference of Testium 9000 was learnt just before.",)
    assert bench.events[:WINDOW] == ["control"] * WINDOW and bench.events[WINDOW + 1] == "A"


def test_what_is_learnt_ahead_is_told_by_the_first_measurement(path):
    bench = Bench(path, [1000])
    bench.gate.learn()
    assert bench.store.read(KEY) is not None
    told = ("The reference of Testium 9000 was learnt just before.",)
    assert [bench.gate.measure({"A": lambda: 1.0}, 1).notes for _ in range(2)] == [told, ()]
    with pytest.raises(Refused, match="cannot be learnt now"):
        Bench(path.with_name("other.json"), [1000, 500] * 40).gate.learn()


@pytest.mark.parametrize(
    ("rates", "condition", "why"),
    [
        ([1000, 1031], QUIET, "the control varied by 3.1%, from 1,000 GFLOP/s to 1,031 GFLOP/s"),
        ([1000, 1000], replace(QUIET, others=0.1), "other processes took 10% of one core"),
        ([1000, 1000], replace(QUIET, seconds=2.9), "12 controls in 2.9 s are too few"),
        ([1000, 1000], replace(QUIET, throttled=True), "the system slowed the machine down"),
        ([1000, 1000], replace(QUIET, quota="of two"), "the system slowed the machine down"),
    ],
)
def test_nothing_is_learnt_in_a_window_that_is_not_quiet(path, rates, condition, why):
    bench = Bench(path, rates * 40, condition)
    text = bench.refusal()
    assert "What Testium 9000 reaches in quiet cannot be learnt now" in text and why in text
    assert "\n" not in text and text.endswith(
        "No figure is printed before it is. --force prints the figures all the same, marked "
        "untrusted."
    )
    assert "relearn" not in text
    assert bench.events == ["control"] * (4 * WINDOW)
    assert bench.store.read(KEY) is None and not path.exists()


def test_a_later_window_may_be_the_quiet_one(path):
    bench = Bench(path, [1000, 900] * 6 + [1000])
    assert reference(bench.measure()) == pytest.approx(1000 * G)


def test_a_slow_first_window_cannot_poison(path):
    """A machine held at half of its speed looks quiet. The next runs find out."""
    assert reference(Bench(path, [500]).measure()) == pytest.approx(500 * G)
    assert reference(Bench(path, [1000]).measure()) == pytest.approx(1000 * G)
    text = Bench(path, [500]).refusal()
    assert "50% below the 1,000 GFLOP/s" in text


def test_a_window_that_was_a_little_slow_is_put_right_by_a_quiet_run(known):
    """Twelve controls are a quiet window; fewer, or beside others, are not."""
    rounds = {name: lambda: 1.0 for name in "AB"}
    assert reference(Bench(known, [1050]).gate.measure(rounds, 10)) == 1000 * G
    noisy = replace(QUIET, others=0.2)
    assert reference(Bench(known, [1050], noisy).gate.measure(rounds, 11)) == 1000 * G
    assert reference(Bench(known, [950]).gate.measure(rounds, 11)) == 1000 * G
    raised = Bench(known, [1050]).gate.measure(rounds, 11)
    assert reference(raised) == pytest.approx(1050 * G) and "raised" in raised.notes[0]


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
    with pytest.raises(Refused, match="cannot be learnt now") as refused:
        Bench(known, [600], BUSY).gate.relearn()
    text = str(refused.value)
    assert text.endswith("leave its low-power mode, let it cool, and try again.")
    assert "--" not in text  # no option helps
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
    assert not measurement.trusted and reference(measurement) == 1000 * G
    assert ReferenceStore(known).read(KEY).rate == 1000 * G


def test_force_does_not_wait_to_learn(path):
    bench = Bench(path, [1000], force=True)
    measurement = bench.measure()
    assert measurement.references == {} and not measurement.trusted
    (note,) = measurement.notes
    assert note.endswith("What Testium 9000 reaches in quiet has never been learnt.")
    assert not path.exists() and bench.events[1] == "A"


@pytest.mark.parametrize("force", [False, True])
def test_a_simulator_is_refused_by_name(path, force):
    def never() -> float:
        raise AssertionError("it ran")

    key = replace(KEY, device="Apple M1 (KRNL Simulator)")
    with pytest.raises(Refused, match=r"'Apple M1 \(KRNL Simulator\)' is a simulator"):
        Gate([Probe("metal", key, never)], ReferenceStore(path), never, never, never, force)


@pytest.mark.parametrize("figure", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_cannot_be_is_no_figure(known, figure):
    with pytest.raises(BackendError, match="The time of A came out as"):
        Bench(known, [1000]).gate.measure({"A": lambda: figure}, 1)


def test_at_least_one_round(known):
    with pytest.raises(ConfigError, match="rounds is 0"):
        Bench(known, [1000]).measure(0)


@pytest.mark.parametrize("figure", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_cannot_be_is_no_control(known, figure):
    with pytest.raises(BackendError, match="The rate of the control of Testium 9000 came out as"):
        Bench(known, [figure]).measure()


def test_the_machine_settles_before_each_control_and_a_control_takes_its_time(known, monkeypatch):
    """What contestants left behind passes in half a second; a quarter is longer than the slice of
    time that another process gets. Of runs of 0.1 s, five come before the three that are read."""
    monkeypatch.setattr("krnl.bench.gate.WARM_UP_SECONDS", WARM_UP_SECONDS)
    settling, read = [500] * 5, [1000] * 3
    bench = Bench(known, 2 * (settling + read), step=0.1)
    measurement = bench.measure(1)
    assert bench.events == 8 * ["control"] + ["A", "B"] + 8 * ["control"]
    assert [c.rate for c in measurement.controls] == pytest.approx([1000 * G] * 2)
