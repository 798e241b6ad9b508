"""Compiles CUDA kernels, and the engine that runs them, into libraries in a cache folder.

The compiler is `g++`, else `clang++`. KRNL_CUDASIM_CXX names another with GNU's builtins.
"""

import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from krnl.backends.cuda_compiler import Kernel
from krnl.kernels.cuda import sources
from metalsim.build import forget_unused

from . import device
from .source import INCLUDE, convert, expand

HERE = Path(__file__).parent
FIBER = HERE.parent / "metalsim" / "engine" / "fiber.cpp"
LANGUAGE = ("-x", "c++", "-std=c++17", "-w", "-Wno-narrowing")
CODE = (
    "-fPIC",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fno-omit-frame-pointer",  # reports say who called a wrapper
    "-fvisibility=hidden",
)
KERNEL = (
    "-O1",
    "-g1",  # lines, for reports
    "-ffp-contract=off",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-fsanitize=alignment,bounds",
    "-fsanitize-recover=alignment,bounds",  # calls of handlers that the engine has
)
ENGINE = ("-O3", "-ffp-contract=fast")
ARCHITECTURE = "-D__CUDA_ARCH__=900"


class CompileError(RuntimeError):
    """What the compiler refuses, in its words."""


class Kernels:
    """Kernels of sources and headers, KRNL's own unless others are given, compiled as they are
    asked for."""

    def __init__(
        self,
        source: Callable[[str], str] = sources.source,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._source = source
        self._headers = dict(sources.headers() if headers is None else headers)
        self._converted: dict[str, str] = {}
        self._loaded: dict[Kernel, device.Function] = {}

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        """Compiles what is missing, in parallel."""
        missing = [k for k in dict.fromkeys(kernels) if k not in self._loaded]
        for library in {k.library for k in missing}:
            self._text(library)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for kernel, path in zip(missing, pool.map(self._compile, missing), strict=True):
                self._loaded[kernel] = device.Function(path, engine())

    def __getitem__(self, kernel: Kernel) -> "device.Function":
        """SourceError or CompileError if there is no such kernel."""
        if kernel not in self._loaded:
            self.prepare([kernel])
        return self._loaded[kernel]

    def _text(self, library: str) -> str:
        if library not in self._converted:
            text = expand(self._source(library), f"{library}.cu", self._headers)
            self._converted[library] = convert(run(("-E", *LANGUAGE, ARCHITECTURE, "-"), text))
        return self._converted[library]

    def _compile(self, kernel: Kernel) -> Path:
        code = (
            f'#include "ptx.h"\n{self._text(kernel.library)}\n'
            '# 1 "launch"\n'
            'extern "C" __attribute__((visibility("default"))) void cudasim_kernel(void **given) '
            f"{{ cudasim::call(&{kernel.expression}, given); }}\n"
        )
        flags = (*LANGUAGE, *CODE, *KERNEL, *target())

        def make(scratch: Path) -> Path:
            compiled, linked = scratch / "kernel.o", scratch / "kernel.so"
            run((*flags, f"-I{INCLUDE}", "-c", "-", "-o", str(compiled)), code)
            # Without the sanitizers' flags, which would bring their libraries.
            run(("-shared", str(compiled), "-o", str(linked), "-lm"))
            return linked

        return cached(kernel.library, (code, included(), *flags), make)


@functools.cache
def engine() -> Path:
    """The shared library of the engine."""
    files = [*sorted((HERE / "engine").iterdir()), FIBER, FIBER.with_suffix(".h")]
    flags = (*LANGUAGE, *CODE, *ENGINE, *target())
    units = [str(path) for path in files if path.suffix == ".cpp"]

    def make(scratch: Path) -> Path:
        linked = scratch / "engine.so"
        run((*flags, "-shared", *units, "-o", str(linked), "-lm"))
        return linked

    return cached("engine", (*(path.read_text() for path in files), included(), *flags), make)


@functools.cache
def included() -> str:
    """What every library depends on beside its source."""
    files = sorted([*INCLUDE.glob("*.h"), HERE / "engine" / "engine.h"])
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def target() -> tuple[str, ...]:
    """Instructions of a processor of the last ten years."""
    return ("-march=x86-64-v3",) if platform.machine() in ("x86_64", "AMD64") else ()


def cached(name: str, key: Sequence[str], make: Callable[[Path], Path]) -> Path:
    """The library that `make` leaves in a folder, unless the cache has it. Many may try at once."""
    digest = hashlib.sha256("\0".join((*key, *compiler(), _version())).encode())
    path = cache_folder() / f"{name}-{digest.hexdigest()[:20]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            os.replace(make(Path(scratch)), path)
    os.utime(path)
    return path


@functools.cache
def cache_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "krnl" / "cudasim"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"krnl-cudasim-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    forget_unused(folder)
    return folder


@functools.cache
def compiler() -> tuple[str, ...]:
    """The first usable compiler. An error says how to get one."""
    if named := os.environ.get("KRNL_CUDASIM_CXX"):
        return tuple(shlex.split(named))
    for name in ("g++", "clang++"):
        if shutil.which(name):
            return (name,)
    raise CompileError("No C++ compiler was found to compile CUDA kernels with: install g++.")


@functools.cache
def _version() -> str:
    return run(("--version",))


def run(arguments: Sequence[str], text: str = "") -> str:
    """What the compiler prints. Its complaints become a CompileError."""
    command = [*compiler(), *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(done.stderr.strip() or f"{shlex.join(command)} failed without a word.")
    return done.stdout
