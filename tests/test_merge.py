"""A merged model is the base with its adapter, in the base's own files."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from krnl.backends.cpu import CpuBackend
from krnl.dtypes import BF16, F16, F32, DType
from krnl.errors import ConfigError, FormatError
from krnl.formats.peft import AdapterConfig, write_adapter
from krnl.formats.safetensors import read_header, read_tensors, write_safetensors
from krnl.generator import Generator
from krnl.merge import Merged, merge
from krnl.model import Model
from krnl.models.config import linear_paths
from runs import BASE, krnl_process, write_chat_model
from tiny import REFERENCE, make_modules

PATTERNED = AdapterConfig(
    rank=3, alpha=6.0, targets=("q_proj", "down_proj", "lm_head"),
    rank_pattern={"down_proj": 2}, alpha_pattern={"q_proj": 1.5},
)  # fmt: skip
PLAIN = AdapterConfig(rank=3, alpha=6.0)


def make(folder: Path, dtype: DType, kind: str = "llama") -> Model:
    return Model.open(str(write_chat_model(folder, kind, dtype=dtype)))


def shard(folder: Path) -> None:
    """Cuts model.safetensors in three, with an index."""
    tensors = {k: np.array(v) for k, v in read_tensors(folder / "model.safetensors")[0].items()}
    (folder / "model.safetensors").unlink()
    where = {}
    for number in range(3):
        part = {k: tensors[k] for k in sorted(tensors)[number::3]}
        name = f"model-0000{number + 1}-of-00003.safetensors"
        write_safetensors(folder / name, part, {"format": "pt"})
        where |= dict.fromkeys(part, name)
    size = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def fold(model: Model, adapter: AdapterConfig, out: Path) -> Merged:
    return merge(model, (adapter, make_modules(model, adapter)), out, CpuBackend())


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("adapter", [PLAIN, PATTERNED], ids=["plain", "patterned"])
def test_weights_are_added_in_float32_and_rounded_once(tmp_path, dtype, adapter):
    model = make(tmp_path / "model", dtype)
    modules = make_modules(model, adapter)
    result = fold(model, adapter, tmp_path / "out")
    merged = Model.open(str(tmp_path / "out"))
    assert result.tensors == len(modules)
    largest, unsure = 0.0, 0.0
    for name in merged.checkpoint.tensors:
        path, got = name.removesuffix(".weight"), merged.checkpoint.read(name)
        base = "model.embed_tokens.weight" if path == "lm_head" else name
        weight = model.checkpoint.read(base)
        assert got.dtype == weight.dtype == dtype.numpy
        if path not in modules:
            assert bits(got) == bits(weight)
            continue
        a, b = (part.astype(np.float64) for part in modules[path])
        exact = weight.astype(np.float64) + adapter.scale_for(path) * (b @ a)
        error = np.abs(got.astype(np.float64) - exact)
        # Half an ulp of the type for the one rounding; and of float32 three products, two sums of
        # them, the scale and the last sum, relative to the terms.
        terms = np.abs(weight.astype(np.float64)) + adapter.scale_for(path) * (abs(b) @ abs(a))
        smallest = {F32: 0.0, BF16: 0.0, F16: 2.0**-25}[dtype]
        assert (error <= dtype.eps / 2 * np.abs(exact) + 4 * F32.eps * terms + smallest).all()
        largest = max(largest, float(error.max() / np.abs(exact).max()))
        unsure = max(unsure, float(4 * F32.eps * terms.max() / np.abs(exact).max()))
    # It is told by what was added in float32.
    assert abs(result.largest_rounding - largest) <= unsure


@pytest.mark.parametrize("adapter", [PLAIN, PATTERNED], ids=["plain", "patterned"])
@pytest.mark.parametrize("kind", ["llama", "untied", "qwen3"])
def test_the_merged_model_says_what_the_adapter_says(tmp_path, adapter, kind):
    """In float64, on weights kept as float32."""
    model = make(tmp_path / "model", F32, kind)
    modules = make_modules(model, adapter)
    fold(model, adapter, tmp_path / "out")
    tokens = np.arange(20, dtype=np.int32) * 37 % 1013
    want = Generator(model, (adapter, modules), REFERENCE, F32, 20, picks=20).read_whole(tokens)
    merged = Model.open(str(tmp_path / "out"))
    got = Generator(merged, None, REFERENCE, F32, 20, picks=20).read_whole(tokens)
    base = Generator(model, None, REFERENCE, F32, 20, picks=20).read_whole(tokens)
    # Each merged weight is off by an ulp of float32; two layers pass that on some dozen times.
    assert np.abs(got - want).max() < 50 * F32.eps * np.abs(want).max()
    assert np.abs(base - want).max() > 0.1 * np.abs(want).max()


def test_the_error_that_is_reported(tmp_path):
    """It is that of rounding: none to speak of in float32, that of bf16 in bf16."""
    errors = {}
    for dtype in (F32, BF16):
        model = make(tmp_path / f"model{dtype}", dtype)
        errors[dtype] = fold(model, PLAIN, tmp_path / f"out{dtype}").logits_error
    assert 0 < errors[F32] < 100 * F32.eps
    assert 0.1 * BF16.eps < errors[BF16] < 20 * BF16.eps


@pytest.mark.parametrize("adapter", [PLAIN, PATTERNED], ids=["tied", "untied"])
def test_files_are_cut_as_they_were(tmp_path, adapter):
    model = make(tmp_path / "model", BF16)
    shard(model.folder)
    (model.folder / "LICENSE").write_text("free")
    model = Model.open(str(model.folder))
    fold(model, adapter, tmp_path / "out")
    untied = adapter is PATTERNED
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {path.name for path in model.folder.iterdir()}
    for path in model.folder.glob("*.safetensors"):
        before, about = read_header(path)
        after, still = read_header(tmp_path / "out" / path.name)
        assert still == about
        added = after.keys() - before.keys()
        assert before.keys() <= after.keys()
        assert added == (
            {"lm_head.weight"} if untied and "model.embed_tokens.weight" in before else set()
        )
    index, old = (
        json.loads((folder / "model.safetensors.index.json").read_text())
        for folder in (tmp_path / "out", model.folder)
    )
    head = model.checkpoint.tensors["model.embed_tokens.weight"].nbytes if untied else 0
    assert index["metadata"]["total_size"] == old["metadata"]["total_size"] + head
    assert ("lm_head.weight" in index["weight_map"]) == untied
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["tie_word_embeddings"] is not untied
    for name in ("tokenizer.json", "LICENSE"):
        assert (tmp_path / "out" / name).read_bytes() == (model.folder / name).read_bytes()


def test_embeddings_stay_when_a_tied_head_is_adapted(tmp_path):
    model = make(tmp_path / "model", F32)
    fold(model, PATTERNED, tmp_path / "out")
    merged = Model.open(str(tmp_path / "out"))
    embedding = "model.embed_tokens.weight"
    assert bits(merged.checkpoint.read(embedding)) == bits(model.checkpoint.read(embedding))
    assert bits(merged.checkpoint.read("lm_head.weight")) != bits(model.checkpoint.read(embedding))


def test_a_copy_of_the_head_beside_tied_embeddings(tmp_path):
    """Some checkpoints hold both, in different files: the merged one has one head."""
    model = make(tmp_path / "model", F32)
    tensors = {
        k: np.array(v) for k, v in read_tensors(model.folder / "model.safetensors")[0].items()
    }
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write_safetensors(model.folder / "model.safetensors", tensors, {"format": "pt"})
    shard(model.folder)
    model = Model.open(str(model.folder))
    fold(model, PATTERNED, tmp_path / "out")
    merged = Model.open(str(tmp_path / "out"))
    head, embedding = (
        merged.checkpoint.read(n) for n in ("lm_head.weight", "model.embed_tokens.weight")
    )
    assert bits(head) != bits(embedding)


def test_a_weight_that_does_not_fit_its_type(tmp_path):
    model = make(tmp_path / "model", F16)
    huge = AdapterConfig(rank=3, alpha=1e7, targets=("q_proj",))
    with pytest.raises(FormatError, match=r"q_proj\.weight does not fit float16 once merged"):
        fold(model, huge, tmp_path / "out")


def test_the_folder_has_to_be_new(tmp_path):
    model = make(tmp_path / "model", F32)
    for out in (model.folder, model.folder / "config.json"):
        with pytest.raises(ConfigError, match="is not an empty folder"):
            fold(model, PLAIN, out)
    (tmp_path / "empty").mkdir()
    fold(model, PLAIN, tmp_path / "empty")
    with pytest.raises(FormatError, match="cannot be written"):
        fold(model, PLAIN, model.folder / "config.json" / "below")


def test_a_link_stays_and_what_it_leads_to_is_the_new_folder(tmp_path):
    model = make(tmp_path / "model", F32)
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new"):
        link = tmp_path / f"to {name}"
        link.symlink_to(tmp_path / name)
        fold(model, PLAIN, link)
        assert link.is_symlink() and (tmp_path / name / "config.json").is_file()


@pytest.mark.parametrize("here", [".", ""])
def test_the_folder_that_one_is_in_is_not_replaced(tmp_path, monkeypatch, here):
    model = make(tmp_path / "model", F32)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ConfigError, match="has to stay where it is"):
        fold(model, PLAIN, Path(here))


def test_nothing_is_written_without_a_tokenizer(tmp_path):
    """The probe text needs one, and that is found out first."""
    model = make(tmp_path / "model", F32)
    (model.folder / "tokenizer.json").unlink()
    with pytest.raises(FormatError, match=r"tokenizer\.json"):
        fold(Model.open(str(model.folder)), PLAIN, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path):
    """On the storyteller, with an adapter on some of its layers."""
    model = Model.open(str(BASE))
    paths = PLAIN.select(linear_paths(model.config))
    rng = np.random.default_rng(3)
    shapes = linear_paths(model.config)
    modules = {
        path: tuple(
            rng.normal(0, 0.02, s).astype(np.float32)
            for s in ((3, shapes[path][1]), (shapes[path][0], 3))
        )
        for path in paths
    }
    write_adapter(tmp_path / "adapter", PLAIN, modules)  # type: ignore[arg-type]
    ended = krnl_process("merge", BASE, tmp_path / "adapter", tmp_path / "out")
    assert ended.returncode == 0, ended.stderr
    found = re.match(r"28 layers merged into (\S+)\. .*at most (\S+) of the largest", ended.stdout)
    assert found is not None, ended.stdout
    assert found[1] == str(tmp_path / "out")
    assert 0 < float(found[2]) < 20 * BF16.eps
    said = krnl_process("generate", tmp_path / "out", "Tell me a story.", "--max-tokens", 5)
    assert said.returncode == 0 and said.stdout.strip()
