"""Cross-entropy over rows of logits."""

import numpy as np

from krnl.plan.op import op, product


def _log_sum_exp(logits):
    top = logits.max(axis=-1, keepdims=True)
    return top + np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


def _losses(logits, target):
    return _log_sum_exp(logits)[:, 0] - logits[np.arange(len(target)), target]


@op(
    "target[n]:i32 loss_scale[1]:f32 live -> +loss[1]:f32 +logits[n,v]",
    flops=lambda d: 6 * product(d, "n", "v"),
)
def cross_entropy(target, loss_scale, loss, logits):
    """loss += Σ (log Σ exp(logits) - logits[target]); logits become loss_scale · (softmax -
    one-hot), the gradient of that sum."""
    gradient = np.exp(logits - _log_sum_exp(logits))
    gradient[np.arange(len(target)), target] -= 1.0
    return loss + _losses(logits, target).sum(), loss_scale * gradient


@op("logits[n,v] target[n]:i32 live -> +loss[1]:f32", flops=lambda d: 4 * product(d, "n", "v"))
def cross_entropy_loss(logits, target, loss):
    """The loss alone."""
    return loss + _losses(logits, target).sum()
