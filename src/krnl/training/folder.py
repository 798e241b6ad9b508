"""The folder of a run: whose it is, what a resumed run must not change, what is cleared away."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from krnl.data.examples import Examples
from krnl.data.packing import Pass
from krnl.errors import ConfigError, FormatError
from krnl.formats import resume
from krnl.formats.files import remove_leftovers, user_path
from krnl.formats.peft import CONFIG as ADAPTER_CONFIG
from krnl.formats.peft import WEIGHTS, AdapterConfig
from krnl.model import Model
from krnl.training.config import TrainConfig
from krnl.training.metrics import METRICS, PICTURE

CHECKPOINTS = "checkpoints"
SAVED_CONFIG = "train.json"
OUTPUTS = (ADAPTER_CONFIG, WEIGHTS, METRICS, PICTURE, CHECKPOINTS)  # what tells of an earlier run

# What is compared by a digest, and what it is of.
DIGESTS = {"data_sha256": "training data", "valid_sha256": "validation data"}
# Settings that say how a command runs, not what the run is.
MANNER = {"resume", "overwrite", "show"}
# Settings that may differ between a run and its resumption: they change no number. Of files, what
# is in them counts, not what they are called.
FREE = {"out", "save_every", "memory_limit", "recompute", "model", "data", "valid", "init_adapter"}


def settings(config: TrainConfig) -> dict[str, Any]:
    """The settings as they are saved beside the adapter."""
    return {name: value for name, value in asdict(config).items() if name not in MANNER}


def identity(
    config: TrainConfig,
    adapter: AdapterConfig,
    model: Model,
    train: Examples,
    valid: Iterable[Pass],
    device: str,
    precision: str,
) -> dict[str, Any]:
    """What must be the same when a run is resumed: settings, data, the model's files by size. Those
    settings that an adapter to start from decides are the adapter's."""
    given = settings(config)
    chosen = given | asdict(adapter)
    same = {name: chosen[name] for name in given if name not in FREE}
    files = {tensor.path for tensor in model.checkpoint.tensors.values()}
    return {
        **same,
        "device": device,
        "precision": precision,
        "model_files": {path.name: path.stat().st_size for path in sorted(files)},
        "data_sha256": _sha256(a for e in train.examples for a in (e.ids, e.targets)),
        "valid_sha256": _sha256(a for w in valid for a in (w.tokens, w.doc_start, w.target_row)),
    }


def check_apart(config: TrainConfig) -> None:
    """ConfigError if the run would write into a folder that it reads from, or over such a file."""
    out = user_path(config.out)
    written = [out, *(out / name for name in (*OUTPUTS, SAVED_CONFIG))]
    for name in ("data", "valid", "init_adapter"):
        given = getattr(config, name)
        if given and any(_same(user_path(given), path) for path in written):
            raise ConfigError(
                f"{name} is {given}, and out is {config.out}: the run would write over what it "
                "reads. Give another --out."
            )


@contextmanager
def held(out: Path) -> Iterator[None]:
    """Makes the folder and keeps other runs out of it; leaves no empty one behind. ConfigError if a
    run is in it, or if there can be no such folder."""
    try:
        made = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out, os.O_RDONLY)
    except FileExistsError as error:
        raise ConfigError(f"out is {out}, which is a file; give a folder.") from error
    except OSError as error:
        raise ConfigError(
            f"out is {out}, which cannot be used: {error.strerror or error}."
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"Another run is using {out}; give another --out.") from error
        yield
    finally:
        os.close(descriptor)
        if made:
            with suppress(OSError):  # it holds something, as it should
                out.rmdir()


def claim(out: Path, config: TrainConfig, run: Mapping[str, Any]) -> resume.Saved | None:
    """Makes sure that no earlier run is mixed with this one. Returns the checkpoint to go on from
    when resuming; ConfigError if the folder is not free, or its run is another one."""
    left = [name for name in OUTPUTS if (out / name).exists() and not _is_empty_log(out / name)]
    saved = None
    if config.resume:
        saved = _checkpoint(out, run, bool(left))
    elif left and not config.overwrite:
        raise ConfigError(
            f"{out} holds an earlier run ({left[0]}). Give --resume to go on with it, --overwrite "
            "to replace it, or another --out."
        )
    else:
        _remove(out / name for name in left)
    remove_leftovers(out, (*OUTPUTS, SAVED_CONFIG))
    return saved


def _checkpoint(out: Path, run: Mapping[str, Any], used: bool) -> resume.Saved:
    saved = resume.newest(out / CHECKPOINTS)
    if saved is None:
        raise ConfigError(
            f"There is no checkpoint in {out} to resume from; leave out --resume"
            + (", and give --overwrite to start again." if used else ".")
        )
    for name, value in run.items():
        before = saved.numbers.get("run", {}).get(name)
        if resume.same_json(before, value):
            continue
        differs = f"{name} is {value!r}, but the run in {out} was started with {before!r}."
        if name in DIGESTS:
            differs = f"The {DIGESTS[name]} is not what the run in {out} was started with."
        raise ConfigError(f"{differs} A resumed run keeps its settings and data.")
    return saved


def _remove(paths: Iterable[Path]) -> None:
    try:
        for path in paths:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError as error:
        raise FormatError(
            f"{error.filename} cannot be removed: {error.strerror or error}."
        ) from error


def _is_empty_log(path: Path) -> bool:
    """As a run leaves it for which the disk was full."""
    return path.name == METRICS and path.is_file() and path.stat().st_size == 0


def _same(path: Path, other: Path) -> bool:
    """Whether both are there, and one file or folder."""
    try:
        return path.samefile(other)
    except OSError:
        return False


def _sha256(arrays: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()
