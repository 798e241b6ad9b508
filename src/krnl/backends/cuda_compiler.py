"""Kernels become machine code: NVRTC, and a folder of what it has compiled before.

Each kernel, with its types and constants, is compiled by itself, so that a plan waits for what it
uses and nothing else. Neither nvcc nor CUDA's headers are needed.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from krnl.errors import BackendError, ConfigError, FormatError
from krnl.formats.files import write_bytes_atomic
from krnl.kernels.cuda import sources
from krnl.kernels.launch import Launch

OPTIONS = (
    "--std=c++17",
    "-default-device",
    # Lines for profilers and compute-sanitizer; the code is the same.
    "-lineinfo",
    "--ptxas-options=--warn-on-spills",
)
# Products on Hopper's tensor cores that wait for one another give right results several times
# slower. The assembler says so in passing, or that it ignores how registers were to be shared out.
SERIALISED = re.compile(
    r"\bC75(09|10|11|12|18|20)\b|serialized|Potential Performance Loss|setmaxnreg ignored"
)
SHOWN_LINES = 12  # of the compiler's words


@dataclass(frozen=True)
class Kernel:
    """A kernel with its template arguments: `expression` as C++ names it."""

    library: str
    expression: str

    @classmethod
    def of(cls, launch: Launch) -> "Kernel":
        arguments = [dtype.name for dtype in launch.types]
        arguments += [_literal(value) for _, value in sorted(launch.constants.items())]
        listed = f"<{', '.join(arguments)}>" if arguments else ""
        return cls(launch.library, launch.function + listed)

    def __str__(self) -> str:
        return f"'{self.expression}' of {self.library}.cu"


@dataclass(frozen=True)
class Cubin:
    """Machine code of one kernel: what it is called in there, and what the compiler said."""

    entry: str
    log: str
    image: bytes


class Compiler:
    """Compiles for one architecture (as sm_90a), keeping what it made in `folder`. `nvrtc` is the
    module of cuda.bindings."""

    def __init__(
        self,
        nvrtc: Any,
        architecture: str,
        folder: Path,
        source: Callable[[str], str] = sources.source,
        headers: Callable[[], Mapping[str, str]] = sources.headers,
    ):
        self._nvrtc = nvrtc
        self.architecture = architecture
        self._folder = folder
        self._source = source
        self._headers = dict(headers())
        self._options = (f"--gpu-architecture={architecture}", *OPTIONS)
        self._version = self._call("nvrtcVersion")

    def compile(self, kernels: Iterable[Kernel]) -> dict[Kernel, Cubin]:
        """The code of each, in parallel. BackendError for one that does not compile, or whose
        products wait for one another."""
        cubins = {}
        for kernel, made in self.try_each(kernels):
            if isinstance(made, BackendError):
                raise made
            cubins[kernel] = made
        return cubins

    def try_each(self, kernels: Iterable[Kernel]) -> Iterator[tuple[Kernel, Cubin | BackendError]]:
        """As `compile`, with each kernel's own result."""
        wanted = list(dict.fromkeys(kernels))
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            yield from zip(wanted, pool.map(self._try, wanted), strict=True)

    def path(self, kernel: Kernel) -> Path:
        """Where its code is kept. Whatever has a part in the code has a part in the name."""
        digest = hashlib.sha256()
        named = {"": self._source(kernel.library), **self._headers}
        for part in (*self._options, str(self._version), str(kernel), json.dumps(named)):
            digest.update(part.encode() + b"\0")
        return self._folder / f"{kernel.library}-{digest.hexdigest()[:32]}.cubin"

    def _try(self, kernel: Kernel) -> Cubin | BackendError:
        try:
            return self._cubin(kernel)
        except BackendError as error:
            return error

    def _cubin(self, kernel: Kernel) -> Cubin:
        path = self.path(kernel)
        cubin = _unpack(path)
        if cubin is None:
            cubin = self._compile(kernel)
            with suppress(FormatError):  # without a place for it, it is compiled again next time
                write_bytes_atomic(path, _pack(cubin))
        if SERIALISED.search(cubin.log):
            raise BackendError(
                f"{kernel} would be slow on {self.architecture}:\n{_words(cubin.log)}"
            )
        return cubin

    def _compile(self, kernel: Kernel) -> Cubin:
        name, source = f"{kernel.library}.cu", self._source(kernel.library)
        names = [name.encode() for name in self._headers]
        texts = [text.encode() for text in self._headers.values()]
        program = self._call(
            "nvrtcCreateProgram", source.encode(), name.encode(), len(names), texts, names
        )
        try:
            expression = kernel.expression.encode()
            self._call("nvrtcAddNameExpression", program, expression)
            options = [option.encode() for option in self._options]
            (status,) = self._nvrtc.nvrtcCompileProgram(program, len(options), options)
            log = self._text("ProgramLog", program).decode(errors="replace").strip("\0 \n")
            if int(status) != 0:
                raise BackendError(
                    f"NVRTC does not compile {kernel} for {self.architecture} ({status.name}):\n"
                    f"{_words(log)}"
                )
            entry = self._call("nvrtcGetLoweredName", program, expression).decode()
            return Cubin(entry, log, self._text("CUBIN", program))
        finally:
            self._call("nvrtcDestroyProgram", program)

    def _text(self, what: str, program: Any) -> bytes:
        size = self._call(f"nvrtcGet{what}Size", program)
        # The bindings write into the bytes that they are given; of those with one element there is
        # only one in the process.
        content = bytes(size + 1)
        self._call(f"nvrtcGet{what}", program, content)
        return content[:size]

    def _call(self, function: str, *arguments: Any) -> Any:
        status, *values = getattr(self._nvrtc, function)(*arguments)
        if int(status) != 0:
            raise BackendError(f"{function} fails: {status.name}.")
        return tuple(values) if len(values) > 1 else values[0] if values else None


def architecture(capability: int, offered: Iterable[int]) -> str:
    """What to compile for: the GPU's own architecture, or the latest earlier one of its generation
    among those that the compiler offers. ConfigError if there is none."""
    usable = [a for a in offered if a <= capability and a // 10 == capability // 10]
    if not usable:
        raise ConfigError(
            f"The installed compiler (NVRTC) does not know GPUs of compute capability "
            f"{capability // 10}.{capability % 10}: pip install --upgrade nvidia-cuda-nvrtc."
        )
    best = max(usable)
    # With the instructions that Hopper alone has.
    return "sm_90a" if best == 90 else f"sm_{best}"


def _literal(value: bool | int | float) -> str:
    assert not isinstance(value, float), "a template argument is no float"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _pack(cubin: Cubin) -> bytes:
    """The content of a file: a checksum of the rest, a line of JSON, the code."""
    head = json.dumps({"entry": cubin.entry, "log": cubin.log}).encode() + b"\n"
    content = head + cubin.image
    return hashlib.sha256(content).digest() + content


def _unpack(path: Path) -> Cubin | None:
    """None if the file is not there, or is damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    checksum, content = data[:32], data[32:]
    if hashlib.sha256(content).digest() != checksum:
        return None
    head, _, image = content.partition(b"\n")
    return Cubin(**json.loads(head), image=image)


def _words(log: str) -> str:
    lines = log.splitlines()
    return "\n".join(lines[:SHOWN_LINES] + ["…"] * (len(lines) > SHOWN_LINES))
