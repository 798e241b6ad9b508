"""Tiny models, one that chats, and a few conversations; a GPU that runs nothing; where a gate keeps
what machines reach. Modules that need others define their own."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fake_cuda import FakeDriver, installed
from krnl.backends import cuda_memory
from krnl.backends.cuda_compiler import Compiler
from krnl.backends.cuda_driver import STEPWISE_VARIABLE
from krnl.bench.reference import ReferenceStore
from krnl.dtypes import F32, DType
from krnl.model import Model
from runs import write_chat_model, write_data
from scripted_gate import KEY, REFERENCE
from tiny import Write, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"), 10, 3)


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Each model once."""

    @cache
    def write(kind: str = "llama", dtype: DType = F32, **sizes: Any) -> Model:
        return write_model(tmp_path_factory.mktemp(kind), kind, dtype, **sizes)

    return write


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No file of this machine's user is read or written; kernels have no sources."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(STEPWISE_VARIABLE, raising=False)
    monkeypatch.setattr(cuda_memory, "STAGING", 4096)
    monkeypatch.setattr(Compiler.__init__, "__defaults__", (lambda library: "source", dict))


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    with installed(FakeDriver()) as driver:
        yield driver


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines need no warming up here, so that scripts hold what is read and nothing else."""
    monkeypatch.setattr("krnl.bench.gate.WARM_UP_SECONDS", 0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of references that is not there yet."""
    return tmp_path / "cache" / "references.json"


@pytest.fixture
def known(path: Path) -> Path:
    """A machine that is known to reach 1,000 GFLOP/s."""
    ReferenceStore(path).raise_to(KEY, REFERENCE.rate, REFERENCE.learnt)
    return path
