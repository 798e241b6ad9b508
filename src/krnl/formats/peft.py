"""LoRA adapters in PEFT's own folder layout, which PEFT, vLLM and others load.

    adapter_config.json          rank, alpha, which modules, ...
    adapter_model.safetensors    base_model.model.<module path>.lora_A.weight [r, in]
                                 base_model.model.<module path>.lora_B.weight [out, r]

How names select modules follows PEFT (https://huggingface.co/docs/peft/package_reference/lora):

    target_modules   "all-linear": every linear layer but the output head; another string: a regular
                     expression for the whole path; a list: paths, or endings of paths after a dot
    rank_pattern,    keys are regular expressions for a path or for its ending after a dot ("^" pins
    alpha_pattern    the start); the first key that matches decides, else r and lora_alpha do
    scale            alpha / r, with rsLoRA alpha / sqrt(r) (arXiv:2312.03732), of the module itself

vLLM reads r and lora_alpha only, so an adapter with patterns has the right scale there only where
`AdapterConfig.uniform` holds.
"""

import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from krnl.errors import ConfigError, FormatError
from krnl.formats.files import read_json, write_json_atomic
from krnl.formats.safetensors import read_tensors, write_safetensors

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
ALL_LINEAR = "all-linear"
HEAD = "lm_head"
LARGEST_RANK = 2**16

KEY = re.compile(re.escape(PREFIX) + r"(?P<path>.+)\.lora_(?P<side>[AB])\.weight")

# Fields of adapter_config.json that say nothing about the function the adapter computes.
NOTES = {
    "auto_mapping",
    "inference_mode",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
}

# Fields that narrow down which modules are adapted; the tensors themselves say that.
NARROWING = {"exclude_modules", "layers_to_transform", "layers_pattern"}

# Initialisations that leave the base weights alone. Others (PiSSA, OLoRA, ...) change them too.
PLAIN_INITS = (True, False, "gaussian", "orthogonal", "eva")

# Module path -> (A float32 [r, in], B float32 [out, r]).
Modules: TypeAlias = Mapping[str, tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class AdapterConfig:
    """Which modules are adapted, and how strongly.

    `targets` is "all-linear", a regular expression, or names; see the top of this file.
    """

    rank: int
    alpha: float
    targets: str | tuple[str, ...] = ALL_LINEAR
    rslora: bool = False
    dropout: float = 0.0
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    base_model: str | None = None

    def __post_init__(self) -> None:
        for name, rank in (("rank", self.rank), *self.rank_pattern.items()):
            if type(rank) is not int or not 1 <= rank <= LARGEST_RANK:
                raise ConfigError(
                    f"LoRA rank must be a whole number from 1 to {LARGEST_RANK:,}; {name} is "
                    f"{rank!r}."
                )
        for name, alpha in (("alpha", self.alpha), *self.alpha_pattern.items()):
            if not _is_number(alpha) or not 0 < alpha <= sys.float_info.max:
                raise ConfigError(
                    f"LoRA alpha must be a finite number above 0; {name} is {alpha!r}."
                )
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ConfigError(f"LoRA dropout must be at least 0 and below 1, not {self.dropout!r}.")
        if not self.targets:
            raise ConfigError(
                'LoRA targets are empty. Give "all-linear" or module names such as q_proj, v_proj.'
            )
        patterns = [*self.rank_pattern, *self.alpha_pattern]
        for pattern in [*patterns, self.targets] if isinstance(self.targets, str) else patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"LoRA pattern '{pattern}' is no regular expression: {error}."
                ) from error

    def rank_for(self, path: str) -> int:
        """The rank of the module at `path`, e.g. model.layers.0.self_attn.q_proj."""
        key = _first_match(self.rank_pattern, path)
        return self.rank if key is None else self.rank_pattern[key]

    def alpha_for(self, path: str) -> float:
        """The alpha of the module at `path`."""
        key = _first_match(self.alpha_pattern, path)
        return self.alpha if key is None else self.alpha_pattern[key]

    def scale_for(self, path: str) -> float:
        """The factor s of y = x Wᵀ + s (x Aᵀ) Bᵀ."""
        return _scale(self.alpha_for(path), self.rank_for(path), self.rslora)

    def uniform(self, paths: Iterable[str]) -> bool:
        """Whether all of `paths` have the scale that rank and alpha alone give."""
        return all(
            self.scale_for(path) == _scale(self.alpha, self.rank, self.rslora) for path in paths
        )

    def select(self, linears: Iterable[str]) -> tuple[str, ...]:
        """The paths among `linears` that are adapted, in their order.

        ConfigError for a target or pattern that matches none: it may be misspelt.
        """
        linears = tuple(linears)
        matches = _matches if isinstance(self.targets, str) else _ends_with
        targets = (self.targets,) if isinstance(self.targets, str) else self.targets
        for target in targets:
            if not any(matches(target, path) for path in linears):
                names = ", ".join(dict.fromkeys(path.rsplit(".", 1)[-1] for path in linears))
                meant = (
                    "It is a regular expression for a layer's whole path"
                    if isinstance(self.targets, str)
                    else "A target is a layer's name or the end of its path, no regular expression"
                )
                raise ConfigError(
                    f"LoRA target '{target}' matches no linear layer. {meant}; the layers are "
                    f"{names}."
                )
        selected = tuple(p for p in linears if any(matches(target, p) for target in targets))
        for pattern in [*self.rank_pattern, *self.alpha_pattern]:
            if not any(_pattern_matches(pattern, path) for path in selected):
                raise ConfigError(f"LoRA pattern '{pattern}' matches none of the adapted layers.")
        return selected


def read_adapter(folder: Path) -> tuple[AdapterConfig, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """An adapter folder: its config, and per module path A [r, in] and B [out, r] in float32.

    FormatError, naming file and field or tensor, for anything but plain LoRA on linear layers:
    DoRA, biases, embeddings, fully saved modules, other methods, ranks that contradict the config.
    """
    if not (folder / CONFIG).is_file():
        raise FormatError(f"{folder} is not an adapter folder: it has no {CONFIG}.")
    if not (folder / WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        hint = (
            " It has adapter_model.bin; save it again with safe_serialization=True."
            if pickled
            else ""
        )
        raise FormatError(f"{folder} has no {WEIGHTS}.{hint}")
    content = read_json(folder / CONFIG)
    config = _parse_config(content, str(folder / CONFIG))
    modules = _pair_tensors(folder / WEIGHTS)
    for path, (a, _) in modules.items():
        if a.shape[0] != config.rank_for(path):
            raise FormatError(
                f"{folder / WEIGHTS}: {path} has rank {a.shape[0]}, "
                f"but {CONFIG} gives it {config.rank_for(path)}."
            )
    if any(content.get(name) not in (None, []) for name in NARROWING):
        config = replace(config, targets=tuple(modules))
    return config, modules


def write_adapter(folder: Path, config: AdapterConfig, modules: Modules) -> None:
    """Write an adapter folder that PEFT loads. A and B are stored as float32.

    "all-linear" is written as the layer names it stood for, and a regular expression as the paths:
    in PEFT the same text could also match modules that are not linear, which PEFT refuses.
    """
    tensors: dict[str, np.ndarray] = {}
    for path, (a, b) in modules.items():
        rank = config.rank_for(path)
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
            raise FormatError(
                f"{path}: A {list(a.shape)} and B {list(b.shape)} do not have rank {rank}."
            )
        tensors[f"{PREFIX}{path}.lora_A.weight"] = a.astype(np.float32, copy=False)
        tensors[f"{PREFIX}{path}.lora_B.weight"] = b.astype(np.float32, copy=False)
    if isinstance(config.targets, tuple):
        targets = list(config.targets)
    elif config.targets.lower() == ALL_LINEAR:
        targets = sorted({path.rsplit(".", 1)[-1] for path in modules})
    else:
        targets = list(modules)
    write_safetensors(folder / WEIGHTS, tensors, {"format": "pt"})
    write_json_atomic(
        folder / CONFIG,
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": config.base_model,
            "r": config.rank,
            "lora_alpha": config.alpha,
            "lora_dropout": config.dropout,
            "target_modules": targets,
            "use_rslora": config.rslora,
            "rank_pattern": dict(config.rank_pattern),
            "alpha_pattern": dict(config.alpha_pattern),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "modules_to_save": None,
            "use_dora": False,
        },
    )


def check_fits(modules: Modules, linears: Mapping[str, tuple[int, int]], where: str) -> None:
    """FormatError if a module is not one of `linears` (path -> (out, in)) or has another shape."""
    for path, (a, b) in modules.items():
        if path not in linears:
            raise FormatError(
                f"{where} adapts {path}, which this model does not have: it is for another model."
            )
        rows, columns = linears[path]
        for side, array, axis, size in (("A", a, 1, columns), ("B", b, 0, rows)):
            if array.shape[axis] != size:
                raise FormatError(
                    f"{where}: {PREFIX}{path}.lora_{side}.weight is {list(array.shape)}, "
                    f"but the layer is [{rows}, {columns}]: the adapter is for another model."
                )


def _parse_config(content: Mapping[str, Any], where: str) -> AdapterConfig:
    rest = dict(content)
    if rest.pop("peft_type", None) != "LORA":
        raise FormatError(
            f"{where}: peft_type is {content.get('peft_type')!r}; KRNL reads LORA only."
        )
    if rest.pop("task_type", None) not in (None, "CAUSAL_LM"):
        raise FormatError(
            f"{where}: task_type is {content['task_type']!r}; KRNL trains CAUSAL_LM only."
        )
    init = rest.pop("init_lora_weights", True)
    if init not in PLAIN_INITS:
        raise FormatError(
            f"{where}: init_lora_weights is {init!r}, which also changes the base model. "
            "Convert the adapter to plain LoRA with PEFT first."
        )
    if rest.pop("bias", "none") != "none":
        raise FormatError(f"{where}: bias is {content['bias']!r}; KRNL does not train biases.")
    targets = rest.pop("target_modules", None)
    if isinstance(targets, list) and all(isinstance(name, str) for name in targets):
        targets = tuple(targets)
    elif not isinstance(targets, str):
        raise FormatError(
            f"{where}: target_modules is {targets!r}; it must be a name, a pattern, or names."
        )
    patterns: list[dict[str, Any]] = []
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = rest.pop(name, None) or {}
        if not isinstance(pattern, dict):
            raise FormatError(
                f"{where}: {name} is {pattern!r}; it must map module names to numbers."
            )
        patterns.append(pattern)
    try:
        config = AdapterConfig(
            rank=rest.pop("r", None),
            alpha=rest.pop("lora_alpha", None),
            targets=targets,
            rslora=bool(rest.pop("use_rslora", False)),
            dropout=rest.pop("lora_dropout", 0.0),
            rank_pattern=patterns[0],
            alpha_pattern=patterns[1],
            base_model=rest.pop("base_model_name_or_path", None),
        )
    except ConfigError as error:
        raise FormatError(f"{where}: {error}") from error
    for name, value in rest.items():
        if name not in NOTES | NARROWING and value not in (None, False, [], {}):
            raise FormatError(f"{where}: {name} is {value!r}, which KRNL does not support.")
    return config


def _pair_tensors(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    tensors, _ = read_tensors(path)
    sides: dict[str, dict[str, np.ndarray]] = {}
    for name, values in tensors.items():
        key = KEY.fullmatch(name)
        if key is None:
            raise FormatError(
                f"{path} holds tensor {name}; "
                f"KRNL reads {PREFIX}<module>.lora_A.weight and lora_B.weight only."
            )
        if values.ndim != 2 or values.dtype == np.int32:
            raise FormatError(
                f"{path}: tensor {name} is {values.dtype}{list(values.shape)}, not a float matrix."
            )
        sides.setdefault(key["path"], {})[key["side"]] = values.astype(np.float32)
    if not sides:
        raise FormatError(f"{path} holds no tensors.")
    for module, pair in sides.items():
        if len(pair) < 2:
            lacking = "B" if "A" in pair else "A"
            raise FormatError(f"{path} lacks tensor {PREFIX}{module}.lora_{lacking}.weight.")
        if pair["A"].shape[0] != pair["B"].shape[1]:
            raise FormatError(
                f"{path}: the ranks of {module} differ: "
                f"A is {list(pair['A'].shape)}, B is {list(pair['B'].shape)}."
            )
    return {module: (pair["A"], pair["B"]) for module, pair in sides.items()}


def _scale(alpha: float, rank: int, rslora: bool) -> float:
    return alpha / (math.sqrt(rank) if rslora else rank)


def _matches(target: str, path: str) -> bool:
    if target.lower() == ALL_LINEAR:
        return not _ends_with(HEAD, path)
    return re.fullmatch(target, path) is not None


def _ends_with(name: str, path: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _first_match(patterns: Iterable[str], path: str) -> str | None:
    return next((pattern for pattern in patterns if _pattern_matches(pattern, path)), None)


def _pattern_matches(pattern: str, path: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", path) is not None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
