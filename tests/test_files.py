"""Files that are either whole or absent, and are looked at before there is anything to write."""

import errno
import os
from pathlib import Path

import pytest

import krnl.formats.files as files
from krnl.errors import ConfigError, FormatError
from krnl.formats.files import check_writable, open_atomic, write_bytes_atomic
from krnl.options import ROOM, BenchOptions, ProfileOptions, check_outputs


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path):
    (tmp_path / "far").mkdir()
    link, target = tmp_path / "link", tmp_path / "far" / "target"
    link.symlink_to(target)  # to nothing yet
    for content in (b"first", b"second"):
        check_writable(link, 10)
        write_bytes_atomic(link, content)
        assert link.is_symlink() and not target.is_symlink()
        assert target.read_bytes() == link.read_bytes() == content
    assert names(tmp_path) == ["far", "link"] and names(tmp_path / "far") == ["target"]


@pytest.mark.parametrize("through", ["itself", "a link"])
def test_what_is_no_file_is_not_replaced(tmp_path, through):
    """A pipe stands for a device too: it is no folder and no file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    path = pipe
    if through == "a link":
        path = tmp_path / "link"
        path.symlink_to(pipe)
    for use in (check_writable, lambda path: write_bytes_atomic(path, b"x")):
        with pytest.raises(FormatError, match="cannot be written: it is a device or a pipe"):
            use(path)
        with pytest.raises(FormatError, match="cannot be written: it is a folder"):
            use(tmp_path)
    assert pipe.is_fifo() and path.is_symlink() == (through == "a link")


def test_links_in_a_circle_are_a_sentence(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(FormatError, match="cannot be written"):
        check_writable(tmp_path / "a")
    with pytest.raises(FormatError, match="cannot be written"):
        check_outputs(BenchOptions(json=str(tmp_path / "a")), "json")
    assert names(tmp_path) == ["a", "b"]


def test_looking_leaves_what_is_there(tmp_path):
    path = tmp_path / "file"
    path.write_text("as it was")
    check_writable(path, 1000)
    assert path.read_text() == "as it was" and names(tmp_path) == ["file"]


def test_a_block_that_fails_leaves_what_is_there(tmp_path):
    path = tmp_path / "file"
    path.write_text("as it was")
    with pytest.raises(RuntimeError), open_atomic(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_text() == "as it was" and names(tmp_path) == ["file"]


@pytest.mark.parametrize("name", ["json", "trace", "png"])
def test_outputs_are_tried_before_anything_is_measured(tmp_path, monkeypatch, name):
    """A disk that is full takes the name of a file and nothing in it."""
    tried: list[int] = []

    def full(file: object) -> None:
        tried.append(os.fstat(file.fileno()).st_size)
        raise OSError(errno.ENOSPC, "No space left on device")

    options = ProfileOptions(**{name: str(tmp_path / "file")})
    check_outputs(options, name)
    assert names(tmp_path) == []
    monkeypatch.setattr(files, "_flush", full)
    with pytest.raises(FormatError, match="file cannot be written: No space left on device"):
        check_outputs(options, name)
    assert names(tmp_path) == [] and tried == [ROOM]


def test_a_folder_that_may_not_be_written_is_told_of(tmp_path, monkeypatch):
    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("builtins.open", refused)
    with pytest.raises(FormatError, match="file cannot be written: Permission denied"):
        check_outputs(BenchOptions(png=str(tmp_path / "file")), "png")


def test_a_dash_is_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="json is '-', and only a file can be written"):
        check_outputs(BenchOptions(json="-"), "json")
    assert names(tmp_path) == []


def test_a_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    check_outputs(BenchOptions(json="~/file"), "json")
    with pytest.raises(ConfigError, match="there is no such folder"):
        check_outputs(BenchOptions(json="~/none/file"), "json")
    with pytest.raises(ConfigError, match="json and png both name"):
        check_outputs(BenchOptions(json="~/file", png=str(tmp_path / "file")), "json", "png")
