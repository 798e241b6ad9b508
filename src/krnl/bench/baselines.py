"""Other tools, each run by an interpreter that has it: a process that does one step for every line
it is sent (bench/peers/protocol.py). KRNL never imports them."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from krnl.backends.base import Backend
from krnl.bench.products import BLAS_REST
from krnl.dtypes import F32, DType
from krnl.errors import BackendError, ConfigError

# glibc keeps what is freed, and asks for huge pages: worth 15 to 30 % to PyTorch.
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "1000000000000",
    "MALLOC_TOP_PAD_": "67108864",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
# Norms of the same gradient; rounding to bf16 moves them by far less.
AGREEMENT = 0.01
PRECISIONS = {"f32": "fp32", "bf16": "bf16", "f16": "fp16"}


class Worker:
    """A process of another interpreter. `hello` is what it said after its first step."""

    def __init__(
        self,
        python: str,
        script: Path,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] = KEEP_MEMORY,
    ):
        self._name = f"{script.name} with {python}"
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115 (close() closes it)
        try:
            self._process = subprocess.Popen(
                [python, str(script), *arguments, "--started", str(time.time())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                env={**os.environ, **environment},
                text=True,
            )
        except OSError as error:
            self._complaints.close()
            raise ConfigError(f"{self._name} does not start: {error.strerror}.") from error
        try:
            self.hello = self._answer("Give an interpreter that has what the script imports.")
        except BaseException:
            self.close()
            raise

    def ask(self) -> dict[str, Any]:
        """One step: what the worker answers, with "seconds", "loss" and "peak" (bytes)."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # _answer says what became of it
        return self._answer("Is there enough memory for all that is compared?")

    def update(self) -> tuple[float, float, int]:
        """One step: seconds, loss, peak memory; then a rest in which its threads fall asleep."""
        answer = self.ask()
        time.sleep(BLAS_REST)
        return float(answer["seconds"]), float(answer["loss"]), int(answer["peak"])

    def seconds(self) -> float:
        """Of one step."""
        return self.update()[0]

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

    def _answer(self, advice: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._complaints.seek(0)
            said = self._complaints.read().strip().splitlines()
            last = f", saying '{said[-1]}'" if said else ""
            raise ConfigError(f"{self._name} ended with {code}{last}. {advice}")
        return dict(json.loads(line))


def script(name: str) -> Path:
    """A script of the repository's bench folder: beside this source, or below where we are.
    ConfigError if there is none."""
    places = [Path(__file__).parents[3] / "bench", Path("bench").absolute()]
    for place in places:
        if (place / "peers" / "protocol.py").is_file():
            return place / name
    raise ConfigError(
        "The scripts that run other tools are in the bench folder of KRNL's repository, which is "
        "neither here nor beside this installation; run krnl bench --against inside a clone."
    )


def variants(peer: str, backend: Backend, activation: DType) -> list[tuple[str, str]]:
    """Precision of the base and of the adapters ("16" or "fp32") in which a peer is measured."""
    if activation is F32 or (peer == "mlx" and backend.name == "cpu"):
        return [("fp32", "fp32")]  # 16-bit products of mlx are slower than float32 on a CPU
    precision = PRECISIONS[activation.name]
    return [(precision, "16"), (precision, "fp32")]


def title(peer: str, precision: str, adapters: str) -> str:
    """What a contestant is called."""
    return f"{peer} {precision}, adapters {precision if adapters == '16' else adapters}"


def check_agreement(name: str, theirs: Mapping[str, float], ours: Mapping[str, float]) -> None:
    """BackendError where another tool computes something else: norms of the same gradients."""
    for result, norm in ours.items():
        if not abs(theirs[result] / norm - 1) <= AGREEMENT:
            raise BackendError(
                f"{name} computes something else than KRNL: the norm of {result} is "
                f"{theirs[result]:.6g} there and {norm:.6g} here. They are not compared."
            )
