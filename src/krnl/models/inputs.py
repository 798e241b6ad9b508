"""What the host hands to a program before a run lies side by side, so that it goes to the device in
one piece."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from krnl.dtypes import I32
from krnl.plan.arena import ALIGNMENT
from krnl.plan.buffer import Buffer, Kind


def side_by_side(name: str, sizes: Mapping[str, int]) -> dict[str, Buffer]:
    """Inputs of so many int32 each, by their names: parts of one buffer, each of which begins where
    a buffer of its own might."""
    unit = ALIGNMENT // I32.size
    starts, end = {}, 0
    for part, size in sizes.items():
        starts[part] = -(-end // unit) * unit
        end = starts[part] + size
    whole = Buffer(name, (end,), I32, Kind.INPUT)
    return {part: whole.part(part, starts[part], (size,)) for part, size in sizes.items()}


def fill(content: np.ndarray, values: Iterable[tuple[Buffer, Any]]) -> None:
    """Puts values where parts of a buffer begin whose whole `content` is, int32. PlanError if they
    are more than a part holds: a device would read and write beyond its memory."""
    for part, array in values:
        at = part.rows(0, len(array))
        content[at.start : at.start + at.size] = array


def start_names(windows: Iterable[int | None]) -> dict[int | None, str]:
    """What the inputs are called that hold the first key a token sees, by window."""
    return {w: f"start_{w}" if w else "start" for w in sorted(windows, key=lambda w: w or 0)}
