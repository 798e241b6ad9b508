"""A folder of machine code that was compiled before. Several processes may use it at once."""

import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from krnl.errors import FormatError
from krnl.formats.files import write_bytes_atomic

SUFFIX = ".cubin"
# What is beyond this is given up, what was not used for longest first.
MOST_BYTES = 512 << 20
MOST_SECONDS = 90 * 86400
CHECKSUM = 32  # bytes at the beginning of a file


@dataclass(frozen=True)
class Cubin:
    """Machine code of one kernel: what it is called in there, and what the compiler said."""

    entry: str
    log: str
    image: bytes


class CubinFolder:
    """Files by name. One that is damaged is as good as none; where nothing can be written, nothing
    is kept."""

    def __init__(self, path: Path):
        self._path = path

    def read(self, name: str) -> Cubin | None:
        path = self._path / f"{name}{SUFFIX}"
        try:
            cubin = _unpack(path.read_bytes())
        except (OSError, ValueError):
            return None
        with suppress(OSError):
            os.utime(path)  # the time of its last use
        return cubin

    def write(self, name: str, cubin: Cubin) -> None:
        with suppress(FormatError):
            write_bytes_atomic(self._path / f"{name}{SUFFIX}", _pack(cubin))

    def trim(self) -> None:
        """Removes what was not used for long, and what is too much."""
        room, oldest = MOST_BYTES, time.time() - MOST_SECONDS
        for used, nbytes, path in sorted(self._files(), reverse=True):
            room -= nbytes
            if room < 0 or used < oldest:
                with suppress(OSError):  # another process was faster, or it is not ours to remove
                    path.unlink()

    def _files(self) -> list[tuple[float, int, Path]]:
        """When each was used last, and its size; those of processes that were killed while they
        wrote one are among them."""
        found = []
        with suppress(OSError):
            for path in self._path.iterdir():
                if SUFFIX not in path.suffixes:
                    continue
                with suppress(OSError):  # gone meanwhile
                    status = path.stat()
                    if S_ISREG(status.st_mode):
                        found.append((status.st_mtime, status.st_size, path))
        return found


def _pack(cubin: Cubin) -> bytes:
    """The content of a file: a checksum of the rest, a line of JSON, the code."""
    head = json.dumps({"entry": cubin.entry, "log": cubin.log}).encode() + b"\n"
    content = head + cubin.image
    return hashlib.sha256(content).digest() + content


def _unpack(data: bytes) -> Cubin:
    """ValueError if it is no such file."""
    checksum, content = data[:CHECKSUM], data[CHECKSUM:]
    if hashlib.sha256(content).digest() != checksum:
        raise ValueError("damaged")
    head, _, image = content.partition(b"\n")
    match json.loads(head):
        case {"entry": str(entry), "log": str(log), **more} if not more:
            return Cubin(entry, log, image)
    raise ValueError("of another version")
