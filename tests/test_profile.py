"""`krnl profile`: what it counts, and what it writes."""

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from krnl.errors import ConfigError
from krnl.profile import print_profile, profile_run, random_pass, write_profile
from krnl.training.config import TrainConfig

MODEL = str(Path(__file__).parent.parent / "examples" / "storyteller" / "model")


@pytest.fixture(scope="module")
def profile():
    return profile_run(TrainConfig(model=MODEL, tokens=256), documents=4, labelled=0.25)


def test_every_dispatch_is_timed_and_grouped(profile):
    assert all(t.seconds > 0 for t in profile.timings)
    assert sum(t.count for t in profile.grouped()) == len(profile.timings)
    assert sum(t.seconds for t in profile.grouped()) == pytest.approx(profile.total)
    # The machine may be busy: only nonsense is caught.
    assert 0.2 < profile.total / profile.replay < 5


def test_work_is_that_of_live_rows(profile):
    heads, head_dim, layers = 4, 64, 4
    visible = 4 * (64 * 65 // 2)
    attention = next(t for t in profile.grouped() if t.kernel == "attention")
    assert attention.flops == layers * 4 * visible * heads * head_dim
    targets = len(random_pass(1013, 256, 4, 0.25).target)
    head = [t for t in profile.timings if t.label == "head/lora_linear"]
    assert sum(t.flops for t in head) == 2 * targets * 1013 * 256


def test_rows_of_a_random_pass_cannot_see_one_another():
    work = random_pass(50, 100, 3, 1.0)
    assert work.live == 100 and len(work.target) == 100 - 3
    np.testing.assert_array_equal(work.target, work.tokens[work.target_row + 1])
    assert np.all(work.doc_start[work.target_row] == work.doc_start[work.target_row + 1])
    with pytest.raises(ConfigError, match="documents is 51"):
        random_pass(50, 100, 51, 1.0)


def test_what_is_printed_and_written(profile, tmp_path):
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
    print_profile(profile, console, every=False)
    text = console.export_text()
    console.file.close()
    assert "lora_swiglu_backward" in text and "whole replay" in text and "widest gaps" in text
    write_profile(profile, tmp_path / "profile.json")
    content = json.loads((tmp_path / "profile.json").read_text())
    assert len(content["dispatches"]) == len(profile.timings)
    assert content["roof"]["flops"].keys() == {"f32", "bf16"}


def test_the_reference_is_not_timed():
    with pytest.raises(ConfigError, match="only the cpu can be profiled"):
        profile_run(TrainConfig(model=MODEL, device="reference"))
