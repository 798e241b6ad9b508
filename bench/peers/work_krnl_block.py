"""The report's MLP block with KRNL: 512 tokens, width 2048, FFN 5632, rank 32 on gate and up,
forward and backward with the gradient at its input. 72.4 GFLOP."""

from protocol import parser, serve

from krnl.bench.workloads import BlockShape, mlp_block
from krnl.devices import activation_type, open_backend

made = parser(__doc__)
made.add_argument("--precision", default="auto")
options = made.parse_args()
backend = open_backend("cpu")
block = mlp_block(backend, activation_type(backend, options.precision), BlockShape())


def step() -> float:
    block.run()
    return 0.0


serve(options, step)
