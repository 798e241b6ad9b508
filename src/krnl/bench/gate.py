"""Decides whether a figure may be printed: a control on each device is run beside everything that
is measured, and must be as fast as that device was seen to be; other processes must be at rest, and
nothing slowed down for heat or power.

Everything that the gate depends on is handed in: the controls, the clock, what the machine is
doing, and where references are kept.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import numpy as np

from krnl.bench.condition import Condition, Watch
from krnl.bench.reference import Key, Reference, ReferenceStore
from krnl.errors import BackendError, ConfigError, Refused

NO_FIGURE = "No figure is printed."
ALLOWED = 0.10  # how far a control may be from the reference
CONTROL_SECONDS = 0.25  # a control is repeated for so long: shorter ones fall between time slices
# Before a control clocks rise from idle, or fall from a short boost. What contestants leave behind
# passes too, and is no load: clocks lowered by wide vectors, threads that wait for more.
WARM_UP_SECONDS = 0.5
# Before each turn, whoever's it is. Threads of other libraries go on looking for work for some
# 25 ms, and a GPU at its power limit is faster after a rest.
REST_SECONDS = 0.05
# Of one core. What other processes take evenly slows controls as well. What they take in bursts may
# miss the controls; but below half of a core one of them is at work for less than half of the time,
# and medians forget rounds that are fewer than half. Where cores are few, half of one is much of
# the machine: there it is the share of all cores that a control may be off.
LOUD_OTHERS = 0.5
# What a quiet window is.
QUIET_CONTROLS = 12
QUIET_SECONDS = 3.0
QUIET_SPREAD = 0.03
QUIET_OTHERS = 0.10  # of one core
LEARNING_WINDOWS = 4  # tried before giving up


@dataclass(frozen=True)
class Probe:
    """Tells how fast a device is just now."""

    backend: str  # as --device takes it
    key: Key  # which device, which control: what its reference is kept under
    control: Callable[[], float]  # runs once; operations a second

    @property
    def device(self) -> str:
        return self.key.device


@dataclass(frozen=True)
class Control:
    """One control: of which device, where in the run, seconds after the start, operations a
    second."""

    device: str
    place: str
    at: float
    rate: float


@dataclass(frozen=True)
class Measurement:
    """What was measured, and what speaks for it."""

    seconds: Mapping[str, tuple[float, ...]]  # of each contestant, a figure a round
    controls: tuple[Control, ...]
    references: Mapping[str, Reference]  # by device; without one if forced, and never learnt
    condition: Condition
    when: str  # the start, ISO 8601, UTC
    trusted: bool
    notes: tuple[str, ...]  # sentences: a reference learnt or raised; why it is not trusted

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def spread(self, name: str) -> tuple[float, float]:
        """The first and third quartile."""
        low, high = np.quantile(self.seconds[name], (0.25, 0.75))
        return float(low), float(high)


def refuse_simulator(device_name: str) -> None:
    """Refused if the device is a simulator, whose times say nothing of any machine."""
    if "simulator" in device_name.lower():
        raise Refused(
            f"'{device_name}' is a simulator: it shows that kernels are right, and its times say "
            "nothing of any machine. None is printed, not even with --force."
        )


class Gate:
    """Measures where `probes` tell how fast the devices are; `now` is the time of day in UTC. A
    forced gate learns nothing, and what it measures is not trusted."""

    def __init__(
        self,
        probes: Sequence[Probe],
        store: ReferenceStore,
        watch: Watch,
        clock: Callable[[], float],
        now: Callable[[], datetime],
        force: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        for probe in probes:
            refuse_simulator(probe.device)
        self._probes = tuple(probes)
        self._store = store
        self._watch = watch
        self._clock = clock
        self._now = now
        self._force = force
        self._sleep = sleep
        # What the next measurement has to tell, be it that of a gate beside this one.
        self._learnt: list[str] = []

    def beside(self, probe: Probe) -> "Gate":
        """A gate with this control too, for contestants on one more device."""
        probes = (*self._probes, probe)
        gate = Gate(
            probes, self._store, self._watch, self._clock, self._now, self._force, self._sleep
        )
        gate._learnt = self._learnt
        return gate

    def measure(self, contestants: Mapping[str, Callable[[], float]], rounds: int) -> Measurement:
        """Seconds of one run of each contestant, rested before, in rounds A B C, B C A, C A B, so
        that each takes each place; controls before, between and after. Refused as soon as a control
        is slow, and at the end if the machine was not quiet otherwise."""
        if rounds < 1:
            raise ConfigError(f"rounds is {rounds}; it must be at least 1.")
        references = self._references()
        notes = self._learnt.copy()
        self._learnt.clear()
        began, start, end_watch = self._now(), self._clock(), self._watch()
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        controls: list[Control] = []
        for i, place in enumerate(_places(rounds)):
            if i > 0:
                for name in _rotated(list(contestants), i - 1):
                    self._sleep(REST_SECONDS)
                    seconds[name].append(_positive(contestants[name](), f"The time of {name}"))
            for probe in self._probes:
                self._warm_up(probe)
                controls.append(self._read_control(probe, place, start))
                if not self._force:
                    # It was learnt in a slow moment if two controls are above.
                    rate = _second_highest(_of(probe, controls))
                    if rate > references[probe.device].rate * (1 + ALLOWED):
                        self._raise(probe, rate, references, notes)
            if not self._force and any(
                _off(control, references[control.device]) < -ALLOWED for control in controls
            ):
                break
        condition = end_watch()
        complaint = self._complaint(controls, references, began, condition)
        if self._force:
            notes.append(f"Forced, and so not to be trusted. {complaint}".rstrip())
        elif complaint:
            raise Refused(" ".join((NO_FIGURE, complaint, *notes, _FORCE)))
        else:
            for probe in self._probes:
                mine = _of(probe, controls)
                if not _unquiet(mine, condition):
                    self._raise(probe, _median(mine), references, notes)
        return Measurement(
            seconds={name: tuple(figures) for name, figures in seconds.items()},
            controls=tuple(controls),
            references=references,
            condition=condition,
            when=_iso(began),
            trusted=not self._force,
            notes=tuple(notes),
        )

    def learn(self) -> None:
        """Learns the references that are not known yet, unless the gate is forced. Refused if the
        machine is not quiet."""
        self._references()

    def relearn(self) -> str:
        """Learns the references anew, be they lower; says from what to what. Refused if the machine
        is not quiet."""
        self._store.check_writable()
        return " ".join(self._relearn(probe) for probe in self._probes)

    def _relearn(self, probe: Probe) -> str:
        rate = self._quiet_rate(probe)
        old = self._store.replace(probe.key, rate, _iso(self._now()))
        if old is None:
            return f"The reference of {probe.device} was learnt: {_rate(rate)}."
        verb = "lowered" if rate < old.rate else "raised"
        return f"The reference of {probe.device} was {verb} {_from_to(old.rate, rate)}."

    def _references(self) -> dict[str, Reference]:
        """Of each device; one that is not known is learnt, unless the gate is forced."""
        references = {}
        for probe in self._probes:
            reference = self._store.read(probe.key)
            if reference is None and not self._force:
                rate = self._quiet_rate(probe, f" No figure is printed before it is. {_FORCE}")
                reference = self._store.raise_to(probe.key, rate, _iso(self._now()))
                self._learnt.append(f"The reference of {probe.device} was learnt just before.")
            if reference is not None:
                references[probe.device] = reference
        return references

    def _raise(
        self, probe: Probe, rate: float, references: dict[str, Reference], notes: list[str]
    ) -> None:
        """Makes the reference of a device not below `rate`."""
        old = references[probe.device]
        new = self._store.raise_to(probe.key, rate, _iso(self._now()))
        if new.rate > old.rate:
            words = _from_to(old.rate, new.rate)
            notes.append(f"The reference of {probe.device} was raised {words}.")
        references[probe.device] = new

    def _quiet_rate(self, probe: Probe, ending: str = "") -> float:
        """What the control reaches in a quiet window. Refused if none comes; `ending` are sentences
        to end the refusal with."""
        unquiet = ""
        for _ in range(LEARNING_WINDOWS):
            self._warm_up(probe)
            start, end_watch = self._clock(), self._watch()
            controls: list[Control] = []
            while len(controls) < QUIET_CONTROLS or self._clock() < start + QUIET_SECONDS:
                controls.append(self._read_control(probe, "learning", start))
            condition = end_watch()
            unquiet = _unquiet(controls, condition)
            if not unquiet:
                return _median(controls)
        raise Refused(
            f"What {probe.device} reaches in quiet cannot be learnt now: {unquiet}. "
            f"{LEARNING_WINDOWS} windows of {QUIET_SECONDS:.0f} s were tried; in the last, "
            f"{condition.describe()}. {_remedy(condition)}{ending}"
        )

    def _warm_up(self, probe: Probe) -> None:
        start = self._clock()
        while self._clock() < start + WARM_UP_SECONDS:
            probe.control()

    def _read_control(self, probe: Probe, place: str, start: float) -> Control:
        """The control's rate over CONTROL_SECONDS: all operations by all of their time."""
        at, what = self._clock(), f"The rate of the control of {probe.device}"
        rates = [_positive(probe.control(), what)]
        while self._clock() < at + CONTROL_SECONDS:
            rates.append(_positive(probe.control(), what))
        return Control(probe.device, place, at - start, statistics.harmonic_mean(rates))

    def _complaint(
        self,
        controls: Sequence[Control],
        references: Mapping[str, Reference],
        began: datetime,
        condition: Condition,
    ) -> str:
        """What was seen, what the machine was doing, and what to do; empty if all is well."""
        unknown, seen, slow = [], [], []
        for probe in self._probes:
            mine, reference = _of(probe, controls), references.get(probe.device)
            if reference is None:
                unknown.append(f"What {probe.device} reaches in quiet has never been learnt.")
            elif off := _off_words(mine, reference, began):
                seen.append(off)
                if any(_off(control, reference) < -ALLOWED for control in mine):
                    slow.append(probe.backend)
        if _loud(condition):
            seen.append(
                f"Other processes took more than the {_allowed_others(condition):.0%} of one core "
                f"that are allowed on {condition.cores} cores."
            )
        if condition.slowed:
            seen.append("The system slowed the machine down.")
        if seen:
            seen.append(f"Meanwhile, {condition.describe()}. {_remedy(condition)}")
        if slow and condition.others < QUIET_OTHERS and not condition.slowed:
            commands = " and ".join(f"`krnl bench --device {name} --relearn`" for name in slow)
            seen.append(f"If it stays so in quiet, learn anew what is reached: {commands}.")
        return " ".join(unknown + seen)


_FORCE = "--force prints the figures all the same, marked untrusted."


def _places(rounds: int) -> list[str]:
    between = [f"after round {i} of {rounds}" for i in range(1, rounds)]
    return ["before the first round", *between, "after the last round"]


def _rotated(names: Sequence[str], places: int) -> list[str]:
    return [names[(i + places) % len(names)] for i in range(len(names))]


def _of(probe: Probe, controls: Sequence[Control]) -> list[Control]:
    return [control for control in controls if control.device == probe.device]


def _off(control: Control, reference: Reference) -> float:
    """How far from its reference, as a share of it; below 0 if it is slower."""
    return control.rate / reference.rate - 1


def _median(controls: Sequence[Control]) -> float:
    return statistics.median(control.rate for control in controls)


def _second_highest(controls: Sequence[Control]) -> float:
    """One control alone may be a fault of the clock, or a short boost; 0 if there is but one."""
    return sorted((0.0, *(control.rate for control in controls)))[-2]


def _allowed_others(condition: Condition) -> float:
    return min(LOUD_OTHERS, ALLOWED * condition.cores)


def _loud(condition: Condition) -> bool:
    return condition.others > _allowed_others(condition)


def _unquiet(controls: Sequence[Control], condition: Condition) -> str:
    """Why nothing can be learnt from this window; empty if it is quiet."""
    rates = [control.rate for control in controls]
    spread = (max(rates) - min(rates)) / _median(controls)
    if len(rates) < QUIET_CONTROLS or condition.seconds < QUIET_SECONDS:
        return f"{len(rates)} controls in {condition.seconds:.1f} s are too few"
    if condition.others >= QUIET_OTHERS:
        return (
            f"other processes took {condition.others:.0%} of one core, and less than "
            f"{QUIET_OTHERS:.0%} is quiet"
        )
    if condition.slowed:
        return "the system slowed the machine down"
    if spread > QUIET_SPREAD:
        return (
            f"the control varied by {spread:.1%}, from {_rate(min(rates))} to {_rate(max(rates))}, "
            f"and up to {QUIET_SPREAD:.0%} is quiet"
        )
    return ""


def _off_words(controls: Sequence[Control], reference: Reference, began: datetime) -> str:
    """On the controls of one device; empty if all are near its reference."""
    worst = max(controls, key=lambda control: abs(_off(control, reference)))
    off = _off(worst, reference)
    if abs(off) <= ALLOWED:
        return ""
    time = (began + timedelta(seconds=worst.at)).strftime("%H:%M:%S UTC")
    return (
        f"The control of {worst.device} {worst.place} ({time}) ran at {_rate(worst.rate)}, "
        f"{abs(off):.0%} {'below' if off < 0 else 'above'} the {_rate(reference.rate)} that it "
        f"reaches in quiet (learnt {reference.learnt[:10]}); up to {ALLOWED:.0%} is allowed. All "
        f"of its controls, in order: {', '.join(_rate(control.rate) for control in controls)}."
    )


def _remedy(condition: Condition) -> str:
    remedies = condition.remedies()
    if not remedies and _loud(condition):
        remedies = ["close what is not needed (no process alone took much)"]
    if not remedies:
        return "No process explains it: let the machine cool and try again."
    text = ", ".join(remedies)
    return f"{text[0].upper()}{text[1:]}, and try again."


def _positive(value: float, what: str) -> float:
    if not 0 < value < math.inf:
        raise BackendError(f"{what} came out as {value}; the device's clock cannot be right.")
    return value


def _rate(rate: float) -> str:
    return f"{rate / 1e9:,.0f} GFLOP/s" if rate >= 1e11 else f"{rate / 1e9:.3g} GFLOP/s"


def _from_to(old: float, new: float) -> str:
    return f"from {_rate(old)} to {_rate(new)}"


def _iso(when: datetime) -> str:
    return when.isoformat(timespec="seconds")
