"""Inputs, and how far a kernel may be from the reference, for every op.

An allowance has two terms. The result is rounded once to its type: half an ulp. And what was summed
on the way was rounded to the accumulator's type at every step: √k of its ulps (the errors of k
roundings add like a random walk; a factor of 4 covers the tail) of the magnitude, which is the same
op on absolute values, where nothing cancels. Where operands are rounded to the activation type
inside the kernel (probabilities in attention; weights of another type under bf16 and float16
activations; sums that Hopper's kernels hand over to SwiGLU), one more ulp of that type of the
magnitude. Below a type's smallest normal number ulps no longer shrink, which matters in float16.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from ml_dtypes import finfo

from krnl.dtypes import F32, DType
from krnl.ops import attention, gemm, loss, norm, optimizer, pointwise
from krnl.plan.op import Op

Arrays = dict[str, Any]
Dims = dict[str, Any]
# Sizes around every tile edge in use, and small ones.
SIZES = [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 97, 130]
size = st.sampled_from(SIZES)
# Sums long enough that kernels cut them into chunks.
deep = st.one_of(size, st.sampled_from([2900, 5600, 9001]))
# More elements than one piece of work or one partial sum has.
long = st.sampled_from([1, 7, 16, 33, 130, 16384, 16385, 40000])
rank = st.sampled_from([0, 1, 3, 4, 8, 16, 17])


@dataclass
class Case:
    """How to draw an op's sizes and inputs, and what its error is measured against."""

    op: Op
    dims: Callable[[Any], Dims]  # draw -> sizes; group letters have a tuple
    # Integers, and inputs that must fit others; handed the values drawn so far.
    special: Callable[[np.random.Generator, Dims, int, Arrays], Arrays] = lambda *given: {}
    magnitude: Callable[["Case", Arrays], tuple[Any, ...]] | None = None  # None: `absolute`
    terms: Callable[[Dims], float] = lambda d: 1.0  # k: how many values are summed
    attributes: Callable[[Any], dict[str, float]] = lambda draw: {}
    absent: Callable[[Any, Dims], set[str]] = lambda draw, dims: set()  # inputs to leave out
    exact: bool = False  # the result is the reference's, rounded to its type
    rounds_inside: bool = False  # what the kernel forms inside has the activation type
    scale: dict[str, float] = field(default_factory=dict)  # standard deviations, where not 1


def absolute(case: Case, given: Arrays) -> tuple[Any, ...]:
    """The op on absolute values."""

    def positive(value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, list):
            return [positive(v) for v in value]
        return np.abs(value) if value.dtype.kind == "f" else value

    names = [p.name for p in case.op.inputs if p.name != "live"]
    inputs = [positive(given[name]) for name in names]
    old = [positive(given["+" + p.name]) for p in case.op.outputs if p.updated]
    return case.op.evaluate(inputs, old, given["attributes"])


def draw_group(draw: Any, letters: str) -> dict[str, Any]:
    count = draw(st.integers(1, 3))
    return {
        letter: tuple(draw(size if letter == "o" else rank) for _ in range(count))
        for letter in letters
    }


def linear_dims(draw: Any) -> Dims:
    c = draw(deep)
    # A long sum of few rows has a kernel of its own, which cuts nothing into chunks.
    n = draw(st.one_of(size, st.sampled_from([33, 49, 65])) if c > max(SIZES) else size)
    dims = {"n": n, "c": c, **draw_group(draw, "or")}
    return {**dims, "s": sum(dims["r"])}


def linear_backward_dims(draw: Any) -> Dims:
    dims = {"n": draw(size), "c": draw(size), **draw_group(draw, "or")}
    dims["o"] = (draw(deep), *dims["o"][1:])
    return {**dims, "s": sum(dims["r"])}


def without_adapter(*names: str) -> Callable[[Any, dict[str, Any]], set[str]]:
    return lambda draw, dims: set(names) if draw(st.booleans()) else set()


def linear_absent(draw: Any, dims: Dims) -> set[str]:
    absent = {"bias"} if draw(st.booleans()) else set()
    absent |= {"u", "b"} if draw(st.booleans()) else set()
    return absent | ({"residual"} if len(dims["o"]) > 1 or draw(st.booleans()) else set())


def swiglu_dims(draw: Any) -> Dims:
    dims = {letter: draw(size) for letter in "ncf"} | {letter: draw(rank) for letter in "pq"}
    return {**dims, "s": dims["p"] + dims["q"]}


def plain(letters: str, **fixed: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda draw: (
        {letter: draw(size) for letter in letters} | {k: draw(v) for k, v in fixed.items()}
    )


def heads_dims(draw: Any) -> Dims:
    return {
        "n": draw(size),
        "h": draw(st.integers(1, 4)),
        "d": draw(st.sampled_from([2, 6, 16, 64, 80, 128])),
    }


def heads_of_attention(draw: Any) -> Dims:
    g = draw(st.integers(1, 3))
    d = draw(st.sampled_from([2, 6, 16, 40, 64, 96, 128]))
    return {"h": g * draw(st.integers(1, 3)), "g": g, "d": d}


def attention_dims(draw: Any) -> Dims:
    """Training, where queries are keys, and generation: a few queries behind a long cache."""
    n = draw(st.sampled_from([*SIZES, 1, 2, 3, 330]))
    beyond = draw(st.sampled_from([0, 5, 190, 700, 1500]))
    return {"n": n, "m": n + beyond, **heads_of_attention(draw)}


def attention_backward_dims(draw: Any) -> Dims:
    """Often more keys than a block has."""
    n = draw(st.sampled_from([*SIZES, 130, 200, 200, 420, 420]))
    return {"n": n, **heads_of_attention(draw)}


def key_ranges(rng: np.random.Generator, d: Dims, live: int, given: Arrays) -> Arrays:
    start = rng.integers(0, d["m"], d["n"])
    stop = start + 1 + rng.integers(0, d["m"], d["n"])
    return {"start": start, "stop": np.minimum(stop, d["m"])}


def document_starts(rng: np.random.Generator, n: int) -> np.ndarray:
    """Starts of random documents, behind which a window may also follow."""
    starts = np.maximum.accumulate(
        np.where(rng.random(n) < rng.choice([0.0, 0.05, 0.5]), np.arange(n), 0)
    )
    window = rng.integers(1, n + 1) if rng.random() < 0.5 else n
    return np.maximum(starts, np.arange(n) - window + 1)


def forward_results(rng: np.random.Generator, d: Dims, live: int, given: Arrays) -> Arrays:
    n = d["n"]
    start = document_starts(rng, n)
    o, lse = attention.attention.reference(
        *(given[name][:live] for name in ("q", "k", "v")),
        start[:live],
        np.arange(1, live + 1),
        scale=given["attributes"]["scale"],
    )
    full_o, full_lse = np.zeros_like(given["q"]), np.zeros((n, d["h"]))
    full_o[:live], full_lse[:live] = o, lse
    return {"start": start, "o": full_o, "lse": full_lse}


def norm_statistics(rng: np.random.Generator, d: Dims, live: int, given: Arrays) -> Arrays:
    return {"rstd": (np.mean(given["x"] ** 2, axis=-1) + 1e-5) ** -0.5}


def norm_backward_magnitude(case: Case, given: Arrays) -> tuple[Any, ...]:
    x_hat, g = np.abs(given["x"] * given["rstd"][..., None]), np.abs(given["dy"] * given["w"])
    dx = np.abs(given["rstd"][..., None]) * (g + x_hat * np.mean(g * x_hat, axis=-1, keepdims=True))
    return (dx if given.get("residual") is None else dx + np.abs(given["residual"]),)


def rope_magnitude(case: Case, given: Arrays) -> tuple[Any, ...]:
    a, b = np.split(np.abs(given["x"]), 2, axis=-1)
    cos, sin = np.abs(given["cos"])[:, None, :], np.abs(given["sin"])[:, None, :]
    return (np.concatenate([a * cos + b * sin, b * cos + a * sin], axis=-1),)


def attention_magnitude(case: Case, given: Arrays) -> tuple[Any, ...]:
    q, k, v, start, stop = (given[name] for name in ("q", "k", "v", "start", "stop"))
    scale = given["attributes"]["scale"]
    o, lse = attention.attention.reference(q, k, np.abs(v), start, stop, scale=scale)
    # A score's error multiplies its probability: the largest score counts as that many ulps.
    score = scale * np.abs(q).sum(axis=-1) * np.abs(k[: int(stop.max(initial=0))]).max(initial=0.0)
    return o * (1 + score[..., None]), np.abs(lse) + score


def attention_backward_magnitude(case: Case, given: Arrays) -> tuple[Any, ...]:
    do, q, k, v, o, start = (given[name] for name in ("do", "q", "k", "v", "o", "start"))
    scale = given["attributes"]["scale"]
    n, h, d = q.shape
    p, _ = attention._probabilities(q, k, start, np.arange(1, n + 1), scale)
    spread = lambda x: np.abs(attention._spread(x, h))  # noqa: E731
    do_h, q_h = np.abs(do).transpose(1, 0, 2), np.abs(q).transpose(1, 0, 2)
    dp = do_h @ spread(v).transpose(0, 2, 1) + np.abs(do * o).sum(axis=-1).T[..., None]
    score = 1 + scale * np.abs(q).sum(axis=-1).max(initial=0.0) * np.abs(k).max(initial=0.0)
    smallest = np.where(p > 0, given["smallest"], 0.0)
    ds, p = np.maximum(scale * p * dp, smallest), np.maximum(p, smallest)
    group = (k.shape[1], h // k.shape[1], n, d)
    dq = (ds @ spread(k)).transpose(1, 0, 2)
    dk = (ds.transpose(0, 2, 1) @ q_h).reshape(group).sum(axis=1).transpose(1, 0, 2)
    dv = (p.transpose(0, 2, 1) @ do_h).reshape(group).sum(axis=1).transpose(1, 0, 2)
    return dq * score, dk * score, dv * score


def loss_magnitude(case: Case, given: Arrays) -> tuple[Any, ...]:
    logits = given["+logits"] if "+logits" in given else given["logits"]
    largest = np.abs(logits).max(axis=-1, initial=0.0)
    total = np.abs(given["+loss"]) + (2 * largest + np.log(logits.shape[-1])).sum()
    if "+logits" not in given:
        return (total,)
    p = np.exp(logits - loss._log_sum_exp(logits))
    return total, np.abs(given["loss_scale"]) * (p * (1 + largest[:, None]) + 2.0**-20)


def adamw_magnitude(case: Case, given: Arrays) -> tuple[Any, ...]:
    lr = given["hyper"][0]
    return (
        np.abs(given["+param"]) + 20 * lr,
        np.abs(given["+first"]) + 1,
        np.abs(given["+second"]) + 1,
    )


def hyper(rng: np.random.Generator, d: Dims, live: int, given: Arrays) -> Arrays:
    values = [
        1e-2,
        0.9,
        0.999,
        1e-8,
        0.01,
        rng.choice([0.0, 1.0]),
        1 - 0.9**3,
        1 - 0.999**3,
        1 / rng.integers(1, 99),
    ]
    special = {"hyper": np.array(values)}
    if "loss" in given:
        special["loss"] = np.array([rng.choice([3.0, np.inf, np.nan], p=[0.6, 0.2, 0.2])])
    if "norm" in given:
        special["norm"] = np.array([rng.choice([0.3, 5.0, np.inf])])
        special["+second"] = np.abs(given["+second"])
    return special


def integers(**ranges: Callable[[dict[str, Any]], tuple[int, int]]) -> Callable[..., Arrays]:
    def special(rng: np.random.Generator, d: Dims, live: int, given: Arrays) -> Arrays:
        return {name: rng.integers(*limits(d), d["n"]) for name, limits in ranges.items()}

    return special


def dropout_inputs(rng: np.random.Generator, d: Dims, live: int, given: Arrays) -> Arrays:
    n = d["n"]
    return {
        "document": rng.integers(0, 50, n),
        "position": rng.integers(0, 5000, n),
        "key": rng.integers(-(2**31), 2**31, 2),
    }


def logits_inputs(rng: np.random.Generator, d: Dims, live: int, given: Arrays) -> Arrays:
    return {
        "target": rng.integers(0, d["v"], d["n"]),
        "loss_scale": np.array([rng.choice([1.0, 128.0])]),
    }


def edges(name: str) -> Callable[..., Arrays]:
    """Values among which are halfway cases, subnormal and infinite ones of float16, and no
    numbers."""

    def special(rng: np.random.Generator, d: Dims, live: int, given: Arrays) -> Arrays:
        x = given[name] * 2.0 ** rng.integers(-30, 20, given[name].shape)
        halfway = x.astype(np.float32).view(np.uint32) & 0xFFFF0000 | 0x8000
        half16 = x.astype(np.float32).view(np.uint32) & 0xFFFFE000 | 0x1000
        not_a_number = np.full(x.shape, 0x7FFFFFFF, np.uint32)
        kinds = [
            x,
            *(bits.view(np.float32).astype(np.float64) for bits in (halfway, half16, not_a_number)),
        ]
        return {name: np.choose(rng.choice(4, x.shape, p=[0.4, 0.3, 0.28, 0.02]), kinds)}

    return special


def cache_rows(rng: np.random.Generator, d: Dims, live: int, given: Arrays) -> Arrays:
    return {"row": rng.permutation(d["m"])[: d["n"]]}


def eps(draw: Any) -> dict[str, float]:
    return {"eps": draw(st.sampled_from([1e-5, 1e-6]))}


def score_scale(draw: Any) -> dict[str, float]:
    return {"scale": draw(st.sampled_from([0.125, 0.3]))}


def dropout_attributes(draw: Any) -> dict[str, float]:
    return {"rate": draw(st.sampled_from([0.05, 0.5])), "stream": draw(st.integers(0, 500))}


CASES = [
    Case(
        gemm.lora_down,
        plain("nc", s=st.sampled_from([1, 4, 16, 17, 48, 64])),
        terms=lambda d: d["c"],
    ),
    Case(gemm.lora_linear, linear_dims, absent=linear_absent, terms=lambda d: d["c"] + d["s"]),
    Case(
        gemm.lora_swiglu,
        swiglu_dims,
        absent=without_adapter("u", "b_gate", "b_up"),
        terms=lambda d: d["c"] + d["s"],
    ),
    Case(gemm.lora_up_backward, linear_backward_dims, terms=lambda d: max(d["o"])),
    Case(
        gemm.lora_linear_backward,
        linear_backward_dims,
        absent=without_adapter("v", "a"),
        terms=lambda d: sum(d["o"]) + d["s"],
    ),
    Case(
        gemm.lora_swiglu_backward,
        plain("ncf", s=rank),
        absent=without_adapter("v", "a"),
        terms=lambda d: d["c"] + d["s"],
    ),
    Case(
        gemm.lora_a_grad,
        plain("nc", s=st.sampled_from([1, 4, 16, 17, 48, 64])),
        terms=lambda d: d["n"],
    ),
    Case(gemm.lora_b_grad, linear_dims, terms=lambda d: d["n"]),
    Case(
        pointwise.embedding,
        plain("nvc"),
        special=lambda *given: integers(ids=lambda d: (0, d["v"]))(*given) | edges("table")(*given),
        exact=True,
    ),
    Case(pointwise.gather_rows, plain("tnc"), special=integers(index=lambda d: (-1, d["t"]))),
    Case(pointwise.cast, plain("", p=long), special=edges("x"), exact=True),
    Case(pointwise.zero, plain("", p=long)),
    Case(pointwise.swiglu, plain("n", f=deep)),
    Case(pointwise.swiglu_backward, plain("n", f=deep)),
    Case(
        pointwise.rope_table,
        plain("np"),
        special=integers(position=lambda d: (0, 9000)),
        attributes=lambda draw: {"scale": draw(st.sampled_from([1.0, 1.3]))},
        magnitude=lambda case, given: (
            (np.ones((len(given["position"]), len(given["inv_freq"]))),) * 2
        ),
    ),
    Case(
        pointwise.rope,
        lambda draw: (lambda d: {**d, "p": d["d"] // 2})(heads_dims(draw)),
        attributes=lambda draw: {"sign": draw(st.sampled_from([1.0, -1.0]))},
        magnitude=rope_magnitude,
    ),
    Case(pointwise.dropout, plain("nc"), special=dropout_inputs, attributes=dropout_attributes),
    Case(
        pointwise.dropout_backward,
        plain("nc"),
        special=dropout_inputs,
        attributes=dropout_attributes,
    ),
    Case(norm.rms_norm, plain("nc"), attributes=eps, terms=lambda d: d["c"]),
    Case(
        norm.rms_norm_backward,
        plain("nc"),
        special=norm_statistics,
        magnitude=norm_backward_magnitude,
        absent=without_adapter("residual"),
        terms=lambda d: d["c"],
    ),
    Case(norm.head_norm, heads_dims, attributes=eps, terms=lambda d: d["d"]),
    Case(
        norm.head_norm_backward,
        heads_dims,
        special=norm_statistics,
        magnitude=norm_backward_magnitude,
        terms=lambda d: d["d"],
    ),
    Case(
        attention.attention,
        attention_dims,
        special=key_ranges,
        attributes=score_scale,
        magnitude=attention_magnitude,
        terms=lambda d: d["m"] + d["d"],
        rounds_inside=True,
    ),
    Case(
        attention.attention_backward,
        attention_backward_dims,
        special=forward_results,
        attributes=score_scale,
        magnitude=attention_backward_magnitude,
        terms=lambda d: d["n"] * d["h"] + d["d"],
        rounds_inside=True,
    ),
    Case(attention.cache_write, attention_dims, special=cache_rows),
    Case(
        loss.cross_entropy,
        plain("n", v=deep),
        special=logits_inputs,
        magnitude=loss_magnitude,
        terms=lambda d: d["v"] + d["n"],
        scale={"+logits": 4.0},
    ),
    Case(
        loss.cross_entropy_loss,
        plain("n", v=deep),
        special=logits_inputs,
        magnitude=loss_magnitude,
        terms=lambda d: d["v"] + d["n"],
        scale={"logits": 4.0},
    ),
    Case(optimizer.gradient_norm, plain("", p=long), special=hyper, terms=lambda d: d["p"]),
    Case(
        optimizer.adamw,
        plain("", p=long),
        special=hyper,
        magnitude=adamw_magnitude,
        terms=lambda d: 16,
    ),
]
CASE = {case.op.name: case for case in CASES}


def allowance(
    case: Case,
    given: Arrays,
    reference: tuple[Any, ...],
    activation: DType,
    types: list[DType],
    rounds: bool,
) -> list[Any]:
    """How far each output may be from the reference. `rounds`: this kernel rounds what it forms
    inside, even if not all for this op do."""
    smallest = float(finfo(activation.numpy).smallest_normal)
    magnitudes = (case.magnitude or absolute)(case, {**given, "smallest": smallest})
    inside = F32.eps * (4 * np.sqrt(case.terms(given["dims"])) + 4)
    if case.rounds_inside or rounds:
        inside += activation.eps

    def bound(exact: Any, magnitude: Any, dtype: DType) -> Any:
        if isinstance(exact, list):
            return [bound(e, m, dtype) for e, m in zip(exact, magnitude, strict=True)]
        normal = np.maximum(np.abs(exact), float(finfo(dtype.numpy).smallest_normal))
        return dtype.eps / 2 * normal + inside * np.abs(magnitude)

    return [bound(e, m, t) for e, m, t in zip(reference, magnitudes, types, strict=True)]
