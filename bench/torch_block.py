"""The report's MLP block in PyTorch. In any environment that has torch and numpy:

    python bench/torch_block.py --steps 10 --adapters fp32

fp32 adapters in a 16-bit base are computed as PEFT does it: the input is widened, the sum
rounded."""

import torch
from peers.block import EPS, arguments, drawn, norms
from peers.protocol import serve
from torch.nn import functional

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

parser = arguments(__doc__.splitlines()[0], tuple(PRECISIONS))
parser.add_argument("--compile", action="store_true", help="torch.compile (slow to start)")
options = parser.parse_args()
base = PRECISIONS[options.precision]
trained = torch.float32 if options.adapters == "fp32" else base
device = "cpu"
if options.device == "gpu":
    device = "cuda" if torch.cuda.is_available() else "mps"
block = drawn(options.tokens, options.width, options.ffn, options.rank)


def tensor(values, dtype: torch.dtype = base, differentiate: bool = False) -> torch.Tensor:
    return torch.from_numpy(values).to(device, dtype).requires_grad_(differentiate)


gate, up, down = (tensor(values) for values in (block.gate, block.up, block.down))
adapters = [tensor(values, trained, differentiate=True) for values in block.adapters]
norm = torch.ones(options.width, dtype=base, device=device)
x, dy = tensor(block.x, differentiate=True), tensor(block.dy)


def adapted(h: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (h @ w.T + (h.to(a.dtype) @ a.T) @ b.T).to(h.dtype)


def forward(x: torch.Tensor) -> torch.Tensor:
    h = functional.rms_norm(x, (options.width,), norm, EPS)
    g, u = adapted(h, gate, *adapters[:2]), adapted(h, up, *adapters[2:])
    return x + (functional.silu(g) * u) @ down.T


run = torch.compile(forward) if options.compile else forward


def step() -> float:
    for each in (x, *adapters):
        each.grad = None
    run(x).backward(dy)
    if device != "cpu":
        getattr(torch, device).synchronize()
    return 0.0


serve(options, step, lambda: norms([float(t.grad.float().norm()) for t in (x, *adapters)]))
