"""CUDA kernels: for which GPUs they are compiled, and how what was compiled is kept."""

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import pytest

from fake_cuda import FakeCompiler
from krnl.backends import cuda_cache, cuda_compiler
from krnl.backends.cuda_cache import CubinFolder
from krnl.backends.cuda_compiler import WHEELS, Compiler, Kernel, architecture
from krnl.dtypes import BF16, F32
from krnl.errors import BackendError
from krnl.kernels.launch import Launch


def test_gpus_are_compiled_for_as_closely_as_can_be() -> None:
    offered = [75, 80, 86, 89, 90, 100, 120]
    found = {c: architecture(c, offered) for c in (80, 87, 89, 90, 100, 103, 120, 121)}
    assert found == {
        80: "sm_80", 87: "sm_86", 89: "sm_89", 90: "sm_90a", 100: "sm_100", 103: "sm_100",
        120: "sm_120", 121: "sm_120",
    }  # fmt: skip


def test_kernels_are_named_as_cxx_names_them() -> None:
    made = Launch("lib", "f", (), (1, 1, 1), 32, (BF16, F32), {2: 64, 0: True, 1: False})
    assert Kernel.of(made) == Kernel("lib", "f<bf16, f32, true, false, 64>")
    assert str(Kernel.of(Launch("lib", "f", (), (1, 1, 1), 32))) == "'f' of lib.cu"


class Kept:
    """A compiler with one source and one header, which a test may change."""

    def __init__(self, folder: Path):
        self.fake, self.folder = FakeCompiler(), folder
        self.source, self.header = "source", "header"

    def compile(self, name: str = "f", architecture: str = "sm_80") -> bytes:
        made = Compiler(
            self.fake, architecture, self.folder, lambda library: self.source,
            lambda: {"common.h": self.header},
        )  # fmt: skip
        kernel = Kernel("lib", name)
        return made.compile([kernel, kernel])[kernel].image


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "cubins")


def test_what_was_compiled_is_kept(kept: Kept) -> None:
    first = kept.compile()
    assert kept.compile() == first == b"code of "
    assert kept.fake.compiled == ["f"]
    assert [path.suffix for path in kept.folder.iterdir()] == [".cubin"]


def test_everything_with_a_part_in_the_code_has_one_in_its_name(kept: Kept) -> None:
    kept.compile()
    kept.compile("g")
    kept.compile(architecture="sm_90a")
    kept.source = "other source"
    kept.compile()
    kept.header = "other header"
    kept.compile()
    kept.fake.version = (13, 1)
    kept.compile()
    assert kept.fake.compiled == ["f", "g", "f", "f", "f", "f"]
    assert len(list(kept.folder.iterdir())) == 6


def checked(content: bytes) -> bytes:
    return hashlib.sha256(content).digest() + content


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[:-1],
        lambda b: b"",
        lambda b: b[:40] + b"x" + b[41:],
        # Whole, but written by something else.
        lambda b: checked(b'{"entry": "f", "log": "", "more": 1}\ncode'),
        lambda b: checked(b'{"entry": "f"}\ncode'),
        lambda b: checked(b'{"entry": "f", "log": 3}\ncode'),
        lambda b: checked(b'["entry", "log"]\ncode'),
        lambda b: checked(b"\xff{}\ncode"),
        lambda b: checked(b""),
    ],
)
def test_a_damaged_file_is_compiled_again(damage: Any, kept: Kept) -> None:
    kept.compile()
    (path,) = kept.folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert kept.compile() == b"code of "
    assert kept.fake.compiled == ["f", "f"]
    assert path.read_bytes() == whole


@pytest.mark.parametrize("wheel", WHEELS)
def test_every_build_of_the_compiler_has_its_own_files(
    wheel: str, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVRTC itself tells two numbers of its version, the wheel that it is in has more."""
    for build in ("13.0.48", "13.0.88"):
        monkeypatch.setattr(cuda_compiler, "version", {wheel: build}.__getitem__)
        monkeypatch.setattr(cuda_compiler, "PackageNotFoundError", KeyError)
        kept.compile()
        kept.compile()
    assert kept.fake.compiled == ["f", "f"]


def age(path: Path, days: float) -> None:
    moment = time.time() - 86400 * days
    os.utime(path, (moment, moment))


def test_files_that_nobody_uses_are_removed(kept: Kept) -> None:
    """When something is compiled; what a killed process left too. A file that is read is used."""
    kept.compile("old")
    (old,) = kept.folder.iterdir()
    kept.compile("used")
    (used,) = set(kept.folder.iterdir()) - {old}
    left, other = kept.folder / f".{old.name}.0123abcd.tmp", kept.folder / "notes.txt"
    for path in (left, other):
        path.write_bytes(b"")
    for path in (old, used, left, other):
        age(path, 91)
    kept.compile("used")
    assert old.exists(), "nothing was compiled"
    kept.compile("new")
    assert not old.exists() and not left.exists()
    assert used.exists() and other.exists() and len(list(kept.folder.iterdir())) == 3


def test_files_beyond_the_room_are_removed_by_age(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Path] = []
    for days, name in enumerate("abcd"):
        kept.compile(name)
        (path,) = set(kept.folder.iterdir()) - set(found)
        found.append(path)
        age(path, 10 - days)
    nbytes = found[0].stat().st_size
    monkeypatch.setattr(cuda_cache, "MOST_BYTES", 3 * nbytes + nbytes // 2)
    kept.compile("e")
    assert [path.exists() for path in found] == [False, False, True, True]


def test_processes_may_trim_at_once(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another has removed meanwhile is no error, nor what it is not allowed to remove."""
    folder = CubinFolder(kept.folder)
    for name in "ab":
        kept.compile(name)
    for path in kept.folder.iterdir():
        age(path, 91)
    files = folder._files()
    monkeypatch.setattr(folder, "_files", lambda: files)
    CubinFolder(kept.folder).trim()
    folder.trim()
    assert not list(kept.folder.iterdir())
    CubinFolder(kept.folder / "nowhere").trim()


def test_what_is_not_wanted_any_more_is_not_compiled(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure, and after Ctrl-C: only what had begun is waited for."""
    for error in (BackendError("broken"), KeyboardInterrupt()):
        made = Compiler(kept.fake, "sm_80", kept.folder, lambda library: "source", dict)
        begun = list[str]()

        def slow(kernel: Kernel, error: BaseException = error, begun: list[str] = begun) -> None:
            begun.append(kernel.expression)
            time.sleep(0.02)
            raise error

        monkeypatch.setattr(made, "_cubin", slow)
        with pytest.raises(type(error)):
            made.compile(Kernel("lib", f"f{i}") for i in range(500))
        assert len(begun) < 100


def test_a_folder_that_cannot_be_written_costs_time_alone(kept: Kept) -> None:
    kept.folder.write_text("a file")
    for _ in range(2):
        assert kept.compile() == b"code of "
    assert kept.fake.compiled == ["f", "f"]


@pytest.mark.parametrize(
    "note",
    [
        "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async is serialized",
        "ptxas warning (C7512) whatever it says",
        "setmaxnreg ignored to maintain minimum register requirement",
    ],
)
def test_of_serialised_products_is_warned_once(note: str, kept: Kept) -> None:
    """They are right. Also when the code comes from the folder."""
    kept.fake.log = f"one\n{note}\n"
    for _ in range(2):
        made = Compiler(kept.fake, "sm_80", kept.folder, lambda library: "source", dict)
        kernels = [Kernel("lib", name) for name in "fg"]
        with pytest.warns(UserWarning, match=r"slow code of 'f' of lib.cu and of 1 other") as told:
            for _ in range(2):
                assert set(made.compile(kernels)) == set(kernels)
        assert len(told) == 1
    assert sorted(kept.fake.compiled) == ["f", "g"]


def test_the_compilers_words_are_passed_on(kept: Kept) -> None:
    kept.fake.broken, kept.fake.log = True, "\n".join(f"line {i}" for i in range(40))
    with pytest.raises(BackendError) as raised:
        kept.compile()
    lines = str(raised.value).splitlines()
    assert lines[0] == "NVRTC does not compile 'f' of lib.cu for sm_80 (NVRTC_ERROR_COMPILATION):"
    assert lines[1] == "line 0" and lines[-1] == "…" and len(lines) < 20
    assert not kept.folder.exists()
