"""Deliberate faults that the checks of test_ops must report.

A kernel finds everything in its dispatch record (kernel.h), so a record that is wrong stands for a
kernel that is: it takes a row too many, leaves out the last column, mistakes one operand for
another. Faults in the source are the business of scripts/mutate_kernels.py, whose list is checked
here against the sources.
"""

import runpy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpu_device import cpu
from krnl.backends.cpu import CpuBackend, CpuProgram, available_isas
from krnl.dtypes import F32
from krnl.kernels.cpu.table import TABLE
from krnl.plan.op import Op, Parameter
from op_bench import Chosen
from op_cases import CASES, Case

ROOT = Path(__file__).parent.parent
# No multiples of a vector. Sizes that must fit each other do: s = p + q = Σ r, d = 2 p.
SIZES = {"n": 21, "c": 37, "f": 23, "v": 29, "t": 25, "m": 40, "h": 4, "g": 2, "d": 26}
SIZES |= {"s": 26, "p": 13, "q": 13}
MEMBER_SIZES = {1: {"o": (19,), "r": (26,)}, 2: {"o": (19, 19), "r": (13, 13)}}  # by group
LIVE = 19
# One example may be blind to a fault: its norm is not clipped, its group has one member.
EXAMPLES = range(4)

# Sizes that a kernel does not look at, so that a wrong one is no fault.
UNREAD = {
    ("lora_up_backward", "s"): "the sum of the members' ranks",
    ("embedding", "v"): "ids lie in the table",
    ("gather_rows", "t"): "indices lie in x",
    ("cache_write", "m"): "row numbers lie in the cache",
    ("rope", "p"): "half of d",
    ("attention", "m"): "start and stop lie in the keys",
}


class Example(Chosen):
    """A call with the sizes above and every input that it can have, in float32, whose allowances
    are small."""

    def __init__(self, case: Case, seed: int):
        sizes = SIZES | MEMBER_SIZES[1 + seed % 2]
        live = LIVE if case.op.has_live else None
        super().__init__(case, F32, sizes, live=live, attributes={"scale": 0.3}, seed=seed)

    def _poisoned(self, parameter: Parameter, value: np.ndarray) -> np.ndarray:
        # Dead integers stay as drawn: one row too many is to be computed, not to end the process.
        return value if value.dtype.kind == "i" else super()._poisoned(parameter, value)


class Record:
    """A program's only dispatch, its arguments under the names of the op's parameters."""

    def __init__(self, op: Op, group: int, program: CpuProgram):
        arguments, self.attributes = program._parts
        self.kept = program._parts
        self.arguments: dict[str, np.ndarray] = {}
        for p in op.inputs + op.outputs:
            count = group if p.group else 1
            self.arguments[p.name], arguments = arguments[:count], arguments[count:]


@dataclass(frozen=True)
class Fault:
    name: str
    apply: Callable[[Record], None]


class Faulty:
    """A backend whose programs have a fault."""

    def __init__(self, device: CpuBackend, example: Example, fault: Fault):
        self._device, self._example, self._fault = device, example, fault
        self.kernels, self.allocate = device.kernels, device.allocate

    def compile(self, *given: Any) -> CpuProgram:
        program = self._device.compile(*given)
        self._fault.apply(Record(self._example.op, self._example.group, program))
        return program


def live_rows(difference: int) -> Callable[[Record], None]:
    def apply(record: Record) -> None:
        record.kept.append(np.array([LIVE + difference], np.int32))
        record.arguments["live"]["data"] = record.kept[-1].ctypes.data

    return apply


def one_short(parameters: tuple[Parameter, ...], letter: str) -> Callable[[Record], None]:
    """Of a size that differs from member to member, the first."""
    members = 2 if letter in SIZES else 1

    def apply(record: Record) -> None:
        for p in parameters:
            for axis, found in enumerate(p.letters):
                if found == letter:
                    record.arguments[p.name]["shape"][:members, axis] -= 1

    return apply


def displaced(name: str) -> Callable[[Record], None]:
    def apply(record: Record) -> None:
        address = record.arguments[name]["data"]
        if address[0]:  # not left out
            address[0] += 4  # bytes of a float32 or int32

    return apply


def swapped(first: str, second: str) -> Callable[[Record], None]:
    """Two arguments, or the two members of one group."""

    def apply(record: Record) -> None:
        a, b = record.arguments[first]["data"], record.arguments[second]["data"]
        a[0], b[-1] = b[-1], a[0]

    return apply


def changed(index: int, change: Callable[[float], float]) -> Callable[[Record], None]:
    def apply(record: Record) -> None:
        record.attributes[index] = change(record.attributes[index])

    return apply


CHANGES: dict[str, tuple[str, Callable[[float], float]]] = {
    "eps": ("times ten", lambda x: 10 * x),
    "scale": ("two per cent too large", lambda x: 1.02 * x),
    "sign": ("flipped", lambda x: -x),
    "rate": ("two per cent too large", lambda x: 1.02 * x),
    "stream": ("that of another layer", lambda x: x + 1),
}


def faults(op: Op) -> Iterator[Fault]:
    """All that an op's signature has room for."""
    parameters = tuple(p for p in op.inputs + op.outputs if p.name != "live")
    if op.has_live:
        yield Fault("a live row too few", live_rows(-1))
        yield Fault("a live row too many", live_rows(1))
    letters = {x: None for p in parameters for x in p.letters if not x.isdigit()}
    for letter in letters:
        # How many rows there is room for, n, does not matter: the live ones are counted.
        if letter != "n" and (op.name, letter) not in UNREAD:
            yield Fault(f"{letter} one short", one_short(parameters, letter))
    for p in parameters:
        yield Fault(f"{p.name} displaced", displaced(p.name))
        if p.group:
            yield Fault(f"members of {p.name} swapped", swapped(p.name, p.name))
    for side in (op.inputs, op.outputs):
        for a, b in combinations(side, 2):
            sizes = [[SIZES.get(x, x) for x in p.letters] for p in (a, b)]
            if sizes[0] == sizes[1] and a.dtype is b.dtype and a.group == b.group:
                yield Fault(f"{a.name} and {b.name} swapped", swapped(a.name, b.name))
    for i, name in enumerate(op.attributes):
        word, change = CHANGES[name]
        yield Fault(f"{name} {word}", changed(i, change))


NO_FAULT = Fault("none", lambda record: None)


def reported(example: Example, fault: Fault) -> bool:
    try:
        with np.errstate(over="ignore"):  # an error beside an allowance of zero
            example.check(Faulty(cpu(available_isas()[-1]), example, fault))
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op.name)
def test_every_fault_is_reported(case: Case) -> None:
    examples = [Example(case, seed) for seed in EXAMPLES]
    assert not any(reported(e, NO_FAULT) for e in examples)
    found = list(faults(case.op))
    assert len(found) >= 2
    missed = [f.name for f in found if not any(reported(e, f) for e in examples)]
    assert not missed


def test_every_kernel_has_a_mutant() -> None:
    """And every mutant's text stands in the sources, once."""
    script = runpy.run_path(str(ROOT / "scripts" / "mutate_kernels.py"))
    folder = ROOT / "src" / "krnl" / "kernels" / "cpu"
    for mutant in script["MUTANTS"]:
        found = (folder / mutant.file).read_text().count(mutant.text)
        assert found == 1, f"{mutant.file} has {found} times: {mutant.text}"
    mutants = Counter(m.op for m in script["MUTANTS"])
    assert set(mutants) >= {row.name for row in TABLE.rows}
