"""The report's reference workload with KRNL: one MLP block, forward and backward with the gradient
at its input. 512 tokens, width 2048, FFN 5632, rank 32 on gate and up: 72.4 GFLOP."""

import numpy as np
from protocol import arguments, serve

from krnl.devices import activation_type, open_backend
from krnl.dtypes import BF16, I32
from krnl.models.lora import AdapterShape, GroupShape, Linear, LoraGroup, Trainable
from krnl.models.mlp import Mlp
from krnl.models.weights import Weights
from krnl.plan.arena import plan
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.step import Step

TOKENS, WIDTH, FFN, RANK = 512, 2048, 5632, 32


class ResidentWeights(Weights):
    """Matrices that no file holds."""

    def matrix(self, name: str, shape: tuple[int, int]) -> Buffer:
        return self.held.setdefault(name, Buffer(name, shape, BF16, Kind.WEIGHT))


options = arguments()
backend = open_backend("cpu")
activation = activation_type(backend, options.variant or "auto")
weights = ResidentWeights({})
gate_up = GroupShape(WIDTH, (Linear("gate_proj", FFN), Linear("up_proj", FFN)))
down = GroupShape(FFN, (Linear("down_proj", WIDTH),))
adapters = {name: AdapterShape(RANK, 1.0) for name in ("gate_proj", "up_proj")}
trainable = Trainable([gate_up, down], adapters, activation)
groups = [
    LoraGroup(shape, weights, adapters, trainable, i) for i, shape in enumerate((gate_up, down))
]
block = Mlp(weights.vector("norm", WIDTH), *groups, eps=1e-5)
x = Buffer("x", (TOKENS, WIDTH), activation, Kind.INPUT)
dy = Buffer("dy", (TOKENS, WIDTH), activation, Kind.INPUT)
live = Buffer("live", (1,), I32, Kind.INPUT)
emitted = Step("block", activation, live)
_, saved = block.forward(emitted, x, None)
block.backward(emitted, dy, saved, None)
(planned,) = plan([emitted], backend.kernels)
memory = backend.allocate(planned.layout)
random = np.random.default_rng(0)
for buffer in [x, dy, trainable.compute, *weights.held.values()]:
    memory.write(buffer, 0.02 * random.standard_normal(buffer.shape, np.float32))
for buffer, values in weights.constants.items():
    memory.write(buffer, values)
memory.write(live, np.array([TOKENS]))
program = backend.compile(planned, memory)


def step() -> float:
    program.run()
    return 0.0


serve(options.started, step)
