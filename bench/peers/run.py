"""Interleaves training steps of KRNL and its peers; prints medians and ratios. See README.md."""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from krnl.bench.baselines import KEEP_MEMORY, Worker
from krnl.bench.shapes import make

HERE = Path(__file__).parent
# A step counts if the machine's peak beside it was at least this share of the best seen.
QUIET = 0.9
TRIES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--krnl", default=sys.executable)
    parser.add_argument("--peft")
    parser.add_argument("--mlx")
    parser.add_argument("--preload", help="library that answers for mlx's BLAS")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--chat", action="store_true", help="varying lengths, a third labelled")
    parser.add_argument("--block", action="store_true", help="one MLP block instead of a model")
    parser.add_argument("--steps", type=int, default=5, help="steps of each tool that count")
    parser.add_argument(
        "--compiled", action="store_true", help="also torch.compile (slow to start)"
    )
    parser.add_argument("--folder", type=Path, default=Path("/tmp/krnl-peers"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = options.folder / options.model
    if not options.block:
        make(options.model, folder)
    given = ["--model", str(folder), "--rows", str(options.rows), "--length", str(options.length)]
    given += ["--chat"] * options.chat
    control = Worker(options.krnl, HERE / "work_control.py", [], {})
    workers = {}
    for name, (python, script, variant, environment) in tools(options).items():
        arguments = variant.split() if options.block else given + variant.split()
        workers[name] = Worker(python, HERE / script, arguments, environment)
    results = measure(workers, control, options.steps)
    report(results, workers, options)
    for worker in (*workers.values(), control):
        worker.close()


def tools(options: argparse.Namespace) -> dict[str, tuple[str, str, str, dict[str, str]]]:
    """Interpreter, script, variant (arguments) and environment of each tool that takes part."""
    if options.block:
        found = {"krnl": (options.krnl, "work_krnl_block.py", "", {})}
        if options.peft:
            block = (options.peft, "../torch_block.py")
            found["torch-tuned"] = (*block, "", KEEP_MEMORY)
            found["torch-compiled"] = (*block, "--compile", KEEP_MEMORY)
        return found
    found = {"krnl": (options.krnl, "work_krnl.py", "", {})}
    if options.peft:
        peft = (options.peft, "../peft_model.py")
        found["peft"] = (*peft, "--adapters fp32", {})
        found["peft-tuned"] = (*peft, "--adapters 16", KEEP_MEMORY)
        if options.compiled:
            found["peft-compiled"] = (*peft, "--adapters 16 --compile", KEEP_MEMORY)
    if options.mlx:
        preload = {"LD_PRELOAD": options.preload} if options.preload else {}
        found["mlx"] = (options.mlx, "work_mlx.py", "", {**KEEP_MEMORY, **preload})
    return found


def measure(
    workers: dict[str, Worker], control: Worker, steps: int
) -> dict[str, list[dict[str, Any]]]:
    """One step of each tool in turn; one beside which the machine was busy is tried again."""
    best = max(control.ask()["bf16"] for _ in range(3))
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    for _ in range(steps):
        for name, worker in workers.items():
            attempts = []
            for _ in range(TRIES):
                before = control.ask()["bf16"]
                step = worker.ask()
                after = control.ask()["bf16"]
                best = max(best, before, after)
                step["quiet"] = min(before, after) / best
                attempts.append(step)
                if step["quiet"] >= QUIET:
                    break
            results[name].append(max(attempts, key=lambda step: step["quiet"]))
    print(f"peak of the machine: {best / 1e9:,.0f} GFLOP/s in bf16")
    return results


def report(
    results: dict[str, list[dict[str, Any]]],
    workers: dict[str, Worker],
    options: argparse.Namespace,
) -> None:
    """Prints the table; ratios are of KRNL to each."""
    seconds = {
        name: statistics.median(s["seconds"] for s in steps) for name, steps in results.items()
    }
    peak = {name: max(s["peak"] for s in steps) for name, steps in results.items()}
    kind = "chat" if options.chat else "all labelled"
    print(f"{options.model}, {options.rows} x {options.length}, {kind}, medians of {options.steps}")
    head = ("", "s/step", "range", "KRNL is", "MiB", "KRNL uses", "first step")
    print("{:15} {:>8} {:>15} {:>8} {:>7} {:>9} {:>10}".format(*head))
    rows = []
    for name, steps in results.items():
        times = [s["seconds"] for s in steps]
        spread = f"{min(times):.3f} – {max(times):.3f}"
        faster, smaller = seconds[name] / seconds["krnl"], peak["krnl"] / peak[name]
        first = workers[name].hello["first"]
        mebibytes = peak[name] / 2**20
        print(
            f"{name:15} {seconds[name]:8.3f} {spread:>15} {faster:7.2f}x {mebibytes:7,.0f} "
            f"{smaller:8.2f}x {first:9.1f}s"
        )
        rows.append({"tool": name, "steps": steps, "first": first})
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
