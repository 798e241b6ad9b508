"""Check against PEFT itself that adapters mean the same on both sides.

Written by KRNL, loaded by PEFT: the same modules, ranks, scales and values, and the logits of the
base model with W + s B A put in place of every W. Saved by PEFT, read by KRNL: the same again.

    PYTHONPATH=src scratch/bin/python scripts/check_peft_roundtrip.py

needs torch, transformers, peft, safetensors and ml_dtypes, and the models in tests/expected/.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from krnl.formats.peft import AdapterConfig, Modules, check_fits, read_adapter, write_adapter
from krnl.models.config import linear_paths, load

EXPECTED = Path(__file__).parent.parent / "tests" / "expected"
MODELS = ("llama-default", "mistral-yarn", "qwen2-yarn", "qwen3-default", "smollm3-linear")

# The first pattern that matches decides, and PEFT sorts the keys when it saves: sorted already, so
# that this is not what is tested.
PATTERNS = {
    "rank_pattern": {"down_proj": 5, r"layers\.0\..*": 3},
    "alpha_pattern": {"^model.layers.1.self_attn.q_proj": 9, "up_proj": 2},
}
OPTIONS = {
    "all linear": {"targets": "all-linear"},
    "names": {"targets": ("q_proj", "mlp.down_proj"), "rslora": True},
    "a path and the head": {"targets": ("model.layers.1.self_attn.v_proj", "lm_head")},
    "an expression": {"targets": r"model\.layers\.1\..*\..*_proj"},
    "patterns": {"targets": "all-linear", **PATTERNS},
    "patterns, rsLoRA": {"targets": "all-linear", "rslora": True, **PATTERNS},
}


def make_modules(config: AdapterConfig, folder: Path) -> Modules:
    random = np.random.default_rng(0)
    shapes = linear_paths(load(folder))
    modules = {}
    for path in config.select(shapes):
        (rows, columns), rank = shapes[path], config.rank_for(path)
        a, b = random.normal(size=(rank, columns)), random.normal(size=(rows, rank))
        modules[path] = (0.3 * a).astype(np.float32), (0.3 * b).astype(np.float32)
    return modules


def base_model(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.arange(40)[None]).logits[0].numpy()


def compare(model: nn.Module, config: AdapterConfig, modules: Modules) -> None:
    """Modules, scales and values of a PEFT model against ours."""
    tuned = {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and "default" in module.lora_A
    }
    assert tuned.keys() == modules.keys(), tuned.keys() ^ modules.keys()
    for path, module in tuned.items():
        a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
        np.testing.assert_array_equal(a.detach().numpy(), modules[path][0])
        np.testing.assert_array_equal(b.detach().numpy(), modules[path][1])
        assert module.scaling["default"] == config.scale_for(path), path


def check_ours_in_peft(folder: Path, options: dict) -> float:
    config = AdapterConfig(**{"rank": 4, "alpha": 6, "base_model": folder.name} | options)
    modules = make_modules(config, folder)
    with tempfile.TemporaryDirectory() as adapter:
        write_adapter(Path(adapter), config, modules)
        model = PeftModel.from_pretrained(base_model(folder), adapter).eval()
        compare(model, config, modules)
    merged = base_model(folder)
    for path, (a, b) in modules.items():
        weight = merged.get_submodule(path).weight
        weight.data += config.scale_for(path) * torch.from_numpy(b @ a)
    difference = float(np.abs(logits(model) - logits(merged)).max())
    assert difference < 1e-3, difference
    return difference


def check_pefts_in_ours(folder: Path, options: dict) -> None:
    targets = options["targets"]
    lora = LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=list(targets) if isinstance(targets, tuple) else targets,
        use_rslora=options.get("rslora", False),
        rank_pattern=options.get("rank_pattern", {}),
        alpha_pattern=options.get("alpha_pattern", {}),
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base_model(folder), lora)
    with tempfile.TemporaryDirectory() as adapter:
        model.save_pretrained(adapter, save_embedding_layers=False)
        config, modules = read_adapter(Path(adapter))
    linears = linear_paths(load(folder))
    check_fits(modules, linears, "adapter")
    assert set(config.select(linears)) == modules.keys()
    compare(model, config, modules)


def main() -> None:
    logging.disable_progress_bar()
    for name in MODELS:
        for title, options in OPTIONS.items():
            difference = check_ours_in_peft(EXPECTED / name, options)
            check_pefts_in_ours(EXPECTED / name, options)
            print(f"{name:16} {title:20} same both ways; logits differ by {difference:.1e}")


if __name__ == "__main__":
    main()
