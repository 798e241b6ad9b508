"""A base model on disk: its config, where its weights lie, and which adapters go on top."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from krnl.backends.base import Memory
from krnl.data.tokenizer import Tokenizer
from krnl.dtypes import BF16, F16, F32, DType
from krnl.errors import ConfigError
from krnl.formats import hub
from krnl.formats.files import read_json
from krnl.formats.peft import AdapterConfig, Modules, check_fits, read_adapter
from krnl.formats.safetensors import SINGLE, Checkpoint
from krnl.models import config as model_config
from krnl.models.config import ModelConfig, linear_paths, tensor_shapes
from krnl.models.lora import AdapterShape
from krnl.models.weights import Stored, Weights
from krnl.plan.buffer import FileRegion


@dataclass(frozen=True)
class Model:
    """A checkpoint folder whose tensors are those that its config calls for. `name` is what it was
    opened by, a path or a hub id."""

    name: str
    folder: Path
    config: ModelConfig
    checkpoint: Checkpoint

    @classmethod
    def open(cls, name: str) -> "Model":
        """A folder, or a hub id to download. ConfigError or FormatError says what is wrong with
        it."""
        folder = hub.resolve(name)
        config = model_config.load(folder)
        checkpoint = Checkpoint.open(folder)
        checkpoint.check(tensor_shapes(config), config.tie_word_embeddings)
        return cls(name, folder, config, checkpoint)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; its ids must fit the embedding."""
        tokenizer = Tokenizer.load(self.folder)
        if tokenizer.vocab_size > self.config.vocab_size:
            raise ConfigError(
                f"{self.folder}: the tokenizer makes ids up to {tokenizer.vocab_size - 1}, but the "
                f"model's vocabulary ends at {self.config.vocab_size - 1}. The two do not belong "
                "together."
            )
        return tokenizer

    def weights(self, alignment: int | None) -> Weights:
        """Buffers for the weights: in the files, where a tensor begins at a multiple of `alignment`
        elements (a device's `Limits.mapped_alignment`; with None, nowhere)."""
        return Weights(
            {
                t.name: _stored(FileRegion(t.path, t.offset), t.dtype, alignment)
                for t in self.checkpoint.tensors.values()
            }
        )

    def fill(self, weights: Weights, memory: Memory) -> None:
        """Writes what a decoder asked for and no file holds ready for it."""
        for name, buffer in weights.held.items():
            memory.write(buffer, self.checkpoint.read(name))
        for buffer, values in weights.constants.items():
            memory.write(buffer, values)

    def read_adapter(self, folder: Path) -> tuple[AdapterConfig, Modules]:
        """An adapter that fits this model; FormatError if it is for another."""
        config, modules = read_adapter(folder)
        check_fits(modules, linear_paths(self.config), str(folder))
        return config, modules


def imagined_weights(config: ModelConfig, dtype: DType, alignment: int | None) -> Weights:
    """Weights as a single file of `dtype` would hold them: enough for a plan, with nothing on disk.
    `alignment` as in `Model.weights`."""
    stored, offset = {}, 0
    for name, shape in tensor_shapes(config).items():
        stored[name] = _stored(FileRegion(Path(SINGLE), offset), dtype, alignment)
        offset += int(np.prod(shape)) * dtype.size
    return Weights(stored)


def _stored(region: FileRegion, dtype: DType, alignment: int | None) -> Stored:
    """A tensor, which is mapped where it begins at a multiple of `alignment` elements."""
    askew = alignment is None or region.offset % (alignment * dtype.size) != 0
    return Stored(None if askew else region, dtype)


def adapter_shapes(
    config: AdapterConfig, paths: Mapping[str, object] | tuple[str, ...]
) -> dict[str, AdapterShape]:
    """Rank and scale of the adapter on each of `paths`."""
    return {path: AdapterShape(config.rank_for(path), config.scale_for(path)) for path in paths}


def initial_modules(
    config: AdapterConfig, model: ModelConfig, seed: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Fresh adapters: A uniform in ±1/√in (Kaiming uniform with a = √5, as PEFT draws it), B zero.

    Each layer's A depends on the seed and the layer's path alone.
    """
    shapes = linear_paths(model)
    modules = {}
    for path in config.select(shapes):
        out_features, in_features = shapes[path]
        rank = config.rank_for(path)
        entropy = [seed, *path.encode()]
        bound = in_features**-0.5
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))
        a = random.uniform(-bound, bound, (rank, in_features))
        modules[path] = (a.astype(np.float32), np.zeros((out_features, rank), np.float32))
    return modules


def stored_dtype(folder: Path) -> DType:
    """The type that config.json says the weights have; bf16 where it names none that KRNL reads."""
    content = read_json(folder / "config.json")
    name = content.get("dtype") or content.get("torch_dtype")
    return {"float32": F32, "float16": F16}.get(str(name), BF16)
