"""Adapters: PEFT's rules for names, its folder layout, and the sentence for what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from krnl.errors import ConfigError, FormatError
from krnl.formats.hub import resolve
from krnl.formats.peft import AdapterConfig, check_fits, read_adapter, write_adapter
from krnl.formats.safetensors import read_tensors, write_safetensors
from krnl.models import config as models

EXPECTED = Path(__file__).parent / "expected"
SHAPES = {"self_attn.q_proj": (16, 8), "self_attn.v_proj": (4, 8), "mlp.down_proj": (8, 12)}
LINEARS = {
    **{f"model.layers.{i}.{name}": shape for i in range(12) for name, shape in SHAPES.items()},
    "lm_head": (10, 8),
}
Q0, Q1, Q11 = (f"model.layers.{i}.self_attn.q_proj" for i in (0, 1, 11))
DOWN1 = "model.layers.1.mlp.down_proj"


def modules_for(config: AdapterConfig, paths: tuple[str, ...]) -> dict:
    random = np.random.default_rng(0)
    result = {}
    for path in paths:
        rank, (rows, columns) = config.rank_for(path), LINEARS[path]
        a, b = random.normal(size=(rank, columns)), random.normal(size=(rows, rank))
        result[path] = a.astype(np.float32), b.astype(np.float32)
    return result


def adapter(folder: Path, change: dict[str, Any] | None = None, **options: Any) -> Path:
    """A good adapter folder, with `change` applied to its adapter_config.json."""
    config = AdapterConfig(**({"rank": 2, "alpha": 4, "targets": ("q_proj",)} | options))
    write_adapter(folder, config, modules_for(config, config.select(LINEARS)))
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (change or {})))
    return folder


# Which modules are adapted.


@pytest.mark.parametrize(
    ("targets", "count", "sample"),
    [
        ("all-linear", 36, DOWN1),
        ("All-Linear", 36, DOWN1),
        (("q_proj",), 12, Q0),
        (("q_proj", "mlp.down_proj"), 24, DOWN1),
        ((Q1,), 1, Q1),
        (("1.self_attn.q_proj",), 1, Q1),
        (("lm_head", Q0), 2, "lm_head"),
        (r".*\.layers\.1\..*", 3, DOWN1),
        (r"model\.layers\.\d\.self_attn\..*", 20, Q0),
    ],
)
def test_targets_follow_peft(targets, count, sample):
    selected = AdapterConfig(2, 4, targets).select(LINEARS)
    assert len(selected) == count
    assert sample in selected
    assert list(selected) == [path for path in LINEARS if path in selected]


@pytest.mark.parametrize(
    ("targets", "name"),
    [
        (("q_proj", "k_poj"), "k_poj"),
        (("proj",), "proj"),
        ("q_proj", "q_proj"),
        (("all-linear",), "all-linear"),
    ],
)
def test_a_target_that_matches_nothing_is_named(targets, name):
    with pytest.raises(
        ConfigError, match=f"'{name}' matches no .*q_proj, v_proj, down_proj, lm_head"
    ):
        AdapterConfig(2, 4, targets).select(LINEARS)


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("q_proj", Q0, True),
        ("proj", Q0, False),
        ("self_attn.q_proj", Q0, True),
        (Q1, Q1, True),
        (Q1, Q11, False),
        (f"^{Q1}", Q1, True),
        ("^self_attn.q_proj", Q0, False),
        ("layers.1.self_attn.q_proj", Q1, True),
        ("layers.1.self_attn.q_proj", Q11, False),
        (r"layers\.[01]\..*", Q0, True),
        (r"layers\.[01]\..*", Q11, False),
        ("q_proj|down_proj", DOWN1, True),
        ("lm_head", "lm_head", True),
    ],
)
def test_patterns_follow_peft(pattern, path, matches):
    config = AdapterConfig(2, 4, rank_pattern={pattern: 5}, alpha_pattern={pattern: 7})
    assert config.rank_for(path) == (5 if matches else 2)
    assert config.alpha_for(path) == (7 if matches else 4)


def test_the_first_pattern_that_matches_decides():
    config = AdapterConfig(2, 4, rank_pattern={r"layers\.1\..*": 3, "q_proj": 5})
    assert (config.rank_for(Q0), config.rank_for(Q1), config.rank_for(DOWN1)) == (5, 3, 3)
    swapped = AdapterConfig(2, 4, rank_pattern={"q_proj": 5, r"layers\.1\..*": 3})
    assert swapped.rank_for(Q1) == 5


def test_scale_uses_the_modules_own_rank_and_alpha():
    patterns = {"rank_pattern": {"q_proj": 9}, "alpha_pattern": {"down_proj": 6}}
    plain = AdapterConfig(4, 8, **patterns)
    assert (plain.scale_for(Q0), plain.scale_for(DOWN1)) == (8 / 9, 6 / 4)
    stabilised = AdapterConfig(4, 8, rslora=True, **patterns)
    assert (stabilised.scale_for(Q0), stabilised.scale_for(DOWN1)) == (8 / math.sqrt(9), 6 / 2)
    assert not plain.uniform([Q0, Q1])
    assert plain.uniform(["lm_head"])


@pytest.mark.parametrize(
    ("targets", "taken"),
    [(r"q_proj\d", "a regular expression for"), ((r"q_proj\d",), "name or the end of its path")],
)
def test_what_a_target_that_matches_nothing_was_taken_for_is_said(targets, taken):
    with pytest.raises(ConfigError) as error:
        AdapterConfig(2, 4, targets).select(LINEARS)
    assert r"'q_proj\d' matches no" in str(error.value)  # as it was given
    assert taken in str(error.value)


def test_a_pattern_that_matches_no_adapted_layer_is_named():
    with pytest.raises(ConfigError, match="'down_proj' matches none of the adapted layers"):
        AdapterConfig(2, 4, ("q_proj",), rank_pattern={"down_proj": 3}).select(LINEARS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"rank": 2.5}, "rank is 2.5"),
        ({"rank": True}, "rank is True"),
        ({"rank_pattern": {"q_proj": 0}}, "q_proj is 0"),
        ({"alpha": 0}, "alpha is 0"),
        ({"rank_pattern": {"q_proj": 10**400}}, "q_proj is 10000"),
        ({"alpha": math.nan}, "alpha is nan"),
        ({"alpha": math.inf}, "a finite number above 0; alpha is inf"),
        ({"alpha": 10**400}, "alpha is 10000"),
        ({"alpha_pattern": {"q_proj": "x"}}, "q_proj is 'x'"),
        ({"dropout": 1.0}, "not 1.0"),
        ({"dropout": -0.1}, "not -0.1"),
        ({"targets": ()}, "targets are empty"),
        ({"targets": "(q_proj"}, r"'\(q_proj' is no regular expression"),
        ({"rank_pattern": {"[": 3}}, r"'\[' is no regular expression"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        AdapterConfig(**({"rank": 2, "alpha": 4} | options))


# The folder.


def test_what_is_written_is_read(tmp_path):
    config = AdapterConfig(
        rank=3,
        alpha=6.5,
        targets=("q_proj", "down_proj"),
        rslora=True,
        dropout=0.1,
        rank_pattern={r"layers\.1\..*": 5},
        alpha_pattern={"down_proj": 2},
        base_model="someone/model",
    )
    modules = modules_for(config, config.select(LINEARS))
    write_adapter(tmp_path, config, modules)
    found, found_modules = read_adapter(tmp_path)
    assert found == config
    assert found_modules.keys() == modules.keys()
    for path, pair in modules.items():
        for array, expected in zip(found_modules[path], pair, strict=True):
            assert array.dtype == np.float32
            np.testing.assert_array_equal(array, expected)


def test_the_layout_is_pefts(tmp_path):
    adapter(tmp_path, targets="all-linear")
    tensors, metadata = read_tensors(tmp_path / "adapter_model.safetensors")
    assert metadata == {"format": "pt"}
    assert tensors[f"base_model.model.{Q0}.lora_A.weight"].shape == (2, 8)
    assert tensors[f"base_model.model.{Q0}.lora_B.weight"].shape == (16, 2)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["peft_type"] == "LORA"
    assert written["target_modules"] == ["down_proj", "q_proj", "v_proj"]
    adapter(tmp_path, targets=r".*\.layers\.1\.self_attn\..*")
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["target_modules"] == [Q1, "model.layers.1.self_attn.v_proj"]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_adapters_are_read_as_float32(tmp_path, dtype):
    adapter(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = {name: array.astype(dtype) for name, array in read_tensors(path)[0].items()}
    write_safetensors(path, tensors)
    a, b = read_adapter(tmp_path)[1][Q0]
    assert a.dtype == b.dtype == np.float32
    np.testing.assert_array_equal(a, tensors[f"base_model.model.{Q0}.lora_A.weight"])


def test_fields_that_peft_writes_switched_off_are_accepted(tmp_path):
    off = {
        "auto_mapping": None,
        "corda_config": None,
        "exclude_modules": None,
        "lora_bias": False,
        "loftq_config": {},
        "megatron_core": "megatron.core",
        "peft_version": "0.21.2",
        "qalora_group_size": 16,
        "target_parameters": None,
        "use_qalora": False,
    }
    assert read_adapter(adapter(tmp_path, off))[0].targets == ("q_proj",)


@pytest.mark.parametrize(
    "narrowing",
    [
        {"layers_to_transform": [0, 1]},
        {"layers_to_transform": 3, "layers_pattern": "layers"},
        {"exclude_modules": "x"},
    ],
)
def test_narrowed_targets_become_the_paths_that_have_tensors(tmp_path, narrowing):
    config, modules = read_adapter(adapter(tmp_path, narrowing))
    assert config.targets == tuple(modules)
    assert set(config.select(LINEARS)) == set(modules)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is"),
        ({"something_new": 1}, "something_new is 1"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"r": "8"}, "rank is '8'"),
        ({"r": None}, "rank is None"),
        ({"lora_alpha": None}, "alpha is None"),
        ({"target_modules": None}, "target_modules is None"),
        ({"target_modules": []}, "targets are empty"),
        ({"target_modules": [1]}, r"target_modules is \[1\]"),
        ({"rank_pattern": [1]}, r"rank_pattern is \[1\]"),
        ({"r": 3}, f"{Q0} has rank 2, but adapter_config.json gives it 3"),
        ({"rank_pattern": {"q_proj": 4}}, "has rank 2, but adapter_config.json gives it 4"),
    ],
)
def test_other_adapters_are_refused_by_field(tmp_path, change, message):
    with pytest.raises(FormatError, match=message) as raised:
        read_adapter(adapter(tmp_path, change))
    assert str(tmp_path) in str(raised.value)


def test_damaged_folders(tmp_path):
    with pytest.raises(
        FormatError, match=r"is not an adapter folder: it has no adapter_config\.json"
    ):
        read_adapter(tmp_path)
    adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(FormatError, match=r"has no adapter_model.safetensors\.$"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(FormatError, match=r"has adapter_model\.bin; save it again"):
        read_adapter(tmp_path)


PREFIX = f"base_model.model.{Q0}"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "holds no tensors"),
        ({f"{PREFIX}.lora_A.weight": (2, 8)}, f"lacks tensor {PREFIX}.lora_B.weight"),
        ({f"{PREFIX}.lora_B.weight": (16, 2)}, f"lacks tensor {PREFIX}.lora_A.weight"),
        (
            {f"{PREFIX}.lora_A.weight": (2, 8), f"{PREFIX}.lora_B.weight": (16, 3)},
            "ranks of .*q_proj differ",
        ),
        ({f"{PREFIX}.lora_A.weight": (2,)}, r"lora_A.weight is float32\[2\], not a float matrix"),
        ({f"{PREFIX}.lora_magnitude_vector": (16,)}, "holds tensor .*lora_magnitude_vector"),
        ({f"{PREFIX}.lora_A.default.weight": (2, 8)}, r"holds tensor .*lora_A\.default"),
        (
            {"base_model.model.model.embed_tokens.lora_embedding_A": (2, 8)},
            "holds tensor .*embedding_A",
        ),
        ({"base_model.model.lm_head.weight": (2, 8)}, r"holds tensor .*lm_head\.weight"),
    ],
)
def test_damaged_tensors_are_named(tmp_path, tensors, message):
    adapter(tmp_path)
    arrays = {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}
    write_safetensors(tmp_path / "adapter_model.safetensors", arrays)
    with pytest.raises(FormatError, match=message):
        read_adapter(tmp_path)


def test_an_adapter_with_the_wrong_rank_is_not_written(tmp_path):
    modules = modules_for(AdapterConfig(2, 4), (Q0,))
    with pytest.raises(FormatError, match=r"q_proj: A \[2, 8\] and B \[16, 2\] do not have rank 3"):
        write_adapter(tmp_path, AdapterConfig(3, 4), modules)


def test_an_adapter_for_another_model(tmp_path):
    modules = modules_for(AdapterConfig(2, 4), (Q0,))
    check_fits(modules, LINEARS, "here")
    with pytest.raises(FormatError, match=f"here adapts {Q0}, which this model does not have"):
        check_fits(modules, {DOWN1: (8, 12)}, "here")
    with pytest.raises(FormatError, match=r"lora_A.weight is \[2, 8\], but the layer is \[16, 7\]"):
        check_fits(modules, {Q0: (16, 7)}, "here")
    with pytest.raises(
        FormatError, match=r"lora_B.weight is \[16, 2\], but the layer is \[15, 8\]"
    ):
        check_fits(modules, {Q0: (15, 8)}, "here")


def test_an_adapter_that_peft_saved(tmp_path):
    folder = EXPECTED / "lora-llama"
    config, modules = read_adapter(folder / "adapter")
    linears = models.linear_paths(models.load(folder))
    check_fits(modules, linears, "adapter")
    assert set(config.select(linears)) == set(modules)
    assert config.rslora and config.rank_pattern and config.alpha_pattern
    write_adapter(tmp_path, config, modules)
    again, same = read_adapter(tmp_path)
    assert again == config
    for path, pair in modules.items():
        np.testing.assert_array_equal(same[path][0], pair[0])
        np.testing.assert_array_equal(same[path][1], pair[1])


# Finding the folder.


def test_a_folder_is_taken_as_it_is(tmp_path):
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["no-such-model", "./models/x", "/nowhere/x", "a/b/c", "../x"])
def test_what_is_neither_folder_nor_hub_id(name):
    with pytest.raises(ConfigError, match="is neither a folder that exists nor a hub id"):
        resolve(name)


def test_a_file_is_not_a_model_folder(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"x.gguf is a file\. Give the folder"):
        resolve(str(tmp_path / "x.gguf"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("GatedRepoError", "owner/name is gated"),
        ("RepositoryNotFoundError", "nor a model on the hub"),
        ("LocalEntryNotFoundError", "the hub cannot be reached"),
        ("OfflineModeIsEnabled", "could not be downloaded"),
    ],
)
def test_download_errors_are_sentences(monkeypatch, error, message):
    errors = pytest.importorskip("huggingface_hub.errors")
    kind = getattr(errors, error)

    def fail(*args: object, **options: object) -> None:
        # The hub's errors want the response they came from; the sentence does not depend on it.
        raise kind.__new__(kind, "refused")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ConfigError, match=message):
        resolve("owner/name")


def test_a_hub_id_downloads_only_what_is_read(monkeypatch, tmp_path):
    pytest.importorskip("huggingface_hub")
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve("owner/name") == tmp_path
    assert asked["name"] == "owner/name"
    assert {"config.json", "model*.safetensors"} <= set(asked["allow_patterns"])
    assert not any("bin" in pattern for pattern in asked["allow_patterns"])
    assert resolve("owner/name", weights=False) == tmp_path
    assert "config.json" in asked["allow_patterns"]
    assert not any("safetensors" in pattern for pattern in asked["allow_patterns"])
