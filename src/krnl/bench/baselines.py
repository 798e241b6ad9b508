"""Other tools, each run by an interpreter that has it: a process that does a step, or several, for
every line it is sent (bench/protocol.py). KRNL never imports them."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType, UnionType
from typing import Any, TypeAlias

from krnl.backends.base import Backend
from krnl.bench.results import Tool
from krnl.bench.workloads import warmed
from krnl.devices import precision_name
from krnl.dtypes import F32, DType
from krnl.errors import BackendError, ConfigError

# glibc keeps what is freed, and asks for huge pages: worth 15 to 30 % to PyTorch. The variant
# "untuned" goes without.
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "1000000000000",
    "MALLOC_TOP_PAD_": "67108864",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
# Libraries of products take as many threads as they find cores, hyperthreads or not, each by a rule
# of its own. On the CPU all tools get as many as KRNL has.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
# Of norms of the same gradient or product, and of a product's first row; rounding to bf16 moves
# them by far less.
AGREEMENT = 0.01
QUOTED = 100  # characters of what a worker should not have said
DEVICES = {
    "torch": {"cpu": "cpu", "metal": "mps", "cuda": "cuda"},
    "mlx": {"cpu": "cpu", "metal": "gpu", "cuda": "gpu"},
}
PEERS = {"step": ("mlx", "torch"), "model": ("mlx", "torch"), "shapes": ("torch",)}  # of tables
# How PyTorch may be run, by table. MLX always runs a function that it compiled.
TORCH_VARIANTS = {
    "shapes": ("eager",),
    "step": ("eager", "compile", "autotune", "graph"),
    "model": ("eager", "untuned", "compile", "graph", "checkpointing", "liger"),
}
NEEDS_CUDA = ("autotune", "graph", "liger")

Keys: TypeAlias = Mapping[str, type | UnionType]  # of an answer, and what they hold
NUMBER = int | float
NOTHING: Keys = {}
# What every worker says after its first step and after each that is timed.
FIRST: Keys = {"versions": dict, "threads": int | None, "peak": int}
EACH: Keys = {"seconds": NUMBER, "peak": int}


class Worker:
    """A process of another interpreter. `hello` is what it said after its first step."""

    def __init__(
        self,
        python: str,
        script: Path,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] = KEEP_MEMORY,
        threads: int | None = None,
        first: Keys = NOTHING,
        each: Keys = NOTHING,
    ):
        """`threads`: of the CPU; None leaves the tool its own choice. `first` and `each`: what this
        script says besides FIRST and EACH. ConfigError if the process does not start, ends, or
        says something else."""
        self._each = {**EACH, **each}
        self._name = f"{script.name} with {python}"
        if threads is not None:
            arguments = [*arguments, "--threads", str(threads)]
            environment = {**environment, **dict.fromkeys(THREAD_VARIABLES, str(threads))}
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115 (close() closes it)
        try:
            self._process = subprocess.Popen(
                [python, str(script), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                env={**os.environ, **environment},
                text=True,
                errors="replace",
            )
        except OSError as error:
            self._complaints.close()
            raise ConfigError(f"{self._name} does not start: {error.strerror}.") from error
        try:
            advice = "Give an interpreter that has what the script imports."
            self.hello = self._answer({**FIRST, **first}, advice)
        except BaseException:
            self.close()
            raise

    def ask(self) -> dict[str, Any]:
        """A step, or as many as the worker was told to repeat: what it answers, "seconds" of one,
        "peak" (bytes), and what its script says of each."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # _answer says what became of it
        return self._answer(self._each, "Is there enough memory for all that is compared?")

    def turn(self) -> dict[str, Any]:
        """What nobody times, and as much again that counts."""
        return warmed(self.ask)

    def seconds(self) -> float:
        """Of one step."""
        return float(self.turn()["seconds"])

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._complaints.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _answer(self, wanted: Keys, advice: str) -> dict[str, Any]:
        """The next line. `advice`: what to do if there is none."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._complaints.seek(0)
            said = self._complaints.read().strip().splitlines()
            last = f", saying '{said[-1]}'" if said else ""
            raise ConfigError(f"{self._name} ended with {code}{last}. {advice}")
        with suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict) and all(
                isinstance(answer.get(key, ...), kind) for key, kind in wanted.items()
            ):
                return answer
        raise ConfigError(
            f"{self._name} said '{line.strip()[:QUOTED]}' where a worker says a line of JSON with "
            f"{', '.join(wanted)} (bench/protocol.py). Nothing else may print there, nor a script "
            "around the interpreter."
        )


def script(name: str) -> Path:
    """A script that runs another tool."""
    return scripts() / name


def scripts() -> Path:
    """The repository's bench folder: beside this source, or below where we are. ConfigError if
    there is none."""
    places = [Path(__file__).parents[3] / "bench", Path("bench").absolute()]
    for place in places:
        if (place / "protocol.py").is_file():
            return place
    raise ConfigError(
        "The scripts that run other tools are in the bench folder of KRNL's repository, which is "
        "neither here nor beside this installation; run krnl bench --against inside a clone."
    )


def start(
    peer: str,
    python: str,
    path: Path,
    given: Sequence[str],
    backend: Backend,
    environment: Mapping[str, str] = KEEP_MEMORY,
    first: Keys = NOTHING,
    each: Keys = NOTHING,
) -> Worker:
    """A worker on the device of `backend`. On the CPU it has as many threads as KRNL; beside a GPU
    the tool decides. `given`: what else the script is told; `first` and `each`: what it then
    says."""
    arguments = [*given, "--device", DEVICES[peer][backend.name]]
    threads = backend.limits.threads if backend.name == "cpu" else None
    return Worker(python, path, arguments, environment, threads, first, each)


@dataclass(frozen=True)
class Setting:
    """How a peer is run: the precision of the base, that of the adapters ("16" is the base's, or
    "fp32"), and for PyTorch one of TORCH_VARIANTS."""

    peer: str
    precision: str
    adapters: str
    variant: str = ""

    def title(self, name: str) -> str:
        """What a contestant is called."""
        adapters = self.precision if self.adapters == "16" else self.adapters
        variant = f", {self.variant}" if self.variant not in ("", "eager") else ""
        return f"{name} {self.precision}, adapters {adapters}{variant}"

    def start(
        self,
        python: str,
        path: Path,
        given: Sequence[str],
        backend: Backend,
        first: Keys = NOTHING,
        each: Keys = NOTHING,
    ) -> Worker:
        """A worker that is run so; the rest as in the function `start`."""
        arguments = [*given, "--precision", self.precision, "--adapters", self.adapters]
        tuned = self.variant != "untuned"
        if self.variant:
            arguments += ["--variant", self.variant if tuned else "eager"]
        environment = KEEP_MEMORY if tuned else {}
        return start(self.peer, python, path, arguments, backend, environment, first, each)


def settings(
    peer: str,
    backend: Backend,
    activation: DType,
    variants: Sequence[str],
    adapters: str = "both",
) -> list[Setting]:
    """All in which a peer is measured beside KRNL in `activation`. `adapters`: of a 16-bit base;
    "16", "fp32" or "both". ConfigError for a variant that this device does not have."""
    for variant in variants:
        if variant in NEEDS_CUDA and backend.name != "cuda":
            raise ConfigError(
                f"variants names {variant}, which needs --device cuda; this is {backend.name}."
            )
    if activation is F32 or (peer == "mlx" and backend.name == "cpu"):
        kinds = [("fp32", "fp32")]  # 16-bit products of mlx are slower than float32 on a CPU
    else:
        wanted = ("16", "fp32") if adapters == "both" else (adapters,)
        kinds = [(precision_name(activation), each) for each in wanted]
    ways = variants if peer == "torch" else ("",)
    return [Setting(peer, *kind, way) for way in ways for kind in kinds]


def tools(workers: Iterable[tuple[str, Worker]]) -> list[Tool]:
    """Who took part, from workers and the names of their tools: what they said of themselves, each
    tool once."""
    found: dict[str, Tool] = {}
    for name, worker in workers:
        known = found[name].versions if name in found else {}
        versions = {**known, **worker.hello["versions"]}
        found[name] = Tool(name, versions, worker.hello["threads"])
    return list(found.values())


def check_agreement(name: str, what: str, theirs: float, ours: float, allowed: float) -> None:
    """BackendError where another tool computes something else: the same number, which may differ by
    the share `allowed`."""
    if not abs(theirs - ours) <= allowed * abs(ours):  # NaN is something else too
        raise BackendError(
            f"{name} computes something else than KRNL: {what} is {theirs:.6g} there and "
            f"{ours:.6g} here, and rounding explains {allowed:.2g} of it. They are not compared."
        )
