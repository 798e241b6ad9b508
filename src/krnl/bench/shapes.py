"""Shapes of models that people train, by name, and checkpoints of them with random weights."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

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
}


def make(name: str, folder: Path) -> None:
    """Writes config.json and model.safetensors (bf16) unless they are there."""
    write(SHAPES[name], name, folder)


def write(shape: dict[str, Any], name: str, folder: Path) -> None:
    """A checkpoint of any shape, as `make` does it."""
    if (folder / SINGLE).exists():
        return
    config = {**shape, "hidden_act": "silu", "torch_dtype": "bfloat16"}
    random = np.random.default_rng(0)
    tensors = {}
    for tensor, sizes in tensor_shapes(parse(config, name)).items():
        if len(sizes) == 1:
            values = np.ones(sizes, np.float32)
        else:
            values = 0.02 * random.standard_normal(sizes, np.float32)
        tensors[tensor] = values.astype(ml_dtypes.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / SINGLE, tensors, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
