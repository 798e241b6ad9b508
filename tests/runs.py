"""Small training runs: a tiny model with a real tokenizer, chats of random words, how far runs may
be apart, and `krnl` as a process of its own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import krnl
from krnl.training.config import TrainConfig
from krnl.training.loop import Result, train
from krnl.training.metrics import METRICS, read
from tiny import write_model

ROOT = Path(__file__).parent.parent
STORYTELLER = ROOT / "examples/storyteller"
EXPECTED = Path(__file__).parent / "expected/storyteller"
BASE = STORYTELLER / "model"
VOCABULARY = 1013
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
WORDS = [
    "Cora",
    "Omar",
    "Tess",
    "went",
    "to",
    "the",
    "forest",
    "kitchen",
    "black",
    "silver",
    "scarf",
    "owl",
    "bear",
    "was",
    "calm",
    "happy",
]
# What a log line says about the clock, not about the run.
CLOCK = {"seconds", "tokens_per_s"}


def write_chat_model(folder: Path, kind: str = "llama", **sizes: Any) -> Path:
    """A tiny random checkpoint that speaks the storyteller's tokens."""
    write_model(folder, kind, vocab_size=VOCABULARY, **sizes)
    for name in TOKENIZER:
        shutil.copyfile(BASE / name, folder / name)
    return folder


def chat(rng: np.random.Generator, longest: int = 12) -> dict[str, Any]:
    """A question and an answer of random words."""
    ask, answer = (" ".join(rng.choice(WORDS, rng.integers(1, longest))) for _ in range(2))
    roles = (("user", ask), ("assistant", answer))
    return {"messages": [{"role": role, "content": content} for role, content in roles]}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_data(folder: Path, train_rows: int, valid_rows: int = 0, seed: int = 0) -> Path:
    """train.jsonl, and valid.jsonl if it has rows."""
    rng = np.random.default_rng([seed, 17])
    write_rows(folder / "train.jsonl", [chat(rng) for _ in range(train_rows)])
    if valid_rows:
        write_rows(folder / "valid.jsonl", [chat(rng) for _ in range(valid_rows)])
    return folder


def settings(model: Path, data: Path, out: Path, **given: Any) -> TrainConfig:
    """A run short enough for a test: ranks of 3, passes of 64 tokens, float32."""
    small: dict[str, Any] = {
        "rank": 3, "alpha": 6.0, "tokens": 64, "batch_size": 4, "lr": 1e-2, "precision": "fp32",
    }  # fmt: skip
    return TrainConfig(model=str(model), data=str(data), out=str(out), **{**small, **given})


def storyteller(out: Path, **given: Any) -> TrainConfig:
    """The settings of the run of PEFT's that is stored."""
    stored: dict[str, Any] = {
        "model": str(BASE), "data": str(STORYTELLER / "data/train.jsonl"), "out": str(out),
        "rank": 16, "alpha": 32.0, "epochs": 3, "batch_size": 16, "lr": 1e-3, "warmup": 20,
        "clip": 1.0,
    }  # fmt: skip
    return TrainConfig(**{**stored, **given})


def run(config: TrainConfig) -> Result:
    """The run, without a word."""
    result = train(config, Console(quiet=True))
    assert result is not None
    return result


def updates(out: Path) -> list[dict[str, Any]]:
    """The log lines of updates."""
    return [line for line in read(out / METRICS) if "loss" in line]


def validations(out: Path) -> list[dict[str, Any]]:
    """The log lines of validations."""
    return [line for line in read(out / METRICS) if "val_loss" in line]


# How far an update's loss and gradient norm may be from those of the same run in fp32 or float64,
# relative. In float32 sums are formed in another order: a loss may be as far off as from PEFT's in
# the first updates of test_storyteller, a norm as over all of them. In 16 bits each of some 60
# roundings moves an activation by up to half an ulp: like a random walk they add to four, and the
# mean over dozens of targets takes that down to one. Updates add less in a few steps, as they see
# gradients that are about as far off. A norm is a length of differences, more easily moved: it gets
# ten times as much.
ALLOWED = {
    "fp32": {"loss": 1e-4, "grad_norm": 1e-2},
    "fp16": {"loss": 2 * 2.0**-11, "grad_norm": 20 * 2.0**-11},
    "bf16": {"loss": 2 * 2.0**-8, "grad_norm": 20 * 2.0**-8},
}


def follow(out: Path, reference: Path, allowed: dict[str, float]) -> None:
    """Of every update, the values named in `allowed` are within that part of the reference's."""
    for name, part in allowed.items():
        here, there = (np.array([line[name] for line in updates(o)]) for o in (out, reference))
        off = np.abs(here / there - 1)
        print(f"{name}: off by {off.max():.1e}, {off.max() / part:.0%} of the allowance")
        assert len(off) > 0 and off.max() <= part


def check_a_run_follows_the_cpu(
    folder: Path, model: Path, data: Path, device: str, precision: str
) -> None:
    """Two epochs with dropout, warm-up, clipping and validation."""
    given: dict[str, Any] = {"epochs": 2, "warmup": 2, "dropout": 0.1}
    cpu, other, allowed = folder / "cpu", folder / device, ALLOWED[precision]
    run(settings(model, data, cpu, device="cpu", **given))
    run(settings(model, data, other, device=device, **{**given, "precision": precision}))
    follow(other, cpu, allowed)
    for got, want in zip(validations(other), validations(cpu), strict=True):
        off = abs(got["val_loss"] / want["val_loss"] - 1)
        assert off <= allowed["loss"], f"val_loss of update {want['step']} is off by {off:.1e}"


def check_the_storyteller_follows_the_cpu(
    folder: Path, steps: int, device: str, precision: str, **given: Any
) -> None:
    """A checkpoint in bf16, against the CPU in float32."""
    for name, chosen in (("cpu", "fp32"), (device, precision)):
        out = folder / name
        run(storyteller(out, device=name, precision=chosen, steps=steps, shuffle=False, **given))
    follow(folder / device, folder / "cpu", ALLOWED[precision])
    assert len(updates(folder / device)) == steps


def timeless(out: Path) -> list[dict[str, Any]]:
    """Every log line, but for what the clock says."""
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in read(out / METRICS)]


def adapter_bytes(out: Path) -> tuple[bytes, bytes]:
    """The adapter's two files."""
    names = ("adapter_config.json", "adapter_model.safetensors")
    config, weights = ((out / name).read_bytes() for name in names)
    return config, weights


def checkpoints(out: Path) -> list[str]:
    """Names of everything in the folder of checkpoints."""
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def environment(**variables: str) -> dict[str, str]:
    """This process's, in which `python -m krnl` is the package under test."""
    return {**os.environ, "PYTHONPATH": str(Path(krnl.__file__).parent.parent), **variables}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "krnl", *map(str, arguments)]


def krnl_process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """`krnl` as a process that has ended."""
    options.setdefault("env", environment())
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=120, **options
    )


def flags(config: TrainConfig) -> list[str]:
    """The command-line flags that give these settings."""
    given, default = vars(config), vars(TrainConfig())
    words: list[str] = []
    for name, value in given.items():
        if value == default[name]:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            items = value if isinstance(value, tuple) else (value,)
            words += [f"--{flag}", *map(str, items)]
    return words
