"""Training steps with KRNL, as `krnl train` runs them."""

import numpy as np
from protocol import arguments, serve
from shapes import batch

from krnl.data.examples import Example
from krnl.data.packing import pack
from krnl.devices import activation_type, open_backend
from krnl.formats.peft import AdapterConfig
from krnl.model import Model, initial_modules
from krnl.training.schedule import hyper
from krnl.training.session import Session, plan_training

options = arguments()
model = Model.open(options.model)
rows = batch(model.config.vocab_size, options.rows, options.length, options.chat)
examples = []
for ids, labels in rows:
    targets = labels != -100
    targets[0] = False
    examples.append(Example(ids.astype(np.int32), targets, 0, False))
capacity = sum(len(e) for e in examples)
adapter = AdapterConfig(rank=16, alpha=32.0)
modules = initial_modules(adapter, model.config, 0)
backend = open_backend("cpu")
activation = activation_type(backend, options.variant or "auto")
weights = model.weights(backend.limits.mapped_alignment)
planned = plan_training(
    model.config, weights, adapter, tuple(modules), backend, activation, capacity
)
session = Session(planned, model, modules, backend, 0)
update = 0


def step() -> float:
    global update
    update += 1
    passes = pack(examples, capacity)
    for work in passes:
        session.accumulate(work, update)
    count = sum(len(work.target) for work in passes)
    loss, _ = session.update(hyper(update, 1e-4, (0.9, 0.999), 1e-8, 0.0, 1.0, 1 / count))
    return loss / count


serve(options.started, step)
