"""Ops: what a kernel must compute, said once.

An op is a function in NumPy (its float64 reference) under a signature such as

    x[n,c] w*[o,c] u[n,s]? live -> y*[n,o] +total[1]:f32

Inputs stand left of the arrow, outputs right. Letters are sizes and must agree wherever they recur.

    :f32    the element type; without it, an input may be any float and an output has the step's
            activation type; :any is an output that may be given in any float type
    *       a group, one buffer per projection; letters found only in groups differ from member to
            member
    ?       may be left out; the reference then gets None
    +       (outputs) updated in place: the reference gets the old value after the inputs
    live    stands for `live[1]:i32`: how many of the n rows hold data. The reference never sees it,
            it is handed the live rows only; a kernel neither reads nor writes a row beyond it

That is the whole language. Anything more is a view made by the caller, or another op.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from krnl.dtypes import BY_NAME, DType

Size = int | tuple[int, ...]
# letter -> int, or a tuple for a group's letters; a word -> what only the data tell: how many pairs
# of a query and a key are `visible`, how many different rows are `taken`
Dims = Mapping[str, Any]
LIVE = "live"
ANY = "any"


@dataclass(frozen=True)
class Parameter:
    """One input or output of an op."""

    name: str
    letters: tuple[str, ...]
    dtype: DType | None
    any_float: bool = False
    group: bool = False
    optional: bool = False
    updated: bool = False


_PARAMETER = re.compile(
    r"(?P<updated>\+)?(?P<name>\w+)(?P<group>\*)?\[(?P<letters>\w+(,\w+)*)\](:(?P<dtype>\w+))?(?P<optional>\?)?"
)


def _parse(text: str) -> Parameter:
    if text == LIVE:
        return Parameter(LIVE, ("1",), BY_NAME["i32"])
    match = _PARAMETER.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text}' is not a parameter of a signature")
    dtype = match["dtype"]
    return Parameter(
        match["name"],
        tuple(match["letters"].split(",")),
        BY_NAME[dtype] if dtype and dtype != ANY else None,
        any_float=dtype == ANY,
        group=bool(match["group"]),
        optional=bool(match["optional"]),
        updated=bool(match["updated"]),
    )


@dataclass(frozen=True, eq=False)
class Op:
    """A signature, its reference, how many floating-point operations it stands for, and how many
    elements of its parameters it moves: `moved` names those of which that is not each one once,
    twice where it is updated, and counts what is read and written, all members of a group
    together. Where only the data tell, it is the most that can be. `gathered` names the input of
    which nothing is read but the rows that indices point to."""

    name: str
    signature: str
    inputs: tuple[Parameter, ...]
    outputs: tuple[Parameter, ...]
    attributes: tuple[str, ...]
    reference: Callable[..., Any]
    flops: Callable[[Dims], int]
    moved: Callable[[Dims], Mapping[str, int]]
    gathered: str

    @property
    def has_live(self) -> bool:
        return any(p.name == LIVE for p in self.inputs)

    def evaluate(
        self, inputs: list[Any], old: list[Any], attributes: Mapping[str, float]
    ) -> tuple[Any, ...]:
        """The reference on arrays (float64 or int): inputs in signature order without `live`,
        then the old values of updated outputs. Returns one entry per output."""
        result = self.reference(*inputs, *old, **attributes)
        return result if isinstance(result, tuple) and len(self.outputs) > 1 else (result,)

    def __repr__(self) -> str:
        return f"{self.name}({self.signature})"


def op(
    signature: str,
    flops: Callable[[Dims], int] = lambda d: 0,
    moved: Callable[[Dims], Mapping[str, int]] = lambda d: {},
    gathered: str = "",
) -> Callable[[Callable[..., Any]], Op]:
    """Decorator: makes an `Op` of a reference function. Keyword-only arguments become
    attributes."""

    def make(reference: Callable[..., Any]) -> Op:
        left, right = signature.split("->")
        parameters = inspect.signature(reference).parameters.values()
        return Op(
            name=reference.__name__,
            signature=signature,
            inputs=tuple(_parse(word) for word in left.split()),
            outputs=tuple(_parse(word) for word in right.split()),
            attributes=tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY),
            reference=reference,
            flops=flops,
            moved=moved,
            gathered=gathered,
        )

    return make


def sizes(dims: Dims, letter: str) -> tuple[int, ...]:
    """The sizes of a group's letter, one per member (a plain letter counts as a group of one)."""
    size = dims.get(letter, 0)
    return size if isinstance(size, tuple) else (size,)


def product(dims: Dims, *letters: str) -> int:
    """The product of plain letters' sizes."""
    return int(np.prod([dims[letter] for letter in letters], dtype=np.int64))
