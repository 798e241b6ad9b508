"""Checkpoints: everything that makes a resumed run the same run.

    checkpoints/step-00000042/state.safetensors   arrays
    checkpoints/step-00000042/state.json          numbers, and the settings of the run

A checkpoint is written under a temporary name, synced and renamed, and renamed again before it is
removed: under its own name it is whole.
"""

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from krnl.errors import FormatError
from krnl.formats.files import flush_folder, read_json, write_json_atomic
from krnl.formats.safetensors import read_tensors, write_safetensors

KEPT = 2  # the newest, and one before it


@dataclass(frozen=True)
class Saved:
    """A checkpoint as read: `numbers` is what was given to `save`, as JSON gives it back."""

    step: int
    arrays: dict[str, np.ndarray]
    numbers: dict[str, Any]


def save(
    folder: Path, step: int, arrays: Mapping[str, np.ndarray], numbers: Mapping[str, Any]
) -> Path:
    """Writes checkpoint `step` in `folder`, then drops all but the newest few. FormatError if the
    disk refuses."""
    final = folder / f"step-{step:08d}"
    temporary = folder / f".{final.name}.tmp"
    try:
        for left in folder.glob(".step-*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        # The reference device has float64, which safetensors.py does not write: bits are kept.
        bits = {name: array.view(np.float32) for name, array in arrays.items()}
        types = {name: array.dtype.name for name, array in arrays.items()}
        write_safetensors(temporary / "state.safetensors", bits)
        write_json_atomic(temporary / "state.json", {"step": step, "types": types, **numbers})
        if final.exists():
            shutil.rmtree(final)
        os.rename(temporary, final)
        flush_folder(folder)
    except OSError as error:
        raise FormatError(
            f"The checkpoint {final} cannot be written: {error.strerror or error}."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in _checkpoints(folder)[:-KEPT]:
        hidden = folder / f".{old.name}.old"
        with suppress(OSError):
            os.rename(old, hidden)
        shutil.rmtree(hidden, ignore_errors=True)
    return final


def newest(folder: Path) -> Saved | None:
    """The newest checkpoint, or None where there is none."""
    found = _checkpoints(folder)
    if not found:
        return None
    numbers = read_json(found[-1] / "state.json")
    bits, _ = read_tensors(found[-1] / "state.safetensors")
    step, types = numbers.pop("step", None), numbers.pop("types", None)
    if type(step) is not int or not isinstance(types, dict) or types.keys() != bits.keys():
        raise FormatError(f"{found[-1] / 'state.json'} does not say what the checkpoint holds.")
    return Saved(step, {name: array.view(types[name]) for name, array in bits.items()}, numbers)


def same_json(a: object, b: object) -> bool:
    """Whether two values are the same once written as JSON."""
    return bool(json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True))


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("step-*") if p.is_dir()) if folder.is_dir() else []
