"""The SwiGLU feed-forward block."""

from dataclasses import dataclass

from krnl.models.lora import Dropout, LoraGroup
from krnl.ops.gemm import lora_swiglu, lora_swiglu_backward
from krnl.ops.norm import rms_norm, rms_norm_backward
from krnl.ops.pointwise import swiglu_backward
from krnl.plan.buffer import Buffer
from krnl.plan.step import Step


@dataclass(frozen=True)
class MlpSaved:
    """What the backward pass needs; gate and up are None where they are computed again."""

    x: Buffer
    rstd: Buffer
    gate: Buffer | None
    up: Buffer | None
    gate_up_u: Buffer | None
    down_u: Buffer | None


class Mlp:
    """y = x + down(silu(gate(h)) ∘ up(h)) with h = rms_norm(x)."""

    def __init__(self, norm: Buffer, gate_up: LoraGroup, down: LoraGroup, eps: float):
        self.norm = norm
        self.gate_up = gate_up
        self.down = down
        self.eps = eps

    def forward(
        self, step: Step, x: Buffer, noise: Dropout | None, recompute: bool = False
    ) -> tuple[Buffer, MlpSaved]:
        h, rstd = step(rms_norm, x, self.norm, eps=self.eps)
        u = self.gate_up.down(step, h, noise)
        gate, up, act = step(
            lora_swiglu, h, *self.gate_up.weight, u, *(self.gate_up.b or (None, None))
        )
        (y,), down_u = self.down.forward(step, act, noise, residual=x)
        step.save(x, rstd)
        if recompute:
            return y, MlpSaved(x, rstd, None, None, u, down_u)
        step.save(gate, up)
        return y, MlpSaved(x, rstd, gate, up, u, down_u)

    def backward(self, step: Step, dy: Buffer, s: MlpSaved, noise: Dropout | None) -> Buffer:
        h, _ = step(rms_norm, s.x, self.norm, eps=self.eps)
        gate, up = s.gate, s.up
        if gate is None or up is None:
            gate, up, _ = step(
                lora_swiglu, h, *self.gate_up.weight, s.gate_up_u, *(self.gate_up.b or (None, None))
            )
        dgate, dup = self._down_backward(step, dy, gate, up, s.down_u, noise)
        v = self.gate_up.up_backward(step, (dgate, dup), s.gate_up_u)
        dh = self.gate_up.input_gradient(step, (dgate, dup), v, noise)
        self.gate_up.down_backward(step, v, h, noise)
        dx: Buffer = step(rms_norm_backward, dh, s.x, self.norm, s.rstd, dy)
        return dx

    def _down_backward(
        self,
        step: Step,
        dy: Buffer,
        gate: Buffer,
        up: Buffer,
        u: Buffer | None,
        noise: Dropout | None,
    ) -> tuple[Buffer, Buffer]:
        """Through the down projection and SwiGLU: dgate and dup."""
        v = self.down.up_backward(step, (dy,), u)
        if v is None or noise is None:
            dgate, dup, act = step(
                lora_swiglu_backward, dy, *self.down.weight, v, self.down.a, gate, up
            )
        else:
            dact = self.down.input_gradient(step, (dy,), v, noise)
            dgate, dup, act = step(swiglu_backward, dact, gate, up)
        self.down.down_backward(step, v, act, noise)
        return dgate, dup
