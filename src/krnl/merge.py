"""Folding an adapter into its base model, and measuring what that costs."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from krnl.backends.base import Backend
from krnl.dtypes import F32, DType
from krnl.errors import ConfigError, FormatError
from krnl.formats.files import read_json, write_json_atomic
from krnl.formats.peft import AdapterConfig, Modules
from krnl.formats.safetensors import INDEX, Shape, read_header, write_safetensors_lazily
from krnl.generator import PROMPT_TOKENS, Generator
from krnl.model import Model

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

# What is read to compare the merged model with the adapter: any text does, this one has words,
# digits and marks.
PROBE = (
    "The quick brown fox jumps over the lazy dog. In 1969 two people walked on the Moon; a third "
    "waited above. "
    "def area(r): return 3.14159 * r ** 2  # and not a line more?"
)


@dataclass(frozen=True)
class Merged:
    """What was written, and how far its logits on the probe text are from the adapter's: the
    largest difference over the largest logit. `largest_rounding` is that of the weights, relative
    to each tensor's largest."""

    out: Path
    tensors: int
    logits_error: float
    largest_rounding: float


def merge(
    model: Model, adapter: tuple[AdapterConfig, Modules], out: Path, backend: Backend
) -> Merged:
    """Writes base + scale · B A for every adapted layer (added in float32, rounded once to the
    layer's own type), the other tensors as they are, in the same files, with the tokenizer and
    configs beside them. A tied head that is adapted becomes a tensor of its own. ConfigError if
    `out` is not empty or no folder that can be replaced, FormatError if it cannot be written."""
    target = Path(os.path.realpath(out))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{out} is not an empty folder; give a new one.")
    if target == Path.cwd() or target.is_mount():
        raise ConfigError(f"{out} has to stay where it is; name a new folder in it.")
    config, modules = adapter
    probe = model.tokenizer.encode(PROBE).ids[: min(PROMPT_TOKENS, model.config.max_positions)]
    rounding = _Rounding()
    sources = sorted({t.path for t in model.checkpoint.tensors.values()})
    building = target.with_name(f".{target.name}.tmp")  # takes its name when it is whole
    try:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        untied = model.config.tie_word_embeddings and "lm_head" in modules
        for path in sources:
            _write_shard(model, config, modules, path, building / path.name, untied, rounding)
        _copy_beside(model.folder, building, untied)
        if (model.folder / INDEX).is_file():
            _write_index(model, building, untied)
        os.rename(building, target)
    except OSError as error:
        raise FormatError(f"{out} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    difference = logits_error(model, adapter, Model.open(str(out)), backend, probe)
    return Merged(out, len(modules), difference, rounding.largest)


def merged_weight(base: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    """W + scale · B A in float32, [out, in]."""
    return base.astype(np.float32) + np.float32(scale) * (
        b.astype(np.float32) @ a.astype(np.float32)
    )


class _Rounding:
    """The largest rounding error of a merged tensor, relative to its largest element."""

    def __init__(self) -> None:
        self.largest = 0.0

    def round(self, name: str, exact: np.ndarray, dtype: np.dtype) -> np.ndarray:
        with np.errstate(over="ignore"):  # found in the next line
            rounded = exact.astype(dtype)
        if not np.isfinite(rounded.astype(np.float32)).all():
            raise FormatError(
                f"{name} does not fit {dtype} once merged: its largest is "
                f"{np.abs(exact).max():.3g}."
            )
        difference = np.abs(rounded.astype(np.float32) - exact).max(initial=0.0)
        self.largest = max(
            self.largest, float(difference / max(np.abs(exact).max(initial=0.0), 1e-30))
        )
        return rounded


def _write_shard(
    model: Model,
    config: AdapterConfig,
    modules: Modules,
    source: Path,
    target: Path,
    untied: bool,
    rounding: _Rounding,
) -> None:
    """One file: its own tensors, and an untied head beside the embedding it was tied to."""
    tensors = {name: t for name, t in model.checkpoint.tensors.items() if t.path == source}
    layout: dict[str, tuple[DType, Shape]] = {
        name: (t.dtype, t.shape) for name, t in tensors.items()
    }
    if untied:
        layout.pop(HEAD, None)  # a copy that lay beside the embedding
        if EMBEDDING in tensors:
            layout[HEAD] = layout[EMBEDDING]

    def values(name: str) -> np.ndarray:
        stored = EMBEDDING if name == HEAD and untied else name
        base = model.checkpoint.read(stored)
        path = name.removesuffix(".weight")
        if path not in modules:
            return base
        a, b = modules[path]
        exact = merged_weight(base, a, b, config.scale_for(path))
        return rounding.round(name, exact, base.dtype)

    _, metadata = read_header(source)
    write_safetensors_lazily(target, layout, values, metadata or {"format": "pt"})


def _copy_beside(folder: Path, out: Path, untied: bool) -> None:
    """Everything that is no weight: tokenizer, templates, licences, configs."""
    for path in sorted(folder.iterdir()):
        weights = path.suffix in (
            ".safetensors",
            ".bin",
            ".pth",
            ".pt",
            ".gguf",
        ) or path.name.endswith(".index.json")
        if path.is_file() and not weights:
            shutil.copyfile(path, out / path.name)
    if untied:
        config = read_json(out / "config.json")
        write_json_atomic(out / "config.json", {**config, "tie_word_embeddings": False})


def _write_index(model: Model, out: Path, untied: bool) -> None:
    index = json.loads((model.folder / INDEX).read_text("utf-8"))
    if untied:
        index["weight_map"][HEAD] = index["weight_map"][EMBEDDING]
        size = index.get("metadata", {}).get("total_size")
        if isinstance(size, int) and HEAD not in model.checkpoint.tensors:
            index["metadata"]["total_size"] = size + model.checkpoint.tensors[EMBEDDING].nbytes
    write_json_atomic(out / INDEX, index)


def logits_error(
    model: Model,
    adapter: tuple[AdapterConfig, Modules],
    merged: Model,
    backend: Backend,
    ids: np.ndarray,
) -> float:
    """The largest difference between the two models' float32 logits after each token of a text,
    over the largest logit."""
    before = Generator(model, adapter, backend, F32, len(ids) + 1, picks=len(ids)).read_whole(ids)
    after = Generator(merged, None, backend, F32, len(ids) + 1, picks=len(ids)).read_whole(ids)
    return float(np.abs(before - after).max() / np.abs(before).max())
