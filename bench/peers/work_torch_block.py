"""The same block in PyTorch, bfloat16. Variant `compiled` uses torch.compile."""

import torch
from protocol import arguments, serve
from torch.nn import functional

TOKENS, WIDTH, FFN, RANK = 512, 2048, 5632, 32

options = arguments()
torch.manual_seed(0)


def drawn(*shape: int, trained: bool = False) -> torch.Tensor:
    return (0.02 * torch.randn(shape)).to(torch.bfloat16).requires_grad_(trained)


gate, up, down = drawn(FFN, WIDTH), drawn(FFN, WIDTH), drawn(WIDTH, FFN)
adapters = [drawn(RANK, WIDTH, trained=True), drawn(FFN, RANK, trained=True)]
adapters += [drawn(RANK, WIDTH, trained=True), drawn(FFN, RANK, trained=True)]
norm = drawn(WIDTH)
x, dy = drawn(TOKENS, WIDTH, trained=True), drawn(TOKENS, WIDTH)


def block(x: torch.Tensor) -> torch.Tensor:
    h = functional.rms_norm(x, (WIDTH,), norm, 1e-5)
    a_gate, b_gate, a_up, b_up = adapters
    g = h @ gate.T + (h @ a_gate.T) @ b_gate.T
    u = h @ up.T + (h @ a_up.T) @ b_up.T
    return x + (functional.silu(g) * u) @ down.T


forward = torch.compile(block) if "compiled" in options.variant else block


def step() -> float:
    forward(x).backward(dy)
    for tensor in (x, *adapters):
        tensor.grad = None
    return 0.0


serve(options.started, step)
