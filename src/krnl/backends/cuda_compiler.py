"""Kernels become machine code: NVRTC, and a folder of what it has compiled before.

Each kernel, with its types and constants, is compiled by itself, so that a plan waits for what it
uses and nothing else. Neither nvcc nor CUDA's headers are needed.
"""

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from krnl.backends.cuda_cache import Cubin, CubinFolder
from krnl.errors import BackendError, ConfigError
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
WHEELS = tuple(f"nvidia-cuda-nvrtc{suffix}" for suffix in ("", "-cu12", "-cu13"))
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
        self._folder = CubinFolder(folder)
        self._source = source
        self._headers = dict(headers())
        self._options = (f"--gpu-architecture={architecture}", *OPTIONS)
        self._version = (*self._call("nvrtcVersion"), *_installed())
        self._warned = self._compiled = False

    def compile(self, kernels: Iterable[Kernel]) -> dict[Kernel, Cubin]:
        """The code of each, in parallel. BackendError for one that does not compile; a warning, the
        first time, if products wait for one another, which is right but slow."""
        cubins = {}
        with closing(self.try_each(kernels)) as results:
            for kernel, made in results:
                if isinstance(made, BackendError):
                    raise made
                cubins[kernel] = made
        self._warn([kernel for kernel, cubin in cubins.items() if SERIALISED.search(cubin.log)])
        return cubins

    def try_each(
        self, kernels: Iterable[Kernel]
    ) -> Generator[tuple[Kernel, Cubin | BackendError], None, None]:
        """As `compile`, with each kernel's own result. Where this is left early, as by Ctrl-C, only
        what is being compiled is waited for."""
        pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        try:
            begun = {kernel: pool.submit(self._cubin, kernel) for kernel in dict.fromkeys(kernels)}
            for kernel, future in begun.items():
                try:
                    made: Cubin | BackendError = future.result()
                except BackendError as error:
                    made = error
                yield kernel, made
        finally:
            pool.shutdown(cancel_futures=True)
            if self._compiled:
                self._folder.trim()
                self._compiled = False

    def _warn(self, slow: Sequence[Kernel]) -> None:
        if slow and not self._warned:
            self._warned = True
            others = f" and of {len(slow) - 1} other kernels" if len(slow) > 1 else ""
            warnings.warn(
                f"The installed compiler (NVRTC) makes slow code of {slow[0]}{others} for "
                f"{self.architecture}. Results are right all the same; another version of "
                "nvidia-cuda-nvrtc may do better.",
                stacklevel=3,
            )

    def _name(self, kernel: Kernel) -> str:
        """Of what is kept. Whatever has a part in the code has a part in it."""
        digest = hashlib.sha256()
        named = {"": self._source(kernel.library), **self._headers}
        for part in (*self._options, str(self._version), str(kernel), json.dumps(named)):
            digest.update(part.encode() + b"\0")
        return f"{kernel.library}-{digest.hexdigest()[:32]}"

    def _cubin(self, kernel: Kernel) -> Cubin:
        name = self._name(kernel)
        cubin = self._folder.read(name)
        if cubin is None:
            cubin = self._compile(kernel)
            self._folder.write(name, cubin)
            self._compiled = True
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


def _installed() -> list[str]:
    """Wheels with NVRTC and their versions, to the last digit. Which of several is in use is not
    told."""
    found = []
    for wheel in WHEELS:
        with suppress(PackageNotFoundError):
            found.append(f"{wheel} {version(wheel)}")
    return found


def _words(log: str) -> str:
    lines = log.splitlines()
    return "\n".join(lines[:SHOWN_LINES] + ["…"] * (len(lines) > SHOWN_LINES))
