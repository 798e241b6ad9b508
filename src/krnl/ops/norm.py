"""RMS normalisation (Zhang & Sennrich 2019), of whole rows and of single heads."""

import numpy as np

from krnl.plan.op import op, product


def _forward(x, w, eps):
    rstd = (np.mean(x * x, axis=-1) + eps) ** -0.5
    return x * rstd[..., None] * w, rstd


def _backward(dy, x, w, rstd):
    x_hat, g = x * rstd[..., None], dy * w
    return rstd[..., None] * (g - x_hat * np.mean(g * x_hat, axis=-1, keepdims=True))


@op("x[n,c] w[c]:f32 live -> y[n,c] rstd[n]:f32", flops=lambda d: 4 * product(d, "n", "c"))
def rms_norm(x, w, *, eps):
    """y = x · rstd ∘ w with rstd = 1/√(mean(x²) + eps) of each row."""
    return _forward(x, w, eps)


@op(
    "dy[n,c] x[n,c] w[c]:f32 rstd[n]:f32 residual[n,c]? live -> dx[n,c]",
    flops=lambda d: 8 * product(d, "n", "c"),
)
def rms_norm_backward(dy, x, w, rstd, residual):
    """dx = rstd (g - x̂ mean(g ∘ x̂)) + residual, with x̂ = x · rstd and g = dy ∘ w."""
    dx = _backward(dy, x, w, rstd)
    return dx if residual is None else dx + residual


@op(
    "x[n,h,d] w[d]:f32 live -> y[n,h,d] rstd[n,h]:f32",
    flops=lambda d: 4 * product(d, "n", "h", "d"),
)
def head_norm(x, w, *, eps):
    """`rms_norm` of every head by itself, one weight for all of them."""
    return _forward(x, w, eps)


@op(
    "dy[n,h,d] x[n,h,d] w[d]:f32 rstd[n,h]:f32 live -> dx[n,h,d]",
    flops=lambda d: 8 * product(d, "n", "h", "d"),
)
def head_norm_backward(dy, x, w, rstd):
    """Gradient of `head_norm` to x."""
    return _backward(dy, x, w, rstd)
