"""Step: model code calls ops on it, and a list of calls grows. No autograd, no broadcasting, no
laziness."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from krnl.dtypes import DType
from krnl.errors import PlanError
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.op import LIVE, Dims, Op, Parameter, Size

Argument = Buffer | tuple[Buffer, ...] | None


@dataclass(frozen=True, eq=False)
class Call:
    """One op on given buffers. `dims` holds every letter's size; `group` how many members the op's
    groups have."""

    op: Op
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    attributes: dict[str, float]
    dims: dict[str, Size]
    group: int
    label: str

    @property
    def arguments(self) -> dict[str, Argument]:
        """Inputs and outputs by the names that the signature gives them."""
        parameters = self.op.inputs + self.op.outputs
        return {p.name: a for p, a in zip(parameters, self.inputs + self.outputs, strict=True)}

    def reads(self) -> Iterator[Buffer]:
        """Every buffer whose old contents matter."""
        for argument in self.inputs:
            yield from members(argument)
        for parameter, argument in zip(self.op.outputs, self.outputs, strict=True):
            if parameter.updated:
                yield from members(argument)

    def writes(self) -> Iterator[Buffer]:
        for argument in self.outputs:
            yield from members(argument)

    @property
    def flops(self) -> int:
        """Floating-point operations at full capacity."""
        return int(self.op.flops(self.dims))

    @property
    def nbytes(self) -> int:
        """Bytes moved at full capacity."""
        return self.bytes_moved(self.dims)

    def bytes_moved(self, dims: Dims) -> int:
        """Bytes that have to be read and written at these sizes, scratch left out. Where only the
        data tell which rows are needed, the most that can be, unless `dims` has their word."""
        moved = self.op.moved(dims)
        total = 0
        for parameter, argument in zip(
            self.op.inputs + self.op.outputs, self.inputs + self.outputs, strict=True
        ):
            buffers = members(argument)
            if buffers and parameter.name in moved:
                total += moved[parameter.name] * buffers[0].dtype.size
                continue
            times = 2 if parameter.updated else 1
            for i, buffer in enumerate(buffers):
                elements = prod(_size(dims, letter, i) for letter in parameter.letters)
                total += times * elements * buffer.dtype.size
        return total


def members(argument: Argument) -> tuple[Buffer, ...]:
    """The buffers of an argument: one, a group's, or none."""
    if argument is None:
        return ()
    return argument if isinstance(argument, tuple) else (argument,)


class Step:
    """Emits calls. `activation` is the type of outputs whose signature names none; `live` is what
    ops with a live count are given unless told otherwise."""

    def __init__(self, name: str, activation: DType, live: Buffer | None = None):
        self.name = name
        self.activation = activation
        self.live = live
        self.calls: list[Call] = []
        self.saved: set[Buffer] = set()
        self._scopes: list[str] = []
        self._saving = True

    def __call__(
        self,
        op: Op,
        *inputs: Argument,
        into: Any = None,
        live: Buffer | None = None,
        **attributes: float,
    ) -> Any:
        """Emits op(inputs). Outputs are new temps unless `into` gives them (a buffer, a group, or a
        tuple with one entry per output; updated outputs must be given). Returns the outputs, alone
        if there is one."""
        label = "/".join([*self._scopes, op.name])
        given = list(inputs)
        if op.has_live:
            position = next(i for i, p in enumerate(op.inputs) if p.name == LIVE)
            given.insert(position, live or self.live)
        if len(given) != len(op.inputs):
            raise PlanError(
                f"{label}: {len(given)} inputs were given; the signature is {op.signature}."
            )
        if set(attributes) != set(op.attributes):
            raise PlanError(
                f"{label}: attributes are {sorted(op.attributes)}, got {sorted(attributes)}."
            )
        dims = self._bind(label, op, given)
        group = max((len(a) for a in given if isinstance(a, tuple)), default=1)
        targets = list(into) if isinstance(into, tuple) and len(op.outputs) > 1 else [into]
        targets += [None] * (len(op.outputs) - len(targets))
        outputs = [
            self._output(label, parameter, target, dims, group)
            for parameter, target in zip(op.outputs, targets, strict=True)
        ]
        self.calls.append(
            Call(op, tuple(given), tuple(outputs), dict(attributes), dims, group, label)
        )
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Calls made inside carry `name` in their label."""
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()

    def save(self, *arguments: Argument) -> None:
        """Keeps what the backward pass will need: from here on these buffers are read-only."""
        if self._saving:
            for argument in arguments:
                self.saved.update(b.root for b in members(argument) if b.kind is Kind.TEMP)

    @contextmanager
    def unsaved(self) -> Iterator[None]:
        """Calls made inside keep nothing: their results serve what follows at once, or are computed
        again."""
        before, self._saving = self._saving, False
        try:
            yield
        finally:
            self._saving = before

    def _bind(self, label: str, op: Op, given: list[Argument]) -> dict[str, Size]:
        per_member = _group_letters(op)
        dims: dict[str, Size] = {}
        for parameter, argument in zip(op.inputs, given, strict=True):
            if argument is None and parameter.optional:
                continue
            if argument is None or isinstance(argument, tuple) != parameter.group:
                wanted = "a group of buffers" if parameter.group else "a buffer"
                raise PlanError(f"{label}: '{parameter.name}' wants {wanted}, got {argument}.")
            self._match(label, parameter, argument, dims, per_member)
        return dims

    def _match(
        self,
        label: str,
        parameter: Parameter,
        argument: Argument,
        dims: dict[str, Size],
        per_member: set[str],
    ) -> None:
        """Checks type and shape of an argument and enters its sizes."""
        found: dict[str, list[int]] = {}
        for buffer in members(argument):
            right_type = (
                buffer.dtype is parameter.dtype if parameter.dtype else buffer.dtype.is_float
            )
            if not right_type or len(buffer.shape) != len(parameter.letters):
                raise PlanError(
                    f"{label}: '{parameter.name}' is {parameter.letters}:{parameter.dtype}, got "
                    f"{buffer}."
                )
            for letter, size in zip(parameter.letters, buffer.shape, strict=True):
                if letter.isdigit() or letter in per_member:
                    found.setdefault(letter, []).append(size)
                elif dims.setdefault(letter, size) != size:
                    raise PlanError(
                        f"{label}: {letter} is {dims[letter]}, but {buffer} makes it {size}."
                    )
        for letter, values in found.items():
            if letter.isdigit():
                if any(value != int(letter) for value in values):
                    raise PlanError(
                        f"{label}: '{parameter.name}' must have size {letter}, got {argument}."
                    )
            elif dims.setdefault(letter, tuple(values)) != tuple(values):
                raise PlanError(
                    f"{label}: {letter} is {dims[letter]}, but '{parameter.name}' makes it "
                    f"{tuple(values)}."
                )

    def _output(
        self, label: str, parameter: Parameter, target: Argument, dims: dict[str, Size], group: int
    ) -> Argument:
        per_member = {letter for letter, size in dims.items() if isinstance(size, tuple)}
        if target is not None:
            if isinstance(target, tuple) != parameter.group:
                raise PlanError(
                    f"{label}: 'into' for '{parameter.name}' does not fit its signature."
                )
            per_member |= {p for p in parameter.letters if parameter.group and p not in dims}
            self._match(label, parameter, target, dims, per_member)
            wanted = parameter.dtype or self.activation
            for buffer in members(target):
                if buffer.dtype is not wanted and not parameter.any_float:
                    raise PlanError(
                        f"{label}: '{parameter.name}' is of type {wanted} here, got {buffer}."
                    )
                if buffer.root in self.saved:
                    raise PlanError(
                        f"{label} would overwrite {buffer}, which the backward pass still needs."
                    )
            return target
        if parameter.updated:
            raise PlanError(
                f"{label}: '{parameter.name}' is updated in place and must be given with into=."
            )

        def new(member: int) -> Buffer:
            shape = [_size(dims, letter, member) for letter in parameter.letters]
            return Buffer(
                f"{label}.{parameter.name}",
                tuple(shape),
                parameter.dtype or self.activation,
                Kind.TEMP,
            )

        return tuple(new(i) for i in range(group)) if parameter.group else new(0)


def _size(dims: Dims, letter: str, member: int) -> int:
    if letter.isdigit():
        return int(letter)
    size = dims[letter]
    return int(size[member] if isinstance(size, tuple) else size)


def _group_letters(op: Op) -> set[str]:
    """Letters that occur in groups only: they may differ from member to member. An optional plain
    input may use one too; it can then be given to a group of one."""
    grouped = {letter for p in op.inputs + op.outputs if p.group for letter in p.letters}
    plain = {x for p in op.inputs + op.outputs if not p.group and not p.optional for x in p.letters}
    return grouped - plain
