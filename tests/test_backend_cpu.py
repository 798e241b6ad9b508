"""The CPU engine under a program's own threads, forks, odd settings and systems."""

import mmap
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import krnl
from cpu_device import cpu
from krnl.backends.cpu import CpuBackend, available_isas
from krnl.dtypes import F32
from krnl.errors import ConfigError
from op_bench import check_drawn
from op_cases import CASE

ROOT = Path(__file__).parent.parent
MODEL = str(ROOT / "examples" / "storyteller" / "model")
PROMPT = "Mia went to the harbor."


@pytest.mark.parametrize("value", ["0", "1025", "-1", "two", "²", "٣", "1.5", ""])
def test_threads_that_make_no_sense(monkeypatch, value):
    monkeypatch.setenv("KRNL_THREADS", value)
    with pytest.raises(ConfigError, match="KRNL_THREADS is"):
        CpuBackend()


@pytest.mark.parametrize("value", ["sse9", "AVX2", "avx2 "])
def test_instruction_sets_that_are_none(monkeypatch, value):
    monkeypatch.setenv("KRNL_CPU_ISA", value)
    with pytest.raises(ConfigError, match="KRNL_CPU_ISA is"):
        CpuBackend()


def test_several_threads_may_generate_at_once():
    model = krnl.load(MODEL)
    alone = krnl.generate(model, PROMPT, max_tokens=6)
    answers: list[str] = []

    def ask() -> None:
        answers.append(krnl.generate(model, PROMPT, max_tokens=6))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert answers == [alone] * 4


def test_a_forked_child_may_generate():
    program = f"""
import os, sys, krnl
model = krnl.load({MODEL!r})
ask = lambda: krnl.generate(model, {PROMPT!r}, max_tokens=6)
before = ask()
child = os.fork()
if child == 0:
    os._exit(0 if ask() == before else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    assert subprocess.run(command, cwd=ROOT, timeout=60, check=False).returncode == 0


def test_a_system_without_huge_pages(monkeypatch):
    class Plain(mmap.mmap):
        def madvise(self, *unused: object) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr("krnl.backends.cpu.mmap.mmap", Plain)
    assert krnl.generate(MODEL, PROMPT, max_tokens=2)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is not heeded elsewhere")
def test_threads_that_the_system_does_not_grant():
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
from krnl.cli import run
raise SystemExit(run(["generate", {MODEL!r}, "hi"]))
"""
    got = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "KRNL_THREADS": "1024"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert got.returncode == 1
    assert got.stderr.startswith("krnl: The system grants "), got.stderr


@pytest.mark.parametrize("ranks", [(0, 9000), (9000, 0)], ids=["up", "gate"])
@pytest.mark.parametrize("isa", ["plain", available_isas()[-1]])
def test_one_side_of_swiglu_may_be_far_longer(isa, ranks):
    """One projection adapted, at a rank that outgrows a thread's scratch unless K is cut for it."""
    p, q = ranks
    dims = {"n": 40, "c": 33, "f": 100, "p": p, "q": q, "s": p + q}
    long_case = replace(CASE["lora_swiglu"], dims=lambda draw: dims, absent=lambda draw, d: set())
    check_drawn(long_case, F32, 3, lambda bench, draw: bench.check(cpu(isa)), shrinks=True)
