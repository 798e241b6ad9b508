"""The command as a process: mistakes get one sentence and code 2, interruptions cost nothing."""

import ctypes
import errno
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from krnl import __version__, cli
from krnl.formats.peft import AdapterConfig, write_adapter
from krnl.formats.safetensors import read_tensors, write_safetensors
from krnl.model import Model, initial_modules
from runs import (
    BASE,
    adapter_bytes,
    checkpoints,
    command,
    environment,
    flags,
    krnl_process,
    settings,
    timeless,
    updates,
    write_chat_model,
)

LLAMA_1B = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 128256,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 16, "head_dim": 64,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "rope_theta": 500000.0, "torch_dtype": "bfloat16", "rope_scaling": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def other_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter for a wider model."""
    folder = tmp_path_factory.mktemp("other")
    pair = np.zeros((2, 99), np.float32), np.zeros((99, 2), np.float32)
    config = AdapterConfig(rank=2, alpha=4.0, targets=("q_proj",))
    write_adapter(folder, config, {"model.layers.0.self_attn.q_proj": pair})
    return folder


class Place:
    """What a mistake is made of: a good model, good data, an adapter that fits neither."""

    def __init__(self, folder: Path, model: Path, data: Path, adapter: Path):
        self.folder, self.model, self.data, self.adapter = folder, model, data, adapter

    def train(self, *more: object, model: object = None, data: object = None) -> list[str]:
        arguments = ["train", "--model", model or self.model, "--data", data or self.data]
        return [str(a) for a in (*arguments, "--out", self.folder / "out", "--steps", 1, *more)]

    def file(self, name: str, content: str | bytes = "") -> Path:
        path = self.folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def changed_model(self, **fields: Any) -> Path:
        folder = Path(shutil.copytree(self.model, self.folder / "changed"))
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
        return folder

    def model_without(self, name: str) -> Path:
        folder = self.changed_model()
        (folder / name).unlink()
        return folder

    def fitting_adapter(self) -> str:
        config = AdapterConfig(rank=2, alpha=4.0, targets=("q_proj",))
        modules = initial_modules(config, Model.open(str(self.model)).config, seed=0)
        write_adapter(self.folder / "fitting", config, modules)
        return str(self.folder / "fitting")

    def without_a_shard(self) -> Path:
        folder = self.changed_model()
        tensors = {"model.norm.weight": np.ones(24, np.float32)}
        (folder / "model.safetensors").unlink()
        write_safetensors(folder / "model-00001-of-00002.safetensors", tensors)
        where = {
            name: f"model-0000{i}-of-00002.safetensors"
            for i, name in ((1, "model.norm.weight"), (2, "x"))
        }
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": where}))
        return folder

    def truncated(self) -> Path:
        folder = self.changed_model()
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-4])
        return folder


@pytest.fixture
def place(tmp_path, model, data, other_adapter) -> Place:
    return Place(tmp_path, model, data, other_adapter)


GOOD_ROW = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'

# What the issue names: these run as processes.
NAMED: dict[str, tuple[Callable[[Place], list[str]], str]] = {
    "a missing shard": (
        lambda p: p.train(model=p.without_a_shard()),
        r"model-00002-of-00002\.safetensors is missing; model\.safetensors\.index\.json names it",
    ),
    "a broken JSONL line": (
        lambda p: p.train(data=p.file("rows.jsonl", GOOD_ROW + "\n\n{broken\n")),
        r"rows\.jsonl, line 3: not valid JSON",
    ),
    "an unknown rope type": (
        lambda p: p.train(model=p.changed_model(rope_scaling={"rope_type": "spiral", "factor": 2})),
        r"config\.json: .*rope_type is \"spiral\"",
    ),
    "an adapter for another model": (
        lambda p: p.train("--init-adapter", p.adapter),
        r"model\.layers\.0\.self_attn\.q_proj.*99",
    ),
    "rank 0": (lambda p: p.train("--rank", 0), r"rank is 0; it must be from 1 to 65,536"),
    "a prompt longer than the limit": (
        lambda p: ["generate", str(p.model), "black bear " * 200],
        r"prompt has \d+ tokens; .* limit of this model is 255",
    ),
    "an empty file": (
        lambda p: p.train(data=p.file("rows.jsonl")), r"rows\.jsonl is empty: it has no rows"
    ),
}  # fmt: skip

OTHERS: dict[str, tuple[Callable[[Place], list[str]], str]] = {
    "no such command": (lambda p: ["trian"], r"no command 'trian'\. Did you mean 'train'\?"),
    "a model as a word": (lambda p: ["train", "folder"], r"'folder' is neither .*--model"),
    "no model": (lambda p: ["train"], r"model is missing"),
    "no data": (lambda p: ["train", "--model", str(p.model)], r"data is missing"),
    "no folder": (lambda p: p.train(model="nowhere"), r"'nowhere' is neither a folder"),
    "a file as a model": (lambda p: p.train(model=p.file("m", "")), r"/m is a file\. Give the fol"),
    "no config": (lambda p: p.train(model=p.model_without("config.json")), r"has no config\.json"),
    "no tokenizer": (
        lambda p: p.train(model=p.model_without("tokenizer.json")), r"has no tokenizer\.json"
    ),
    "no weights": (
        lambda p: p.train(model=p.model_without("model.safetensors")), r"holds no weights"
    ),
    "cut weights": (lambda p: p.train(model=p.truncated()), r"model\.safetensors is truncated"),
    "another width": (
        lambda p: p.train(model=p.changed_model(hidden_size=32)),
        r"model\.safetensors.*\bmodel\.\S+.*24.*32|model\.safetensors.*\bmodel\.\S+.*32.*24",
    ),
    "a layer too many": (
        lambda p: p.train(model=p.changed_model(num_hidden_layers=3)), r"model\.layers\.2\."
    ),
    "another family": (
        lambda p: p.train(model=p.changed_model(model_type="gpt2")),
        r"config\.json: model_type is \"gpt2\"; KRNL trains llama",
    ),
    "experts": (
        lambda p: p.train(model=p.changed_model(num_local_experts=8)), r"num_local_experts is 8"
    ),
    "quantised": (
        lambda p: p.train(model=p.changed_model(quantization_config={"bits": 4})),
        r"quantization_config .*use the original",
    ),
    "a broken config": (
        lambda p: (p.model_without("config.json") / "config.json").write_text("{") and p.train(model=p.folder / "changed"),  # type: ignore[dict-item, return-value]  # noqa: E501
        r"config\.json is not valid JSON",
    ),
    "no data file": (lambda p: p.train(data="nowhere"), r"nowhere does not exist"),
    "another kind of file": (lambda p: p.train(data=p.file("a.csv", "x")), r"a\.csv is not train"),
    "a folder without data": (lambda p: p.train(data=p.model), r"neither train\.jsonl nor train\."),
    "a role": (
        lambda p: p.train(data=p.file("r.jsonl", GOOD_ROW.replace('"user"', '"human"'))),
        r"r\.jsonl, line 1: `messages`, message 1 has the role 'human'",
    ),
    "no UTF-8": (
        lambda p: p.train(data=p.file("r.jsonl", b'{"text": "\xff"}')), r"line 1: byte 0xff"
    ),
    "no answer": (
        lambda p: p.train(data=p.file("r.jsonl", GOOD_ROW.replace("assistant", "user"))),
        r"r\.jsonl: none of its 1 rows has a token to train on",
    ),
    "a bad validation file": (
        lambda p: p.train("--valid", p.file("v.jsonl", "[]")), r"v\.jsonl, line 1"
    ),
    "a target": (lambda p: p.train("--targets", "q_prj"), r"'q_prj' matches no linear layer.*q_p"),
    "a pattern as a target": (
        lambda p: p.train("--targets", r"q_proj\d"),
        r"'q_proj\\d' matches no .* name or the end of its path, no regular expression; .* q_proj,",
    ),
    "targets": (lambda p: p.train("--targets"), r"targets are empty"),
    "a pattern": (
        lambda p: p.train("--rank-pattern", "q_proj", "0"), r"rank must be .*q_proj is 0"
    ),
    "passes too short": (lambda p: p.train("--tokens", "4"), r"--max-length 4"),
    "too much": (
        lambda p: p.train("--tokens", 16_000_000, "--recompute", "none"),
        r"GiB more than cpu may use on this .* activations: lower --tokens\b",
    ),
    "over the limit": (lambda p: p.train("--memory-limit", "0.001"), r"more than --memory-limit"),
    "no limit": (
        lambda p: p.train("--memory-limit", "inf"), r"memory_limit is inf; it must be a finite num"
    ),
    "a device": (lambda p: p.train("--device", "cuda"), r"an NVIDIA GPU .*use --device cpu"),
    "a precision": (lambda p: p.train("--precision", "fp16"), r"precision is 'fp16'.*fp32, bf16"),
    "a file as a folder": (lambda p: p.train("--out", p.file("o", "")), r"out is .*/o, which is a"),
    "below a file": (
        lambda p: p.train("--out", p.file("o", "") / "x"), r"/o/x, which cannot be used: Not a dir"
    ),
    "a name too long": (lambda p: p.train("--out", p.folder / ("x" * 300)), r"File name too long"),
    "nothing to resume": (lambda p: p.train("--resume"), r"no checkpoint .*leave out --resume"),
    "both": (lambda p: p.train("--resume", "--overwrite"), r"resume and overwrite exclude"),
    "no adapter": (lambda p: p.train("--init-adapter", "none"), r"none is not an adapter folder"),
    "no YAML": (lambda p: ["train", str(p.folder / "a.yaml")], r"a\.yaml does not exist"),
    "a YAML key": (
        lambda p: ["train", str(p.file("a.yaml", "rnak: 3\n"))],
        r"a\.yaml: there is no setting 'rnak'\. Did you mean 'rank'\?",
    ),
    "a YAML value": (
        lambda p: ["train", str(p.file("a.yaml", "rank: x\n"))], r"a\.yaml: rank is 'x'; it must be"
    ),
    "plan what": (lambda p: ["plan"], r"model is missing"),
    "plan a bad adapter": (
        lambda p: ["plan", str(p.model), "--init-adapter", str(p.adapter)], r"q_proj.*99"
    ),
    "plan no tokens": (lambda p: ["plan", str(p.model), "--tokens", "0"], r"tokens is 0"),
    "no prompt": (lambda p: ["generate", str(p.model)], r"either a prompt or --messages"),
    "prompt and messages": (
        lambda p: ["generate", str(p.model), "a", "--messages", "b"], r"either a prompt or --mess"
    ),
    "nothing to answer last": (
        lambda p: ["generate", str(p.model), "a", "--answer-last"], r"answer.last concerns"
    ),
    "an empty prompt": (lambda p: ["generate", str(p.model), "", "--raw"], r"[Pp]rompt.* is empty"),
    "messages that are none": (
        lambda p: ["generate", str(p.model), "--messages", str(p.file("a.jsonl", '{"text": "a"}'))],
        r"a\.jsonl, line 1 is not a conversation",
    ),
    "messages that are answered": (
        lambda p: ["generate", str(p.model), "--messages", str(p.file("a.jsonl", GOOD_ROW))],
        r"a\.jsonl, line 1 leaves nothing to answer.*--answer-last",
    ),
    "messages without an answer": (
        lambda p: ["generate", str(p.model), "--answer-last", "--messages", str(p.file("a.jsonl", GOOD_ROW.replace("assistant", "user")))],  # noqa: E501
        r"a\.jsonl, line 1 does not end with an assistant's turn",
    ),
    "a conversation longer than the limit": (
        lambda p: ["generate", str(p.model), "--answer-last", "--messages", str(p.file("a.jsonl", "\n" + GOOD_ROW + "\n" + GOOD_ROW.replace('"a"', json.dumps("bear " * 300))))],  # noqa: E501
        r"a\.jsonl, line 3 .*\d+ tokens.* 255",
    ),
    "raw conversations": (
        lambda p: ["generate", str(p.model), "--raw", "--messages", "b"], r"raw concerns a prompt"
    ),
    "an adapter without a name": (
        lambda p: ["generate", str(p.model), "a", "--adapter", ""], r"is not an adapter folder"
    ),
    "no tokens": (
        lambda p: ["generate", str(p.model), "a", "--max-tokens", "0"], r"max_tokens is 0"
    ),
    "cold": (
        lambda p: ["generate", str(p.model), "a", "--temperature", "-1"], r"temperature is -1"
    ),
    "no share": (lambda p: ["generate", str(p.model), "a", "--top-p", "0"], r"top_p is 0"),
    "a seed": (lambda p: ["generate", str(p.model), "a", "--seed", "-1"], r"seed is -1"),
    "a share of nothing": (
        lambda p: ["generate", str(p.model), "a", "--top-p", "0.5"], r"top_p concerns sampling"
    ),
    "a seed for nothing": (
        lambda p: ["generate", str(p.model), "a", "--seed", "7"], r"seed concerns sampling"
    ),
    "another's adapter": (
        lambda p: ["generate", str(p.model), "a", "--adapter", str(p.adapter)], r"q_proj.*99"
    ),
    "merge nothing": (
        lambda p: ["merge", str(p.model), "none", str(p.folder / "o")], r"none is not"
    ),
    "merge into something": (
        lambda p: ["merge", str(BASE), str(p.adapter), str(p.model)],
        r"model\S* is not an empty folder|q_proj.*99",
    ),
    "merge another's": (
        lambda p: ["merge", str(p.model), str(p.adapter), str(p.folder / "o")], r"q_proj.*99"
    ),
    "an adapter as a model": (
        lambda p: ["generate", str(p.adapter), "a"], r"has no config\.json|holds an adapter"
    ),
}  # fmt: skip


def one_sentence(said: str, pattern: str) -> None:
    """The last line is a sentence for people, and no other line is."""
    lines = said.splitlines()
    assert [line for line in lines if line.startswith("krnl: ")] == lines[-1:], said
    assert "Traceback" not in said
    assert re.search(pattern, lines[-1]), lines[-1]


@pytest.mark.parametrize("name", NAMED)
def test_mistakes_that_the_issue_names(place, name):
    arguments, pattern = NAMED[name]
    ended = krnl_process(*arguments(place))
    assert ended.returncode == 2, ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    one_sentence(ended.stderr, pattern)


@pytest.mark.parametrize("name", OTHERS)
def test_other_mistakes(place, capsys, monkeypatch, name):
    monkeypatch.chdir(place.folder)
    arguments, pattern = OTHERS[name]
    assert cli.run(arguments(place)) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    one_sentence(said, pattern)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--rnak", "3"], ["--rnak", "--rank"]),
        (["train", "--rank", "many"], ["--rank", "many"]),
        (["train", "--schedule", "sine"], ["--schedule", "sine", "cosine"]),
        (["plan", "m", "--tokns", "3"], ["--tokns", "--tokens"]),
        (["plan", "m", "--memory-limit", "16GB"], ["16GB", "a number such as 16"]),
        (["generate", "m", "p", "--temprature", "1"], ["--temprature", "--temperature"]),
        (["merge", "m", "a"], ["Missing", "OUT"]),
        (["merge", "m", "a", "o", "x"], ["x"]),
        (["doctor", "--all"], ["--all"]),
    ],
)
def test_mistakes_in_flags(capsys, arguments, words):
    with pytest.raises(SystemExit) as stopped:
        cli.run(arguments)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said


PATHS: dict[str, Callable[[Place, str], list[str]]] = {
    "settings": lambda p, path: ["train", f"{path}.yaml"],
    "model": lambda p, path: p.train(model=path),
    "data": lambda p, path: p.train(data=path),
    "valid": lambda p, path: p.train("--valid", path),
    "out": lambda p, path: p.train("--out", path),
    "init_adapter": lambda p, path: p.train("--init-adapter", path),
    "plan": lambda p, path: ["plan", path],
    "plan from": lambda p, path: ["plan", str(p.model), "--init-adapter", path],
    "generate": lambda p, path: ["generate", path, "a"],
    "adapter": lambda p, path: ["generate", str(p.model), "a", "--adapter", path],
    "messages": lambda p, path: ["generate", str(p.model), "--messages", f"{path}.jsonl"],
    "merge": lambda p, path: ["merge", path, str(p.adapter), "o"],
    "merge an adapter": lambda p, path: ["merge", str(p.model), path, "o"],
    "merge into": lambda p, path: ["merge", str(p.model), p.fitting_adapter(), path],
    "profile": lambda p, path: ["profile", str(p.model), "--json", path],
    "bench": lambda p, path: ["bench", "nt", "--json", path],
    "bench a model": lambda p, path: ["bench", "model", "--model", path],
}


@pytest.mark.parametrize("path", ["x" * 300, "~no-user-of-this-name/x"], ids=["long", "no home"])
@pytest.mark.parametrize("name", PATHS)
def test_paths_that_cannot_be(place, capsys, monkeypatch, name, path):
    """Of the system, or of a user who is not here: wherever a path may be given."""
    monkeypatch.chdir(place.folder)
    assert cli.run(PATHS[name](place, path)) == 2
    said = capsys.readouterr().err
    one_sentence(said, r"File name too long|of a user who is not known here")
    assert len(said.splitlines()) == 1 and path in said
    assert {file.name for file in place.folder.iterdir()} <= {"fitting"}


def obey_permissions() -> None:
    """Takes from root, on Linux, what lets it read files that nobody may read."""
    if sys.platform == "linux":
        for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
            ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


@pytest.mark.skipif(sys.platform != "linux" and os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize(
    "name",
    ["rows.jsonl", "rows.json", "changed/config.json", "changed/generation_config.json",
     "changed/chat_template.jinja", "changed/model.safetensors", "closed/rows.jsonl"],
)  # fmt: skip
def test_files_that_may_not_be_read(place, name):
    rows = place.file("rows.jsonl", GOOD_ROW)
    place.file("rows.json", f"[{GOOD_ROW}]")
    model = place.changed_model()
    (place.folder / "closed").mkdir()
    path = place.folder / name
    given = rows if path.parent == model else path
    (path if path.exists() else path.parent).chmod(0)
    ended = krnl_process(*place.train(model=model, data=given), preexec_fn=obey_permissions)
    (path.parent if path.parent.name == "closed" else path).chmod(0o700)
    assert ended.returncode == 2, ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    one_sentence(ended.stderr, rf"{re.escape(str(path))} cannot be (read|used).*Permission denied")


def test_help_and_version(capsys):
    assert cli.run([]) == 2
    assert cli.run(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in cli.COMMANDS)
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"krnl {__version__}\n"
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit) as stopped:
            cli.run([name, "--help"])
        assert stopped.value.code == 0
        said = " ".join(capsys.readouterr().out.split())
        assert f"usage: krnl {name}" in said
        first = "The first word may be "
        assert (f"{first}the MODEL, a folder or hub id, or a FILE.yaml" in said) == (
            name in ("plan", "profile")
        )
        assert (f"{first}a FILE.yaml" in said) == (name == "train")


def seconds(arguments: list[object], times: int) -> float:
    """The least time of several: the machine may be busy."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        assert krnl_process(*arguments).returncode == 0
        taken.append(time.perf_counter() - start)
    return min(taken)


def test_help_answers_at_once():
    assert seconds(["--help"], 5) < 0.5


def test_a_plan_needs_no_weights_and_little_time(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_1B))
    said = krnl_process("plan", tmp_path).stdout
    assert "no weights here" in said
    # 1,235,814,400 parameters of 2 bytes, norms left out, as Llama 3.2 1B has them.
    assert "2.30 GiB" in said
    assert "peak" in said
    assert seconds(["plan", tmp_path], 3) < 2.0
    assert len(krnl_process("plan", tmp_path, "--dispatches").stdout.splitlines()) > 500


def test_plan_and_train_agree(tmp_path, model, data):
    """On layers and parameters, of a new adapter and of one to start from."""
    given = ["--tokens", 512, "--rank", 4, "--targets", "q_proj", "o_proj"]
    start_from: list[object] = []
    for name in ("new", "further"):
        out = tmp_path / name
        plan = krnl_process("plan", model, *given, *start_from).stdout
        said = krnl_process(
            "train", "--model", model, "--data", data, "--out", out, *given, *start_from
        ).stdout
        found = [
            re.search(r"adapters on (\d+) linear layers, ([\d,]+) trained", " ".join(text.split()))
            for text in (plan, said)
        ]
        assert found[0] and found[1] and found[0].groups() == found[1].groups()
        assert found[0][1] == "4"
        unused = f"not used, as {tmp_path / 'new'} has its own: rank\n"
        assert (unused in said) == bool(start_from)
        # Of one to start from, the rank is its own.
        given, start_from = ["--tokens", 512, "--rank", 9], ["--init-adapter", out]


def test_of_settings_that_are_not_used_it_is_said(tmp_path, model, data, capsys):
    """A run of so many updates has no epochs, and one without validation data no validations."""
    words = ["--eval-every", "2", "--epochs", "3", "--steps", "1", "--tokens", "64"]
    for given, unused in (
        (
            data / "train.jsonl",
            ["steps are given: epochs", "there is no validation data: eval_every"],
        ),
        (data, ["steps are given: epochs"]),
    ):
        out = tmp_path / given.name
        arguments = ["train", "--model", model, "--data", given, "--out", out, *words]
        assert cli.run([str(word) for word in arguments]) == 0
        said = [
            line for line in capsys.readouterr().out.splitlines() if line.startswith("not used")
        ]
        assert said == [f"not used, as {reason}" for reason in unused]


def test_of_rows_beyond_the_positions_of_the_model_it_is_said(tmp_path, data, capsys):
    """They are trained on all the same: rotations go on."""
    folder = write_chat_model(tmp_path / "model")
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 28}))
    noted = (
        r"note: rows have up to \d+ tokens, and this model was made for 28; "
        r"--max-length 28 would cut them"
    )
    for longest in (None, 28):
        words = ["--model", folder, "--data", data, "--steps", 1, "--tokens", 64]
        words += ["--out", tmp_path / str(longest)] + ["--max-length", longest] * bool(longest)
        assert cli.run(["train", *map(str, words)]) == 0
        said = [x for x in capsys.readouterr().out.splitlines() if x.startswith("note: rows")]
        assert [bool(re.fullmatch(noted, line)) for line in said] == [True] * (longest is None)


def test_names_are_printed_as_they_are(tmp_path, model, data):
    """What looks like markup is none."""
    out = tmp_path / "[red]run[1]"
    ended = krnl_process("train", "--model", model, "--data", data, "--out", out, "--steps", 1)
    assert ended.returncode == 0, ended.stderr
    assert str(out) in ended.stdout
    assert (out / "adapter_config.json").is_file()


def reader_leaves(lines: int, *arguments: object) -> None:
    """A command whose output is read up to there: it ends well, without a word of that."""
    process = subprocess.Popen(
        command(*arguments), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    for _ in range(lines):
        assert process.stdout.readline()
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 0, said
    assert said == b""


@pytest.mark.parametrize("lines", [0, 1])
@pytest.mark.parametrize("arguments", [["bench"], ["--help"], ["plan", "--dispatches"]])
def test_a_reader_that_leaves_is_no_error(tmp_path, arguments, lines):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_1B))
    model = [tmp_path] if "plan" in arguments else []
    reader_leaves(lines, *arguments[:1], *model, *arguments[1:])


def test_an_output_that_is_closed_is_no_error(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_1B))
    for arguments in (["bench"], ["--version"], ["plan", str(tmp_path)]):
        words = shlex.join(map(str, command(*arguments)))
        for closed in (">&-", ">&- 2>&-"):
            ended = subprocess.run(
                f"{words} {closed}", shell=True, env=environment(), capture_output=True, text=True
            )
            assert ended.returncode == 0, ended.stderr
            assert ended.stderr == ""


LONG: dict[str, Any] = {"epochs": 20, "dropout": 0.2, "save_every": 1, "eval_every": 4}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> Path:
    """Sixty updates that nobody disturbed."""
    out = tmp_path_factory.mktemp("whole") / "out"
    ended = krnl_process("train", *flags(settings(model, data, out, **LONG)))
    assert ended.returncode == 0, ended.stderr
    assert "60 updates in" in ended.stdout
    return out


def test_a_run_goes_on_when_its_reader_leaves(tmp_path, model, data, whole):
    out = tmp_path / "out"
    reader_leaves(3, "train", *flags(settings(model, data, out, **LONG)))
    assert timeless(out) == timeless(whole)
    assert adapter_bytes(out) == adapter_bytes(whole)


def start(out: Path, model: Path, data: Path, resume: bool) -> "subprocess.Popen[str]":
    words = flags(settings(model, data, out, resume=resume, **LONG))
    return subprocess.Popen(
        command("train", *words),
        env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for(out: Path, lines: int, process: "subprocess.Popen[str]") -> None:
    """Until the log has that many lines, or the process has ended."""
    path = out / "metrics.jsonl"
    while process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= lines:
            return
        time.sleep(0.001)


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, model, data, whole):
    out = tmp_path / "out"
    with start(out, model, data, False) as process:
        wait_for(out, 10, process)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read() if process.stderr else ""
    assert process.returncode == 130
    at_once, at_last = said.splitlines()
    assert at_once == "Stopping after this update; once more stops at once."
    one_sentence(at_last, r"Stopped after update \d+ of 60; everything is saved\. .*--resume")
    assert 0 < len(updates(out)) < 60
    with start(out, model, data, True) as process:
        assert process.wait() == 0
    assert timeless(out) == timeless(whole)
    assert adapter_bytes(out) == adapter_bytes(whole)


def test_kill_9_at_any_moment(tmp_path, model, data, whole):
    """A checkpoint is written after each update, so that many of the moments are inside one."""
    seed = time.time_ns()
    print(f"seed {seed}")  # which moments they are depends on the machine as well
    out, random = tmp_path / "out", np.random.default_rng(seed)
    for killed, more in enumerate((4, 9, 9, 9)):
        with start(out, model, data, killed > 0) as process:
            path = out / "metrics.jsonl"
            before = path.read_bytes().count(b"\n") if path.exists() else 0
            wait_for(out, before + more, process)
            time.sleep(random.uniform(0, 0.03))
            process.kill()
        assert process.returncode == -signal.SIGKILL, process.returncode
        for name in checkpoints(out):
            if not name.startswith("."):
                content = sorted(path.name for path in (out / "checkpoints" / name).iterdir())
                assert content == ["state.json", "state.safetensors"]
    with start(out, model, data, True) as process:
        said = process.stderr.read() if process.stderr else ""
    assert process.returncode == 0, said
    assert timeless(out) == timeless(whole)
    assert adapter_bytes(out) == adapter_bytes(whole)
    last = "checkpoints/step-00000060/state.safetensors"
    assert (out / last).read_bytes() == (whole / last).read_bytes()


def test_ctrl_c_elsewhere_stops_at_once():
    process = subprocess.Popen(
        command("doctor"), env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # Shells have it ignored in what they run in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert said == "krnl: Stopped.\n"


@pytest.mark.parametrize(
    ("limit", "name"),
    [(100, "train"), (10_000, "adapter_model"), (20_000, "state"), (40_000, "loss")],
)
def test_files_that_may_not_grow(tmp_path, model, data, limit, name):
    """What the run writes is too large for a limit of the system."""
    out = tmp_path / "out"
    ended = krnl_process(
        "train", *flags(settings(model, data, out, epochs=3)),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    assert ended.returncode == 2, ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    one_sentence(ended.stderr, rf"/out/\S*{name}\.\w+ cannot be written: File too large")
    left = [path.name for path in out.rglob("*") if path.name.endswith(".tmp")]
    assert not left


@pytest.fixture
def mounted() -> Iterator[Callable[..., Path]]:
    """Mounts small file systems in memory, where this user may."""
    places: list[Path] = []

    def mount(folder: Path, options: str) -> Path:
        folder.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
        if not shutil.which("mount") or subprocess.run(words, capture_output=True).returncode:
            pytest.skip("this user may not mount a file system")
        places.append(folder)
        return folder

    yield mount
    for folder in places:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_costs_no_checkpoint(tmp_path, model, data, mounted, whole):
    """The disk fills up in the middle of the run, which goes on once there is room."""
    disk = mounted(tmp_path / "disk", "size=4m")
    out = disk / "out"
    with start(out, model, data, False) as process:
        wait_for(out, 8, process)
        filler = disk / "filler"
        fill(filler)
        said = process.stderr.read() if process.stderr else ""
    assert process.returncode == 2, said
    one_sentence(said, r"/out/\S+ cannot be written: No space left on device")
    assert len(said.splitlines()) == 1
    filler.unlink()
    with start(out, model, data, True) as process:
        said = process.stderr.read() if process.stderr else ""
    assert process.returncode == 0, said
    assert timeless(out) == timeless(whole)
    assert adapter_bytes(out) == adapter_bytes(whole)


def fill(path: Path) -> None:
    """Writes until the disk is full."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(descriptor, bytes(4096))
    except OSError as error:
        assert error.errno == errno.ENOSPC
    finally:
        os.close(descriptor)


def test_a_folder_that_cannot_be_written(tmp_path, model, data, mounted):
    if os.geteuid():
        folder = tmp_path / "disk"
        folder.mkdir(mode=0o500)
    else:
        folder = mounted(tmp_path / "disk", "ro")
    ended = krnl_process("train", *flags(settings(model, data, folder / "out")))
    assert ended.returncode == 2
    one_sentence(ended.stderr, r"/out, which cannot be used: (Read-only file|Permission denied)")
    assert len(ended.stderr.splitlines()) == 1


def test_a_disk_is_not_replaced_by_a_merged_model(place, capsys, mounted):
    disk = mounted(place.folder / "disk", "size=4m")
    assert cli.run(["merge", str(place.model), place.fitting_adapter(), str(disk)]) == 2
    one_sentence(capsys.readouterr().err, r"/disk has to stay where it is; name a new folder in it")


def test_a_loss_that_is_no_number_is_code_1(tmp_path, data):
    folder = write_chat_model(tmp_path / "model")
    tensors = {k: np.array(v) for k, v in read_tensors(folder / "model.safetensors")[0].items()}
    tensors["model.norm.weight"][3] = np.nan
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    ended = krnl_process("train", *flags(settings(folder, data, tmp_path / "out")))
    assert ended.returncode == 1
    one_sentence(ended.stderr, r"Update 1 has loss nan .*not applied\. The last good adapter is in")


def test_the_doctor_passes():
    ended = krnl_process("doctor")
    assert ended.returncode == 0, ended.stdout
    assert "pass" in ended.stdout and "FAIL" not in ended.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["profile", str(BASE), "--json", "{}/no/x.json"],
        ["profile", str(BASE), "--trace", "{}/no/x.json"],
        ["bench", "nt", "--png", "{}/no/x.png"],
    ],
    ids=["json", "trace", "png"],
)
def test_files_have_a_folder_before_anything_is_measured(tmp_path, arguments):
    ended = krnl_process(*(word.format(tmp_path) for word in arguments))
    assert ended.returncode == 2
    one_sentence(ended.stderr, r"there is no such folder to write it in")
