"""The self-attention block: grouped heads, rotary positions, documents and windows; with a cache
for generation."""

from dataclasses import dataclass

from krnl.models.config import ModelConfig
from krnl.models.lora import Dropout, LoraGroup
from krnl.ops.attention import attention, attention_backward, cache_write
from krnl.ops.norm import head_norm, head_norm_backward, rms_norm, rms_norm_backward
from krnl.ops.pointwise import rope
from krnl.plan.buffer import Buffer
from krnl.plan.step import Step


@dataclass(frozen=True)
class Context:
    """What the layers of a pass share: rotary tables, which keys each token sees, dropout in front
    of adapters."""

    cos: Buffer
    sin: Buffer
    start: Buffer
    stop: Buffer
    noise: Dropout | None


@dataclass(frozen=True)
class Cache:
    """Keys and values of one layer, and the row that each new token takes."""

    k: Buffer
    v: Buffer
    row: Buffer


@dataclass(frozen=True)
class HeadSaved:
    """A query or key projection on its way to attention: before and after the per-head norm and the
    rotation."""

    raw: Buffer
    rstd: Buffer | None
    turned: Buffer


@dataclass(frozen=True)
class AttentionSaved:
    """What the backward pass needs."""

    x: Buffer
    rstd: Buffer
    q: HeadSaved
    k: HeadSaved
    v: Buffer
    o: Buffer
    lse: Buffer
    qkv_u: Buffer | None
    o_u: Buffer | None


class Attention:
    """y = x + o_proj(attention(q, k, v)) with q, k, v projected from rms_norm(x)."""

    def __init__(
        self,
        config: ModelConfig,
        norm: Buffer,
        qkv: LoraGroup,
        o: LoraGroup,
        head_norms: tuple[Buffer, Buffer] | tuple[None, None],
        rotary: bool,
    ):
        self.config = config
        self.norm = norm
        self.qkv = qkv
        self.o = o
        self.q_norm: Buffer | None = head_norms[0]
        self.k_norm: Buffer | None = head_norms[1]
        self.rotary = rotary
        self.scale = config.head_dim**-0.5

    def forward(
        self, step: Step, x: Buffer, at: Context, cache: Cache | None = None
    ) -> tuple[Buffer, AttentionSaved]:
        h, rstd = step(rms_norm, x, self.norm, eps=self.config.rms_norm_eps)
        (q, k, v), u = self.qkv.forward(step, h, at.noise)
        q_saved = self._turn(step, q.heads(self.config.heads), self.q_norm, at)
        k_saved = self._turn(step, k.heads(self.config.kv_heads), self.k_norm, at)
        v = v.heads(self.config.kv_heads)
        keys, values = k_saved.turned, v
        if cache is not None:
            keys = step(cache_write, keys, cache.row, into=cache.k)
            values = step(cache_write, values, cache.row, into=cache.v)
        o, lse = step(attention, q_saved.turned, keys, values, at.start, at.stop, scale=self.scale)
        (y,), o_u = self.o.forward(step, o.flat(), at.noise, residual=x)
        saved = AttentionSaved(x, rstd, q_saved, k_saved, v, o, lse, u, o_u)
        step.save(x, rstd, q_saved.turned, k_saved.turned, v, o, lse)
        if self.q_norm is not None:
            step.save(q_saved.raw, q_saved.rstd, k_saved.raw, k_saved.rstd)
        return y, saved

    def backward(
        self, step: Step, dy: Buffer, s: AttentionSaved, at: Context, wanted: bool
    ) -> Buffer | None:
        """The gradient at x, or None when nothing below is trained (not `wanted`)."""
        v_o = self.o.up_backward(step, (dy,), s.o_u)
        do = self.o.input_gradient(step, (dy,), v_o, at.noise).heads(self.config.heads)
        self.o.down_backward(step, v_o, s.o.flat(), at.noise)
        dq, dk, dv = step(
            attention_backward,
            do,
            s.q.turned,
            s.k.turned,
            s.v,
            s.o,
            s.lse,
            at.start,
            scale=self.scale,
        )
        dqkv = (
            self._turn_back(step, dq, s.q, self.q_norm, at).flat(),
            self._turn_back(step, dk, s.k, self.k_norm, at).flat(),
            dv.flat(),
        )
        v_qkv = self.qkv.up_backward(step, dqkv, s.qkv_u)
        h = None
        if v_qkv is not None:
            h, _ = step(rms_norm, s.x, self.norm, eps=self.config.rms_norm_eps)
        dh = self.qkv.input_gradient(step, dqkv, v_qkv, at.noise) if wanted else None
        if h is not None:
            self.qkv.down_backward(step, v_qkv, h, at.noise)
        if dh is None:
            return None
        dx: Buffer = step(rms_norm_backward, dh, s.x, self.norm, s.rstd, dy)
        return dx

    def _turn(self, step: Step, x: Buffer, norm: Buffer | None, at: Context) -> HeadSaved:
        """The per-head norm (where the family has one), then the rotation (where the layer has
        one)."""
        normed, rstd = (
            (x, None) if norm is None else step(head_norm, x, norm, eps=self.config.rms_norm_eps)
        )
        turned = step(rope, normed, at.cos, at.sin, sign=1.0) if self.rotary else normed
        return HeadSaved(x, rstd, turned)

    def _turn_back(
        self, step: Step, dx: Buffer, s: HeadSaved, norm: Buffer | None, at: Context
    ) -> Buffer:
        if self.rotary:
            dx = step(rope, dx, at.cos, at.sin, sign=-1.0)
        if norm is not None:
            dx = step(head_norm_backward, dx, s.raw, norm, s.rstd)
        return dx
