"""The report's MLP block in PyTorch. In any environment that has torch and numpy:

    python bench/torch_block.py --steps 10 --adapters fp32

fp32 adapters in a 16-bit base are computed as PEFT does it: the input is widened, the sum
rounded."""

import torch
import torch_worker
from block import EPS, arguments, drawn, norms
from torch.nn import functional
from torch_worker import DEVICES, PRECISIONS

parser = arguments(__doc__.splitlines()[0], tuple(PRECISIONS), DEVICES)
parser.add_argument(
    "--variant",
    choices=("eager", "compile", "autotune", "graph"),
    default="eager",
    help="compile: torch.compile, on CUDA with its graphs; autotune: with max-autotune, on CUDA "
    "(takes minutes to start); graph: uncompiled, as one CUDA graph",
)
options = parser.parse_args()
if options.variant in ("autotune", "graph") and options.device != "cuda":
    parser.error(f"--variant {options.variant} needs --device cuda")
torch_worker.prepare(options)
base, device = PRECISIONS[options.precision], options.device
trained = torch.float32 if options.adapters == "fp32" else base
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


if options.variant == "compile":
    forward = torch.compile(forward, mode="reduce-overhead" if device == "cuda" else None)
elif options.variant == "autotune":
    forward = torch.compile(forward, mode="max-autotune")


def differentiate() -> None:
    """Forward and backward; the gradients are new."""
    for each in (x, *adapters):
        each.grad = None
    forward(x).backward(dy)


run = torch_worker.captured(differentiate) if options.variant == "graph" else differentiate


def step() -> dict[str, float]:
    run()
    return {}


torch_worker.serve(
    options, step, lambda: norms([float(t.grad.float().norm()) for t in (x, *adapters)])
)
