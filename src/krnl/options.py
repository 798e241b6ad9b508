"""Options of the commands that are not a training run. Those of `krnl train` are in
training/config.py."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from krnl.errors import ConfigError
from krnl.formats.files import check_writable, user_path
from krnl.training.config import TrainConfig

# Settings of a training run that `krnl profile` has no use for: its pass is one of random tokens,
# and no update follows.
UNPROFILED = (
    "data", "valid", "out", "batch_size", "max_length", "train_on", "shuffle", "epochs", "steps",
    "lr", "schedule", "warmup", "weight_decay", "beta1", "beta2", "eps", "clip", "eval_every",
    "save_every", "resume", "overwrite", "show",
)  # fmt: skip
ROOM = 2**20  # bytes that have to be free for each file: about what they take


@dataclass(frozen=True)
class PlanOptions(TrainConfig):
    """What a training run with these settings will hold, compute and launch. The first word may be
    the MODEL, a folder or hub id, or a FILE.yaml of settings. The answer is a plan, and no error,
    even where it exceeds the memory and krnl train would refuse. Close to a limit the two may
    differ by a few MiB that the process itself holds."""

    dispatches: bool = False
    """List every dispatch instead of a summary."""


@dataclass(frozen=True)
class ProfileOptions(TrainConfig):
    """Where the time of a training pass goes: full capacity, random tokens. The first word may be
    the MODEL, a folder or hub id, or a FILE.yaml of settings. Settings of data, updates and
    checkpoints are refused, and passed over in a file."""

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


def check_flags(arguments: Sequence[str]) -> None:
    """ConfigError if a word of `krnl profile` is the flag of a setting that it has no use for."""
    for word in arguments:
        flag = word.partition("=")[0]
        name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        if flag.startswith("--") and name in UNPROFILED:
            raise ConfigError(
                f"{flag} is given, and krnl profile has no use for it: its pass is one of random "
                "tokens, and no update follows."
            )


def passed_over(config: TrainConfig) -> str:
    """A sentence on what a file sets and `krnl profile` has no use for; empty if there is none."""
    names = config.changed(UNPROFILED)
    return f"Not used for a profile: {names}." if names else ""


@dataclass(frozen=True)
class BenchOptions:
    """Repeat a table of measurements on this machine."""

    table: Annotated[Positional[str], arg(metavar="[TABLE]")] = ""
    """Which; `krnl bench` alone lists them."""
    device: Literal["auto", "cpu", "metal", "cuda"] = "auto"
    """What computes."""
    against: str | None = None
    """Peers to measure in the same rounds, separated by commas: mlx and torch in the tables step
    and model, torch in shapes."""
    mlx_python: str | None = None
    """The Python of an environment that has MLX."""
    torch_python: str | None = None
    """The Python of an environment that has PyTorch."""
    variants: str = "eager"
    """How PyTorch is run, separated by commas. step: eager, compile; autotune, graph (on CUDA).
    model: eager, untuned (the allocator as it comes), compile, checkpointing, on CUDA graph
    (compiled) and liger."""
    adapters: Literal["both", "16", "fp32"] = "both"
    """The type of peers' adapters in the tables step and model, where the base has 16 bits: that of
    the base, or fp32."""
    model: str | None = None
    """What the table model trains: smollm2-135m, qwen2.5-0.5b, llama-3.2-1b or llama-3.1-8b with
    random weights, or the folder of a checkpoint. The first if not given."""
    rows: int | None = None
    """Rows of an update in the table model: 4 if not given."""
    length: int | None = None
    """Tokens of a row in the table model, 256 if not given, or of the block in the table step,
    512 if not given."""
    chat: bool = False
    """Rows of uneven lengths, a third of each labelled, in the table model."""
    memory_limit: float | None = None
    """GiB that KRNL may take in the table model, as in krnl train; peers do not heed it."""
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

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """Folder or hub id."""
    prompt: Annotated[Positional[str | None], arg(metavar="[PROMPT]")] = None
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

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """Folder or hub id of the base model."""
    adapter: Annotated[Positional[str], arg(metavar="ADAPTER")]
    """PEFT adapter folder."""
    out: Annotated[Positional[str], arg(metavar="OUT")]
    """New folder for the merged model."""


@dataclass(frozen=True)
class DoctorOptions:
    """Check this machine: what is here, and whether it computes what it should."""


def check_outputs(options: ProfileOptions | BenchOptions, *names: str) -> None:
    """ConfigError or FormatError if a file that is to be written is given twice, has no folder to
    be in, or cannot be written. To be called before anything is measured."""
    taken: dict[str, str] = {}
    for name in names:
        given = getattr(options, name)
        if given is None:
            continue
        if given == "-":
            raise ConfigError(f"{name} is '-', and only a file can be written; name one.")
        path = user_path(given)
        if not os.path.isdir(path.absolute().parent):
            raise ConfigError(f"{name} is '{given}', and there is no such folder to write it in.")
        if os.path.isdir(path):
            raise ConfigError(f"{name} is '{given}', which is a folder; give a file in it.")
        other = taken.setdefault(os.path.realpath(path), name)
        if other != name:
            raise ConfigError(f"{other} and {name} both name '{given}'; give each its own file.")
        check_writable(path, ROOM)
