"""What it costs that the blocks of a cluster share their sums (exchange.h)."""

from krnl.dtypes import F32

# Clocks until the blocks have met twice, and bytes of sums that one takes in a clock: fitted to
# what an H200 took.
MEETING_CLOCKS, BYTES_PER_CLOCK = 1000, 7


def exchange_clocks(floats: int, split: int) -> float:
    """Of `split` blocks with so many sums each, until each has its part of what all have."""
    if split == 1:
        return 0.0
    return MEETING_CLOCKS + F32.size * floats * (split - 1) / split / BYTES_PER_CLOCK
