"""From signatures to lists of calls, and what is refused. The emitted lists of tiny models are kept
as text in tests/golden; KRNL_UPDATE_GOLDEN=1 writes them anew."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from krnl.dtypes import BF16, F32, I32
from krnl.errors import PlanError
from krnl.plan import arena
from krnl.plan.arena import plan
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.lower import Row, Table
from krnl.plan.op import op
from krnl.plan.step import Argument, Step
from plan_ops import add_up, buffer, combine, pair, project, step, turn
from tiny import ALL, plan_model, write_model

GOLDEN = Path(__file__).parent / "golden"


# The language of signatures.


def test_a_signature_says_everything() -> None:
    x, y, live = combine.inputs
    assert (x.name, x.letters, x.dtype, x.optional) == ("x", ("n", "c"), None, False)
    assert y.optional and not y.group
    assert (live.name, live.letters, live.dtype) == ("live", ("1",), I32)
    assert combine.has_live and not turn.has_live
    assert combine.attributes == ("weight",)
    assert [p.dtype for p in combine.outputs] == [None, F32]
    assert [p.group for p in project.inputs] == [False, True, True, False]
    assert project.inputs[2].optional and project.inputs[2].dtype is F32
    assert add_up.outputs[0].updated and not add_up.inputs[0].updated


@pytest.mark.parametrize(
    "word", ["x", "x[n", "x[]", "x[n,]", "x[n]:", "*x[n]", "x[n]?:f32", "x[n]f32", "x+[n]", "[n]"]
)
def test_what_is_not_a_parameter_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="is not a parameter"):
        op(f"{word} -> y[n]")(lambda x: x)


def test_other_malformed_signatures_are_refused() -> None:
    with pytest.raises(KeyError, match="f99"):
        op("x[n]:f99 -> y[n]")(lambda x: x)
    for signature in ("x[n] y[n]", "x[n] -> y[n] -> z[n]"):
        with pytest.raises(ValueError):
            op(signature)(lambda x: x)


# What a step makes of a call, and what it refuses.


def test_outputs_take_shape_and_type_from_the_signature() -> None:
    s = step(BF16)
    z, total = s(combine, buffer(3, 5), None, weight=1.0)
    assert (z.shape, z.dtype, z.kind) == ((3, 5), BF16, Kind.TEMP)
    assert (total.shape, total.dtype) == ((3,), F32)
    (call,) = s.calls
    assert (call.dims["n"], call.dims["c"]) == (3, 5)
    assert call.flops == 15 and call.inputs[2] is s.live
    assert s(pair).shape == (2,)


def test_groups_differ_from_member_to_member() -> None:
    s = step()
    w = (buffer(4, 5), buffer(0, 5), buffer(7, 5))
    y = s(project, buffer(3, 5), w, None, None)
    assert [b.shape for b in y] == [(3, 4), (3, 0), (3, 7)]
    assert s.calls[0].group == 3 and s.calls[0].dims["o"] == (4, 0, 7)
    bias = tuple(buffer(o) for o in (4, 0, 7))
    assert len(s(project, buffer(3, 5), w, bias, None)) == 3
    (alone,) = s(project, buffer(3, 5), w[:1], None, buffer(3, 4))
    assert alone.shape == (3, 4)


def test_scopes_label_calls() -> None:
    s = step()
    with s.scope("forward"), s.scope("layer0"):
        y = s(turn, buffer(2, 2))
    s(turn, y)
    assert [call.label for call in s.calls] == ["forward/layer0/turn", "turn"]
    assert y.name == "forward/layer0/turn.y"


X, W = buffer(3, 5, name="x"), (buffer(4, 5), buffer(7, 5))
REFUSALS: dict[str, tuple[str, Callable[[Step], Any]]] = {
    "too few inputs": ("1 inputs were given", lambda s: s(project, X)),
    "too many inputs": ("2 inputs were given", lambda s: s(turn, X, X)),
    "missing attribute": (
        r"attributes are \['weight'\], got \[\]",
        lambda s: s(combine, X, None),
    ),
    "unknown attribute": ("got", lambda s: s(turn, X, weight=1.0)),
    "other size": ("c is 5, but .* makes it 6", lambda s: s(combine, X, buffer(3, 6), weight=1.0)),
    "other rank": ("'x' is", lambda s: s(turn, buffer(3, 5, 1))),
    "integer for a float": ("'x' is", lambda s: s(turn, buffer(3, 5, dtype=I32))),
    "other float type": (
        "'bias' is .*f32, got",
        lambda s: s(project, X, W, (buffer(4, dtype=BF16), buffer(7)), None),
    ),
    "required input left out": ("'x' wants a buffer, got None", lambda s: s(turn, None)),
    "group for a buffer": ("'x' wants a buffer", lambda s: s(turn, (X,))),
    "buffer for a group": ("'w' wants a group", lambda s: s(project, X, W[0], None, None)),
    "groups of other lengths": (
        r"o is \(4, 7\), but 'bias' makes it \(4,\)",
        lambda s: s(project, X, W, (buffer(4),), None),
    ),
    "member of other width": (
        "c is 5, but",
        lambda s: s(project, X, (W[0], buffer(7, 6)), None, None),
    ),
    "residual for two members": (
        "makes it",
        lambda s: s(project, X, W, None, buffer(3, 4)),
    ),
    "live of two": (
        "'live' must have size 1",
        lambda s: s(combine, X, None, live=buffer(2, dtype=I32), weight=1.0),
    ),
    "live of floats": ("'live' is", lambda s: s(combine, X, None, live=buffer(1), weight=1.0)),
    "no live anywhere": (
        "'live' wants a buffer",
        lambda s: Step("bare", F32)(combine, X, None, weight=1.0),
    ),
    "updated output not given": (r"must be given with into=", lambda s: s(add_up, X)),
    "target of other size": ("c is 5, but", lambda s: s(add_up, X, into=buffer(4))),
    "target of other type": ("'total' is", lambda s: s(add_up, X, into=buffer(5, dtype=BF16))),
    "target group for a buffer": ("'into' for 'total'", lambda s: s(add_up, X, into=(buffer(5),))),
    "target buffer for a group": ("'into' for 'y'", lambda s: s(project, X, W, None, None, into=X)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_calls_that_do_not_fit_are_refused(name: str) -> None:
    message, emit = REFUSALS[name]
    s = step()
    with s.scope("forward"), pytest.raises(PlanError, match=message) as error:
        emit(s)
    assert s.calls == []
    if name != "no live anywhere":
        assert str(error.value).startswith("forward/")


def test_saved_buffers_are_read_only() -> None:
    s = step()
    y = s(turn, buffer(3, 5))
    s(turn, buffer(3, 5), into=y)
    s.save(y.rows(0, 1), None)
    for target in (y, y.part("view", 0, (3, 5))):
        with pytest.raises(PlanError, match=r"turn would overwrite .* still needs"):
            s(turn, buffer(3, 5), into=target)
    with s.unsaved():
        z = s(turn, y)
        s.save(z)
    s(turn, y, into=z)
    assert s.saved == {y}


def test_views_stay_inside() -> None:
    b = buffer(4, 6)
    assert (b.rows(1, 3).start, b.rows(1, 3).shape, b.rows(1, 3).root) == (6, (2, 6), b)
    assert b.rows(1, 3).rows(1, 2).start == 12
    assert b.heads(3).shape == (4, 3, 2) and b.heads(3).flat().shape == (4, 6)
    for start, shape in ((-1, (1,)), (20, (5,)), (0, (25,))):
        with pytest.raises(PlanError, match="does not lie inside"):
            b.part("view", start, shape)
    with pytest.raises(PlanError, match="does not lie inside"):
        b.rows(1, 3).rows(0, 3)


# Lowering.


def test_the_first_row_that_takes_the_call_is_chosen() -> None:
    rows = [
        Row("turn", "wide", when=lambda call: call.dims["c"] == 64, workspace=lambda call: 10),
        Row("turn"),
    ]
    s = step()
    s(turn, buffer(2, 64))
    s(turn, buffer(2, 63))
    wide, other = arena.lower(s.calls, Table("test", rows))
    assert (wide.row.name, other.row.name) == ("wide", "turn")
    assert wide.workspace is not None and wide.workspace.nbytes >= 10 and other.workspace is None


def test_a_call_without_a_kernel_is_an_error_before_anything_runs() -> None:
    s = step()
    with s.scope("head"):
        s(turn, buffer(2, 64, dtype=BF16, name="h"))
    table = Table("test", [Row("turn", when=lambda call: False), Row("pair")])
    with pytest.raises(
        PlanError, match=r"test backend has no kernel for head/turn on h\[2,64\]:bf16"
    ):
        plan([s], table)


# Golden lists.


def emitted_text(s: Step) -> str:
    """One call a line. Temps are numbered, * if kept for backward; @ is where a view begins."""
    numbers: dict[Buffer, str] = {}

    def show(argument: Argument) -> str:
        if argument is None:
            return "-"
        if isinstance(argument, tuple):
            return "(" + " ".join(show(b) for b in argument) + ")"
        b = argument
        name = b.name
        if b.kind is Kind.TEMP:
            saved = "*" if b.root in s.saved else ""
            name = numbers.setdefault(b.root, f"%{len(numbers)}") + saved
        elif b.root is not b:
            name = f"{b.name} of {b.root.name}"
        at = f"@{b.start}" if b.start else ""
        return f"{name}{at}[{','.join(map(str, b.shape))}]:{b.dtype}"

    lines = []
    for call in s.calls:
        given = ", ".join(map(show, call.inputs))
        results = ", ".join(map(show, call.outputs))
        attributes = "".join(f" {k}={v:g}" for k, v in call.attributes.items())
        lines.append(f"{call.label}({given}) -> {results}{attributes}")
    return f"{s.name}\n" + "".join(f"    {line}\n" for line in lines)


GOLDEN_PLANS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "llama": ("llama", replace(ALL, targets=("q_proj", "v_proj")), {}),
    "qwen3": ("qwen3", ALL, {}),
    "dropout": ("untied", replace(ALL, dropout=0.1), {"activation": BF16}),
    "recompute-mlp": ("qwen2", ALL, {"recompute": 2}),
    "recompute-layer": ("window", ALL, {"recompute": "layer"}),
    "head": ("untied", replace(ALL, targets=("lm_head",)), {}),
}


@pytest.mark.parametrize("name", GOLDEN_PLANS)
def test_golden_plans(name: str, tmp_path: Path) -> None:
    kind, adapter, options = GOLDEN_PLANS[name]
    planned = plan_model(write_model(tmp_path, kind), adapter, tokens=16, **options)
    programs = planned.programs
    steps = [programs.accumulate(), programs.evaluate(), programs.update()]
    text = "\n".join(emitted_text(s) for s in steps)
    path = GOLDEN / f"{name}.plan"
    if os.environ.get("KRNL_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    assert path.read_text("utf-8") == text
