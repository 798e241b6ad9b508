"""Checkpoints: what is read, what is written, and the sentence for every kind of damage."""

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from krnl.dtypes import BF16, F16, F32
from krnl.errors import FormatError
from krnl.formats.files import read_json, write_json_atomic
from krnl.formats.safetensors import (
    ALIGNMENT,
    Checkpoint,
    read_header,
    read_tensors,
    write_safetensors,
    write_safetensors_lazily,
)

MAPS = Path("/proc/self/maps")
TYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I32": np.int32}


def values(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def write_raw(path: Path, header: object, data: bytes = b"", text: bytes | None = None) -> Path:
    """A file with exactly this header, however wrong."""
    text = json.dumps(header).encode() if text is None else text
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, dtype: str = "F32", shape: list[int] | None = None) -> dict:
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_sharded(
    folder: Path, shards: dict[str, dict[str, np.ndarray]], index: bool = True
) -> Path:
    for file, tensors in shards.items():
        write_safetensors(folder / file, tensors)
    if index:
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
        write_json_atomic(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    return folder


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(list(TYPES)), st.lists(st.integers(0, 5), max_size=3)),
        max_size=6,
    ),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
)
def test_what_is_written_is_read(tmp_path_factory, layout, metadata):
    path = tmp_path_factory.mktemp("st") / "x.safetensors"
    tensors = {
        name: (100 * values(tuple(shape), seed=i)).astype(TYPES[dtype])
        for i, (name, (dtype, shape)) in enumerate(layout.items())
    }
    write_safetensors(path, tensors, metadata)
    found, found_metadata = read_tensors(path)
    assert found_metadata == metadata
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()
        assert not found[name].flags.writeable
    for tensor in read_header(path)[0].values():
        assert tensor.offset % tensor.dtype.size == 0


def test_the_safetensors_library_reads_ours_and_we_read_its(tmp_path):
    tensors = {"a": values((3, 4)), "b": values((5,), np.float16), "scalar": values(())}
    write_safetensors(tmp_path / "ours", tensors, {"format": "pt"})
    for name, array in safetensors.numpy.load_file(tmp_path / "ours").items():
        np.testing.assert_array_equal(array, tensors[name])
    safetensors.numpy.save_file(tensors, tmp_path / "theirs", {"format": "np"})
    found, metadata = read_tensors(tmp_path / "theirs")
    assert metadata == {"format": "np"}
    for name, array in tensors.items():
        np.testing.assert_array_equal(found[name], array)


def test_offsets_point_at_the_bytes_and_data_is_aligned(tmp_path):
    tensors = {
        "half": values((3,), np.float16),
        "wide": values((2, 2)),
        "brain": values((5,), BF16.numpy),
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)
    content = (tmp_path / "model.safetensors").read_bytes()
    checkpoint = Checkpoint.open(tmp_path)
    assert {name: t.dtype for name, t in checkpoint.tensors.items()} == {
        "half": F16,
        "wide": F32,
        "brain": BF16,
    }
    assert min(tensor.offset for tensor in checkpoint.tensors.values()) % ALIGNMENT == 0
    for name, tensor in checkpoint.tensors.items():
        assert content[tensor.offset : tensor.offset + tensor.nbytes] == tensors[name].tobytes()
        np.testing.assert_array_equal(checkpoint.read(name), tensors[name])


def test_lazy_writing_asks_for_one_tensor_at_a_time_and_checks_it(tmp_path):
    layout = {"a": (F32, (2,)), "b": (F16, (3,))}
    asked = []

    def produce(name: str) -> np.ndarray:
        asked.append(name)
        return values(layout[name][1], layout[name][0].numpy)

    write_safetensors_lazily(tmp_path / "x", layout, produce)
    assert asked == ["a", "b"]
    with pytest.raises(FormatError, match=r"tensor a was announced as f32\[2\] .* float64\[2\]"):
        write_safetensors_lazily(tmp_path / "x", layout, lambda name: np.zeros(2))
    assert read_tensors(tmp_path / "x")[0].keys() == {"a", "b"}, "a failed write keeps the old file"
    assert os.listdir(tmp_path) == ["x"], "and leaves nothing behind"


def test_a_type_that_cannot_be_stored_is_named(tmp_path):
    with pytest.raises(FormatError, match="Tensor a is float64"):
        write_safetensors(tmp_path / "x", {"a": np.zeros(2)})


def test_an_unwritable_place_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FormatError, match="cannot be written"):
        write_safetensors(tmp_path / "file" / "x", {"a": values((2,))})


# Which files are read.


def test_shards_with_an_index(tmp_path):
    shards = {ONE: {"a": values((2,)), "b": values((3,))}, TWO: {"c": values((4,), np.float16)}}
    write_sharded(tmp_path, shards)
    write_safetensors(tmp_path / "consolidated.safetensors", {"a": values((9,))})
    checkpoint = Checkpoint.open(tmp_path)
    assert {name: tensor.path.name for name, tensor in checkpoint.tensors.items()} == {
        "a": ONE,
        "b": ONE,
        "c": TWO,
    }
    np.testing.assert_array_equal(checkpoint.read("c"), shards[TWO]["c"])


def test_shards_without_an_index_must_be_complete(tmp_path):
    write_sharded(tmp_path, {ONE: {"a": values((2,))}, TWO: {"b": values((2,))}}, index=False)
    assert Checkpoint.open(tmp_path).tensors.keys() == {"a", "b"}
    (tmp_path / ONE).unlink()
    with pytest.raises(FormatError, match=f"{ONE} is missing"):
        Checkpoint.open(tmp_path)


def test_a_shard_that_the_index_names_is_missing(tmp_path):
    write_sharded(tmp_path, {ONE: {"a": values((2,))}, TWO: {"b": values((2,))}})
    (tmp_path / TWO).unlink()
    with pytest.raises(FormatError, match=rf"{TWO} is missing; model.safetensors.index.json names"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": ONE, "b": TWO, "c": TWO}, f"{TWO} lacks tensor c, which .*index.json places there"),
        ({"a": ONE, "b": "../" + TWO}, "which is not a plain file name"),
        ({"a": 1}, "has no weight_map"),
        ({}, "has no weight_map"),
        (None, "has no weight_map"),
    ],
)
def test_an_index_that_does_not_fit(tmp_path, weight_map, message):
    write_sharded(tmp_path, {ONE: {"a": values((2,))}, TWO: {"b": values((2,))}})
    write_json_atomic(tmp_path / "model.safetensors.index.json", {"weight_map": weight_map})
    with pytest.raises(FormatError, match=message):
        Checkpoint.open(tmp_path)


def test_a_tensor_in_another_shard_than_the_index_says(tmp_path):
    write_sharded(tmp_path, {ONE: {"a": values((2,)), "b": values((2,))}, TWO: {"c": values((2,))}})
    write_safetensors(tmp_path / ONE, {"a": values((2,))})
    write_safetensors(tmp_path / TWO, {"b": values((2,)), "c": values((2,))})
    with pytest.raises(FormatError, match=f"Tensor b is in .*{TWO}, but .* places it in {ONE}"):
        Checkpoint.open(tmp_path)


def test_files_that_the_index_does_not_name_are_not_read(tmp_path):
    write_sharded(tmp_path, {ONE: {"a": values((2,))}})
    (tmp_path / TWO).write_bytes(b"not a safetensors file")
    assert Checkpoint.open(tmp_path).tensors.keys() == {"a"}


def test_a_tensor_in_two_shards_and_one_that_the_index_does_not_name(tmp_path):
    write_sharded(tmp_path, {ONE: {"a": values((2,)), "b": values((2,))}, TWO: {"c": values((2,))}})
    write_safetensors(tmp_path / TWO, {"b": values((2,)), "c": values((2,))})
    with pytest.raises(FormatError, match=f"Tensor b is in both .*{ONE} and .*{TWO}"):
        Checkpoint.open(tmp_path)
    write_safetensors(tmp_path / TWO, {"c": values((2,)), "d": values((2,))})
    with pytest.raises(
        FormatError, match=f"{TWO} holds tensor d, which .*index.json does not name"
    ):
        Checkpoint.open(tmp_path)


def test_two_answers_to_which_weights_are_refused(tmp_path):
    write_sharded(tmp_path, {ONE: {"a": values((2,))}, TWO: {"b": values((2,))}})
    write_safetensors(tmp_path / "model.safetensors", {"a": values((2,))})
    with pytest.raises(FormatError, match=r"holds both model\.safetensors and an index"):
        Checkpoint.open(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(FormatError, match=f"holds both model.safetensors and {ONE}"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pytorch_model.bin", r"pickled weights \(pytorch_model.bin\) and no safetensors"),
        ("consolidated.00.pth", r"pickled weights \(consolidated.00.pth\)"),
        ("model-Q4_K_M.gguf", r"GGUF weights \(model-Q4_K_M.gguf\)"),
        ("adapter_model.safetensors", "holds an adapter, not a model"),
        ("readme.txt", "holds no weights"),
    ],
)
def test_a_folder_without_safetensors_weights(tmp_path, file, message):
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(FormatError, match=message):
        Checkpoint.open(tmp_path)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FormatError, match="is not a folder"):
        Checkpoint.open(tmp_path / "nowhere")


# Damaged files.


@pytest.mark.parametrize("length", [0, 7, 8, 20, -1, -12])
def test_a_truncated_file(tmp_path, length):
    write_safetensors(tmp_path / "model.safetensors", {"a": values((4,)), "b": values((3, 3))})
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:length])
    with pytest.raises(FormatError, match=r"model\.safetensors is truncated"):
        Checkpoint.open(tmp_path)


def test_bytes_after_the_end(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {"a": values((4,))})
    with open(tmp_path / "model.safetensors", "ab") as file:
        file.write(b"abc")
    with pytest.raises(FormatError, match="has 3 bytes after its last tensor"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "must be a JSON object"),
        ({"a": 3}, "the entry of tensor a"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "the entry of tensor a"),
        ({"a": entry(0, 8) | {"extra": 1}}, "the entry of tensor a"),
        ({"a": entry(0, 8, shape=[-2])}, "the entry of tensor a"),
        ({"a": entry(0, 8, shape=[2.0])}, "the entry of tensor a"),
        ({"a": entry(0, 8) | {"data_offsets": [0, 4, 8]}}, "the entry of tensor a"),
        ({"a": entry(0, 8, shape=[3])}, r"a is f32\[3\], 12 bytes, but its data_offsets span 8"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, "tensor b overlaps the tensor before it"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, "tensor b leaves a hole before it"),
        ({"a": entry(4, 12)}, "tensor a leaves a hole before it"),
        ({"a": entry(0, 12), "__metadata__": {"format": 1}}, "__metadata__ must map text to text"),
        ({"a": entry(0, 12, "F8_E4M3", [12])}, "tensor a is stored as F8_E4M3.* quantised"),
        ({"a": entry(0, 12, "I8", [12])}, "tensor a is stored as I8.* quantised"),
        ({"a": entry(0, 12, "I32")}, "tensor a is stored as I32.* quantised"),
        ({"a": entry(0, 8, "F64", [1])}, "tensor a is stored as F64"),
    ],
)
def test_a_damaged_header(tmp_path, header, message):
    write_raw(tmp_path / "model.safetensors", header, bytes(12))
    with pytest.raises(FormatError, match=message) as raised:
        Checkpoint.open(tmp_path)
    assert "model.safetensors" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{not json", "damaged header"),
        (b"\xff\xfe{}", "damaged header"),
        (
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
            b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
            "the key 'a' appears twice",
        ),
    ],
)
def test_a_header_that_is_no_json_or_repeats_a_name(tmp_path, text, message):
    write_raw(tmp_path / "model.safetensors", None, bytes(4), text)
    with pytest.raises(FormatError, match=message):
        Checkpoint.open(tmp_path)


def test_an_index_that_repeats_a_name(tmp_path):
    (tmp_path / "x.json").write_text('{"weight_map": {"a": "1", "a": "2"}}')
    with pytest.raises(FormatError, match=r"x.json is not valid JSON: the key 'a' appears twice"):
        read_json(tmp_path / "x.json")


# Against what the model needs.


def open_with(folder: Path, tensors: dict[str, np.ndarray]) -> Checkpoint:
    write_safetensors(folder / "model.safetensors", tensors)
    return Checkpoint.open(folder)


EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_tensors_that_are_missing_extra_or_misshapen_are_named(tmp_path):
    checkpoint = open_with(tmp_path, {EMBED: values((5, 4)), "x": values((2,))})
    checkpoint.check({EMBED: (5, 4), "x": (2,)}, tied=False)
    with pytest.raises(FormatError, match=r"lacks tensor y \(and 1 more\), which config.json"):
        checkpoint.check({EMBED: (5, 4), "x": (2,), "y": (1,), "z": (1,)}, tied=False)
    with pytest.raises(FormatError, match=r"model.safetensors holds tensor x, which the model of"):
        checkpoint.check({EMBED: (5, 4)}, tied=False)
    with pytest.raises(FormatError, match=r"tensor x is \[2\], but config.json calls for \[3\]"):
        checkpoint.check({EMBED: (5, 4), "x": (3,)}, tied=False)
    with pytest.raises(FormatError, match="lacks tensor nothing"):
        checkpoint.read("nothing")


@pytest.mark.skipif(not MAPS.exists(), reason="what is mapped is read from /proc")
def test_a_file_is_mapped_only_while_values_are_in_use(tmp_path):
    checkpoint = open_with(tmp_path, {"a": values((6,))})
    kept = checkpoint.read("a")
    assert str(tmp_path) in MAPS.read_text()
    np.testing.assert_array_equal(kept, values((6,)))
    del kept
    assert str(tmp_path) not in MAPS.read_text()


def test_stored_rotary_frequencies_are_harmless(tmp_path):
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    open_with(tmp_path, {EMBED: values((5, 4)), buffer: values((2,))}).check({EMBED: (5, 4)}, False)


def test_a_head_beside_tied_embeddings_must_equal_them(tmp_path):
    embedding = values((5, 4))
    expected = {EMBED: (5, 4)}
    checkpoint = open_with(tmp_path, {EMBED: embedding, HEAD: embedding})
    checkpoint.check(expected, tied=True)
    with pytest.raises(FormatError, match=r"holds tensor lm_head.weight"):
        checkpoint.check(expected, tied=False)
    for head in (embedding + np.float32(1), embedding.astype(np.float16)):
        with pytest.raises(FormatError, match=r"lm_head.weight differs .*tie_word_embeddings"):
            open_with(tmp_path, {EMBED: embedding, HEAD: head}).check(expected, tied=True)
