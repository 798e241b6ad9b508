"""Ctrl-C and SIGTERM as a wish that a run can heed between two updates, and signals that end a
program as an exit that cleans up."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Set by the first Ctrl-C or SIGTERM, so that the run can save itself; a second one stops at
    once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        print("Stopping after this update; once more stops at once.", file=sys.stderr)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the program as they do otherwise, but for that `with` blocks are left
    first. One that is ignored stays so."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    if threading.current_thread() is threading.main_thread():
        heard = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    else:
        heard = []

    def leave(number: int, frame: Any) -> NoReturn:
        for other in heard:
            signal.signal(other, signal.SIG_IGN)  # what is being left is left once
        raise SystemExit(128 + number)

    for number in heard:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, signal.SIG_DFL)
