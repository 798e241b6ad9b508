"""One update over the contiguous regions of parameters, gradients and moments.

`hyper[9]` is written by the host before each update and holds, in this order: learning rate, beta1,
beta2, eps, weight decay, clip, 1 - beta1^t, 1 - beta2^t, and what the summed gradients are to be
multiplied by to become the mean over target tokens (1 / tokens, and / loss scale where there is
one)."""

import numpy as np

from krnl.plan.op import op, product

HYPER = (
    "lr",
    "beta1",
    "beta2",
    "eps",
    "weight_decay",
    "clip",
    "correction1",
    "correction2",
    "gradient_scale",
)


@op("grad[p]:f32 loss[1]:f32 hyper[9]:f32 -> norm[1]:f32", flops=lambda d: 2 * product(d, "p"))
def gradient_norm(grad, loss, hyper):
    """The Euclidean norm of the mean gradient; not finite when any gradient or the loss is not."""
    norm = np.sqrt(np.sum((grad * hyper[8]) ** 2))
    return np.array([norm if np.isfinite(loss[0]) else np.inf])


@op(
    "grad[p]:f32 norm[1]:f32 hyper[9]:f32 -> +param[p]:f32 +first[p]:f32 +second[p]:f32",
    flops=lambda d: 14 * product(d, "p"),
)
def adamw(grad, norm, hyper, param, first, second):
    """AdamW (Loshchilov & Hutter 2019, algorithm 2) on the gradient clipped to norm `clip` (0: not
    clipped). Does nothing when the norm is not finite."""
    lr, beta1, beta2, eps, decay, clip, correction1, correction2, scale = hyper
    if not np.isfinite(norm[0]):
        return param, first, second
    shrink = min(1.0, clip / (norm[0] + 1e-6)) if clip > 0 else 1.0
    g = grad * (scale * shrink)
    first = beta1 * first + (1.0 - beta1) * g
    second = beta2 * second + (1.0 - beta2) * g * g
    step = (first / correction1) / (np.sqrt(second / correction2) + eps)
    return param * (1.0 - lr * decay) - lr * step, first, second
