"""Checkpoints of real shapes with random weights, and batches of random tokens."""

import json
from pathlib import Path

import numpy as np

SHAPES = {
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
}


def make(name: str, folder: Path) -> None:
    """Writes config.json and model.safetensors (bf16) unless they are there."""
    import ml_dtypes

    from krnl.formats.safetensors import write_safetensors
    from krnl.models.config import parse, tensor_shapes

    if (folder / "model.safetensors").exists():
        return
    config = {**SHAPES[name], "hidden_act": "silu", "torch_dtype": "bfloat16"}
    random = np.random.default_rng(0)
    tensors = {}
    for tensor, shape in tensor_shapes(parse(config, name)).items():
        values = np.ones(shape) if len(shape) == 1 else random.standard_normal(shape, np.float32)
        tensors[tensor] = (values if len(shape) == 1 else 0.02 * values).astype(ml_dtypes.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def batch(
    vocab_size: int, rows: int, length: int, chat: bool
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows of (ids, labels); labels are -100 where nothing is to be learnt. `chat`: lengths vary
    from a quarter of `length` to all of it, and the last third of a row is what is trained."""
    random = np.random.default_rng(1)
    lengths = random.integers(length // 4, length + 1, rows) if chat else np.full(rows, length)
    made = []
    for count in lengths:
        ids = random.integers(0, vocab_size, count)
        labels = ids.copy()
        if chat:
            labels[: count - count // 3] = -100
        made.append((ids, labels))
    return made
