"""Attention over packed rows, with grouped key and value heads, documents, windows and caches.

Query i sees keys start[i] ≤ j < stop[i]; which document a token belongs to, how far a window
reaches and where a sequence lies in a cache are all said by these two numbers."""

import numpy as np

from krnl.plan.op import Dims, op, product


def _visible(d: Dims) -> int:
    """Pairs of a query and a key that it sees: as told, else half of the square."""
    return int(d.get("visible", d["n"] * d.get("m", d["n"]) // 2))


def _seen(d: Dims) -> dict[str, int]:
    """Keys and values that a query sees: never more than there are visible pairs."""
    elements = min(d["m"], d.get("visible", d["m"])) * product(d, "g", "d")
    return {"k": elements, "v": elements}


def _spread(x, heads):
    """[m, g, d] -> [h, m, d]: each key or value head serves heads/g query heads."""
    return np.repeat(x, heads // x.shape[1], axis=1).transpose(1, 0, 2)


def _probabilities(q, k, start, stop, scale):
    """Softmax of the visible scores [h, n, m] and their log-sum-exp [h, n]."""
    scores = scale * (q.transpose(1, 0, 2) @ _spread(k, q.shape[1]).transpose(0, 2, 1))
    key = np.arange(k.shape[0])
    scores = np.where((key >= start[:, None]) & (key < stop[:, None]), scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    exp = np.exp(scores - top)
    total = exp.sum(axis=-1, keepdims=True)
    return exp / total, (top + np.log(total))[..., 0]


@op(
    "q[n,h,d] k[m,g,d] v[m,g,d] start[n]:i32 stop[n]:i32 live -> o[n,h,d] lse[n,h]:f32",
    flops=lambda d: 4 * _visible(d) * product(d, "h", "d"),
    moved=_seen,
)
def attention(q, k, v, start, stop, *, scale):
    """o = softmax(scale · q kᵀ) v over the visible keys; lse is the log of the softmax's
    denominator."""
    seen = int(stop.max(initial=0))
    p, lse = _probabilities(q, k[:seen], start, stop, scale)
    return (p @ _spread(v[:seen], q.shape[1])).transpose(1, 0, 2), lse.T


@op(
    "do[n,h,d] q[n,h,d] k[n,g,d] v[n,g,d] o[n,h,d] lse[n,h]:f32 start[n]:i32 live -> dq[n,h,d] "
    "dk[n,g,d] dv[n,g,d]",
    flops=lambda d: 10 * _visible(d) * product(d, "h", "d"),
)
def attention_backward(do, q, k, v, o, lse, start, *, scale):
    """Gradients of `attention` with stop[i] = i + 1 and start never decreasing. dP = dO Vᵀ, dS = P
    ∘ (dP - rowsum(dO ∘ O)) · scale, dQ = dS K, dK = dSᵀ Q, dV = Pᵀ dO (Dao et al. 2022, B.2)."""
    n, h, d = q.shape
    p, _ = _probabilities(q, k, start, np.arange(1, n + 1), scale)
    do_h, q_h = do.transpose(1, 0, 2), q.transpose(1, 0, 2)
    dp = do_h @ _spread(v, h).transpose(0, 2, 1)
    ds = scale * p * (dp - (do * o).sum(axis=-1).T[..., None])
    dq = (ds @ _spread(k, h)).transpose(1, 0, 2)
    group = (k.shape[1], h // k.shape[1], n, d)
    dk = (ds.transpose(0, 2, 1) @ q_h).reshape(group).sum(axis=1).transpose(1, 0, 2)
    dv = (p.transpose(0, 2, 1) @ do_h).reshape(group).sum(axis=1).transpose(1, 0, 2)
    return dq, dk, dv


@op(
    "x[n,g,d] row[n]:i32 live -> +cache[m,g,d]",
    moved=lambda d: {"cache": product(d, "n", "g", "d")},
)
def cache_write(x, row, cache):
    """Puts row i of x into row row[i] of the cache."""
    cache = cache.copy()
    cache[row] = x
    return cache
