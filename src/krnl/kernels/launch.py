"""How an op becomes launches of GPU kernels. The tables of GPU backends are made of these rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from krnl.plan.buffer import Buffer
from krnl.plan.lower import Row
from krnl.plan.step import Call


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel on a grid of threadgroups. `library` is the source file it is in, without suffix.

    `arguments` stand in the order of the kernel's buffer indices: a buffer or view, the bytes of a
    constant, or None where this specialisation of the kernel has no such argument.
    `constants` are the function constants, by index. `threads` is per threadgroup.
    """

    library: str
    function: str
    arguments: tuple[Buffer | bytes | None, ...]
    groups: tuple[int, int, int]
    threads: int
    constants: Mapping[int, bool | int | float] = field(default_factory=dict)


@dataclass(frozen=True)
class GpuRow(Row):
    """A row whose op takes one or more launches, made from the call and its workspace."""

    launches: Callable[[Call, Buffer | None], Sequence[Launch]] = lambda call, workspace: ()
