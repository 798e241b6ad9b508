"""How a worker talks: a line of JSON after its first step, then one for every line it is sent.
Run by hand with `--steps N`, it does N steps by itself."""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

STARTED = time.time()


def parser(description: str) -> argparse.ArgumentParser:
    """What every worker is told."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--steps", type=int, help="steps to do; without it, one for each line sent")
    made.add_argument("--started", type=float, default=STARTED, help=argparse.SUPPRESS)
    return made


def model_arguments(description: str) -> argparse.ArgumentParser:
    """For workers that train a model."""
    made = parser(description)
    made.add_argument("--model", required=True, help="folder of the checkpoint")
    made.add_argument("--rows", type=int, default=4)
    made.add_argument("--length", type=int, default=256)
    made.add_argument("--chat", action="store_true", help="varying lengths, a third labelled")
    return made


def serve(
    options: argparse.Namespace,
    step: Callable[[], float],
    describe: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Runs the first step and says what `describe` has to say of it, then the others."""
    out = sys.stdout
    sys.stdout = sys.stderr
    loss = step()
    hello = {"first": time.time() - options.started, "loss": loss, **describe()}
    print(json.dumps(hello), file=out, flush=True)
    wanted: Iterable[object] = sys.stdin if options.steps is None else range(options.steps)
    for _ in wanted:
        start = time.perf_counter()
        loss = step()
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak *= 1 if sys.platform == "darwin" else 1024
        print(json.dumps({"seconds": seconds, "loss": loss, "peak": peak}), file=out, flush=True)
