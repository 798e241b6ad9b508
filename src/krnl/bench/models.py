"""Shapes of models that people train, by name, and checkpoints of them with random weights."""

import math
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from krnl.errors import ConfigError
from krnl.formats.files import write_json_atomic
from krnl.formats.safetensors import SINGLE, write_safetensors
from krnl.models.config import parse, tensor_shapes

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
}
# Random numbers that matrices are cut from, each from another place on: to draw billions would take
# minutes.
POOL = 2**24


def write(shape: dict[str, Any], name: str, folder: Path) -> None:
    """config.json and model.safetensors, bf16, in a folder that is made. ConfigError if the disk
    has no room for them, FormatError if they cannot be written."""
    config = {**shape, "hidden_act": "silu", "torch_dtype": "bfloat16"}
    shapes = tensor_shapes(parse(config, name))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror or error}.") from error
    needed = 2 * sum(math.prod(sizes) for sizes in shapes.values())
    if needed > free:
        raise ConfigError(
            f"Random weights of {name} take {needed / 2**20:,.0f} MiB, and where {folder} is, "
            f"{free / 2**20:,.0f} MiB are free. Set TMPDIR to a folder with more."
        )
    random = np.random.default_rng(0)
    pool = (0.02 * random.standard_normal(POOL, np.float32)).astype(ml_dtypes.bfloat16)
    tensors = {}
    for tensor, sizes in shapes.items():
        if len(sizes) == 1:
            tensors[tensor] = np.ones(sizes, ml_dtypes.bfloat16)
        else:
            turned = np.roll(pool, -int(random.integers(POOL)))
            tensors[tensor] = np.resize(turned, sizes)
    write_safetensors(folder / SINGLE, tensors, {"format": "pt"})
    write_json_atomic(folder / "config.json", config)
