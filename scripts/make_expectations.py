"""Make tests/expected/: what transformers and PEFT compute for tiny random models.

Run once, in an environment of its own, since KRNL needs none of these packages:

    python -m venv scratch && scratch/bin/pip install torch transformers peft safetensors
    scratch/bin/python scripts/make_expectations.py

Every family meets every rope type, with documents that run far beyond the original length.
Weights, tokens and adapters come from NumPy generators with fixed seeds, so a second run makes the
same files, but for the order of target_modules in adapter_config.json, which PEFT keeps as a set.
Stored are the results of torch 2.13.0, transformers 5.24.0 and PEFT 0.21.2. One folder per case:

    config.json          written here, and read by transformers from the file
    model.safetensors    float32
    adapter/             lora-llama only: saved by PEFT itself
    expected.npz         ids[n], lengths[2]: two documents, one after the other, run one by one
                         targets[n]: this token is predicted, from those before it
                         logits[n, v]: float32
                         token_loss[n]: 0 where the token is not a target; loss: mean over targets
                         inv_freq[d/2], rope_factor: the rotary embedding
    lora-llama, as well  grad/<module>.lora_A, grad/<module>.lora_B: of `loss`
                         step_losses[10], step_norms[10]: loss, and norm of the gradients before
                         clipping, ahead of each AdamW update (rate 1e-2, betas 0.9 and 0.999,
                         epsilon 1e-8, weight decay 0.01, clipped to norm 1)

All is computed in float64 (see `everything_in_float64`); logits are rounded once, for size.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

FOLDER = Path(__file__).parent.parent / "tests" / "expected"
LENGTHS = (76, 21)
ORIGINAL = 32
STEPS = 10

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "max_position_embeddings": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": 97,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
WIDE_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}

# The rope of a case in the spelling of transformers 5, or before it: both must be understood.
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "linear": {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {"rope_parameters": {"rope_theta": 20000.0, **LLAMA3}},
    "yarn": {"rope_theta": 10000.0, "rope_scaling": YARN},
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": 24, **WIDE_HEADS, "tie_word_embeddings": False},
    "qwen2": {"use_sliding_window": False, "sliding_window": 8, "tie_word_embeddings": True},
    "qwen3": {"use_sliding_window": False, **WIDE_HEADS, "tie_word_embeddings": True},
    "smollm3": {"num_hidden_layers": 3, "no_rope_layer_interval": 2, "tie_word_embeddings": True},
}

# What single cases have beyond family and rope, so that every choice of a family occurs somewhere.
VARIATIONS: dict[str, dict[str, Any]] = {
    "llama-linear": {"attention_bias": True},
    "llama-llama3": {"tie_word_embeddings": True, **WIDE_HEADS},
    "llama-yarn": {"rope_scaling": {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}},
    "mistral-default": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": None},
    "mistral-linear": {"sliding_window": None},
    "mistral-yarn": {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}},
    "qwen2-linear": {
        "use_sliding_window": True,
        "num_hidden_layers": 3,
        "max_window_layers": 1,
        "sliding_window": 12,
    },
    "qwen2-yarn": {
        "tie_word_embeddings": False,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3-default": {"tie_word_embeddings": False, "attention_bias": True},
    "qwen3-llama3": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "qwen3-yarn": {"rope_scaling": {**YARN, "attention_factor": 1.3}},
    "smollm3-linear": {"no_rope_layers": [0, 1, 1], "tie_word_embeddings": False},
    "smollm3-llama3": {"use_sliding_window": True, "sliding_window": 16},
}

ARCHITECTURES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}

LORA = {
    "r": 4,
    "lora_alpha": 6,
    "use_rslora": True,
    "target_modules": "all-linear",
    "rank_pattern": {"down_proj": 6, r"layers\.1\.self_attn\.[qk]_proj": 2},
    "alpha_pattern": {"^model.layers.0.self_attn.v_proj": 3, "gate_proj": 12},
    "lora_dropout": 0.0,
    "task_type": "CAUSAL_LM",
}


@contextmanager
def everything_in_float64() -> Iterator[None]:
    """Let float32 mean float64: model code rounds to it in norms, softmax and rotary embeddings."""
    saved = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = saved


def make_config(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    architecture = ARCHITECTURES.get(family, "SmolLM3") + "ForCausalLM"
    return {"model_type": family, "architectures": [architecture], **SMALL, **changes}


def random_weight(name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Norms away from 1, biases away from 0, projections that keep scores and logits lively."""
    normal = random.normal(size=shape)
    if name.endswith("bias"):
        return 0.5 * normal
    if len(shape) == 1:
        return 1 + 0.3 * normal
    gain = 2.0 if name.split(".")[-2] in ("q_proj", "k_proj", "embed_tokens", "lm_head") else 1.0
    return gain * normal / np.sqrt(shape[1])


def write_model(folder: Path, config: dict[str, Any], seed: int) -> None:
    """config.json and random weights; transformers itself says which tensors there are."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    names = [name for name, _ in empty.named_parameters()]
    random = np.random.default_rng(seed)
    weights = {
        name: random_weight(name, tuple(empty.get_parameter(name).shape), random).astype(np.float32)
        for name in sorted(names)
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def load_model(folder: Path) -> nn.Module:
    """The model in float64, rotary frequencies included."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    with everything_in_float64():
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float64
    return model.eval()


def make_documents(seed: int, vocabulary: int, share: float) -> dict[str, np.ndarray]:
    """Random tokens; `share` of those that have a token before them are targets."""
    random = np.random.default_rng([seed, 1])
    n = sum(LENGTHS)
    targets = random.random(n) < share
    targets[np.cumsum([0, *LENGTHS[:-1]])] = False
    ids = random.integers(0, vocabulary, n).astype(np.int32)
    return {"ids": ids, "lengths": np.array(LENGTHS, np.int32), "targets": targets}


def run(model: nn.Module, documents: dict[str, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, v], and the loss of each token [n], which is 0 where it is not a target."""
    ids = torch.from_numpy(documents["ids"]).long().split(LENGTHS)
    logits = [model(input_ids=document[None]).logits[0] for document in ids]
    losses = []
    for rows, document in zip(logits, ids, strict=True):
        first = rows.new_zeros(1)
        predicted = nn.functional.cross_entropy(rows[:-1], document[1:], reduction="none")
        losses.append(torch.cat([first, predicted]))
    return torch.cat(logits), torch.cat(losses) * torch.from_numpy(documents["targets"])


def expectations(model: nn.Module, documents: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with torch.no_grad():
        logits, token_loss = run(model, documents)
    assert logits.dtype == token_loss.dtype == torch.float64
    rope = (model.get_base_model() if isinstance(model, PeftModel) else model).model.rotary_emb
    return {
        **documents,
        "logits": logits.numpy().astype(np.float32),
        "token_loss": token_loss.numpy(),
        "loss": token_loss.sum().numpy() / documents["targets"].sum(),
        "inv_freq": rope.inv_freq.numpy(),
        "rope_factor": np.float64(rope.attention_scaling),
    }


def check_against_unchanged(folder: Path, expected: dict[str, np.ndarray]) -> float:
    """Largest difference to transformers as it is, in float32: the float64 mode is faithful."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if (folder / "adapter").is_dir():
        model = PeftModel.from_pretrained(model, folder / "adapter").eval()
    with torch.no_grad():
        logits, _ = run(model, expected)
    difference = float(np.abs(logits.numpy() - expected["logits"]).max())
    assert difference < 1e-3, f"{folder.name}: float64 mode is {difference} off"
    return difference


def make_case(name: str, seed: int) -> None:
    family, rope = name.split("-")
    changes = {**FAMILIES[family], **ROPES[rope], **VARIATIONS.get(name, {})}
    folder = FOLDER / name
    write_model(folder, make_config(family, changes), seed)
    documents = make_documents(seed, SMALL["vocab_size"], share=1.0)
    model = load_model(folder)
    with everything_in_float64():
        expected = expectations(model, documents)
    finish(folder, expected)


def make_lora_case(name: str, seed: int) -> None:
    folder = FOLDER / name
    changes = {**FAMILIES["llama"], **ROPES["llama3"]}
    write_model(folder, make_config("llama", changes), seed)
    make_adapter(folder, seed)
    documents = make_documents(seed, SMALL["vocab_size"], share=0.5)
    model = PeftModel.from_pretrained(load_model(folder), folder / "adapter", is_trainable=True)
    model.double()
    with everything_in_float64():
        expected = expectations(model, documents) | train(model, documents)
    finish(folder, expected)


def make_adapter(folder: Path, seed: int) -> None:
    """An adapter that PEFT saves, with B away from 0, so that every gradient is."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(**LORA))
    model.peft_config["default"].base_model_name_or_path = folder.name
    random = np.random.default_rng([seed, 2])
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" in name:
            values = 0.3 * random.normal(size=tuple(parameter.shape))
            parameter.data = torch.from_numpy(values.astype(np.float32))
    model.save_pretrained(folder / "adapter", save_embedding_layers=False)
    (folder / "adapter" / "README.md").unlink()


def train(model: nn.Module, documents: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(p.dtype == torch.float64 for p in parameters.values())
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, weight_decay=0.01)
    result: dict[str, np.ndarray] = {}
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = run(model, documents)[1].sum() / documents["targets"].sum()
        loss.backward()
        if step == 0:
            for name, parameter in parameters.items():
                short = name.removeprefix("base_model.model.").removesuffix(".default.weight")
                result[f"grad/{short}"] = parameter.grad.numpy().copy()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(parameters.values(), 1.0).item())
        optimizer.step()
    return {**result, "step_losses": np.array(losses), "step_norms": np.array(norms)}


def finish(folder: Path, expected: dict[str, np.ndarray]) -> None:
    np.savez_compressed(folder / "expected.npz", **expected)
    difference = check_against_unchanged(folder, expected)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    spread = float(expected["logits"].std())
    print(
        f"{folder.name:16} loss {float(expected['loss']):.6f}  logits ±{spread:.2f}  "
        f"float32 differs by {difference:.1e}  {size / 1024:.0f} KiB"
    )


def main() -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    names = [f"{family}-{rope}" for family in FAMILIES for rope in ROPES]
    for seed, name in enumerate(names):
        make_case(name, seed)
    make_lora_case("lora-llama", len(names))


if __name__ == "__main__":
    main()
