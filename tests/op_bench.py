"""Calls of an op, drawn or chosen: their values, their run on a device, and the comparison with the
float64 reference.

Inputs are rounded to the device's types before the reference sees them. Rows beyond the live ones
hold NaN, temps hold NaN, and every output lies between guard elements that must come back
untouched.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from krnl.dtypes import BF16, F16, F32, I32, DType
from krnl.kernels.cuda import attention_wgmma
from krnl.kernels.launch import GpuRow, launches
from krnl.plan.arena import plan
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.lower import Table, lower
from krnl.plan.op import Op, Parameter
from krnl.plan.step import Step
from op_cases import CASE, Case, allowance

Draw = Callable[[Any], Any]
EXAMPLES = int(os.environ.get("KRNL_TEST_EXAMPLES", "40"))  # drawn calls of an op

GUARD = 24  # elements around an output; no multiple of a vector, so that outputs are misaligned
# Read in the checkpoint's type, whatever the activations are.
WEIGHTS = {"w", "w_gate", "w_up", "table"}
FLOATS = (BF16, F32, F16)
HANDS_OVER = 6  # the constant of gemm_wgmma that says so
ATTRIBUTES = {"eps": 1e-5, "scale": 0.125, "sign": 1.0, "rate": 0.5, "stream": 7}


def shape_of(parameter: Parameter, dims: dict[str, Any], member: int) -> tuple[int, ...]:
    sizes = [int(x) if x.isdigit() else dims[x] for x in parameter.letters]
    return tuple(s[member] if isinstance(s, tuple) else s for s in sizes)


def output_types(op: Op, activation: DType) -> tuple[DType, ...]:
    """What results without a type of their own may be stored in."""
    if op.name == "cast":
        return FLOATS
    free = any(p.any_float for p in op.outputs)
    return (activation, F32) if free and activation is not F32 else (activation,)


def keys_shared_by(split: int) -> Table:
    """Attention's backward on Hopper, where so many blocks share each sum of dK and dV."""
    return Table(
        "cuda",
        [
            GpuRow(
                "attention_backward",
                "attention_backward_wgmma",
                workspace=attention_wgmma.terms_bytes,
                launches=lambda call, terms: attention_wgmma.backward(call, terms, split),
            )
        ],
    )


class Bench:
    """One drawn call: its buffers and its values. `shift`: elements by which everything is moved
    away from aligned addresses."""

    shift = 0

    def __init__(self, case: Case, draw: Any, activation: DType):
        self.case, self.op, self.activation = case, case.op, activation
        self.dims = case.dims(draw)
        self.attributes = case.attributes(draw)
        self.absent = case.absent(draw, self.dims)
        self.weight = draw(st.sampled_from(FLOATS))
        self.target = draw(st.sampled_from(output_types(case.op, activation)))
        n = self.dims.get("n", 0)
        self.live = (
            draw(st.sampled_from([n, n // 2, max(n - 1, 0), 1, n, 0])) if case.op.has_live else n
        )
        self.rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        self.group = max((len(s) for s in self.dims.values() if isinstance(s, tuple)), default=1)

    def dtype(self, parameter: Parameter) -> DType:
        if parameter.dtype is not None:
            return parameter.dtype
        return self.weight if parameter.name in WEIGHTS else self.activation

    @cached_property
    def values(self) -> dict[str, Any]:
        """Float64 values, already rounded, under the parameter's name ('+name' for old values of
        outputs)."""
        given: dict[str, Any] = {"dims": self.dims, "attributes": self.attributes}
        wanted = [(p.name, p) for p in self.op.inputs if p.name != "live"]
        wanted += [("+" + p.name, p) for p in self.op.outputs if p.updated]
        for name, parameter in wanted:
            if name in self.absent:
                given[name] = None
                continue
            scale = self.case.scale.get(name, 1.0)
            drawn = [
                self.round(self.rng.normal(0, scale, shape_of(parameter, self.dims, i)), parameter)
                for i in range(self.group if parameter.group else 1)
            ]
            given[name] = drawn if parameter.group else drawn[0]
        special = self.case.special(self.rng, self.dims, self.live, given)
        parameters = {p.name: p for p in self.op.inputs} | {
            "+" + p.name: p for p in self.op.outputs
        }
        for name, value in special.items():
            if name in given:
                given[name] = self.round(value, parameters[name])
        return given

    def round(self, values: np.ndarray, parameter: Parameter) -> np.ndarray:
        dtype = self.dtype(parameter)
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(dtype.numpy).astype(np.float64 if dtype.is_float else np.int64)

    def rows(self, parameter: Parameter, value: Any) -> Any:
        """The live rows of a value."""
        if value is None or parameter.letters[0] != "n" or not self.op.has_live:
            return value
        return [v[: self.live] for v in value] if isinstance(value, list) else value[: self.live]

    def reference(self) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """The inputs as the reference sees them, and its results."""
        seen = dict(self.values)
        for p in self.op.inputs:
            if p.name in seen:
                seen[p.name] = self.rows(p, seen[p.name])
        for p in self.op.outputs:
            if p.updated:
                seen["+" + p.name] = self.rows(p, seen["+" + p.name])
        inputs = [seen[p.name] for p in self.op.inputs if p.name != "live"]
        old = [seen["+" + p.name] for p in self.op.outputs if p.updated]
        with np.errstate(invalid="ignore"):
            return seen, self.op.evaluate(inputs, old, self.attributes)

    def emit(self) -> tuple[Step, dict[str, Any], list[list[Buffer]]]:
        """The call; its inputs' buffers by name; and per output the buffers that hold it between
        guards."""
        step = Step("test", self.activation)
        buffers: dict[str, Any] = {"live": Buffer("live", (1,), I32, Kind.INPUT)}
        for p in self.op.inputs:
            if p.name == "live":
                continue
            count = self.group if p.group else 1
            made = [
                self._placed(p.name, shape_of(p, self.dims, i), self.dtype(p)) for i in range(count)
            ]
            buffers[p.name] = None if p.name in self.absent else tuple(made) if p.group else made[0]
        roots: list[list[Buffer]] = []
        outputs: list[Any] = []
        for p in self.op.outputs:
            dtype = p.dtype or self.target
            shapes = [shape_of(p, self.dims, i) for i in range(self.group if p.group else 1)]
            sizes = [self._before + int(np.prod(s)) + GUARD for s in shapes]
            roots.append([Buffer(p.name, (size,), dtype, Kind.STATE) for size in sizes])
            parts = [
                root.part(p.name, self._before, s)
                for root, s in zip(roots[-1], shapes, strict=True)
            ]
            outputs.append(tuple(parts) if p.group else parts[0])
        inputs = [buffers[p.name] for p in self.op.inputs if p.name != "live"]
        into = tuple(outputs) if len(outputs) > 1 else outputs[0]
        step(self.op, *inputs, into=into, live=buffers["live"], **self.attributes)
        return step, buffers, roots

    @property
    def _before(self) -> int:
        """Elements before an output."""
        return GUARD + self.shift

    def _placed(self, name: str, shape: tuple[int, ...], dtype: DType) -> Buffer:
        if not self.shift:
            return Buffer(name, shape, dtype, Kind.INPUT)
        root = Buffer(name, (self.shift + int(np.prod(shape)),), dtype, Kind.INPUT)
        return root.part(name, self.shift, shape)

    def run(self, device: Any) -> list[list[np.ndarray]]:
        """The outputs' values on a device, guards and dead rows checked."""
        step, buffers, roots = self.emit()
        (planned,) = plan([step], device.kernels)
        memory = device.allocate(planned.layout)
        if hasattr(memory, "poison"):
            memory.poison()
        program = device.compile(planned, memory)
        self._write(memory, buffers, roots)
        program.run()
        return self._read(memory, roots)

    def _write(self, memory: Any, buffers: dict[str, Any], roots: list[list[Buffer]]) -> None:
        if self.op.has_live:
            memory.write(buffers["live"], np.array([self.live]))
        for p in self.op.inputs:
            if p.name == "live" or buffers[p.name] is None:
                continue
            group = buffers[p.name] if p.group else [buffers[p.name]]
            values = self.values[p.name] if p.group else [self.values[p.name]]
            for buffer, value in zip(group, values, strict=True):
                memory.write(buffer, self._poisoned(p, value))
        for p, group in zip(self.op.outputs, roots, strict=True):
            for i, root in enumerate(group):
                memory.write(root, np.full(root.shape, 7.0))
                if p.updated:
                    value = self.values["+" + p.name]
                    part = root.part("", self._before, shape_of(p, self.dims, i))
                    memory.write(part, self._poisoned(p, value[i] if p.group else value))

    def _poisoned(self, parameter: Parameter, value: np.ndarray) -> np.ndarray:
        if parameter.letters[0] != "n" or not self.op.has_live:
            return value
        value = value.copy()
        value[self.live :] = np.nan if value.dtype.kind == "f" else 2**30
        return value

    def _read(self, memory: Any, roots: list[list[Buffer]]) -> list[list[np.ndarray]]:
        results = []
        for p, group in zip(self.op.outputs, roots, strict=True):
            arrays = []
            for i, root in enumerate(group):
                raw = memory.read(root).astype(np.float64)
                before = self._before
                assert (raw[:before] == 7).all() and (raw[-GUARD:] == 7).all(), (
                    f"wrote outside '{p.name}'"
                )
                value = raw[before:-GUARD].reshape(shape_of(p, self.dims, i))
                if p.letters[0] == "n" and self.op.has_live:
                    dead = value[self.live :]
                    untouched = np.isnan(dead) if p.updated else dead == 7
                    assert untouched.all(), f"wrote rows of '{p.name}' beyond the live ones"
                    value = value[: self.live]
                arrays.append(value)
            results.append(arrays)
        return results

    def _hands_over(self, device: Any) -> bool:
        """Whether sums reach SwiGLU in the activation type, as Hopper's kernels hand them over."""
        (found,) = lower(self.emit()[0].calls, device.kernels)
        made = launches(found) if isinstance(found.row, GpuRow) else []
        return any(x.function == "gemm_wgmma" and x.constants[HANDS_OVER] for x in made)

    def check(self, device: Any) -> float:
        """Compares; returns the largest share of the allowance used."""
        seen, reference = self.reference()
        types = [p.dtype or self.target for p in self.op.outputs]
        with np.errstate(invalid="ignore", over="ignore"):
            weighted = any(p.name in WEIGHTS for p in self.op.inputs)
            other_type = self.activation is not F32 and self.weight is not self.activation
            if self.case.exact:
                reference = tuple(
                    r.astype(t.numpy).astype(np.float64)
                    for r, t in zip(reference, types, strict=True)
                )
            rounds = (weighted and other_type) or self._hands_over(device)
            bounds = allowance(self.case, seen, reference, self.activation, types, rounds)
            if self.case.exact:
                bounds = [np.zeros_like(r) for r in reference]
        used = 0.0
        for p, got, want, bound in zip(
            self.op.outputs, self.run(device), reference, bounds, strict=True
        ):
            triples = zip(got, want, bound, strict=True) if p.group else [(got[0], want, bound)]
            for g, w, b in triples:
                w, b = np.broadcast_to(w, g.shape), np.broadcast_to(b, g.shape)
                same = (g == w) | (np.isnan(g) & np.isnan(w))
                with np.errstate(over="ignore", invalid="ignore"):
                    share = np.abs(g - w) / np.maximum(b, np.finfo(np.float64).tiny)
                share = np.where(same, 0.0, np.where(np.isnan(share), np.inf, share))
                worst = float(share.max(initial=0.0))
                assert worst <= 1.0, (
                    f"'{p.name}' is off by {worst:.2f} of its allowance; sizes {self.dims}, live "
                    f"{self.live}"
                )
                used = max(used, worst)
        return used


class Chosen(Bench):
    """A call of chosen sizes, with every input that it may have."""

    def __init__(
        self,
        case: Case,
        activation: DType,
        dims: dict[str, Any],
        weight: DType | None = None,
        target: DType | None = None,
        live: int | None = None,
        attributes: dict[str, float] | None = None,
        seed: int = 0,
    ):
        self.case, self.op, self.activation = case, case.op, activation
        self.weight, self.target = weight or activation, target or activation
        letters = {x for p in case.op.inputs + case.op.outputs for x in p.letters}
        self.dims = {letter: size for letter, size in dims.items() if letter in letters}
        self.group = max((len(s) for s in self.dims.values() if isinstance(s, tuple)), default=1)
        self.attributes = {
            name: (attributes or {}).get(name, ATTRIBUTES[name]) for name in case.op.attributes
        }
        self.absent = {"residual"} if self.group > 1 else set()
        self.live = self.dims.get("n", 0) if live is None else live
        self.rng = np.random.default_rng(seed)


# Whole tiles; ragged ones; a single row with long sums, where kernels cut the sum into pieces.
SIZES: dict[str, dict[str, Any]] = {
    "whole": {"n": 64, "c": 64, "f": 64, "v": 64, "t": 64, "m": 96, "d": 64, "p": 32, "q": 32}
    | {"o": (64, 96), "r": (32, 32), "elements": 1024},
    "ragged": {"n": 37, "c": 45, "f": 39, "v": 51, "t": 41, "m": 70, "d": 26, "p": 13, "q": 9}
    | {"o": (45, 19, 7), "r": (13, 9, 4), "elements": 1001},
    "long": {"n": 1, "c": 1028, "f": 516, "v": 2051, "t": 9, "m": 1500, "d": 16, "p": 8, "q": 8}
    | {"o": (516,), "r": (16,), "elements": 40001},
}


def few_keys(activation: DType, d: int) -> Iterator[Chosen]:
    """Calls of attention's backward in which the blocks of a cluster have several tiles to sum, and
    in which some have none."""
    for n, h, g in ((270, 3, 1), (70, 2, 2), (130, 4, 2)):
        dims = {"n": n, "h": h, "g": g, "d": d}
        yield Chosen(CASE["attention_backward"], activation, dims, live=n - 3)


def chosen(
    case: Case,
    sizes: Mapping[str, Any],
    activation: DType,
    weight: DType | None = None,
    target: DType | None = None,
) -> Bench:
    """Four heads that share two key heads, unless `sizes` has others; every row is live but the
    last one of several."""
    parameters = case.op.inputs + case.op.outputs
    letters = {x for p in parameters for x in p.letters}
    dims = {"h": 4, "g": 2, **sizes}
    dims["s"] = sum(dims["r"]) if "r" in letters else dims["p"] + dims["q"]
    if "d" in letters:
        dims["p"] = dims["d"] // 2
    elif parameters[0].letters == ("p",):
        dims["p"] = dims["elements"]
    live = max(1, dims["n"] - 1) if case.op.has_live else None
    return Chosen(case, activation, dims, weight, target, live)


def of_every_type(
    case: Case, activation: DType, sizes: Iterable[Mapping[str, Any]]
) -> Iterator[Bench]:
    """Calls of chosen sizes with every type of weight and output."""
    weighted = any(p.name in WEIGHTS and p.dtype is None for p in case.op.inputs)
    weights = FLOATS if weighted else (activation,)
    for call in product(sizes, [activation], weights, output_types(case.op, activation)):
        yield chosen(case, *call)


def check_drawn(
    case: Case,
    activation: DType,
    count: int,
    check: Callable[[Bench, Draw], float],
    shrinks: bool = False,
) -> float:
    """Hands `count` drawn calls to `check`, which may draw more; the largest share of the allowance
    that it tells. A call that fails names its sizes, and is not shrunk unless told so: to run many
    more takes minutes, and after an illegal access on a GPU nothing runs any more."""
    used = [0.0]

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        phases=settings.default.phases if shrinks else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        used.append(check(Bench(case, data.draw, activation), data.draw))

    run()
    return max(used)


def hide_last_keys(bench: Bench, count: int) -> None:
    """No query sees so many of the last keys any more."""
    values = bench.values
    values["stop"][:] = np.minimum(values["stop"], bench.dims["m"] - count)
    values["start"][:] = np.minimum(values["start"], values["stop"] - 1)


def forget_last_keys(bench: Bench, count: int) -> None:
    """They and their values become NaN."""
    bench.values["k"][-count:] = bench.values["v"][-count:] = np.nan
