"""What a machine's control reached in quiet, kept from run to run.

Never lowered, except by `ReferenceStore.replace`."""

import fcntl
import hashlib
import math
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import krnl.kernels
from krnl.errors import FormatError
from krnl.formats.files import read_json, write_json_atomic

VERSION = 1
_REMEDY = "Delete it: what this machine reaches will be learnt anew."


@dataclass(frozen=True)
class Key:
    """What a reference holds for. Whatever changes the control's rate has to be in it."""

    device: str  # as the system calls it; on the CPU with instruction set and threads
    system: str  # `this_system()`
    driver: str  # "" where there is none
    kernels: str  # `kernel_hash(...)`
    control: str  # which control, and its version

    def __str__(self) -> str:
        return " | ".join((self.device, self.system, self.driver, self.kernels, self.control))


@dataclass(frozen=True)
class Reference:
    rate: float  # operations a second
    learnt: str  # ISO 8601, UTC
    windows: int  # how many raised or confirmed it


def this_system() -> str:
    """The operating system and its build."""
    name = f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else platform.system()
    return f"{name} {platform.release()} {platform.version()}"


def kernel_hash(backend: str) -> str:
    """Of every file in the folder of a backend's kernels."""
    folder = Path(krnl.kernels.__file__).parent / backend
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file():
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def default_path() -> Path:
    """Under the user's cache folder."""
    if folder := os.environ.get("XDG_CACHE_HOME"):
        cache = Path(folder)
    else:
        cache = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return cache / "krnl" / "references.json"


class ReferenceStore:
    """A JSON file with a reference for each key. Several processes may use it at once. FormatError,
    naming the file, if it is damaged or cannot be written."""

    def __init__(self, path: Path):
        self.path = path

    def read(self, key: Key) -> Reference | None:
        return self._reference(self._content(), key)

    def raise_to(self, key: Key, rate: float, when: str) -> Reference:
        """The control reached `rate`: keeps the higher; returns what is kept."""
        with self._held():
            content = self._content()
            old = self._reference(content, key)
            windows = old.windows + 1 if old else 1
            if old and old.rate >= rate:
                new = Reference(old.rate, old.learnt, windows)
            else:
                new = Reference(rate, when, windows)
            self._write(content, key, new)
            return new

    def replace(self, key: Key, rate: float, when: str) -> Reference | None:
        """Keeps `rate`, be it lower; returns what was kept before."""
        with self._held():
            content = self._content()
            old = self._reference(content, key)
            self._write(content, key, Reference(rate, when, 1))
            return old

    def _content(self) -> dict[str, Any]:
        if not self.path.exists():
            return {"version": VERSION, "references": {}}
        try:
            content = read_json(self.path)
        except FormatError as error:
            raise FormatError(f"{error} {_REMEDY}") from error
        if content.get("version") != VERSION or not isinstance(content.get("references"), dict):
            raise FormatError(f"{self.path} holds no references of this version. {_REMEDY}")
        return content

    def _reference(self, content: dict[str, Any], key: Key) -> Reference | None:
        if str(key) not in content["references"]:
            return None
        match content["references"][str(key)]:
            case {"rate": float(rate), "learnt": str(learnt), "windows": int(windows)}:
                if 0 < rate < math.inf:
                    return Reference(rate, learnt, windows)
        raise FormatError(f"{self.path} is damaged at the reference of '{key}'. {_REMEDY}")

    def _write(self, content: dict[str, Any], key: Key, reference: Reference) -> None:
        references = {**content["references"], str(key): asdict(reference)}
        try:
            write_json_atomic(self.path, {**content, "references": references})
        except ValueError as error:  # an infinity that another key came with
            raise FormatError(f"{self.path} is damaged: {error}. {_REMEDY}") from error

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Keeps other processes from writing between a reading and a writing."""
        lock = self.path.with_name(f".{self.path.name}.lock")
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise FormatError(
                f"{self.path} cannot be written: {error.strerror or error}."
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
