"""What the choice of kernels depends on, of a GPU."""

from dataclasses import dataclass

# Multiprocessors of an H100 SXM and an H200: what is assumed where there is no GPU.
USUAL = 132
CLUSTER_SIZES = (1, 2, 4, 8)  # blocks
# Clusters that run at once on a GPU of so many multiprocessors, by their size
# (cuOccupancyMaxActiveClusters on an H200).
SEEN = {USUAL: {1: USUAL, 2: 66, 4: 30, 8: 15}}


@dataclass(frozen=True)
class Target:
    """A kind of GPU: its compute capability (80, 86, 90, 120, …) and how many multiprocessors it
    has. How products, and sums of dK and dV, are cut depends on both, and with it the order of
    what is added: results are the same bit for bit on GPUs of the same kind."""

    capability: int
    multiprocessors: int = USUAL

    @property
    def hopper(self) -> bool:
        """Whether it has Hopper's copy engine and products of whole warpgroups, which no other
        generation has."""
        return self.capability == 90

    def clusters(self, size: int) -> int:
        """How many clusters of `size` blocks run at once, where each block fills a
        multiprocessor."""
        if seen := SEEN.get(self.multiprocessors):
            return seen[size]
        # A cluster lies within one of the GPU's partitions. These have pairs of multiprocessors,
        # but not all have a multiple of four, and how many have is not told: a tenth is left.
        most = self.multiprocessors // size
        return max(1, most if size <= 2 else most * 9 // 10)
