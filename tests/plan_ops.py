"""Ops to plan with, which nothing runs, and what they are called on."""

from krnl.dtypes import F32, I32, DType
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.lower import Row, Table
from krnl.plan.op import op
from krnl.plan.step import Step


@op("x[n,c] -> y[n,c]")
def turn(x):
    return x


@op("x[n,c] y[n,c]? live -> z[n,c] total[n]:f32", flops=lambda d: d["n"] * d["c"])
def combine(x, y, *, weight):
    return x, x


@op("x[n,c] w*[o,c] bias*[o]:f32? residual[n,o]? -> y*[n,o]")
def project(x, w, bias, residual):
    return w


@op("x[n,c] -> +total[c]:f32")
def add_up(x, total):
    return total


@op("-> y[2]:i32")
def pair():
    return 0


EVERY = Table("test", [Row(o.name) for o in (turn, combine, project, add_up, pair)])


def buffer(*shape: int, dtype: DType = F32, kind: Kind = Kind.INPUT, name: str = "b") -> Buffer:
    return Buffer(name, shape, dtype, kind)


def step(activation: DType = F32) -> Step:
    return Step("test", activation, buffer(1, dtype=I32, name="live"))
