"""Matrix products of LoRA layers (Hu et al. 2022: y = x Wᵀ + s (x Aᵀ) Bᵀ, W frozen, A and B
trained).

Projections that share an input form a group (q, k, v; gate, up). Their A are stacked, so one narrow
product u = (x Aᵀ) ∘ scale serves the group; `scale` holds each projection's s, once per row of A. A
member without an adapter has rank 0. The adapter's share is never a pass of its own: the K loop of
the wide product runs on over (u, B) forward and over (v, A) backward, where v = (dy B) ∘ scale."""

import numpy as np

from krnl.ops.pointwise import silu, swiglu_backward
from krnl.plan.op import Dims, op, product, sizes


def _columns(members):
    """Column ranges of the members of a group inside u or v."""
    stops = np.cumsum([b.shape[1] for b in members])
    return [slice(stop - b.shape[1], stop) for b, stop in zip(members, stops, strict=True)]


def _linear_flops(d: Dims) -> int:
    wide = sum(sizes(d, "o"))
    adapters = sum(o * r for o, r in zip(sizes(d, "o"), sizes(d, "r"), strict=False))
    return int(2 * d["n"] * (wide * d["c"] + adapters))


def _adapted(d: Dims) -> dict[str, int]:
    """The gradient of a member without an adapter is not read."""
    pairs = zip(sizes(d, "o"), sizes(d, "r"), strict=True)
    return {"dy": int(d["n"] * sum(o for o, r in pairs if r))}


@op("x[n,c] a[s,c] scale[s]:f32 live -> u[n,s]", flops=lambda d: 2 * product(d, "n", "c", "s"))
def lora_down(x, a, scale):
    """u = (x Aᵀ) ∘ scale, for a whole group."""
    return (x @ a.T) * scale


@op(
    "x[n,c] w*[o,c] u[n,s]? b*[o,r]? bias*[o]:f32? residual[n,o]? live -> y*[n,o]:any",
    flops=_linear_flops,
)
def lora_linear(x, w, u, b, bias, residual):
    """y_i = x W_iᵀ + u_i B_iᵀ + bias_i + residual, where u_i are the member's columns of u."""
    y = [x @ member.T for member in w]
    if b is not None:
        y = [t + u[:, c] @ member.T for t, member, c in zip(y, b, _columns(b), strict=True)]
    if bias is not None:
        y = [t + member for t, member in zip(y, bias, strict=True)]
    if residual is not None:
        y = [t + residual for t in y]
    return y


@op(
    "x[n,c] w_gate[f,c] w_up[f,c] u[n,s]? b_gate[f,p]? b_up[f,q]? live -> gate[n,f] up[n,f] "
    "act[n,f]",
    flops=lambda d: 2 * product(d, "n", "f") * (2 * d["c"] + d.get("p", 0) + d.get("q", 0)),
)
def lora_swiglu(x, w_gate, w_up, u, b_gate, b_up):
    """gate and up projections with their adapters, and act = silu(gate) ∘ up (Shazeer 2020)."""
    gate, up = x @ w_gate.T, x @ w_up.T
    if b_gate is not None:
        at_gate, at_up = _columns([b_gate, b_up])
        gate, up = gate + u[:, at_gate] @ b_gate.T, up + u[:, at_up] @ b_up.T
    return gate, up, silu(gate) * up


@op(
    "dy*[n,o] b*[o,r] scale[s]:f32 live -> v[n,s]",
    flops=lambda d: (
        2 * d["n"] * sum(o * r for o, r in zip(sizes(d, "o"), sizes(d, "r"), strict=True))
    ),
    moved=_adapted,
)
def lora_up_backward(dy, b, scale):
    """v = (dy_i B_i, side by side) ∘ scale: the gradient at x Aᵀ."""
    return np.concatenate([t @ member for t, member in zip(dy, b, strict=True)], axis=1) * scale


@op(
    "dy*[n,o] w*[o,c] v[n,s]? a[s,c]? live -> dx[n,c]",
    flops=lambda d: 2 * product(d, "n", "c") * (sum(sizes(d, "o")) + d.get("s", 0)),
)
def lora_linear_backward(dy, w, v, a):
    """dx = Σ dy_i W_i + v A, one product whose K runs over every pair."""
    dx = sum(t @ member for t, member in zip(dy, w, strict=True))
    return dx if a is None else dx + v @ a


@op(
    "dy[n,c] w[c,f] v[n,s]? a[s,f]? gate[n,f] up[n,f] live -> dgate[n,f] dup[n,f] act[n,f]",
    flops=lambda d: 2 * product(d, "n", "f") * (d["c"] + d.get("s", 0)),
)
def lora_swiglu_backward(dy, w, v, a, gate, up):
    """Backward of the down projection and of SwiGLU in one: dact = dy W + v A, then dgate and dup.
    act is formed again for the down projection's own adapter gradient."""
    dact = dy @ w if a is None else dy @ w + v @ a
    return swiglu_backward.reference(dact, gate, up)


@op("v[n,s] x[n,c] live -> +da[s,c]:f32", flops=lambda d: 2 * product(d, "n", "s", "c"))
def lora_a_grad(v, x, da):
    """dA += vᵀ x, for a whole group."""
    return da + v.T @ x


@op(
    "dy*[n,o] u[n,s] live -> +db*[o,r]:f32",
    flops=lambda d: (
        2 * d["n"] * sum(o * r for o, r in zip(sizes(d, "o"), sizes(d, "r"), strict=True))
    ),
    moved=_adapted,
)
def lora_b_grad(dy, u, db):
    """dB_i += dy_iᵀ u_i."""
    return [g + t.T @ u[:, c] for g, t, c in zip(db, dy, _columns(db), strict=True)]
