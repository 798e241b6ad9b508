"""How an op becomes launches of GPU kernels. The tables of GPU backends are made of these rows."""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from krnl.dtypes import DType
from krnl.errors import PlanError
from krnl.plan.buffer import Buffer
from krnl.plan.lower import Dispatch, Row
from krnl.plan.step import Call

LANES = 32  # threads of a simdgroup, or warp
MOST_GROUPS = 2**31 - 1  # along the first axis; what is launched keeps well below it on others


@dataclass(frozen=True)
class TensorMap:
    """A matrix of which CUDA's copy engine fetches boxes: `rows` × `columns` elements of `buffer`
    from its start, `stride` elements from one row to the next, in boxes of `box_rows` ×
    `box_columns` that are swizzled over 128 bytes. Beyond rows and columns it reads zeros."""

    buffer: Buffer
    rows: int
    columns: int
    stride: int
    box_rows: int
    box_columns: int


Argument = Buffer | bytes | None


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel on a grid of groups: Metal's threadgroups, CUDA's blocks. `library` is the source
    file it is in, without suffix; `types` are the element types that it is made for.

    `arguments` stand in the order of the kernel's parameters: a buffer or view, the bytes of a
    struct, a struct of pointers or of tensor maps (CUDA only; None in place of those that are not
    used), or None where this specialisation has no such argument.
    `constants` specialise it. On Metal they are function constants, by index; in CUDA they are
    template arguments, behind the types and in the order of their indices. `threads` is per group.
    `independent`: nothing that it touches is written by the launch before it in its dispatch, and
    it writes nothing that this one touches, so that both may run at once (CUDA).
    """

    library: str
    function: str
    arguments: tuple[Argument | tuple[Buffer | TensorMap | None, ...], ...]
    groups: tuple[int, int, int]
    threads: int
    types: tuple[DType, ...] = ()
    constants: Mapping[int, bool | int | float] = field(default_factory=dict)
    shared: int = 0  # bytes of shared memory beside what the kernel declares itself (CUDA)
    cluster: int = 1  # blocks along x that run together (CUDA, from sm_90 on)
    independent: bool = False


@dataclass(frozen=True)
class GpuRow(Row):
    """A row whose op takes one or more launches, made from the call and its workspace."""

    launches: Callable[[Call, Buffer | None], Sequence[Launch]] = lambda call, workspace: ()


def pieces(size: int, piece: int) -> int:
    """How many pieces of at most `piece` make `size`."""
    return -(-size // piece)


def pack(form: str, *values: int | float) -> bytes:
    """A struct of numbers as kernels take it by value; `form` as of Python's module struct, without
    the order of bytes. PlanError if a number is too large for its place."""
    try:
        return struct.pack(f"<{form}", *values)
    except struct.error:
        largest = max(value for value in values if isinstance(value, int))
        raise PlanError(
            f"{largest:,} elements are more than a kernel counts (it has 32 bits). Take fewer "
            "--tokens or a smaller model."
        ) from None


def launches(dispatch: Dispatch) -> list[Launch]:
    """What a dispatch enqueues. Launches without groups, which do nothing, are left out; what was
    `independent` of one of them waits for the launch before it, of which nothing was said.
    PlanError if there is more of something than a kernel counts."""
    assert isinstance(dispatch.row, GpuRow)
    try:
        made = dispatch.row.launches(dispatch.call, dispatch.workspace)
    except PlanError as error:
        raise PlanError(f"{dispatch.call.label}: {error}") from None
    kept, last_is_kept = list[Launch](), True
    for launch in made:
        if max(launch.groups) > MOST_GROUPS:
            raise PlanError(
                f"{dispatch.call.label}: {max(launch.groups):,} groups of threads are more than a "
                "GPU starts at once. Take fewer --tokens or a smaller model."
            )
        if all(launch.groups):
            kept.append(launch if last_is_kept else replace(launch, independent=False))
        last_is_kept = all(launch.groups)
    return kept
