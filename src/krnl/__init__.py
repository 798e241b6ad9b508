"""KRNL: LoRA fine-tuning with kernels written by hand.

    import krnl

    model = krnl.load("examples/storyteller/model")
    lora = krnl.Lora(rank=16, alpha=32)
    krnl.train(model, "examples/storyteller/data", lora, out="adapter", epochs=3, lr=1e-3)
    print(krnl.generate(model, "How did Cora feel?", adapter="adapter"))

The command line does the same things with the same words.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from krnl.errors import (
    BackendError,
    ConfigError,
    DataError,
    FormatError,
    KrnlError,
    PlanError,
    TrainingError,
)

if TYPE_CHECKING:
    from krnl.api import Lora, generate, load, train

__version__ = "0.1.0"
__all__ = [
    "BackendError",
    "ConfigError",
    "DataError",
    "FormatError",
    "KrnlError",
    "Lora",
    "PlanError",
    "TrainingError",
    "generate",
    "load",
    "train",
]

_LATE = ("Lora", "generate", "load", "train")


def __getattr__(name: str) -> Any:
    # Imported when first used: `krnl --help` needs none of it.
    if name in _LATE:
        return getattr(import_module("krnl.api"), name)
    raise AttributeError(f"module 'krnl' has no attribute '{name}'")
