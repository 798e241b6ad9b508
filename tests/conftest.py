"""A tiny model that chats, and a few conversations; a GPU that runs nothing. Modules that need
others define their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_cuda import FakeDriver, installed
from krnl.backends import cuda_memory
from krnl.backends.cuda_compiler import Compiler
from krnl.backends.cuda_driver import STEPWISE_VARIABLE
from runs import write_chat_model, write_data


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"), 10, 3)


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
