"""How a worker talks: a line of JSON after its first step, then one for every line it is sent.
Run by hand with `--steps N`, it does N of them by itself. With `--repeats N` each of them is N
steps, one enqueued behind the other, and one wait for all."""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import metadata
from typing import Any


def parser(description: str) -> argparse.ArgumentParser:
    """What every worker is told."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--steps", type=int, help="steps to do; without it, one for each line sent")
    made.add_argument(
        "--repeats", type=int, default=1, help="how often a step is repeated each time"
    )
    made.add_argument("--threads", type=int, help="of the CPU; without it, the tool's own choice")
    return made


def resident() -> int:
    """The most memory that this process had so far, in bytes."""
    # Not ru_maxrss on Linux: a process begins with that of the one which started it.
    with suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def serve(
    options: argparse.Namespace,
    step: Callable[[], dict[str, float]],
    packages: Sequence[str] = (),
    threads: Callable[[], int | None] = lambda: None,
    peak: Callable[[], int] = resident,
    describe: Callable[[], dict[str, Any]] = dict,
    finish: Callable[[], None] = lambda: None,
) -> None:
    """Runs the first step and says who did it, what the step said, and what `describe` has to say
    of it; then the others, and of these the mean seconds of a step and what the last one said.
    `threads`: None where the tool does not tell; `peak`: bytes; `finish` returns when all work of
    the steps before is done."""
    out = sys.stdout
    sys.stdout = sys.stderr
    said = step()
    finish()
    hello = {
        "versions": {name: metadata.version(name) for name in packages},
        "threads": threads(),
        "peak": peak(),
    }
    print(json.dumps({**hello, **said, **describe()}), file=out, flush=True)
    wanted: Iterable[object] = sys.stdin if options.steps is None else range(options.steps)
    for _ in wanted:
        start = time.perf_counter()
        for _ in range(options.repeats):
            said = step()
        finish()
        seconds = (time.perf_counter() - start) / options.repeats
        print(json.dumps({"seconds": seconds, "peak": peak(), **said}), file=out, flush=True)
