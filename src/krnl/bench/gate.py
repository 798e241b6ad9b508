"""Decides whether a figure may be printed: a control is run beside everything that is measured, and
must be as fast as this machine was seen to be.

Everything that the gate depends on is handed in: the control, the clock, what the machine is doing,
and where references are kept.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import numpy as np

from krnl.bench.condition import Condition, Watch
from krnl.bench.reference import Key, Reference, ReferenceStore
from krnl.errors import BackendError, ConfigError, Refused

ALLOWED = 0.10  # how far a control may be from the reference
CONTROL_SECONDS = 0.25  # a control is repeated for so long: shorter ones fall between time slices
WARM_UP_SECONDS = 0.5  # clocks rise from idle, or fall from a short boost
# What a quiet window is.
QUIET_CONTROLS = 12
QUIET_SECONDS = 3.0
QUIET_SPREAD = 0.03
QUIET_OTHERS = 0.10  # of one core
LEARNING_WINDOWS = 4  # tried before giving up


@dataclass(frozen=True)
class Control:
    """One control: where in the run, seconds after the start, operations a second."""

    place: str
    at: float
    rate: float


@dataclass(frozen=True)
class Measurement:
    """What was measured, and what speaks for it."""

    seconds: Mapping[str, tuple[float, ...]]  # of each contestant, a figure a round
    controls: tuple[Control, ...]
    reference: float | None  # operations a second; None: forced, and never learnt
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
    """Measures on one device. `key` says which, and which control; `now` is the time of day in UTC.
    A forced gate learns nothing, and what it measures is not trusted."""

    def __init__(
        self,
        key: Key,
        store: ReferenceStore,
        control: Callable[[], float],  # runs once; operations a second
        watch: Watch,
        clock: Callable[[], float],
        now: Callable[[], datetime],
        force: bool = False,
    ) -> None:
        refuse_simulator(key.device)
        self._key = key
        self._store = store
        self._control = control
        self._watch = watch
        self._clock = clock
        self._now = now
        self._force = force

    def measure(self, contestants: Mapping[str, Callable[[], float]], rounds: int) -> Measurement:
        """Seconds of one run of each contestant, in rounds A B A B, controls before, between and
        after. Refused as soon as the machine is seen not to be quiet."""
        if rounds < 1:
            raise ConfigError(f"rounds is {rounds}; it must be at least 1.")
        notes: list[str] = []
        reference = self._store.read(self._key)
        if reference is None and not self._force:
            reference = self._learn()
            notes.append(f"The reference was learnt just before: {_rate(reference.rate)}.")
        began, start, end_watch = self._now(), self._clock(), self._watch()
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        controls: list[Control] = []
        self._warm_up()
        for place in _places(rounds):
            if controls:
                for name, contestant in contestants.items():
                    seconds[name].append(_positive(contestant(), f"The time of {name}"))
                self._settle()
            controls.append(self._read_control(place, start))
            if reference is not None and not self._force:
                # It was learnt in a slow moment if two controls are above.
                if (rate := _second_highest(controls)) > reference.rate * (1 + ALLOWED):
                    reference = self._raised(reference, rate, notes)
                if any(control.rate < reference.rate * (1 - ALLOWED) for control in controls):
                    break
        condition = end_watch()
        if reference is None:
            complaint = "What this machine reaches in quiet has never been learnt."
        else:
            complaint = _complaint(controls, reference.rate, began, condition)
        if self._force:
            notes.append(f"Forced, and so not to be trusted. {complaint}".rstrip())
        elif complaint:
            raise Refused(" ".join(("No figure is printed.", complaint, *notes, _FORCE)))
        elif reference is not None and not _unquiet(controls, condition):
            reference = self._raised(reference, _median(controls), notes)
        return Measurement(
            seconds={name: tuple(figures) for name, figures in seconds.items()},
            controls=tuple(controls),
            reference=None if reference is None else reference.rate,
            condition=condition,
            when=_iso(began),
            trusted=not self._force,
            notes=tuple(notes),
        )

    def relearn(self) -> str:
        """Learns the reference anew, be it lower; says from what to what. Refused if the machine is
        not quiet."""
        rate = self._quiet_rate()
        old = self._store.replace(self._key, rate, _iso(self._now()))
        if old is None:
            return f"The reference of {self._key.device} was learnt: {_rate(rate)}."
        verb = "lowered" if rate < old.rate else "raised"
        return f"The reference of {self._key.device} was {verb} {_from_to(old.rate, rate)}."

    def _learn(self) -> Reference:
        return self._store.raise_to(self._key, self._quiet_rate(), _iso(self._now()))

    def _raised(self, reference: Reference, rate: float, notes: list[str]) -> Reference:
        """The reference, not below `rate`."""
        raised = self._store.raise_to(self._key, rate, _iso(self._now()))
        if raised.rate > reference.rate:
            notes.append(f"The reference was raised {_from_to(reference.rate, raised.rate)}.")
        return raised

    def _quiet_rate(self) -> float:
        """What the control reaches in a quiet window. Refused if none comes."""
        unquiet = ""
        for _ in range(LEARNING_WINDOWS):
            self._warm_up()
            start, end_watch = self._clock(), self._watch()
            controls: list[Control] = []
            while len(controls) < QUIET_CONTROLS or self._clock() < start + QUIET_SECONDS:
                controls.append(self._read_control("learning", start))
            condition = end_watch()
            unquiet = _unquiet(controls, condition)
            if not unquiet:
                return _median(controls)
        raise Refused(
            f"What this machine reaches in quiet cannot be learnt now, and no figure is printed "
            f"before it is: {unquiet}. {LEARNING_WINDOWS} windows of {QUIET_SECONDS:.0f} s were "
            f"tried; in the last, {condition.describe()}. {_remedy(condition)} {_FORCE}"
        )

    def _warm_up(self) -> None:
        start = self._clock()
        while self._clock() < start + WARM_UP_SECONDS:
            self._control()

    def _settle(self) -> None:
        """What contestants leave behind is no load: clocks lowered by wide vectors, threads that
        wait for more."""
        self._warm_up()

    def _read_control(self, place: str, start: float) -> Control:
        """The control's rate over CONTROL_SECONDS: all operations by all of their time."""
        at = self._clock()
        rates = [_positive(self._control(), "The rate of the control")]
        while self._clock() < at + CONTROL_SECONDS:
            rates.append(_positive(self._control(), "The rate of the control"))
        return Control(place, at - start, statistics.harmonic_mean(rates))


_FORCE = "--force prints the figures all the same, marked untrusted."


def _places(rounds: int) -> list[str]:
    between = [f"after round {i} of {rounds}" for i in range(1, rounds)]
    return ["before the first round", *between, "after the last round"]


def _median(controls: Sequence[Control]) -> float:
    return statistics.median(control.rate for control in controls)


def _second_highest(controls: Sequence[Control]) -> float:
    """One control alone may be a fault of the clock, or a short boost; 0 if there is but one."""
    return sorted((0.0, *(control.rate for control in controls)))[-2]


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
    if spread > QUIET_SPREAD:
        return (
            f"the control varied by {spread:.1%}, from {_rate(min(rates))} to {_rate(max(rates))}, "
            f"and up to {QUIET_SPREAD:.0%} is quiet"
        )
    return ""


def _complaint(
    controls: Sequence[Control], reference: float, began: datetime, condition: Condition
) -> str:
    """What was seen, what the machine was doing, and what to do; empty if all is well."""
    outside = [c for c in controls if abs(c.rate / reference - 1) > ALLOWED]
    if not outside:
        return ""
    worst = max(outside, key=lambda control: abs(control.rate / reference - 1))
    time = (began + timedelta(seconds=worst.at)).strftime("%H:%M:%S UTC")
    side = "below" if worst.rate < reference else "above"
    return (
        f"The control {worst.place} ({time}) ran at {_rate(worst.rate)}, "
        f"{abs(worst.rate / reference - 1):.0%} {side} the {_rate(reference)} that this machine "
        f"reaches in quiet; up to {ALLOWED:.0%} is allowed. All controls, in order: "
        f"{', '.join(_rate(control.rate) for control in controls)}. Meanwhile, "
        f"{condition.describe()}. {_remedy(condition)}"
    )


def _remedy(condition: Condition) -> str:
    remedies = condition.remedies()
    if not remedies:
        return (
            "No process explains it: let the machine cool and try again. If it stays so in quiet, "
            "`--relearn` learns anew what it reaches."
        )
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
