"""What a run holds at its peak is what the plan said, within a tenth."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runs import VOCABULARY, environment, krnl_process, write_chat_model, write_data

# Large enough that the process itself, and what it reads, are not most of it.
SIZES = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip
TOKENS = 1024
TOLERANCE = 0.10

# Runs `krnl` and prints, last, the most memory that was ever resident, in bytes. VmHWM is of this
# program alone; ru_maxrss would begin with what the parent had when it forked.
PEAK = """
import re, sys
from krnl.cli import run
code = run(sys.argv[1:])
print(code, int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024)
"""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="resident memory is read from /proc"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic model of 8,192 tokens, of which the tokenizer knows the first thousand."""
    folder = write_chat_model(tmp_path_factory.mktemp("model"))
    from krnl.dtypes import BF16
    from tiny import write_model

    write_model(folder, "llama", dtype=BF16, vocab_size=8192, **SIZES)
    assert VOCABULARY < 8192
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough rows that two updates of 64 fill a pass each."""
    return write_data(tmp_path_factory.mktemp("data"), 128)


def megabytes(text: str, unit: str) -> float:
    return float(text) * {"MiB": 2**20, "GiB": 2**30}[unit]


def planned_peak(model: Path, *options: object) -> tuple[float, str]:
    """Bytes that `krnl plan` says, and all that it says."""
    said = krnl_process("plan", model, "--tokens", TOKENS, *options).stdout
    found = re.search(r"peak\s+([\d.]+) (MiB|GiB)", said)
    assert found, said
    return megabytes(*found.groups()), said


def test_peak_of_a_run_within_a_limit(tmp_path, model, data):
    """Half of the layers compute gate and up again, and that memory is not taken."""
    kept, _ = planned_peak(model, "--precision", "fp32")
    gate_and_up = 2 * TOKENS * SIZES["intermediate_size"] * 4
    limit = ["--memory-limit", (kept - 3.5 * gate_and_up) / 2**30]
    planned, said = planned_peak(model, "--precision", "fp32", *limit)
    again = r"gate and up of [345] of 8 trained decoder layers are computed again to stay within"
    assert re.search(again, said)
    words = ["train", "--model", model, "--data", data, "--tokens", TOKENS, "--precision", "fp32"]
    words += ["--batch-size", 64, "--steps", 2]
    peaks = {}
    for name, more in (("kept", []), ("again", limit)):
        ended = subprocess.run(
            [sys.executable, "-c", PEAK, *map(str, [*words, "--out", tmp_path / name, *more])],
            env=environment(), capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        code, peaks[name] = map(int, ended.stdout.splitlines()[-1].split())
        assert code == 0, ended.stderr
        assert ("gate and up of" in ended.stdout) == (name == "again")
    print(f"\nkept {peaks['kept'] / 2**20:.0f} MiB, again {peaks['again'] / 2**20:.0f} MiB")
    assert abs(peaks["again"] - planned) <= TOLERANCE * planned
    assert peaks["kept"] - peaks["again"] > 2 * gate_and_up
    weights = [(tmp_path / n / "adapter_model.safetensors").read_bytes() for n in peaks]
    assert weights[0] == weights[1]


def test_peak_of_a_run_that_takes_less_than_its_picture(tmp_path, data):
    model = write_chat_model(tmp_path / "model")
    words = ["train", "--model", model, "--data", data, "--out", tmp_path / "out"]
    words += ["--tokens", 64, "--batch-size", 1, "--steps", 50]
    ended = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, words)],
        env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    code, peak = map(int, ended.stdout.splitlines()[-1].split())
    assert code == 0, ended.stderr
    said = re.search(r"at\s+most\s+([\d.]+)\s+(MiB|GiB)", ended.stdout)
    assert said, ended.stdout
    announced = megabytes(*said.groups())
    print(f"\ntrain said {announced / 2**20:.0f} MiB, peak {peak / 2**20:.0f} MiB")
    assert abs(peak - announced) <= TOLERANCE * announced


@pytest.mark.parametrize(
    "options",
    [
        ["--precision", "fp32"],
        ["--precision", "bf16"],
        ["--precision", "fp32", "--recompute", "layer"],
        ["--precision", "fp32", "--dropout", "0.1", "--rank", "64"],
    ],
    ids=lambda options: "-".join(o.strip("-") for o in options),
)
def test_peak_of_a_run(tmp_path, model, data, options):
    given = ["--tokens", str(TOKENS), *options]
    planned, _ = planned_peak(model, *options)
    words = ["train", "--model", model, "--data", data, "--out", tmp_path / "out", *given]
    ended = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, words), "--batch-size", "64", "--steps", "2"],
        env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    code, peak = map(int, ended.stdout.splitlines()[-1].split())
    assert code == 0, ended.stderr
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert max(line["tokens"] for line in lines) > TOKENS, "a pass was never full"
    again = re.search(r"at\s+most\s+([\d.]+)\s+(MiB|GiB)", ended.stdout)
    assert again, ended.stdout
    announced = megabytes(*again.groups())
    print(
        f"\n{' '.join(options)}: plan {planned / 2**20:.0f} MiB, train said "
        f"{announced / 2**20:.0f} MiB, peak {peak / 2**20:.0f} MiB ({peak / planned - 1:+.1%})"
    )
    assert abs(peak - planned) <= TOLERANCE * planned
    assert abs(peak - announced) <= TOLERANCE * announced
