"""How a worker talks: a line of JSON after its first step, then one for every line it is sent."""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable

STARTED = time.time()


def arguments() -> argparse.Namespace:
    """What every worker is told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--variant", default="")
    parser.add_argument("--started", type=float, default=STARTED)
    return parser.parse_args()


def serve(started: float, step: Callable[[], float]) -> None:
    """Runs the first step, then one for each line on standard input."""
    out = sys.stdout
    sys.stdout = sys.stderr
    loss = step()
    print(json.dumps({"first": time.time() - started, "loss": loss}), file=out, flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        loss = step()
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "loss": loss, "peak": peak}), file=out, flush=True)
