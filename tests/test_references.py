"""The file that keeps what machines reach in quiet."""

import json
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import pytest

from krnl.bench.reference import Reference, ReferenceStore, default_path
from krnl.errors import FormatError
from scripted_gate import KEY, REFERENCE, Bench, G

NOW = "2026-01-01T12:00:00+00:00"


def test_references_are_kept_apart_by_every_part_of_the_key(known):
    store = ReferenceStore(known)
    for part in ("device", "system", "driver", "kernels", "control"):
        other = replace(KEY, **{part: "other"})
        assert store.read(other) is None
        store.raise_to(other, 5 * G, NOW)
        assert store.read(other).rate == 5 * G
    assert store.read(KEY).rate == 1000 * G
    assert len(json.loads(known.read_text())["references"]) == 6


def test_a_lower_rate_never_replaces_a_higher(known):
    store = ReferenceStore(known)
    kept = store.raise_to(KEY, 10 * G, NOW)
    assert kept == store.read(KEY) == REFERENCE


def test_what_older_versions_kept_is_read(known):
    """They counted windows, too."""
    content = json.loads(known.read_text())
    content["references"][str(KEY)]["windows"] = 7
    known.write_text(json.dumps(content))
    assert ReferenceStore(known).read(KEY) == REFERENCE


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "\0\0", '{"version": 99, "references": {}}', '{"version": 1}',
     '{"version": 1, "references": []}'],
)  # fmt: skip
def test_garbage_for_a_file_is_a_sentence(path, content):
    path.parent.mkdir()
    path.write_text(content)
    for use in (Bench(path, [1000]).measure, Bench(path, [1000]).gate.relearn):
        with pytest.raises(FormatError, match=r"references\.json .*\. Delete it: "):
            use()
    assert path.read_text() == content


@pytest.mark.parametrize(
    "entry",
    [None, 7, {}, {"rate": 1e9}, {"learnt": NOW}, {"rate": "x", "learnt": NOW},
     {"rate": -1.0, "learnt": NOW}, {"rate": 1e9, "learnt": []}, {"rate": 1e9, "learnt": ""},
     {"rate": 1e9, "learnt": "zzz"}, {"rate": 1e9, "learnt": "2026-01-01T12:00:00"}],
)  # fmt: skip
def test_garbage_for_one_reference_leaves_the_others(known, entry):
    content = json.loads(known.read_text())
    bad = replace(KEY, device="bad")
    content["references"][str(bad)] = entry
    known.write_text(json.dumps(content))
    store = ReferenceStore(known)
    with pytest.raises(FormatError, match=r"damaged at the reference of 'bad .*Delete it: "):
        store.read(bad)
    assert store.raise_to(KEY, 2000 * G, NOW).rate == store.read(KEY).rate == 2000 * G


def test_an_infinity_in_another_reference_is_a_sentence(known):
    content = json.loads(known.read_text())
    content["references"]["other"] = {"rate": float("inf")}
    known.write_text(json.dumps(content))
    with pytest.raises(FormatError, match="damaged"):
        ReferenceStore(known).raise_to(KEY, 2000 * G, NOW)
    assert "Infinity" in known.read_text()


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(FormatError, match="cannot be"):
        ReferenceStore(tmp_path / "cache" / "references.json").raise_to(KEY, G, NOW)


def test_a_crash_while_writing_leaves_the_old_file(known, monkeypatch):
    def crash(*_: object) -> None:
        raise OSError("power cut")

    before = known.read_text()
    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(FormatError, match="power cut"):
        ReferenceStore(known).raise_to(KEY, 2000 * G, NOW)
    assert known.read_text() == before


def _write_many(path: Path, device: str) -> None:
    store = ReferenceStore(path)
    for i in range(1, 26):
        store.raise_to(replace(KEY, device=f"{device} {i}"), i * G, NOW)
        store.raise_to(KEY, i * G, NOW)


def test_two_processes_at_once_lose_nothing(path):
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_many, args=(path, name)) for name in ("one", "two")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    store = ReferenceStore(path)
    assert store.read(KEY) == Reference(25 * G, NOW)
    for name in ("one", "two"):
        for i in range(1, 26):
            assert store.read(replace(KEY, device=f"{name} {i}")) == Reference(i * G, NOW)


def test_the_file_lies_in_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "krnl" / "references.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_path().is_relative_to(Path.home())


@pytest.mark.parametrize("obstacle", ["a file for a folder", "a folder for the file", "no lock"])
def test_a_store_that_cannot_be_written_is_told_of_before_anything_is_measured(path, obstacle):
    if obstacle == "a file for a folder":
        path.parent.write_text("")
    elif obstacle == "a folder for the file":
        path.mkdir(parents=True)
    else:
        (path.parent / f".{path.name}.lock").mkdir(parents=True)
    bench = Bench(path, [1000])
    with pytest.raises(FormatError, match=r"cannot be written.*set XDG_CACHE_HOME to a folder"):
        bench.store.check_writable()
    with pytest.raises(FormatError, match="set XDG_CACHE_HOME"):
        bench.gate.relearn()
    assert bench.events == []


def test_looking_at_a_store_changes_nothing(known):
    before = known.read_bytes()
    ReferenceStore(known).check_writable()
    assert known.read_bytes() == before
    assert {p.name for p in known.parent.iterdir()} == {known.name, f".{known.name}.lock"}
