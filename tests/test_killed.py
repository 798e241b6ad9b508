"""A run that was killed at any write to the disk, or anywhere in an update, goes on to be the run
that was not."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from krnl.errors import ConfigError
from krnl.formats.resume import newest
from krnl.training import loop
from krnl.training.metrics import Metrics
from krnl.training.session import Session
from runs import adapter_bytes, checkpoints, run, settings, timeless, updates

# Two epochs of three updates, of which the last has two rows and the others four in several passes.
GIVEN: dict[str, Any] = {"epochs": 2, "dropout": 0.3, "warmup": 2}
RHYTHMS: dict[str, dict[str, Any]] = {
    "validated": {"eval_every": 3, "save_every": 2},
    "not validated": {"save_every": 4},
}


class Killed(BaseException):
    """Nothing in krnl catches this."""


class Killer:
    """Ends the process at one of the calls that it watches, before it does anything. From then on
    none of them does: what `finally` would clean up stays as a killed process leaves it."""

    def __init__(self, patch: pytest.MonkeyPatch, last: int | None = None):
        self.calls, self._last, self._patch = 0, last, patch
        for name in ("fsync", "mkdir", "rename", "replace", "rmdir", "unlink"):
            self._watch(os, name)
        for name in ("accumulate", "evaluate", "update"):
            self._watch(Session, name)
        self._watch(Metrics, "write", half_a_line)

    def _watch(self, owner: Any, name: str, dying: Callable[..., None] | None = None) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            if self._last is not None and self.calls >= self._last:
                if dying and self.calls == self._last:
                    dying(*arguments, **named)
                raise Killed
            return original(*arguments, **named)

        self._patch.setattr(owner, name, call)


def half_a_line(metrics: Metrics, **values: Any) -> None:
    metrics._file.write(b'{"step": 1, "lo')


@pytest.mark.parametrize("rhythm", RHYTHMS)
def test_a_killed_run_goes_on_as_if_it_had_not_been(
    tmp_path, monkeypatch, model, data, rhythm
) -> None:
    """Whatever it was doing. Where it had saved nothing yet, that is said, and it starts again."""
    monkeypatch.setattr(loop, "draw", lambda folder: None)
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: None
    )  # there is no power cut, and it is slow
    source = data if rhythm == "validated" else data / "train.jsonl"
    given = {**GIVEN, **RHYTHMS[rhythm]}

    def go(name: str, **more: Any) -> Path:
        run(settings(model, source, tmp_path / name, **given, **more))
        return tmp_path / name

    with monkeypatch.context() as patch:
        killer = Killer(patch)
        whole = go("whole")
    assert [line["rows"] for line in updates(whole)] == [4, 4, 2] * 2
    assert max(line["tokens"] for line in updates(whole)) > 64, "these take two passes"
    assert killer.calls > 50
    again = 0
    for last in range(1, killer.calls + 1):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            Killer(patch, last)
            go(f"out{last}")
        out = tmp_path / f"out{last}"
        if newest(out / "checkpoints") is None:
            again += 1
            with pytest.raises(ConfigError, match="There is no checkpoint"):
                go(out.name, resume=True)
            go(out.name, overwrite=True)
        else:
            go(out.name, resume=True)
        assert timeless(out) == timeless(whole), f"killed at call {last}"
        assert adapter_bytes(out) == adapter_bytes(whole)
        assert set(checkpoints(out)) >= set(checkpoints(whole))  # of older ones some may be left
        for name in checkpoints(whole):
            saved = [f / "checkpoints" / name / "state.safetensors" for f in (out, whole)]
            assert saved[0].read_bytes() == saved[1].read_bytes()
        left = {path.name for path in out.iterdir()}
        assert left == {path.name for path in whole.iterdir()}
    assert 0 < again < killer.calls
