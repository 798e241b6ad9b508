"""`python -m krnl` is `krnl`."""

from krnl.cli import main

main()
