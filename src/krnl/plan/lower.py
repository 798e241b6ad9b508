"""Lowering: every call becomes a dispatch of a concrete kernel, chosen from the backend's table."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from krnl.dtypes import F32
from krnl.errors import PlanError
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.step import Call


@dataclass(frozen=True)
class Row:
    """A kernel for an op. The first row whose `when` accepts the call is taken; `workspace` is the
    bytes of scratch it wants from the plan; `why` gives the reason for the row, or where it was
    measured."""

    op: str
    kernel: str = ""
    when: Callable[[Call], bool] = lambda call: True
    workspace: Callable[[Call], int] = lambda call: 0
    why: str = ""

    @property
    def name(self) -> str:
        return self.kernel or self.op


@dataclass(frozen=True)
class Table:
    """The kernels of a backend, in order of preference."""

    backend: str
    rows: Sequence[Row]

    def choose(self, call: Call) -> Row:
        """The first row that takes the call; PlanError if there is none."""
        for row in self.rows:
            if row.op == call.op.name and row.when(call):
                return row
        types = ", ".join(str(b) for b in call.reads())
        raise PlanError(f"The {self.backend} backend has no kernel for {call.label} on {types}.")


@dataclass(frozen=True, eq=False)
class Dispatch:
    """One launch: the call, the table's row for it, and its scratch."""

    call: Call
    row: Row
    workspace: Buffer | None


def lower(calls: Iterable[Call], table: Table) -> list[Dispatch]:
    """Chooses a kernel for every call."""
    dispatches = []
    for call in calls:
        row = table.choose(call)
        nbytes = row.workspace(call)
        scratch = (
            Buffer(f"{call.label}.workspace", (-(-nbytes // 4),), F32, Kind.TEMP)
            if nbytes
            else None
        )
        dispatches.append(Dispatch(call, row, scratch))
    return dispatches
