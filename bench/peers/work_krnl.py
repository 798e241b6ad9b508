"""Training steps with KRNL, as `krnl train` runs them."""

import numpy as np
from protocol import model_arguments, serve
from shapes import batch

from krnl.bench.trainer import training_step
from krnl.data.examples import Example
from krnl.data.packing import pack
from krnl.model import Model

parser = model_arguments(__doc__)
parser.add_argument("--precision", default="auto")
options = parser.parse_args()
model = Model.open(options.model)
examples = []
for ids, labels in batch(model.config.vocab_size, options.rows, options.length, options.chat):
    targets = labels != -100
    targets[0] = False
    examples.append(Example(ids.astype(np.int32), targets, 0, False))
passes = pack(examples, sum(len(e) for e in examples))
serve(options, training_step(model, "cpu", options.precision, passes))
