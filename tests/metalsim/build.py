"""Compiles Metal sources, and the engine that runs them, into libraries in a cache folder.

The compiler is clang 16 or newer: the system's `clang++` or `clang++-NN`, else the `ziglang` wheel.
KRNL_METALSIM_CXX names another. Used on x86-64 Linux; arm64 and macOS are written for, not tried.
"""

import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from . import device
from .source import Source, convert

HERE = Path(__file__).parent
INCLUDE = HERE / "include"
KEPT_SECONDS = 7 * 24 * 3600
OLDEST_CLANG = 16  # the first that can round half after every operation
Mode = Literal["checked", "fast"]

METAL_MACROS = (
    "-D__METAL__=1",
    "-D__METAL_VERSION__=320",
    "-D__METAL_MACOS__=1",
    "-D__HAVE_BFLOAT__=1",
    "-D__HAVE_SIMDGROUP_MATRIX__=1",
)
LANGUAGE = ("-x", "c++", "-std=c++17", "-w", "-ftemplate-depth=2000", "-fsigned-char")
CODE = (
    "-O2",
    "-g1",  # lines, for reports
    "-fPIC",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-ffp-contract=off",  # the same bits from every compiler; flags may ask for another
)
HIDDEN = ("-fvisibility=hidden",)  # two libraries must not share their tables
ROUND_HALF = ("-Xclang", "-ffloat16-excess-precision=none")  # after every operation
CHECKED = (
    "-DSIM_CHECKED",
    "-fsanitize=thread",
    *("-mllvm", "-tsan-instrument-func-entry-exit=0"),
    *("-mllvm", "-tsan-instrument-atomics=0"),
    *("-mllvm", "-tsan-instrument-read-before-write=1"),
    "-fsanitize=array-bounds,alignment",
    "-fsanitize-recover=array-bounds,alignment",
    "-fno-vectorize",  # else two accesses of the source may count as one
    "-fno-slp-vectorize",
)
# The engine's functions are found when a library is loaded. Nothing needs a C++ library.
LINK = (
    "-shared",
    "-nostdlib++",
    "-fno-sanitize=undefined",  # zig would add a runtime of its own, which ends the process
    *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()),
)


class CompileError(RuntimeError):
    """A source that the compiler refuses, in the compiler's words."""


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]
    version: str

    @property
    def is_zig(self) -> bool:
        return "ziglang" in self.command


def library(
    source: str | Path, mode: Mode, flags: Sequence[str] = (), include: Sequence[Path] = ()
) -> device.Library:
    """The compiled library of a Metal source: a file, or the text itself.

    `flags` go to the compiler behind the simulator's own, such as -ffast-math or -DNAME=1;
    `include` are folders for #include. Raises SourceError or CompileError.
    """
    expanded = preprocess(source, flags, include)
    converted = convert(expanded, name_of(source))
    checks = CHECKED if mode == "checked" else ()
    command = (*CODE, *HIDDEN, *ROUND_HALF, *target(), *checks, *flags)
    code = f'#include "metalsim.h"\n{converted.code}'
    name = f"{Path(name_of(source)).stem}-{mode}"

    def make(scratch: Path) -> Path:
        text, compiled, linked = (scratch / f"{name}.{end}" for end in ("cpp", "o", "so"))
        text.write_text(code)
        run((*LANGUAGE, *command, f"-I{INCLUDE}", "-c", str(text), "-o", str(compiled)))
        run((*LINK, str(compiled), "-o", str(linked), "-lm"))  # without the sanitizers' flags
        return linked

    path = cached(name, (code, headers(), *command), make)
    return device.Library(path, converted, mode, engine())


def preprocess(source: str | Path, flags: Sequence[str] = (), include: Sequence[Path] = ()) -> str:
    """The text with macros and includes put in place. Metal's headers give only macros here."""
    command = (
        *("-E", "-nostdinc", "-nostdinc++"),
        *LANGUAGE,
        *METAL_MACROS,
        f"-I{INCLUDE / 'stub'}",
        *(f"-I{folder}" for folder in include),
        *flags,
    )
    if isinstance(source, Path):
        return run((*command, str(source)))
    return run((*command, "-"), f'# 1 "{name_of(source)}"\n{source}\n')


def convert_file(path: Path, flags: Sequence[str] = (), include: Sequence[Path] = ()) -> Source:
    """The source pass alone, over a preprocessed file."""
    return convert(preprocess(path, flags, include), str(path))


def name_of(source: str | Path) -> str:
    return str(source) if isinstance(source, Path) else "source.metal"


@functools.cache
def engine() -> Path:
    """The shared library of the engine."""
    files = sorted(path for path in (HERE / "engine").iterdir() if path.suffix in (".cpp", ".h"))
    sources = [str(path) for path in files if path.suffix == ".cpp"]
    command = (*CODE, "-ftls-model=initial-exec", *target())

    def make(scratch: Path) -> Path:
        linked = scratch / "engine.so"
        run((*LANGUAGE, *command, *LINK, *sources, "-o", str(linked), "-lm"))
        return linked

    return cached("engine", (*(path.read_text() for path in files), *command), make)


@functools.cache
def headers() -> str:
    """What the code of a library depends on beside its source."""
    files = sorted([*INCLUDE.glob("*.h"), HERE / "engine" / "engine.h"])
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def target() -> tuple[str, ...]:
    """Instructions of a processor of the last ten years, where there are half conversions."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    return ("-mcpu=x86_64_v3",) if compiler().is_zig else ("-march=x86-64-v3",)


def cached(name: str, key: Sequence[str], make: Callable[[Path], Path]) -> Path:
    """The library that `make` leaves in a folder, unless the cache has it. Many may try at once."""
    cxx = compiler()
    digest = hashlib.sha256("\0".join((*key, *LINK, *cxx.command, cxx.version)).encode())
    path = cache_folder() / f"{name}-{digest.hexdigest()[:20]}.so"
    if not path.exists():
        forget_unused(path.parent)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            os.replace(make(Path(scratch)), path)
    os.utime(path)
    return path


def forget_unused(folder: Path) -> None:
    """Removes libraries that nothing has asked for in a while. Processes that have them loaded keep
    them."""
    oldest = time.time() - KEPT_SECONDS
    for path in folder.glob("*.so"):
        with suppress(FileNotFoundError):  # another process was faster
            if path.stat().st_mtime < oldest:
                path.unlink()


@functools.cache
def cache_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "krnl" / "metalsim"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"krnl-metalsim-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@functools.cache
def compiler() -> Compiler:
    """The first usable compiler. An error says how to get one."""
    named = os.environ.get("KRNL_METALSIM_CXX")
    if named:
        candidates = [shlex.split(named)]
    else:
        versions = range(29, OLDEST_CLANG - 1, -1)
        candidates = [["clang++"], *([f"clang++-{version}"] for version in versions)]
        if find_spec("ziglang"):
            candidates.append([sys.executable, "-m", "ziglang", "c++"])
    for command in candidates:
        if not shutil.which(command[0]):
            continue
        answer = subprocess.run([*command, "--version"], capture_output=True, text=True)
        version = re.search(r"clang version (\d+)", answer.stdout)
        if version and int(version[1]) >= OLDEST_CLANG:
            return Compiler(tuple(command), answer.stdout)
    raise CompileError(
        f"No clang {OLDEST_CLANG} or newer was found to compile Metal sources with. "
        "Install one, or run: pip install ziglang"
    )


def run(arguments: Sequence[str], text: str = "") -> str:
    """What the compiler prints. Its complaints become a CompileError."""
    command = [*compiler().command, *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(done.stderr.strip() or f"{shlex.join(command)} failed without a word.")
    return done.stdout
