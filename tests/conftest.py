"""A tiny model that chats, and a few conversations. Modules that need others define their own."""

from pathlib import Path

import pytest

from runs import write_chat_model, write_data


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"), 10, 3)
