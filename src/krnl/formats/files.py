"""Files that are either whole or absent.

Everything KRNL writes goes to a temporary name in the same folder, is flushed to the disk, and then
takes its final name in one step: a crash or a full disk leaves the previous file as it was.
"""

import json
import os
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from krnl.errors import ConfigError, FormatError
from krnl.strict_json import unique_keys


def cache_folder() -> Path:
    """Where KRNL keeps what it can find out or make again, under the user's cache folder."""
    if folder := os.environ.get("XDG_CACHE_HOME"):
        cache = Path(folder)
    else:
        cache = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return cache / "krnl"


def user_path(given: str | Path) -> Path:
    """A path as users write it, which may begin with ~. ConfigError if that is of nobody here."""
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{given} begins with the home folder of a user who is not known here."
        ) from error


@contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which appears under `path` when the block ends, and not if it fails. Where
    `path` is a link, what it leads to is written.

    Missing folders are made. FormatError, naming the file, when the system refuses, and where
    something is there that is no file.
    """
    with _beside(path) as (file, target):
        yield file
        _flush(file)
        os.replace(file.name, target)
        flush_folder(target.parent)


def check_writable(path: Path, nbytes: int = 0) -> None:
    """FormatError, as of `open_atomic`, if a file of so many bytes could not be written now. Leaves
    what is there as it is."""
    with _beside(path) as (file, _):
        file.write(bytes(nbytes))
        _flush(file)


@contextmanager
def _beside(path: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A temporary file, gone when the block ends, and what it may be renamed to: `path`, or what
    that leads to."""
    try:
        with suppress(FileNotFoundError):
            mode = path.stat().st_mode
            if not stat.S_ISREG(mode):
                kind = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
                raise FormatError(f"{path} cannot be written: it is {kind}, and no file.")
        target = Path(os.path.realpath(path))
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "xb") as file:
                yield file, target
        finally:
            with suppress(OSError):  # gone already when it became `target`
                temporary.unlink()
    except OSError as error:
        raise FormatError(f"{path} cannot be written: {error.strerror or error}.") from error


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Write `data` as the whole content of `path`."""
    with open_atomic(path) as file:
        file.write(data)


def write_json_atomic(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object, indented, keys in the order given. ValueError for NaN and infinities."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    write_bytes_atomic(path, (text + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. FormatError if it is missing, damaged, or repeats a key."""
    try:
        content = json.loads(path.read_text("utf-8"), object_pairs_hook=unique_keys)
    except FileNotFoundError as error:
        raise FormatError(f"{path} does not exist.") from error
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:  # bad UTF-8, bad JSON, or a repeated key
        raise FormatError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise FormatError(f"{path} must hold a JSON object, not {type(content).__name__}.")
    return content


def remove_leftovers(folder: Path, names: Iterable[str]) -> None:
    """Removes temporary files of `open_atomic` that a killed process left for any of `names`."""
    for name in names:
        for path in folder.glob(f".{name}.*.tmp"):
            path.unlink(missing_ok=True)


def flush_folder(folder: Path) -> None:
    """Make a rename survive a power cut: the folder's own entry list has to reach the disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
