"""Every setting of a training run, declared once: command-line flags, YAML keys and the saved
config follow from here."""

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from krnl.errors import ConfigError
from krnl.formats.peft import LARGEST_RANK

MOST = 2**31 - 1  # of whatever is counted
LONGEST = 64  # bits of a whole number that is looked at: thousands cannot even be printed

Recompute = Literal["auto", "none", "mlp", "layer"]


@dataclass(frozen=True)
class TrainConfig:
    """Fine-tune a model with LoRA. The first word may be a FILE.yaml of settings, over which flags
    win."""

    model: str = ""
    """Folder with config.json and safetensors, or a Hugging Face hub id."""
    data: str = ""
    """A .jsonl or .json file, or a folder with train and valid files."""
    valid: str | None = None
    """Validation file; by default the one in the data folder, if there is one."""
    out: str = "adapter"
    """Folder for the adapter (PEFT format), metrics, picture and checkpoints."""
    device: Literal["auto", "cpu", "metal", "cuda", "reference"] = "auto"
    """What computes. auto: Metal on a Mac with Apple silicon, CUDA where it can be used, else the
    CPU."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type of activations; sums are float32 in any case. auto: fp16 on Metal, bf16 on CUDA; on the
    CPU bf16 where it computes in bf16, else fp32. fp16 comes with dynamic loss scaling."""

    rank: int = 16
    """Rank of the adapters."""
    alpha: float = 32.0
    """Adapters are scaled by alpha / rank."""
    targets: tuple[str, ...] = ("all-linear",)
    """Layers to adapt: all-linear (all but lm_head), or names such as q_proj v_proj."""
    rslora: bool = False
    """Scale by alpha over the square root of rank instead (rank-stabilised LoRA)."""
    dropout: float = 0.0
    """Dropout on what enters the adapters."""
    rank_pattern: dict[str, int] = field(default_factory=dict)
    """Other ranks for layers whose path matches a pattern, as PEFT matches them."""
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    """Other alphas, likewise."""
    init_adapter: str | None = None
    """A PEFT adapter folder to start from; its own rank, alpha and targets are used."""

    batch_size: int = 16
    """Rows per update."""
    tokens: int = 2048
    """Capacity of one pass, in tokens. An update takes as many passes as its rows need."""
    max_length: int | None = None
    """Rows are cut to this many tokens; by default to the capacity of a pass."""
    train_on: Literal["all-assistant", "last-assistant", "everything"] = "all-assistant"
    """Which tokens are targets."""
    shuffle: bool = True
    """Draw a new order of rows for each epoch."""

    epochs: int = 1
    """Times that every row is trained on."""
    steps: int | None = None
    """Number of updates, instead of epochs."""
    lr: float = 2e-4
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """How the rate falls after warmup."""
    warmup: int = 0
    """Updates over which the rate rises to its peak."""
    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW."""
    beta1: float = 0.9
    """Decay of AdamW's first moment."""
    beta2: float = 0.999
    """Decay of AdamW's second moment."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    clip: float = 1.0
    """Largest global norm of the gradient; 0 does not clip."""
    seed: int = 0
    """Seed of the initial adapter, the order of rows and dropout."""

    eval_every: int | None = None
    """Updates between validations; by default once per epoch."""
    save_every: int | None = None
    """Updates between checkpoints; by default once per epoch."""
    resume: bool = False
    """Continue the run in `out` from its last checkpoint."""
    overwrite: bool = False
    """Replace an earlier run in `out`."""
    recompute: Recompute = "auto"
    """Activations to compute again instead of keeping: less memory, same numbers. mlp: gate and up
    of every layer; layer: everything inside layers. auto: gate and up of as few layers as the
    memory asks for, everything only if that is not enough."""
    memory_limit: float | None = None
    """GiB that the run may take, a number such as 16; by default all that the device has. It does
    not start if it needs more."""
    show: int | None = None
    """Print this many rows with the trained tokens in colour, and stop."""

    def check(self, needs_data: bool = True) -> None:
        """ConfigError that names the field, if any setting cannot be used."""
        if not self.model:
            raise ConfigError(
                "model is missing: give a folder or a hub id, e.g. --model "
                "HuggingFaceTB/SmolLM2-135M."
            )
        if needs_data and not self.data:
            raise ConfigError("data is missing: give a .jsonl file or a folder with train.jsonl.")
        if not self.out:
            raise ConfigError("out is empty: give a folder for the adapter.")
        self._require("tokens", lambda v: 2 <= v < 2**24, "from 2 to 16,777,215")
        for name in ("batch_size", "epochs", "steps", "eval_every", "save_every", "show"):
            self._require(name, lambda v: v is None or 1 <= v <= MOST, f"from 1 to {MOST:,}")
        self._require(
            "max_length",
            lambda v: v is None or 2 <= v <= self.tokens,
            f"from 2 to the {self.tokens} tokens of a pass",
        )
        if "all-linear" in self.targets and len(self.targets) > 1:
            raise ConfigError(
                "targets holds all-linear and others; give all-linear alone, or names."
            )
        self._require("rank", lambda v: 1 <= v <= LARGEST_RANK, f"from 1 to {LARGEST_RANK:,}")
        self._require("alpha", lambda v: 0 < v < math.inf, "a finite number above 0")
        self._require("dropout", lambda v: 0 <= v < 1, "at least 0 and below 1")
        self._require("lr", lambda v: 0 < v < math.inf, "a finite number above 0")
        self._require("warmup", lambda v: 0 <= v <= MOST, f"from 0 to {MOST:,}")
        self._require("weight_decay", lambda v: 0 <= v < math.inf, "finite and at least 0")
        self._require("beta1", lambda v: 0 <= v < 1, "at least 0 and below 1")
        self._require("beta2", lambda v: 0 <= v < 1, "at least 0 and below 1")
        self._require("eps", lambda v: 0 < v < math.inf, "a finite number above 0")
        self._require("clip", lambda v: 0 <= v < math.inf, "finite and at least 0")
        self._require("seed", lambda v: 0 <= v < 2**31, "at least 0 and below 2³¹")
        check_memory_limit(self.memory_limit)
        if self.resume and self.overwrite:
            raise ConfigError("resume and overwrite exclude each other.")

    def changed(self, names: Iterable[str]) -> str:
        """Which of these settings are not at their defaults, for people."""
        default = TrainConfig()
        return ", ".join(n for n in names if getattr(self, n) != getattr(default, n))

    def _require(self, name: str, fits: Callable[[Any], bool], rule: str) -> None:
        value = getattr(self, name)
        if not fits(value):
            raise ConfigError(f"{name} is {value}; it must be {rule}.")


def check_memory_limit(gib: float | None) -> None:
    """ConfigError for a limit that is no number of GiB."""
    if gib is not None and not 0 < gib < math.inf:
        raise ConfigError(f"memory_limit is {gib}; it must be a finite number above 0.")


def from_yaml(path: Path) -> TrainConfig:
    """The settings in a YAML file. ConfigError, with the nearest key, for one that does not
    exist."""
    import yaml

    try:
        text = path.read_text("utf-8")
        content, node = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist.") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be read: {reason}.") from error
    except (yaml.YAMLError, ValueError) as error:  # the latter for what looks like a date
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold settings such as 'rank: 16', one a line.")
    keys = [str(key.value) for key, _ in node.value]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"{path}: {key} is set twice.")
    return from_dict(content, str(path))


def from_dict(content: dict[Any, Any], where: str) -> TrainConfig:
    """The settings in a mapping; `where` is what errors call it."""
    hints = get_type_hints(TrainConfig)
    values = {}
    for key, value in content.items():
        if key not in hints:
            raise ConfigError(
                f"{where}: there is no setting "
                f"'{key}'.{_nearest(str(key).replace('-', '_'), hints)}"
            )
        values[key] = _convert(f"{where}: {key}", value, hints[key])
    return TrainConfig(**values)


def _nearest(word: str, words: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(words), n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


def _convert(where: str, value: Any, hint: Any) -> Any:
    """A YAML value as a type of the dataclass. YAML reads 1e-4 as text, 2 as a whole number, one
    name as no list."""
    if isinstance(value, int) and value.bit_length() > LONGEST:
        raise ConfigError(
            f"{where} is a whole number of {value.bit_length():,} bits; no setting has so many."
        )
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:  # X | None
        return None if value is None else _convert(where, value, arguments[0])
    if origin is Literal:
        if value not in arguments:
            choices = ", ".join(map(str, arguments))
            raise ConfigError(
                f"{where} is {value!r}; it must be one of "
                f"{choices}.{_nearest(str(value), arguments)}"
            )
        return value
    if origin is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        return tuple(_convert(where, item, arguments[0]) for item in items)
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{where} is {value!r}; it must map patterns to numbers.")
        return {str(k): _convert(f"{where}.{k}", v, arguments[1]) for k, v in value.items()}
    if hint is float and isinstance(value, (int, str)) and type(value) is not bool:
        try:
            return float(value)
        except ValueError:
            pass
    if type(value) is not hint:
        kind = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[hint]
        raise ConfigError(f"{where} is {value!r}; it must be {kind}.")
    return value
