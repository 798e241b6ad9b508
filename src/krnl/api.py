"""The Python interface: load, Lora, train, generate. The command line does the same things with the
same words."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from krnl.answering import chat_ids, prompt_ids
from krnl.data.template import Message
from krnl.devices import activation_type, open_backend
from krnl.errors import ConfigError
from krnl.formats.files import user_path
from krnl.generator import Request, Sampling, answer_all, open_generator
from krnl.model import Model
from krnl.training.config import from_dict
from krnl.training.loop import Result
from krnl.training.loop import train as run_training


@dataclass(frozen=True)
class Lora:
    """Which layers are adapted, and how. See the flags of `krnl train` of the same names."""

    rank: int = 16
    alpha: float = 32.0
    targets: Sequence[str] = ("all-linear",)
    rslora: bool = False
    dropout: float = 0.0
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)


def load(model: str | Path) -> Model:
    """Opens a checkpoint folder or hub id. Nothing is read but headers."""
    return Model.open(str(model))


def train(
    model: Model | str | Path,
    data: str | Path,
    lora: Lora | None = None,
    out: str | Path = "adapter",
    quiet: bool = False,
    **settings: Any,
) -> Result:
    """Fine-tunes; `settings` are those of `krnl train` (lr=1e-4, epochs=3, …). The adapter is in
    `out` afterwards."""
    name = model.name if isinstance(model, Model) else model
    if lora is not None and not isinstance(lora, Lora):
        raise ConfigError(f"lora is {lora!r}; give krnl.Lora(rank=…, alpha=…, …).")
    adapter = vars(lora) if lora is not None else {}
    given = {"model": name, "data": data, "out": out, **adapter}
    twice = sorted(given.keys() & settings.keys())
    if twice:
        raise ConfigError(f"{twice[0]} is given twice.")
    words = {k: str(v) if isinstance(v, Path) else v for k, v in {**given, **settings}.items()}
    config = from_dict(words, "krnl.train")
    if config.show is not None:
        raise ConfigError("show is for the command line.")
    result = run_training(config, Console(quiet=quiet, markup=False))
    assert result is not None
    return result


def generate(
    model: Model | str | Path,
    prompt: str | Sequence[Message],
    adapter: str | Path | None = None,
    max_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    device: str = "auto",
    precision: str = "auto",
) -> str:
    """The answer to a prompt, or to a conversation given as messages."""
    opened = model if isinstance(model, Model) else load(model)
    tokenizer = opened.tokenizer
    if isinstance(prompt, str):
        ids = prompt_ids(tokenizer, prompt)
    elif isinstance(prompt, (list, tuple)):
        ids = chat_ids(tokenizer, prompt)
    else:
        raise ConfigError(f"prompt is {prompt!r}; give text, or a list of messages.")
    request = Request([ids], max_tokens, Sampling(temperature, top_p, seed))
    backend = open_backend(device)
    loaded = opened.read_adapter(user_path(adapter)) if adapter is not None else None
    generator = open_generator(
        opened, loaded, backend, activation_type(backend, precision), request
    )
    return "".join(piece for _, piece, _ in answer_all(generator, opened, request))
