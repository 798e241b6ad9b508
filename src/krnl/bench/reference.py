"""What a machine's control reached in quiet, kept from run to run.

Never lowered, except by `ReferenceStore.replace`."""

import fcntl
import math
import platform
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from krnl.errors import FormatError
from krnl.formats.files import cache_folder, check_writable, read_json, write_json_atomic

VERSION = 1
_REMEDY = "Delete it: what this machine reaches will be learnt anew."


@dataclass(frozen=True)
class Key:
    """What a reference holds for. Whatever changes the control's rate has to be in it."""

    device: str  # as the system calls it; on the CPU with instruction set and threads
    system: str  # `this_system()`
    driver: str  # "" where there is none
    kernels: str  # hash of what runs
    control: str  # which control, and its version

    def __str__(self) -> str:
        return " | ".join((self.device, self.system, self.driver, self.kernels, self.control))


@dataclass(frozen=True)
class Reference:
    rate: float  # operations a second
    learnt: str  # when it was reached, ISO 8601, UTC


def this_system() -> str:
    """The operating system and its build."""
    name = f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else platform.system()
    return f"{name} {platform.release()} {platform.version()}"


def default_path() -> Path:
    """In the user's cache folder."""
    return cache_folder() / "references.json"


class ReferenceStore:
    """A JSON file with a reference for each key. Several processes may use it at once. FormatError,
    naming the file, if it is damaged or cannot be written."""

    def __init__(self, path: Path):
        self.path = path

    def check_writable(self) -> None:
        """FormatError, which says what to do, if nothing could be learnt. To be called before
        anything is measured."""
        try:
            with self._held():
                check_writable(self.path)
        except FormatError as error:
            raise FormatError(
                f"{error} It keeps what machines reach in quiet: set XDG_CACHE_HOME to a folder "
                "that can be written."
            ) from error

    def read(self, key: Key) -> Reference | None:
        return self._reference(self._content(), key)

    def raise_to(self, key: Key, rate: float, when: str) -> Reference:
        """The control reached `rate`: keeps the higher; returns what is kept."""
        with self._held():
            content = self._content()
            old = self._reference(content, key)
            if old and old.rate >= rate:
                return old
            new = Reference(rate, when)
            self._write(content, key, new)
            return new

    def replace(self, key: Key, rate: float, when: str) -> Reference | None:
        """Keeps `rate`, be it lower; returns what was kept before."""
        with self._held():
            content = self._content()
            old = self._reference(content, key)
            self._write(content, key, Reference(rate, when))
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
            case {"rate": float(rate), "learnt": str(learnt)}:
                if 0 < rate < math.inf and _is_time(learnt):
                    return Reference(rate, learnt)
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
        with ExitStack() as stack:
            try:
                lock.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(open(lock, "ab"))
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                raise FormatError(
                    f"{self.path} cannot be written: {error.strerror or error}."
                ) from error
            yield


def _is_time(text: str) -> bool:
    with suppress(ValueError):
        return datetime.fromisoformat(text).tzinfo is not None
    return False
