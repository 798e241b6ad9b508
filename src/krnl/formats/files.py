"""Files that are either whole or absent.

Everything KRNL writes goes to a temporary name in the same folder, is flushed to the disk, and then
takes its final name in one step: a crash or a full disk leaves the previous file as it was.
"""

import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from krnl.errors import FormatError
from krnl.strict_json import unique_keys


@contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which appears under `path` when the block ends, and not if it fails.

    Missing folders are made. FormatError, naming the file, when the system refuses.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        flush_folder(path.parent)
    except OSError as error:
        raise FormatError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        with suppress(OSError):  # gone already when it became `path`
            temporary.unlink()


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
