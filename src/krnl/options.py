"""Options of the commands that are not a training run. Those of `krnl train` are in
training/config.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from krnl.errors import ConfigError
from krnl.training.config import TrainConfig


@dataclass(frozen=True)
class PlanOptions(TrainConfig):
    """What a training run with these settings will hold, compute and launch."""

    dispatches: bool = False
    """List every dispatch instead of a summary."""


@dataclass(frozen=True)
class ProfileOptions(TrainConfig):
    """Where the time of a training pass goes: full capacity, random tokens."""

    documents: int = 1
    """Rows of equal length that the pass is made of."""
    labelled: float = 1.0
    """Share of the tokens that are targets."""
    by: Literal["kernel", "label", "layer"] = "kernel"
    """What a line of the table is: a kernel, what it computes, or a layer of the model."""
    dispatches: bool = False
    """List every dispatch instead of groups."""
    json: str | None = None
    """Also write every dispatch to this file."""
    trace: str | None = None
    """Also write the dispatches as a trace, to be opened in Perfetto or chrome://tracing."""
    png: str | None = None
    """Also draw the longest lines as bars."""
    force: bool = False
    """Print figures even if the machine is busy, marked as untrusted."""


@dataclass(frozen=True)
class BenchOptions:
    """Repeat a table of measurements on this machine."""

    table: Positional[str] = ""
    """Which; `krnl bench` alone lists them."""
    device: Literal["auto", "cpu", "metal", "cuda"] = "auto"
    """What computes."""
    against: str | None = None
    """Peers to measure in the same rounds, separated by commas: mlx, torch."""
    mlx_python: str | None = None
    """The Python of an environment that has MLX."""
    torch_python: str | None = None
    """The Python of an environment that has PyTorch."""
    rounds: int = 7
    """How often each contestant runs; medians are shown."""
    json: str | None = None
    """Also write the table to this file."""
    png: str | None = None
    """Also draw the table."""
    force: bool = False
    """Print figures even if the machine is busy, marked as untrusted."""
    relearn: bool = False
    """Learn anew how fast this machine is in quiet, even if it is slower than before."""
    quick: bool = False
    """Small sizes, to see that everything works."""


@dataclass(frozen=True)
class GenerateOptions:
    """Continue a prompt, or answer conversations."""

    model: Positional[str]
    """Folder or hub id."""
    prompt: Positional[str | None] = None
    """What to answer: a user's turn where the tokenizer has a chat template, plain text where it
    has none."""
    adapter: str | None = None
    """PEFT adapter folder."""
    messages: str | None = None
    """Answer every conversation of this .jsonl file instead of a prompt."""
    answer_last: bool = False
    """With --messages: leave out each conversation's last assistant turn, and answer in its
    place."""
    json: bool = False
    """Print one {"answer", "tokens", "stopped"} a line."""
    raw: bool = False
    """Take the prompt as plain text even if there is a chat template."""
    max_tokens: int = 256
    """Longest answer, in tokens."""
    temperature: float = 0.0
    """0 takes the most likely token each time."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens with this much probability."""
    seed: int = 0
    """Seed of the drawing."""
    device: Literal["auto", "cpu", "metal", "cuda", "reference"] = "auto"
    """What computes."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type of activations."""


@dataclass(frozen=True)
class MergeOptions:
    """Fold an adapter into its base model: added in float32, rounded once, the files kept as they
    are cut."""

    model: Positional[str]
    """Folder or hub id of the base model."""
    adapter: Positional[str]
    """PEFT adapter folder."""
    out: Positional[str]
    """New folder for the merged model."""


def check_outputs(options: ProfileOptions | BenchOptions, *names: str) -> None:
    """ConfigError if a file that is to be written has no folder to be in. To be called before
    anything is measured."""
    for name in names:
        path = getattr(options, name)
        if path is not None and not Path(path).expanduser().absolute().parent.is_dir():
            raise ConfigError(f"{name} is '{path}', and there is no such folder to write it in.")
