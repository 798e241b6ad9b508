"""Rotary position embeddings: what config.json says about them, and the frequencies that follow.

Pair i of a head of d elements is turned by position * frequency[i]. The plain frequencies are those
of RoFormer (arXiv:2104.09864); the other types slow some pairs down, so that positions beyond those
of pre-training give angles that pre-training saw.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from krnl.models.fields import Fields

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. Parameters that `kind` does not use keep their neutral values."""

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def frequencies(self, d: int) -> tuple[np.ndarray, float]:
        """Radians per position for each pair, float64[d / 2], and the factor on cos and sin.

        default  theta^(-2i/d)
        linear   default / factor                                 (arXiv:2306.15595)
        llama3   by turns of a pair over the original positions: at least high_freq_factor, kept;
                 at most low_freq_factor, divided by factor; between, a blend linear in the turns
                 (Llama 3.1 reference model, which says the same in wavelengths)
        yarn     by pair index: kept up to the pair that turns beta_fast times, divided by factor
                 from the one that turns beta_slow times, linear between
                 (arXiv:2309.00071, section 3.2)
        """
        i = np.arange(d // 2, dtype=np.float64)
        plain = self.theta ** (-2 * i / d)
        if self.kind == "default":
            return plain, 1.0
        if self.kind == "linear":
            return plain / self.factor, 1.0
        if self.kind == "llama3":
            turns = self.original_positions * plain / (2 * math.pi)
            kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        else:
            first, last = (
                self._turning_pair(d, self.beta_fast),
                self._turning_pair(d, self.beta_slow),
            )
            if self.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, d - 1)
            # Equal bounds would divide 0 by 0; this width makes them a step, as in transformers.
            kept = 1 - (i - first) / (last - first if last != first else 1e-3)
        kept = np.clip(kept, 0, 1)
        return plain * (kept + (1 - kept) / self.factor), self.attention_factor

    def _turning_pair(self, d: int, turns: float) -> float:
        """The fractional index i of the pair that turns so often over the original positions."""
        length = math.log(self.original_positions / (turns * 2 * math.pi))
        return d * length / (2 * math.log(self.theta))


def parse_rope(fields: Fields, default_theta: float, max_positions: int) -> Rope:
    """The rope of a config.json; ConfigError for a type or parameter that KRNL does not know."""
    content = {
        "rope_theta": fields.take("rope_theta", default_theta),
        "partial_rotary_factor": fields.take("partial_rotary_factor", 1.0),
        **_parameters(fields),
    }
    original = fields.take("original_max_position_embeddings")
    if original is not None:
        # This one wins over the parameters' own, and rope_theta does not: transformers has it so.
        content["original_max_position_embeddings"] = original
    rope = Fields(content, f"{fields.where}: rope parameters")
    kind = rope.take("rope_type", rope.take("type", "default"))
    if kind not in KINDS:
        raise rope.error("rope_type", kind, f"KRNL knows {', '.join(KINDS)}")
    if rope.take("type", kind) != kind:
        raise rope.error("type", content["type"], f"rope_type says {kind}")
    partial, theta = rope.number("partial_rotary_factor"), rope.number("rope_theta")
    if partial != 1:
        raise rope.error("partial_rotary_factor", partial, "KRNL rotates whole heads")
    if theta <= 1:
        raise rope.error("rope_theta", theta, "it must be above 1")
    length = rope.count("original_max_position_embeddings", max_positions)
    if kind == "yarn":
        result = _yarn(rope, theta, length, max_positions)
    elif kind == "llama3":
        result = _llama3(rope, theta, length)
    else:
        result = Rope(theta, kind, rope.number("factor") if kind == "linear" else 1.0)
    rope.refuse_rest()
    return result


def _parameters(fields: Fields) -> dict[str, Any]:
    """rope_parameters or rope_scaling. KRNL has one rope per model, so layer types must agree."""
    found = {}
    for key in ("rope_parameters", "rope_scaling"):
        value = fields.take(key, {})
        if not isinstance(value, dict):
            raise fields.error(key, value, "it must be an object")
        nested = [value[kind] for kind in ("full_attention", "sliding_attention") if kind in value]
        if nested:
            if len(nested) < len(value) or nested[0] != nested[-1] or type(nested[0]) is not dict:
                raise fields.error(key, value, "KRNL has one rope for all layers")
            value = nested[0]
        if value:
            found[key] = value
    if len(found) == 2 and found["rope_parameters"] != found["rope_scaling"]:
        raise fields.error("rope_scaling", found["rope_scaling"], "rope_parameters contradicts it")
    return dict(next(iter(found.values()), {}))


def _llama3(rope: Fields, theta: float, length: int) -> Rope:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", high, f"it must be above low_freq_factor, {low}")
    factor = rope.number("factor")
    return Rope(theta, "llama3", factor, length, low_freq_factor=low, high_freq_factor=high)


def _yarn(rope: Fields, theta: float, length: int, max_positions: int) -> Rope:
    factor = rope.number("factor", max_positions / length)
    growth = 0.1 * math.log(max(factor, 1.0))  # arXiv:2309.00071, section 3.4
    attention = 1 + growth
    if rope.take("mscale") and rope.take("mscale_all_dim"):
        attention = 1 + rope.number("mscale") * growth
        attention /= 1 + rope.number("mscale_all_dim") * growth
    return Rope(
        theta,
        "yarn",
        factor,
        length,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", attention),
    )
