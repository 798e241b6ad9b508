"""Tiny models on disk, batches of random documents, and sessions that train on them."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from krnl.backends.base import Backend, Paper
from krnl.backends.reference import ReferenceBackend
from krnl.data.examples import Example
from krnl.data.packing import Pass, pack
from krnl.dtypes import F32, DType
from krnl.formats.peft import AdapterConfig
from krnl.formats.safetensors import SINGLE, write_safetensors
from krnl.model import Model
from krnl.models.config import linear_paths, parse, tensor_shapes
from krnl.models.training_programs import Recomputed
from krnl.plan.buffer import Kind
from krnl.training.session import Session, TrainingPlan, plan_training

Write = Callable[..., Model]  # write_model, in a folder of its own
REFERENCE = ReferenceBackend()
VOCABULARY = 61  # odd sizes throughout: every kernel has a ragged edge to get right
SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "untied": {"model_type": "llama", "tie_word_embeddings": False, "attention_bias": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "window": {"model_type": "mistral", "sliding_window": 5, "num_key_value_heads": 4},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0]},
}
ALL = AdapterConfig(rank=3, alpha=6.0)
DROPOUT = replace(ALL, dropout=0.3)
RECOMPUTE: tuple[Recomputed, ...] = (0, 1, 3, "layer")  # no model here has more than 3 layers
LENGTHS = (13, 1, 9, 20, 2)


def write_model(folder: Path, kind: str = "llama", dtype: DType = F32, **sizes: Any) -> Model:
    """A random checkpoint of a kind in MODELS. Norms are away from 1, biases from 0, and logits
    differ, but not so much that rounding errors grow from layer to layer."""
    content = {**SIZES, **MODELS[kind], **sizes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    rng = np.random.default_rng(7)
    tensors = {
        name: _weight(name, shape, rng).astype(dtype.numpy)
        for name, shape in tensor_shapes(parse(content, "tiny")).items()
    }
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    return Model.open(str(folder))


def with_longer_header(model: Model, folder: Path, nbytes: int) -> Model:
    """A copy in a new `folder`, the tensors `nbytes` further into their file: a header may end in
    spaces."""
    shutil.copytree(model.folder, folder)
    path = folder / SINGLE
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    length = (end - 8 + nbytes).to_bytes(8, "little")
    path.write_bytes(length + content[8:end] + b" " * nbytes + content[end:])
    return Model.open(str(folder))


def _weight(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    normal = rng.normal(size=shape)
    if name.endswith("bias"):
        return 0.3 * normal
    if len(shape) == 1:
        return 1 + 0.2 * normal
    gain = 1.5 if name.split(".")[-2] in ("embed_tokens", "lm_head") else 1.0
    return gain * normal / np.sqrt(shape[1])


def make_documents(
    lengths: Sequence[int], share: float = 0.7, seed: int = 0, vocabulary: int = VOCABULARY
) -> list[Example]:
    """Random tokens, of which about `share` are targets; at least the last one of each document."""
    rng = np.random.default_rng([seed, 3])
    examples = []
    for line, length in enumerate(lengths):
        targets = rng.random(length) < share
        targets[-1], targets[0] = True, False
        ids = rng.integers(0, vocabulary, length).astype(np.int32)
        examples.append(Example(ids, targets, line + 1, False))
    return examples


def one_pass(examples: Sequence[Example]) -> list[Pass]:
    """All documents in one pass, in their order."""
    return pack(examples, sum(len(e.ids) for e in examples))


def perturbed(example: Example, start: int, stop: int | None = None) -> Example:
    """The same example with other tokens from `start` to `stop`."""
    ids = example.ids.copy()
    ids[start:stop] = (ids[start:stop] + 17) % VOCABULARY
    return replace(example, ids=ids)


def with_targets(example: Example, targets: Sequence[int] | range) -> Example:
    return replace(example, targets=np.isin(np.arange(len(example)), targets))


def make_modules(
    model: Model, adapter: AdapterConfig, dtype: DType = F32
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Random adapters, B away from zero, so that every gradient is. The values exist in `dtype`."""
    rng = np.random.default_rng(11)
    shapes = linear_paths(model.config)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.3, shape).astype(dtype.numpy).astype(np.float32)

    modules = {}
    for path in adapter.select(shapes):
        rank, (out_features, in_features) = adapter.rank_for(path), shapes[path]
        modules[path] = (draw(rank, in_features), draw(out_features, rank))
    return modules


def plan_model(
    model: Model,
    adapter: AdapterConfig = ALL,
    backend: Backend | Paper = REFERENCE,
    activation: DType = F32,
    tokens: int = 64,
    recompute: Recomputed = 0,
) -> TrainingPlan:
    """The training programs of a tiny model."""
    paths = adapter.select(linear_paths(model.config))
    weights = model.weights(backend.limits.mapped_alignment)
    return plan_training(
        model.config, weights, adapter, paths, backend, activation, tokens, recompute
    )


class Run:
    """A session, and the sums that a batch leaves in it."""

    def __init__(
        self,
        model: Model,
        adapter: AdapterConfig = ALL,
        backend: Backend = REFERENCE,
        modules: Any = None,
        activation: DType = F32,
        seed: int = 5,
        **options: Any,
    ):
        self.planned = plan_model(model, adapter, backend, activation, **options)
        modules = modules or make_modules(model, adapter, activation)
        self.session = Session(self.planned, model, modules, backend, seed)
        self.memory: Any = self.session._memory
        self.trainable = self.planned.decoder.trainable

    def sums(self, passes: Sequence[Pass], update: int = 1) -> tuple[float, np.ndarray]:
        """The summed loss, and the summed gradient as one array, of passes run from zero."""
        loss = self.planned.programs.loss
        self.memory.write(loss, np.zeros(1))
        self.memory.write(self.trainable.grad, np.zeros(self.trainable.size))
        for work in passes:
            self.session.accumulate(self.session.inputs_of(work, update))
        total = float(self.memory.read(loss)[0])
        self.memory.write(loss, np.zeros(1))
        return total, self.memory.read(self.trainable.grad)

    def modules(self, region: np.ndarray) -> dict[str, np.ndarray]:
        """A region of parameters or gradients by adapter matrix: path.A and path.B."""
        return {
            f"{path}.{letter}": values
            for path, pair in self.trainable.unpack(region).items()
            for letter, values in zip("AB", pair, strict=True)
        }

    def place(self, param: np.ndarray) -> None:
        """Sets the parameters, with moments zero."""
        zeros = np.zeros_like(param)
        self.session.restore(param, zeros, zeros)

    def poison(self) -> None:
        """NaN in every temp and between them; indices that point nowhere in the inputs, beyond what
        later passes put there."""
        for buffer in self.planned.accumulate.layout.places:
            if buffer.kind is Kind.TEMP:
                self.memory.write(buffer, np.full(buffer.shape, np.nan))
        self.session._blank[:] = 2**30
        if hasattr(self.memory, "poison"):
            self.memory.poison()
