"""Learning rate and the other numbers of an update, as functions of its number."""

import math
from typing import Literal

import numpy as np

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(update: int, updates: int, peak: float, warmup: int, schedule: Schedule) -> float:
    """The rate of update k = 1 … N. The first W updates warm up with peak · k / W; after them, with
    t = (k - 1 - W) / (N - W), the rate is

        constant  peak
        linear    peak · (1 - t)
        cosine    peak · ½ (1 + cos πt)
    """
    if update <= warmup:
        return peak * update / warmup
    t = (update - 1 - warmup) / (updates - warmup)
    if schedule == "linear":
        return peak * (1.0 - t)
    if schedule == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * t))
    return peak


def hyper(
    update: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip: float,
    gradient_scale: float,
) -> np.ndarray:
    """The `hyper` input of ops/optimizer.py for update k: float32 [9], bias corrections worked out
    in double."""
    beta1, beta2 = betas
    corrections = (1.0 - beta1**update, 1.0 - beta2**update)
    return np.array(
        [lr, beta1, beta2, eps, weight_decay, clip, *corrections, gradient_scale], np.float32
    )
