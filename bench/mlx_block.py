"""The report's MLP block in MLX. In any environment that has mlx and numpy:

    python bench/mlx_block.py --steps 10 --adapters fp32

The gradient at the input is asked for beside the adapters', as what lies below a block needs it;
and the output, as MLX leaves out what nobody asks for."""

from functools import partial

import mlx.core as mx
import mlx_worker
from block import EPS, arguments, drawn, norms
from mlx_worker import DEVICES, PRECISIONS
from protocol import serve

options = arguments(__doc__.splitlines()[0], tuple(PRECISIONS), DEVICES).parse_args()
mlx_worker.use_device(options.device)
base = PRECISIONS[options.precision]
trained = mx.float32 if options.adapters == "fp32" else base
block = drawn(options.tokens, options.width, options.ffn, options.rank)
frozen = [mx.array(values).astype(base) for values in (block.gate, block.up, block.down)]
adapters = [mx.array(values).astype(trained) for values in block.adapters]
x, dy = (mx.array(values).astype(base) for values in (block.x, block.dy))
norm = mx.ones(options.width, base)
mlx_worker.settle(frozen, adapters, x, dy, norm)
results = []


def adapted(h: mx.array, w: mx.array, a: mx.array, b: mx.array) -> mx.array:
    return (h @ w.T + (h.astype(a.dtype) @ a.T) @ b.T).astype(h.dtype)


def forward(x: mx.array, *adapters: mx.array) -> mx.array:
    gate, up, down = frozen
    h = mx.fast.rms_norm(x, norm, EPS)
    g, u = adapted(h, gate, *adapters[:2]), adapted(h, up, *adapters[2:])
    return x + (g * mx.sigmoid(g) * u) @ down.T


@partial(mx.compile, inputs=frozen)
def differentiated(dy: mx.array, *primals: mx.array) -> list[mx.array]:
    """The output, and the gradients."""
    output, gradients = mx.vjp(forward, primals, [dy])
    return output + gradients


def step() -> dict[str, float]:
    results[:] = differentiated(dy, x, *adapters)
    mx.async_eval(results)
    return {}


serve(
    options,
    step,
    ("mlx",),
    mlx_worker.threads,
    lambda: mlx_worker.peak(options.device),
    lambda: norms([float(mx.linalg.norm(g.astype(mx.float32).reshape(-1))) for g in results[1:]]),
    mx.synchronize,
)
