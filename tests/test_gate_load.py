"""The gate on this machine, with a real load put on it."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest

from krnl.backends.cpu import CpuBackend
from krnl.bench.condition import watch
from krnl.bench.control import probe
from krnl.bench.gate import Gate
from krnl.bench.reference import ReferenceStore
from krnl.errors import Refused


@pytest.fixture
def tenants(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Starts busy processes, two for each core, that are not ours: their parent ends at once. Each
    ends by itself after a minute of processor time."""
    shell = tmp_path / "heavytenant"
    shell.symlink_to("/bin/sh")
    pids: list[int] = []

    def start() -> None:
        for _ in range(2 * (os.cpu_count() or 1)):
            burn = f"ulimit -t 60; '{shell}' -c 'while :; do :; done' >/dev/null 2>&1 & echo $!"
            answer = subprocess.run(["/bin/sh", "-c", burn], stdout=subprocess.PIPE, check=True)
            pids.append(int(answer.stdout))
        time.sleep(0.5)

    yield start
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_a_real_load_is_named_and_refused(tmp_path, tenants):
    """The control's own best before the load is its reference, so that this holds on a machine that
    is busy anyway."""
    here = probe(CpuBackend())
    rate = max(here.control() for _ in range(20))
    store = ReferenceStore(tmp_path / "references.json")
    store.raise_to(here.key, rate, datetime.now(timezone.utc).isoformat())
    gate = Gate([here], store, watch, time.perf_counter, lambda: datetime.now(timezone.utc))
    tenants()
    with pytest.raises(Refused) as refused:
        gate.measure({"control": lambda: 1 / here.control()}, 3)
    text = str(refused.value)
    assert "below the" in text and "Other processes took more than" in text
    seen, _, advice = text.partition("Meanwhile")[2].partition("Close ")
    assert "heavytenant ×" in seen and "heavytenant ×" in advice
