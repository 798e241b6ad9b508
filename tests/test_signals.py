"""Signals that end a program leave nothing behind."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from krnl.training.signals import exit_on_signals
from runs import command, environment

ENDING = [signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Also where these tests are run by `nohup`."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDING)
def test_random_weights_are_gone_when_a_signal_ends_the_bench(tmp_path: Path, number: int) -> None:
    """Which else would run for hours."""
    flags = ("--quick", "--force", "--rounds", 10**6, "--device", "cpu")
    given = environment(TMPDIR=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache"))
    with subprocess.Popen(
        command("bench", "model", *flags), env=given, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            deadline = time.monotonic() + 60
            while not list(tmp_path.glob("krnl-bench-*/*/config.json")):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(number)
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()  # does nothing to one that has ended
    assert process.returncode == 128 + number and said == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", ENDING)
def test_a_second_signal_does_not_disturb_the_leaving(number: int) -> None:
    left = []
    with pytest.raises(SystemExit) as ended, exit_on_signals():
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            left.append("whole")
    assert ended.value.code == 128 + number and left == ["whole"]
    assert [signal.getsignal(n) for n in ENDING] == [signal.SIG_DFL] * 2


def test_what_is_ignored_stays_so() -> None:
    """As `nohup` has it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with exit_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_in_another_thread_nothing_changes() -> None:
    """Only the main one may say what signals do."""
    done = []

    def use() -> None:
        with exit_on_signals():
            done.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert done == [signal.SIG_DFL]
