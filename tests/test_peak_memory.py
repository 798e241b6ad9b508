"""The memory of a process that is measured is its own, not that of the one which started it."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"
FAT = 600 * 2**20
PARENT = """
import subprocess, sys
fat = bytearray({fat})
fat[::4096] = b"x" * len(fat[::4096])
print(subprocess.run([sys.executable, "-c", {child!r}], capture_output=True, text=True).stdout)
"""
CHILDREN = {
    "krnl": "from krnl.bench.trainer import peak_memory; print(peak_memory())",
    "a peer": f"import sys; sys.path.insert(0, {str(BENCH)!r})\n"
    "from protocol import resident; print(resident())",
}


@pytest.mark.parametrize("child", CHILDREN.values(), ids=CHILDREN)
def test_a_fat_parent_is_not_counted(child: str) -> None:
    parent = PARENT.format(fat=FAT, child=child)
    run = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True)
    assert 2**20 < int(run.stdout) < FAT / 2
