"""Scripts of the laboratory run, where what they want is only played."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from fake_cuda import FakeDriver, installed

LAB = Path(__file__).parent.parent / "lab"


def test_every_tiling_of_an_update_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out = tmp_path / "tilings.json"
    flags = ["--layers", "1", "--length", "64", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["tilings_cuda.py", *flags])
    with installed(FakeDriver(capability=90, nbytes=1 << 30)):
        runpy.run_path(str(LAB / "tilings_cuda.py"), run_name="__main__")
    said, found = capsys.readouterr().out, json.loads(out.read_text("utf-8"))
    # Every launch takes the 1.5 ms of all 32 of a graph.
    launches = sum(job["launches"] for job in found["jobs"])
    total = f"{launches * 1500 / 32:,.1f} µs; the best tilings would save 0.0 µs"
    assert launches > 10 and total in said
    for job in found["jobs"]:
        assert {timing["microseconds"] for timing in job["timings"]} == {1500 / 32}
        least = min(job["timings"], key=lambda timing: timing["clocks"])
        assert least["tiling"] == job["chosen"]


def test_without_hopper_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tilings_cuda.py"])
    with installed(FakeDriver(capability=80)), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(LAB / "tilings_cuda.py"), run_name="__main__")
    assert ended.value.code == 2
    assert "Only a Hopper GPU has these tilings" in capsys.readouterr().err
