"""The Python interface, and what it says to those who misuse it."""

import subprocess
import sys
from pathlib import Path

import pytest

import krnl
from krnl.formats.files import read_json
from krnl.training.folder import held

ROOT = Path(__file__).parent.parent
STORY = ROOT / "examples" / "storyteller"
MODEL, DATA = STORY / "model", STORY / "data"


def train(tmp_path, **settings):
    return krnl.train(MODEL, DATA / "valid.jsonl", out=tmp_path, quiet=True, steps=1, **settings)


def test_a_trained_adapter_names_the_model_as_it_was_given(tmp_path):
    model = krnl.load("examples/storyteller/model") if Path.cwd() == ROOT else krnl.load(MODEL)
    krnl.train(model, DATA / "valid.jsonl", out=tmp_path / "a", quiet=True, steps=1)
    assert read_json(tmp_path / "a/adapter_config.json")["base_model_name_or_path"] == model.name
    again = train(tmp_path / "b", init_adapter=tmp_path / "a", overwrite=True)
    assert again.updates == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora": {"rank": 3}}, "lora is {'rank': 3}; give krnl.Lora"),
        ({"lora": krnl.Lora(rank=3), "rank": 5}, "rank is given twice"),
        ({"rnak": 5}, "no setting 'rnak'. Did you mean 'rank'"),
        ({"lr": "fast"}, "lr is 'fast'; it must be a number"),
        ({"show": 3}, "show is for the command line"),
        ({"tokens": 10**13}, "tokens is 10000000000000; it must be from 2 to"),
        ({"targets": ["all-linear", "lm_head"]}, "all-linear alone"),
    ],
)
def test_settings_that_cannot_be(tmp_path, settings, message):
    with pytest.raises(krnl.ConfigError) as caught:
        train(tmp_path, **settings)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["model", "data", "out"])
def test_paths_have_to_be_paths(tmp_path, monkeypatch, name):
    """None, of a variable that was never set, is no folder called None."""
    monkeypatch.chdir(tmp_path)
    given = {"model": MODEL, "data": DATA / "valid.jsonl", "out": tmp_path / "out"}
    with pytest.raises(krnl.ConfigError, match=f"{name} is None; it must be text"):
        krnl.train(**{**given, name: None}, steps=1, quiet=True)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": "a", "max_tokens": 5.5}, "max_tokens is 5.5"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens is '5'; it must be a whole number"),
        ({"prompt": None}, "prompt is None"),
        ({"prompt": "\ud800"}, "half a surrogate pair"),
        ({"prompt": [{"role": "user", "content": "\udfff"}]}, "half a surrogate pair"),
    ],
)
def test_questions_that_cannot_be_answered(given, message):
    with pytest.raises(krnl.KrnlError, match=message):
        krnl.generate(MODEL, **given)


def test_one_folder_has_one_run(tmp_path):
    with held(tmp_path), pytest.raises(krnl.ConfigError, match="Another run is using"):
        train(tmp_path, overwrite=True)
    assert train(tmp_path).updates == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(
    "words",
    [["--help"], ["plan", str(MODEL)], ["generate", str(MODEL), "Mia", "--max-tokens", "2"]],
    ids=lambda words: words[0],
)
def test_output_that_cannot_be_written(words):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "krnl", *words]
        got = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert got.returncode == 1
    assert got.stderr.startswith("krnl: The output cannot be written: No space left")
