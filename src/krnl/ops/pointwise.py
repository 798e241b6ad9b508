"""Row-wise and element-wise ops: embedding, gather, casts, activation, rotary positions,
dropout."""

import numpy as np

from krnl.plan.op import Dims, op, product


def sigmoid(x):
    """1 / (1 + exp(-x)), without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def silu(x):
    """x · sigmoid(x)."""
    return x * sigmoid(x)


def silu_gradient(x):
    """The derivative of silu: σ(x) (1 + x (1 - σ(x)))."""
    s = sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


def _taken(d: Dims, rows: str) -> int:
    """Different rows that are read of a table of so many: as told, else one for each index."""
    return int(d.get("taken", min(d["n"], d[rows])))


@op(
    "ids[n]:i32 table[v,c] live -> x[n,c]",
    moved=lambda d: {"table": _taken(d, "v") * d["c"]},
    gathered="table",
)
def embedding(ids, table):
    """Rows of the table."""
    return table[ids]


@op(
    "x[t,c] index[n]:i32 live -> y[n,c]",
    moved=lambda d: {"x": _taken(d, "t") * d["c"]},
    gathered="x",
)
def gather_rows(x, index):
    """Row index[i] of x; zeros where index[i] is -1. With the inverse index it is its own
    backward."""
    return np.where(index[:, None] >= 0, x[index], 0.0)


@op("x[p] -> y[p]:any")
def cast(x):
    """The same values in another element type."""
    return x


@op("-> +x[p]:f32", moved=lambda d: {"x": d["p"]})  # written, not read
def zero(x):
    """Zeros."""
    return np.zeros_like(x)


@op("gate[n,f] up[n,f] live -> act[n,f]", flops=lambda d: 5 * product(d, "n", "f"))
def swiglu(gate, up):
    """silu(gate) ∘ up (Shazeer 2020)."""
    return silu(gate) * up


@op(
    "dact[n,f] gate[n,f] up[n,f] live -> dgate[n,f] dup[n,f] act[n,f]",
    flops=lambda d: 12 * product(d, "n", "f"),
)
def swiglu_backward(dact, gate, up):
    """Gradients of `swiglu`, and act once more for the down projection's own adapter."""
    return dact * up * silu_gradient(gate), dact * silu(gate), silu(gate) * up


@op("position[n]:i32 inv_freq[p]:f32 live -> cos[n,p]:f32 sin[n,p]:f32")
def rope_table(position, inv_freq, *, scale):
    """scale · cos and sin of position · inv_freq (Su et al. 2024; scale is YaRN's attention factor,
    else 1)."""
    angle = position[:, None] * inv_freq
    return scale * np.cos(angle), scale * np.sin(angle)


@op(
    "x[n,h,d] cos[n,p]:f32 sin[n,p]:f32 live -> y[n,h,d]",
    flops=lambda d: 3 * product(d, "n", "h", "d"),
)
def rope(x, cos, sin, *, sign):
    """Rotates the pairs (x[j], x[j + d/2]) by sign · angle: sign 1 forward, -1 backward. The two
    halves of a head are paired as in checkpoints of the Llama family."""
    a, b = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None, :], sign * sin[:, None, :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def philox(counter, key):
    """Philox4x32-10 (Salmon et al. 2011): four random words for each of N counters.
    counter: uint32 [N, 4]; key: two words. Returns uint32 [N, 4]."""
    c = [counter[:, i].astype(np.uint64) for i in range(4)]
    k0, k1 = int(key[0]) & 0xFFFFFFFF, int(key[1]) & 0xFFFFFFFF
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (b >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            b & low,
            (a >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            a & low,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, axis=1).astype(np.uint32)


def _keep(document, position, key, width, rate, stream):
    """Which of [n, width] elements survive: the random word of (column, position, document, stream)
    under the key is at least rate · 2³². The place of a token in a pass plays no part."""
    blocks = -(-width // 4)
    counter = np.empty((len(document), blocks, 4), np.uint32)
    counter[..., 0] = np.arange(blocks)
    counter[..., 1] = np.asarray(position, np.uint32)[:, None]
    counter[..., 2] = np.asarray(document, np.uint32)[:, None]
    counter[..., 3] = int(stream)
    words = philox(counter.reshape(-1, 4), key).reshape(len(document), 4 * blocks)
    return words[:, :width] >= np.uint32(round(rate * 2.0**32))


@op("x[n,c] document[n]:i32 position[n]:i32 key[2]:i32 live -> y[n,c]")
def dropout(x, document, position, key, *, rate, stream):
    """x / (1 - rate) where kept, else 0. The mask is drawn again wherever it is needed, never
    stored."""
    return x * _keep(document, position, key, x.shape[1], rate, stream) / (1.0 - rate)


@op("dy[n,c] document[n]:i32 position[n]:i32 key[2]:i32 residual[n,c] live -> dx[n,c]")
def dropout_backward(dy, document, position, key, residual, *, rate, stream):
    """residual + the gradient through `dropout` with the same key and stream."""
    return residual + dy * _keep(document, position, key, dy.shape[1], rate, stream) / (1.0 - rate)
