"""`krnl profile`: what it prints and writes."""

import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from krnl.backends.base import Roof
from krnl.bench.results import circumstances
from krnl.dtypes import BF16, F32
from krnl.options import ProfileOptions
from krnl.profile import ROUNDS, By, Profile, profile_run
from krnl.profile_report import as_json, as_trace, picture, report
from open_gate import OpenGate
from profiles import CONFIG, MODEL, printed, profiled
from runs import krnl_process


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profiled()


@pytest.fixture(scope="module")
def forced() -> Profile:
    return profile_run(CONFIG, gate=OpenGate(trusted=False))


def test_what_is_printed(profile):
    text = printed(profile)
    assert "lora_swiglu_backward" in text and "whole replay" in text and "widest gaps" in text
    assert f"{profile.roof.nbytes / 1e9:,.0f} GB/s" in text and "under a roof of" in text
    assert "untrusted" not in text
    assert text.count("share of the sum") == 2  # of the dispatches; the pass is quicker or slower
    assert "fwd down = s@Wᵀ + u@Bᵀ + x" in printed(profile, by="label")
    assert "bwd layer 3" in printed(profile, by="layer")
    every = printed(profile, every=True).splitlines()
    assert sum("fwd down = s@Wᵀ" in line for line in every) >= 4


BY: list[By] = ["kernel", "label", "layer"]


@pytest.mark.parametrize("width", [70, 200])
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("by", BY)
def test_forced_figures_are_marked_wherever_they_are_printed(forced, by, every, width):
    """On narrow terminals too, which fold lines that stay whole."""
    lines = printed(forced, by=by, every=every, width=width).splitlines()
    surroundings = circumstances(forced.machine, forced.measurement)
    assert lines[-len(surroundings) :] == surroundings
    machine = surroundings[0]
    figures = [x for x in lines if any(c.isdigit() for c in x) and x != machine]
    assert len(figures) > 15
    assert all("untrusted" in line for line in figures)
    assert not any("…" in line for line in lines)


def test_forced_figures_are_marked_in_files(forced):
    content = as_json(forced)
    assert content["trusted"] is content["roof"]["trusted"] is False
    assert content["measurement"]["trusted"] is False
    assert all(dispatch["trusted"] is False for dispatch in content["dispatches"])
    trace = as_trace(forced)
    assert trace["otherData"]["trusted"] is False
    for event in trace["traceEvents"]:
        if event["ph"] == "M":
            assert "untrusted" in event["args"]["name"]
        else:
            assert event["args"]["trusted"] is False


@pytest.mark.parametrize("by", BY)
def test_forced_figures_are_marked_in_pictures(forced, profile, by):
    def texts(profile: Profile) -> list[str]:
        (axes,) = picture(profile, by).axes
        legend = [text.get_text() for text in axes.get_legend().get_texts()]
        return [axes.get_title(), axes.get_xlabel(), *legend]

    assert [text.count("untrusted") for text in texts(forced)] == [1, 1, 1, 1]
    assert not any("untrusted" in text for text in texts(profile))


def test_what_is_shown_says_where_when_and_how_quiet(profile):
    lines = circumstances(profile.machine, profile.measurement)
    assert len(lines) == 3
    assert printed(profile).splitlines()[-3:] == lines
    assert as_trace(profile)["otherData"]["circumstances"] == lines
    content = as_json(profile)
    assert content["measurement"].keys() >= {
        "controls", "references", "condition", "when", "notes", "trusted",
    }  # fmt: skip
    assert content["machine"]["kernels"] == profile.machine.kernels
    assert content["machine"]["threads"] == profile.machine.threads


def test_json(profile, tmp_path):
    report(profile, ProfileOptions(json=str(tmp_path / "p.json")), Console(quiet=True))
    content = json.loads((tmp_path / "p.json").read_text())
    assert content["schema"] == 2
    assert content.keys() == {
        "schema", "trusted", "machine", "model", "tokens", "documents", "targets", "activation",
        "recomputed", "replay", "sum", "roof", "measurement", "dispatches",
    }  # fmt: skip
    assert (content["model"], content["documents"]) == (MODEL, 4)
    assert len(content["dispatches"]) == len(profile.timings)
    assert content["roof"]["flops"].keys() == {"f32", "bf16"}
    assert content["sum"] == pytest.approx(sum(d["seconds"] for d in content["dispatches"]))
    assert content["measurement"]["seconds"].keys() == {"replay", "dispatches", "roof"}
    assert all(len(s) == ROUNDS for s in content["measurement"]["seconds"].values())
    assert content["machine"]["backend"] == "cpu"


def test_the_trace_is_one_that_perfetto_loads(profile, tmp_path):
    """The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU"""
    report(profile, ProfileOptions(trace=str(tmp_path / "t.json")), Console(quiet=True))
    content = json.loads((tmp_path / "t.json").read_text())
    metadata = [e for e in content["traceEvents"] if e["ph"] == "M"]
    assert [e["name"] for e in metadata] == ["process_name", "thread_name"]
    assert all(isinstance(e["args"]["name"], str) for e in metadata)
    complete = [e for e in content["traceEvents"] if e["ph"] == "X"]
    assert len(metadata) + len(complete) == len(content["traceEvents"])
    for event in complete:
        assert event.keys() == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        assert event["ts"] >= 0 and event["dur"] > 0
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
    # Layers lie end to end, and dispatches inside them; on one thread, viewers nest them by time.
    layers = [e for e in complete if e["cat"] == "layer"]
    dispatches = [e for e in complete if e["cat"] != "layer"]
    assert [e["name"] for e in dispatches] == [t.label for t in profile.timings]
    for events in (layers, dispatches):
        at = 0.0
        for event in events:
            assert event["ts"] == pytest.approx(at, abs=1e-6)
            at = event["ts"] + event["dur"]
        assert at == pytest.approx(1e6 * profile.total)
    edges = np.array([e["ts"] for e in layers[1:]])
    for event in dispatches:
        inside = (edges > event["ts"] + 1e-6) & (edges < event["ts"] + event["dur"] - 1e-6)
        assert not inside.any(), "a dispatch reaches over the end of its layer"


def test_a_picture(profile, tmp_path):
    for by in BY:
        report(profile, ProfileOptions(by=by, png=str(tmp_path / by)), Console(quiet=True))
        assert (tmp_path / by).read_bytes().startswith(b"\x89PNG")


def test_operands_in_a_cache_are_told_of(profile):
    roof = "the roof is that of memory"
    beyond, under = (
        [replace(t, floor=factor * t.seconds, bound="memory") for t in profile.timings]
        for factor in (2, 0.5)
    )
    assert roof in printed(replace(profile, timings=beyond))
    assert roof not in printed(replace(profile, timings=under))


@pytest.mark.parametrize(("bound", "limit"), [("compute", "2 GFLOP/s"), ("memory", "7 GB/s")])
def test_a_line_names_the_roof_in_the_type_of_the_pass(profile, bound, limit):
    roof = Roof({F32: 9e9, BF16: 2e9}, 7e9)
    timings = [replace(t, bound=bound) for t in profile.timings]
    text = printed(replace(profile, roof=roof, activation=BF16, timings=timings), by="layer")
    lines = [line for line in text.splitlines() if "bwd layer" in line and "%" in line]
    assert sum(f"  {limit}  " in line for line in lines) == 4


def test_the_command(tmp_path):
    """As a process; forced, as other things run beside the tests."""
    files = {name: tmp_path / f"p.{name}" for name in ("json", "trace", "png")}
    flags = [word for name, path in files.items() for word in (f"--{name}", path)]
    ended = krnl_process("profile", MODEL, "--tokens", 64, "--by", "layer", "--force", *flags)
    assert ended.returncode == 0, ended.stderr
    assert "untrusted: sum of dispatches" in ended.stdout and "bwd layer 0" in ended.stdout
    assert all(path.stat().st_size > 0 for path in files.values())
