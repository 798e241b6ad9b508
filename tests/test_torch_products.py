"""bench/torch_products.py on a CUDA device that a stand-in for PyTorch plays: what it describes is
what is timed, and a PyTorch that is too old is told in a sentence."""

import shutil
import sys
from pathlib import Path

import pytest

import fake_torch
from krnl.backends.cpu import CpuBackend
from krnl.bench import rotation
from krnl.bench.baselines import Worker, script
from krnl.bench.products import Product
from krnl.bench.rotation import Rotation
from krnl.bench.tables import shapes
from krnl.dtypes import F32
from krnl.errors import BackendError, ConfigError

SHAPES = {layout: shapes.Shape("group", layout, 24, 40, 56) for layout in ("nn", "tn", "nt")}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """One that has the stand-in."""
    shutil.copy(fake_torch.__file__, tmp_path / "torch.py")
    (tmp_path / "torch-2.7.0.dist-info").mkdir()
    (tmp_path / "torch-2.7.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.7.0\n")
    return {"PYTHONPATH": str(tmp_path)}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Rotation]:
    monkeypatch.setattr(rotation, "MOST_COPIES", 2)
    monkeypatch.setattr(rotation, "LEAST_CALLS", 4)
    return {
        layout: Rotation(Product(layout, shape.m, shape.n, shape.k, F32, F32), CpuBackend())
        for layout, shape in SHAPES.items()
    }


def worker(layout: str, made: Rotation, environment: dict[str, str]) -> Worker:
    given = [*shapes.arguments(SHAPES[layout], made, "bf16"), "--device", "cuda"]
    path = script("torch_products.py")
    return Worker(sys.executable, path, given, environment, first=shapes.SAID)


@pytest.mark.parametrize("layout", SHAPES)
def test_it_computes_what_krnl_does(
    layout: str, made: dict[str, Rotation], environment: dict[str, str]
) -> None:
    with worker(layout, made[layout], environment) as peer:
        shapes.check("torch", peer.hello, made[layout])
        assert peer.hello["versions"] == {"torch": "2.7.0"}
        assert peer.seconds() > 0


@pytest.mark.parametrize(("layout", "forgotten"), [("nn", 4), ("nt", 4), ("tn", 4), ("tn", 1)])
def test_a_graph_that_computes_something_else_is_not_compared(
    layout: str, forgotten: int, made: dict[str, Rotation], environment: dict[str, str]
) -> None:
    """Whatever the same calls compute outside of it."""
    environment["FAKE_TORCH"] = str(forgotten)
    peer = worker(layout, made[layout], environment)
    words = "torch computes something else than KRNL: the norm"
    with peer, pytest.raises(BackendError, match=words):
        shapes.check("torch", peer.hello, made[layout])


@pytest.mark.parametrize("failing", ["no out_dtype", "other sum"])
def test_a_pytorch_that_adds_nothing_to_a_sum_in_fp32_is_told_in_a_sentence(
    failing: str, made: dict[str, Rotation], environment: dict[str, str]
) -> None:
    environment["FAKE_TORCH"] = failing
    words = (
        r"PyTorch 2\.7\.0 does not add products in bf16 to a sum in fp32 .* PyTorch 2\.11 does\."
    )
    with pytest.raises(ConfigError, match=words):
        worker("tn", made["tn"], environment)
    with worker("nt", made["nt"], environment) as peer:
        shapes.check("torch", peer.hello, made["nt"])


def test_a_pytorch_without_the_device_is_told_in_a_sentence(
    made: dict[str, Rotation], environment: dict[str, str]
) -> None:
    environment["FAKE_TORCH"] = "no device"
    with pytest.raises(ConfigError, match=r"device is cuda, which PyTorch 2\.7\.0 cannot use here"):
        worker("nt", made["nt"], environment)
