"""Stands in for `nvidia-smi`: answers are captured from it, or follow its documentation."""

from collections.abc import Sequence

from krnl.bench.nvidia import Nvidia

INVALID = ""  # nvidia-smi fails on a field that it does not know, and then nothing is taken from it
APPS = "--query-compute-apps=pid"
COUNTED = "--query-gpu=clocks_event_reasons_counters."
FLAGGED = "--query-gpu=clocks_throttle_reasons."
STATE = "--query-gpu=clocks.sm,"


def smi(**answers: str) -> Nvidia:
    """Of a driver that answers so: apps, counted, flagged, state."""
    queries = {"apps": APPS, "counted": COUNTED, "flagged": FLAGGED, "state": STATE}

    def answer(command: Sequence[str]) -> str:
        program, query, *form = command
        assert (program, form) == ("nvidia-smi", ["--format=csv,noheader"])
        (name,) = [name for name, start in queries.items() if query.startswith(start)]
        return answers.get(name, INVALID)

    return Nvidia(answer)
