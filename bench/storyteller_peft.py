"""KRNL and PyTorch + PEFT on the storyteller recipe, interleaved on one machine.

    python -m venv peft && peft/bin/pip install torch transformers peft    # a CPU build will do
    python bench/storyteller_peft.py --peft peft/bin/python --krnl python --updates 40 --rounds 5

Each round runs both tools in fresh processes for the same number of updates of 16 rows in file
order: PEFT in float32 and bfloat16, KRNL in fp32 and in the machine's best precision. Printed are
the median seconds of an update (the first three of a process left out) and the ratio. PEFT runs as
people run it: padded batches, SDPA attention, AdamW, all linear layers, rank 16; both on as many
threads as there are cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
STORY = ROOT / "examples" / "storyteller"
ROWS = 16
WARM = 3
THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peft_worker(updates: int, dtype: str) -> list[float]:
    """Seconds of each update with PEFT."""
    import torch
    from peft import LoraConfig, get_peft_model
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    tokenizer = Tokenizer.from_file(str(STORY / "model" / "tokenizer.json"))

    def rendered(messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
        ids, labels = [], []
        for message in messages:
            head = tokenizer.encode(f"<|im_start|>{message['role']}\n").ids
            body = tokenizer.encode(message["content"] + "<|im_end|>").ids
            tail = tokenizer.encode("\n").ids
            ids += head + body + tail
            trained = body if message["role"] == "assistant" else [-100] * len(body)
            labels += [-100] * len(head) + trained + [-100] * len(tail)
        return ids, labels

    lines = (STORY / "data" / "train.jsonl").read_text().splitlines()
    rows = [rendered(json.loads(line)["messages"]) for line in lines[: updates * ROWS]]
    base = AutoModelForCausalLM.from_pretrained(STORY / "model", dtype=getattr(torch, dtype))
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0)
    seconds = []
    for update in range(updates):
        batch = rows[update * ROWS : (update + 1) * ROWS]
        start = time.perf_counter()
        longest = max(len(ids) for ids, _ in batch)
        ids = torch.full((ROWS, longest), 3)
        labels = torch.full((ROWS, longest), -100)
        mask = torch.zeros(ROWS, longest, dtype=torch.long)
        for i, (row, targets) in enumerate(batch):
            ids[i, : len(row)], labels[i, : len(row)] = torch.tensor(row), torch.tensor(targets)
            mask[i, : len(row)] = 1
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        seconds.append(time.perf_counter() - start)
    return seconds


def krnl_updates(python: str, updates: int, precision: str) -> list[float]:
    """Seconds of each update of `krnl train`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            python,
            "-m",
            "krnl",
            "train",
            str(STORY / "train.yaml"),
            "--steps",
            str(updates),
            "--no-shuffle",
        ]
        command += [
            "--out",
            folder + "/out",
            "--precision",
            precision,
            "--valid",
            str(STORY / "data" / "valid.jsonl"),
        ]
        environment = {**os.environ, "KRNL_THREADS": str(THREADS)}
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT, env=environment)
        lines = Path(folder, "out", "metrics.jsonl").read_text().splitlines()
        return [m["seconds"] for m in map(json.loads, lines) if "seconds" in m]


def peft_updates(python: str, updates: int, dtype: str) -> list[float]:
    command = [python, __file__, "--worker", dtype, "--updates", str(updates)]
    finished = subprocess.run(command, check=True, capture_output=True, text=True)
    return [float(x) for x in json.loads(finished.stdout.splitlines()[-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--peft", default=sys.executable, help="Python that has torch, transformers and peft"
    )
    parser.add_argument("--krnl", default=sys.executable, help="Python that has krnl")
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(peft_worker(options.updates, options.worker)))
        return
    runs = {
        "PEFT float32": lambda: peft_updates(options.peft, options.updates, "float32"),
        "PEFT bfloat16": lambda: peft_updates(options.peft, options.updates, "bfloat16"),
        "KRNL fp32": lambda: krnl_updates(options.krnl, options.updates, "fp32"),
        "KRNL auto": lambda: krnl_updates(options.krnl, options.updates, "auto"),
    }
    medians: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            medians[name].append(statistics.median(run()[WARM:]))
    first = statistics.median(medians["PEFT float32"])
    for name, values in medians.items():
        middle = statistics.median(values)
        print(
            f"{name:14} {1e3 * middle:7.1f} ms an update ({1e3 * min(values):.1f} – "
            f"{1e3 * max(values):.1f}), {first / middle:.2f}x"
        )


if __name__ == "__main__":
    main()
