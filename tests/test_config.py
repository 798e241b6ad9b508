"""config.json: what families mean, how rope is computed, and that nothing is overlooked."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from krnl.errors import ConfigError
from krnl.formats.safetensors import Checkpoint
from krnl.models.config import (
    ModelConfig,
    linear_paths,
    linear_shapes,
    load,
    parse,
    rope_frequencies,
    tensor_shapes,
)

EXPECTED = Path(__file__).parent / "expected"
CASES = sorted(path.parent.name for path in EXPECTED.glob("*/config.json"))

BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "vocab_size": 97,
}

# Fields of published checkpoints, without those that every config.json has.
LLAMA_2 = {"architectures": ["LlamaForCausalLM"], "rope_scaling": None, "torch_dtype": "float16"}
LLAMA_3_2 = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 16,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
SMOLLM_2 = {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"a": {}}}
MISTRAL = {"model_type": "mistral", "sliding_window": 32}
QWEN_2_5 = {
    "model_type": "qwen2",
    "use_mrope": False,
    "use_sliding_window": False,
    "sliding_window": 64,
    "max_window_layers": 2,
}
QWEN_3 = {"model_type": "qwen3", "attention_bias": False, "head_dim": 32, "sliding_window": None}
SMOLLM_3 = {
    "model_type": "smollm3",
    "no_rope_layers": [1, 1, 0],
    "no_rope_layer_interval": 4,
    "max_window_layers": 28,
    "layer_types": ["full_attention"] * 3,
    "use_sliding_window": False,
    "sliding_window": None,
}


def config(*changes: dict[str, Any]) -> ModelConfig:
    content = dict(BASE)
    for change in changes:
        content.update(change)
    return parse(content, "config.json")


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_scaling": parameters}


# Families.


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            LLAMA_2,
            {"family": "llama", "head_dim": 16, "qkv_bias": False, "tie_word_embeddings": False},
        ),
        (LLAMA_3_2, {"tie_word_embeddings": True, "windows": (None,) * 3}),
        (SMOLLM_2, {"family": "llama"}),
        ({"num_key_value_heads": None}, {"kv_heads": 4}),
        ({"attention_bias": True}, {"qkv_bias": True, "o_bias": True}),
        ({"head_dim": 24}, {"head_dim": 24}),
        (MISTRAL, {"windows": (32,) * 3, "qkv_bias": False}),
        (MISTRAL | {"sliding_window": None}, {"windows": (None,) * 3}),
        ({"model_type": "mistral"}, {"windows": (4096,) * 3}),
        (QWEN_2_5, {"windows": (None,) * 3, "qkv_bias": True, "o_bias": False, "qk_norm": False}),
        (QWEN_2_5 | {"use_sliding_window": True}, {"windows": (None, None, 64)}),
        (QWEN_2_5 | {"use_sliding_window": True, "sliding_window": None}, {"windows": (None,) * 3}),
        (
            QWEN_2_5
            | {"use_sliding_window": True}
            | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            {"windows": (64, None, 64)},
        ),
        (QWEN_3, {"qk_norm": True, "qkv_bias": False, "head_dim": 32}),
        ({"model_type": "qwen3"}, {"head_dim": 128}),
        ({"model_type": "qwen3", "attention_bias": True}, {"qkv_bias": True, "o_bias": True}),
        (SMOLLM_3, {"rotary": (True, True, False), "windows": (None,) * 3}),
        (
            {"model_type": "smollm3", "num_hidden_layers": 5, "no_rope_layer_interval": 2},
            {"rotary": (True, False, True, False, True), "tie_word_embeddings": True},
        ),
        (
            SMOLLM_3 | {"use_sliding_window": True, "sliding_window": 8, "layer_types": None},
            {"windows": (None, None, 8)},
        ),
    ],
)
def test_families(fields, expected):
    found = config(fields)
    assert {name: getattr(found, name) for name in expected} == expected


def test_defaults_of_the_family_apply_where_the_file_is_silent():
    assert config().rope.theta == 10_000.0
    assert config({"model_type": "smollm3"}).rope.theta == 2_000_000.0
    assert config().rms_norm_eps == 1e-6


# What is refused.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "gemma2"},
            'model_type is "gemma2"; KRNL trains llama, mistral, qwen2, qwen3, smollm3',
        ),
        ({"model_type": "qwen3_moe"}, 'model_type is "qwen3_moe"'),
        ({"model_type": None}, 'model_type is "missing"'),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures is"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"; KRNL computes silu'),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"num_experts": 8}, "num_experts is 8"),
        ({"vision_config": {"depth": 2}}, "vision_config is"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config is .*; KRNL does not train quant",
        ),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map is .*; KRNL does not run code"),
        ({"sliding_window": 16}, "sliding_window is 16; KRNL does not support this field"),
        ({"new_idea": 3}, "new_idea is 3"),
        ({"hidden_size": None}, "hidden_size is missing; it must be a whole number"),
        ({"hidden_size": "64"}, 'hidden_size is "64"'),
        ({"hidden_size": 66}, "hidden_size is 66; without head_dim, 4 heads must divide it"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": 97.0}, "vocab_size is 97.0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide the 4 heads"),
        ({"head_dim": 15}, "head_dim is 15; rotary embeddings need an even number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; it must be a number above 0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
        (
            {"layer_types": ["sliding_attention"] * 3},
            "layer_types is .*; the sliding window fields contradict",
        ),
        (MISTRAL | {"layer_types": ["full_attention"] * 3}, "layer_types is .* contradict"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window is 0"),
        (QWEN_2_5 | {"layer_types": ["sliding_attention"] * 3}, "layer_types is .* contradict"),
        (
            QWEN_2_5 | {"layer_types": ["chunked_attention"] * 3},
            "layer_types is .*full_attention, sliding_attention",
        ),
        (
            QWEN_2_5 | {"layer_types": ["full_attention"]},
            "layer_types is .*; it must hold 3 values",
        ),
        (SMOLLM_3 | {"no_rope_layers": [1, 2, 0]}, "no_rope_layers is .*; it must hold 3 values"),
    ],
)
def test_anything_else_is_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=f"^config.json: {message}"):
        config(change)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"rope_type": "dynamic", "factor": 2.0},
            'rope_type is "dynamic"; KRNL knows default, linear, llama3, yarn',
        ),
        ({"type": "longrope"}, 'rope_type is "longrope"'),
        ({"type": "mrope", "mrope_section": [1]}, 'rope_type is "mrope"'),
        ({"rope_type": "linear"}, "factor is missing; it must be a number above 0"),
        ({"rope_type": "linear", "factor": -1}, "factor is -1"),
        (
            {"rope_type": "linear", "factor": 2.0, "type": "yarn"},
            'type is "yarn"; rope_type says linear',
        ),
        (
            {"rope_type": "linear", "factor": 2.0, "beta_fast": 8},
            "beta_fast is 8; KRNL does not support this field",
        ),
        ({"rope_type": "default", "factor": 2.0}, "factor is 2.0"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1}, "high_freq_factor is missing"),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4},
            "high_freq_factor is 4.0; it must be above low_freq_factor",
        ),
        ({"rope_type": "yarn", "factor": 4, "finetuned": True}, "finetuned is true"),
        ({"rope_type": "yarn", "factor": 4, "truncate": 1}, "truncate is 1"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0"),
    ],
)
def test_unknown_ropes_are_refused_by_name(parameters, message):
    with pytest.raises(ConfigError, match=f"^config.json: rope parameters: {message}"):
        config(rope(**parameters))


def test_other_spellings_of_partial_or_contradictory_ropes():
    with pytest.raises(
        ConfigError, match=r"partial_rotary_factor is 0\.25; KRNL rotates whole heads"
    ):
        config({"partial_rotary_factor": 0.25})
    linear, yarn = {"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 2.0}
    with pytest.raises(ConfigError, match=r"rope_scaling is .*; rope_parameters contradicts it"):
        config({"rope_parameters": linear, "rope_scaling": yarn})
    with pytest.raises(
        ConfigError, match=r"rope_parameters is .*; KRNL has one rope for all layers"
    ):
        config({"rope_parameters": {"full_attention": linear, "sliding_attention": yarn}})
    with pytest.raises(ConfigError, match="rope_scaling is 3; it must be an object"):
        config({"rope_scaling": 3})


def test_both_spellings_say_the_same():
    linear = {"rope_type": "linear", "factor": 2.0}
    old = config({"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = {"rope_parameters": {**linear, "rope_theta": 5000.0}}
    nested = {key: new["rope_parameters"] for key in ("full_attention", "sliding_attention")}
    assert (
        old
        == config(new)
        == config({"rope_parameters": nested})
        == config(new, {"rope_theta": 9.0})
    )


def test_the_original_length_beside_the_parameters_wins():
    found = config(rope(rope_type="yarn", factor=4.0), {"original_max_position_embeddings": 16})
    assert found.rope.original_positions == 16
    assert config(rope(rope_type="yarn", factor=4.0)).rope.original_positions == 128


# Frequencies.


def test_plain_frequencies_and_linear_scaling():
    frequencies, factor = rope_frequencies(config())
    np.testing.assert_allclose(frequencies, 10_000.0 ** -(np.arange(8) / 8), rtol=1e-15)
    assert factor == 1.0
    slower, factor = rope_frequencies(config(rope(type="linear", factor=4.0)))
    np.testing.assert_allclose(slower * 4, frequencies, rtol=1e-15)
    assert factor == 1.0


def test_llama3_keeps_fast_pairs_and_slows_slow_ones():
    plain, _ = rope_frequencies(config({"rope_theta": 500000.0}))
    scaled, factor = rope_frequencies(config(LLAMA_3_2))
    turns = 64 * plain / (2 * math.pi)
    np.testing.assert_array_equal(scaled[turns > 4], plain[turns > 4])
    np.testing.assert_allclose(scaled[turns < 1], plain[turns < 1] / 32, rtol=1e-15)
    between = (turns > 1) & (turns < 4)
    assert between.any() and np.all(scaled[between] < plain[between])
    assert factor == 1.0


def test_yarn_keeps_fast_pairs_and_slows_slow_ones():
    parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    plain, _ = rope_frequencies(config({"head_dim": 64}))
    scaled, factor = rope_frequencies(config({"head_dim": 64}, rope(**parameters)))
    turns = 4096 * plain / (2 * math.pi)
    np.testing.assert_array_equal(scaled[turns > 64], plain[turns > 64])
    np.testing.assert_allclose(scaled[turns < 0.5], plain[turns < 0.5] / 4, rtol=1e-15)
    assert np.all(np.diff(scaled) < 0)
    assert factor == 0.1 * math.log(4.0) + 1


@pytest.mark.parametrize(
    ("parameters", "factor"),
    [
        ({"factor": 4.0, "attention_factor": 0.7}, 0.7),
        ({"factor": 0.5}, 1.0),
        ({"factor": None, "original_max_position_embeddings": 32}, 0.1 * math.log(128 / 32) + 1),
        (
            {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0},
            (0.07 * math.log(4) + 1) / (0.1 * math.log(4) + 1),
        ),
        ({"factor": 4.0, "mscale": 0.7}, 0.1 * math.log(4) + 1),
    ],
)
def test_the_attention_factor_of_yarn(parameters, factor):
    found = rope_frequencies(config(rope(rope_type="yarn", **parameters)))[1]
    assert found == pytest.approx(factor, rel=1e-15)


# Tensors.


def test_tensor_names_and_shapes():
    shapes = tensor_shapes(config(QWEN_3, {"attention_bias": True, "num_hidden_layers": 1}))
    layer = "model.layers.0."
    assert shapes == {
        "model.embed_tokens.weight": (97, 64),
        layer + "input_layernorm.weight": (64,),
        layer + "post_attention_layernorm.weight": (64,),
        layer + "self_attn.q_norm.weight": (32,),
        layer + "self_attn.k_norm.weight": (32,),
        layer + "self_attn.q_proj.weight": (128, 64),
        layer + "self_attn.q_proj.bias": (128,),
        layer + "self_attn.k_proj.weight": (64, 64),
        layer + "self_attn.k_proj.bias": (64,),
        layer + "self_attn.v_proj.weight": (64, 64),
        layer + "self_attn.v_proj.bias": (64,),
        layer + "self_attn.o_proj.weight": (64, 128),
        layer + "self_attn.o_proj.bias": (64,),
        layer + "mlp.gate_proj.weight": (96, 64),
        layer + "mlp.up_proj.weight": (96, 64),
        layer + "mlp.down_proj.weight": (64, 96),
        "model.norm.weight": (64,),
        "lm_head.weight": (97, 64),
    }


def test_a_tied_head_has_no_tensor_but_is_a_layer():
    tied = config(LLAMA_3_2)
    assert "lm_head.weight" not in tensor_shapes(tied)
    assert linear_shapes(tied)["lm_head"] == (97, 64)
    paths = linear_paths(tied)
    assert list(paths)[-1] == "lm_head"
    assert len(paths) == 3 * 7 + 1
    assert paths["model.layers.2.mlp.down_proj"] == (64, 96)


# Files.


def test_load_names_the_file(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json, so it is not a model folder"):
        load(tmp_path)
    for text, message in (
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ('{"vocab_size": 1, "vocab_size": 2}', "the key 'vocab_size' appears twice"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    assert load(tmp_path).name == tmp_path.name


@pytest.mark.parametrize("case", CASES)
def test_the_stored_models_of_transformers(case):
    found = load(EXPECTED / case)
    Checkpoint.open(EXPECTED / case).check(tensor_shapes(found), found.tie_word_embeddings)
    with np.load(EXPECTED / case / "expected.npz") as expected:
        frequencies, factor = rope_frequencies(found)
        # Both sides are float64 and differ in the order of a handful of roundings.
        np.testing.assert_allclose(frequencies, expected["inv_freq"], rtol=16 * 2.0**-52)
        assert factor == pytest.approx(float(expected["rope_factor"]), rel=4 * 2.0**-52)
