"""How a worker talks: a line of JSON after its first step, then one for every line it is sent.
Run by hand with `--steps N`, it does N steps by itself."""

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
) -> None:
    """Runs the first step and says who did it, what the step said, and what `describe` has to say
    of it; then the others. A step ends when all its work is done. `threads`: None where the tool
    does not tell; `peak`: bytes."""
    out = sys.stdout
    sys.stdout = sys.stderr
    said = step()
    hello = {
        "versions": {name: metadata.version(name) for name in packages},
        "threads": threads(),
        "peak": peak(),
    }
    print(json.dumps({**hello, **said, **describe()}), file=out, flush=True)
    wanted: Iterable[object] = sys.stdin if options.steps is None else range(options.steps)
    for _ in wanted:
        start = time.perf_counter()
        said = step()
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "peak": peak(), **said}), file=out, flush=True)
