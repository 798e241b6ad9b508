"""What a model is, read from its config.json. Families differ by one table here, by nothing else.

Every field of config.json is used, known to change nothing, switched off, or refused by name: one
that is overlooked gives a model that runs and is wrong. Fields are those of transformers, in the
older spelling (rope_theta, rope_scaling) and in that of version 5 (rope_parameters).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from krnl.errors import ConfigError
from krnl.models.fields import Fields
from krnl.models.rope import Rope, parse_rope
from krnl.strict_json import unique_keys


@dataclass(frozen=True)
class Family:
    """How one model_type differs: fixed choices, and defaults where config.json is silent.

    `slides` says which layers have a sliding window: none, all, those from max_window_layers on, or
    those without rope. `qkv_bias` None leaves it to attention_bias, for q, k, v and o alike.
    `head_dim` None means hidden_size / num_attention_heads.
    """

    architecture: str
    slides: Literal["never", "always", "late", "unrotated"]
    qkv_bias: bool | None = None
    qk_norm: bool = False
    skips_rope: bool = False
    head_dim: int | None = None
    theta: float = 10_000.0
    tied: bool = False
    window: int | None = 4096


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "never"),
    "mistral": Family("MistralForCausalLM", "always", qkv_bias=False),
    "qwen2": Family("Qwen2ForCausalLM", "late", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", "late", qk_norm=True, head_dim=128),
    "smollm3": Family(
        "SmolLM3ForCausalLM", "unrotated", skips_rope=True, theta=2e6, tied=True, window=None
    ),
}

# Fields that do not change the function: provenance, initialisation, tokens, generation settings.
HARMLESS = """
    bos_token_id chunk_size_feed_forward diversity_penalty do_sample dtype eos_token_id id2label
    initializer_range is_llama_config label2id length_penalty max_length max_new_tokens
    max_sequence_length max_window_layers model_name num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states pad_token_id prefix pretraining_tp remove_invalid_values
    repetition_penalty return_dict sep_token_id task_specific_params temperature tokenizer_class
    top_k top_p torch_dtype transformers.js_config transformers_version typical_p unsloth_fixed
    unsloth_version use_cache
"""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: `layers` blocks of attention and SwiGLU on tokens of width `hidden_size`.

    Per layer, `windows` is how many keys a query sees, itself included (None: all before it), and
    `rotary` whether queries and keys are rotated.
    """

    name: str
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    rotary: tuple[bool, ...]
    rope: Rope
    max_positions: int


def load(folder: Path) -> ModelConfig:
    """The config of the model in `folder`, named after it. ConfigError names file and field."""
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text("utf-8"), object_pairs_hook=unique_keys)
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} has no config.json, so it is not a model folder.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:  # bad UTF-8, bad JSON, or a repeated key
        raise ConfigError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object.")
    return parse(content, str(path), folder.name)


def parse(config: Mapping[str, Any], where: str, name: str = "model") -> ModelConfig:
    """Understand the content of a config.json; `where` is what a ConfigError calls the file."""
    fields = Fields(config, where)
    family_name = str(fields.take("model_type", "missing"))
    if family_name not in FAMILIES:
        raise fields.error("model_type", family_name, f"KRNL trains {', '.join(FAMILIES)}")
    family = FAMILIES[family_name]
    architectures = fields.take("architectures", [family.architecture])
    if architectures != [family.architecture]:
        raise fields.error("architectures", architectures, f"KRNL trains {family.architecture}")
    activation = fields.take("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.error("hidden_act", activation, "KRNL computes silu")
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", kv_heads, f"it must divide the {heads} heads")
    if config.get("head_dim") is None and family.head_dim is None and hidden % heads:
        raise fields.error("hidden_size", hidden, f"without head_dim, {heads} heads must divide it")
    head_dim = fields.count("head_dim", family.head_dim or hidden // heads)
    if head_dim % 2:
        raise fields.error("head_dim", head_dim, "rotary embeddings need an even number")
    bias = fields.flag("attention_bias", False) if family.qkv_bias is None else family.qkv_bias
    rotary = _rotary(fields, family, fields.count("num_hidden_layers"))
    max_positions = fields.count("max_position_embeddings")
    result = ModelConfig(
        name=name,
        family=family_name,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        layers=len(rotary),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=fields.flag("tie_word_embeddings", family.tied),
        qkv_bias=bias,
        o_bias=bias and family.qkv_bias is None,
        qk_norm=family.qk_norm,
        windows=_windows(fields, family, rotary),
        rotary=rotary,
        rope=parse_rope(fields, family.theta, max_positions),
        max_positions=max_positions,
    )
    fields.refuse_rest(HARMLESS.split())
    return result


def rope_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Radians per position, float64[head_dim / 2], and the factor on cos and sin: see rope.py."""
    return config.rope.frequencies(config.head_dim)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint must hold; lm_head.weight only if not tied."""
    c = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, c)}
    qkv, o = config.qkv_bias, config.o_bias
    biased = {"q_proj": qkv, "k_proj": qkv, "v_proj": qkv, "o_proj": o}
    for layer in range(config.layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}.weight"] = (c,)
        if config.qk_norm:
            for norm in ("q_norm", "k_norm"):
                shapes[f"model.layers.{layer}.self_attn.{norm}.weight"] = (config.head_dim,)
    for path, shape in linear_paths(config).items():
        if path != "lm_head" or not config.tie_word_embeddings:
            shapes[f"{path}.weight"] = shape
        if biased.get(path.rsplit(".", 1)[-1]):
            shapes[f"{path}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (c,)
    return shapes


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(out, in) of each kind of linear layer, by its last name, in order of the forward pass."""
    c, f = config.hidden_size, config.intermediate_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "q_proj": (q, c),
        "k_proj": (kv, c),
        "v_proj": (kv, c),
        "o_proj": (c, q),
        "gate_proj": (f, c),
        "up_proj": (f, c),
        "down_proj": (c, f),
        "lm_head": (config.vocab_size, c),
    }


def linear_paths(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(out, in) of every linear layer, by its full path, in the order of the forward pass."""
    shapes = linear_shapes(config)
    head = shapes.pop("lm_head")
    paths = {}
    for layer in range(config.layers):
        for name, shape in shapes.items():
            part = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            paths[f"model.layers.{layer}.{part}.{name}"] = shape
    return {**paths, "lm_head": head}


def _rotary(fields: Fields, family: Family, layers: int) -> tuple[bool, ...]:
    if not family.skips_rope:
        return (True,) * layers
    interval = fields.count("no_rope_layer_interval", 4)
    regular = [int((layer + 1) % interval != 0) for layer in range(layers)]
    return tuple(bool(flag) for flag in fields.choices("no_rope_layers", regular, (0, 1)))


def _windows(fields: Fields, family: Family, rotary: tuple[bool, ...]) -> tuple[int | None, ...]:
    layers = len(rotary)
    window = _window(fields, family)
    first = fields.count("max_window_layers", 28, least=0) if family.slides == "late" else 0
    slides = {
        "never": [False] * layers,
        "always": [True] * layers,
        "late": [layer >= first for layer in range(layers)],
        "unrotated": [not rotated for rotated in rotary],
    }[family.slides]
    names = ("full_attention", "sliding_attention")
    derived = [names[slide and window is not None] for slide in slides]
    kinds = fields.choices("layer_types", derived, names)
    if kinds != derived and (window is None or family.slides == "always"):
        raise fields.error("layer_types", kinds, "the sliding window fields contradict it")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _window(fields: Fields, family: Family) -> int | None:
    """The window of the layers that have one. Here null means none; absent means the default."""
    if family.slides == "never":
        return None
    enabled = family.slides == "always" or fields.flag("use_sliding_window", False)
    given = fields.content.get("sliding_window", family.window)
    if fields.take("sliding_window", given) is None or not enabled:
        return None
    return fields.count("sliding_window", given)
