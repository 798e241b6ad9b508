"""Programs of launches that a test chooses, for the CUDA engine on a driver that runs nothing."""

import ctypes
from typing import Any

from krnl.dtypes import BF16
from krnl.kernels.launch import GpuRow, Launch
from krnl.plan.arena import Plan, plan
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.lower import Table
from krnl.plan.op import op
from krnl.plan.step import Step


@op("x[p] -> y[p]")
def twice(x: Any) -> Any:
    """Stands for any op: its launches are what a test says."""
    return 2 * x


X, Y = (Buffer(name, (64,), BF16, Kind.STATE) for name in "xy")


def launch(*arguments: Any, **options: Any) -> Launch:
    given: dict[str, Any] = {"groups": (3, 2, 1), "threads": 128, **options}
    return Launch("lib", "twice", arguments or (X, Y), types=(BF16,), **given)


def table(*launches: Launch) -> Table:
    return Table("cuda", [GpuRow("twice", launches=lambda call, workspace: list(launches))])


def planned(kernels: Table, calls: int = 1, name: str = "program") -> Plan:
    step = Step(name, BF16)
    for index in range(calls):
        with step.scope(f"call {index}"):
            step(twice, X, into=Y)
    (made,) = plan([step], kernels)
    return made


def buffers(*made: Buffer) -> Plan:
    """A plan that has them, and does nothing with them."""
    step = Step("nothing", BF16)
    for buffer in made:
        step(
            twice,
            buffer.part("", 0, (buffer.size,)),
            into=Buffer("y", (buffer.size,), BF16, Kind.TEMP),
        )
    (result,) = plan([step], table())
    return result


def parameters(config: Any, sizes: list[int]) -> list[bytes]:
    """What a launch hands to its kernel."""
    pointers = (ctypes.c_void_p * len(sizes)).from_address(config.pointers)
    return [ctypes.string_at(p, size) for p, size in zip(pointers, sizes, strict=True)]
