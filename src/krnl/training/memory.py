"""Where the memory of a training run goes, known before the first step."""

import os
from dataclasses import dataclass, replace

from krnl.backends.base import Backend, Paper
from krnl.plan.buffer import Kind
from krnl.training.session import TrainingPlan

# What drawing the losses takes when training has given its memory back: most of it is code.
DRAWING = 40 << 20


@dataclass(frozen=True)
class MemoryUse:
    """Bytes by purpose."""

    mapped: int  # weights read where they lie in their files
    held: int  # weights in another type, or that lie askew in their files
    adapter: int  # parameters, compute copy, moments
    gradients: int
    inputs: int
    saved: int  # activations kept for the backward pass
    temporaries: int  # the rest of the arena at its fullest
    engine: int  # scratch of the device's own
    # What the host holds, which counts where it has the device's memory in common:
    saving: int  # copies of parameters and moments while a checkpoint is written
    process: int  # Python, its libraries and the data, as resident now
    drawing: int  # of the picture at the end, where that is more than all but the process
    hosted: int  # weights that a device with memory of its own reads in the host's; in no sum

    @property
    def total(self) -> int:
        """The peak."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Name, for people, and bytes of each part of the peak."""
        return {
            "weights, mapped from their files": self.mapped,
            "weights, held in memory": self.held,
            "adapter, its copy and moments": self.adapter,
            "gradients": self.gradients,
            "inputs": self.inputs,
            "activations kept for backward": self.saved,
            "temporaries": self.temporaries,
            "engine scratch": self.engine,
            "copies for a checkpoint": self.saving,
            "Python and data": self.process,
            "drawing the losses, beyond the rest": self.drawing,
        }


def memory_use(planned: TrainingPlan, backend: Backend | Paper) -> MemoryUse:
    """What the planned run will hold at its peak."""
    layout, trainable = planned.accumulate.layout, planned.decoder.trainable
    arena = layout.reserved(Kind.TEMP)
    saved = min(planned.accumulate.saved, arena)
    copies = sum(b.nbytes for b in (trainable.param, trainable.first, trainable.second))
    apart = backend.limits.own_memory
    use = MemoryUse(
        mapped=layout.mapped,
        held=layout.reserved(Kind.WEIGHT),
        adapter=layout.reserved(Kind.STATE),
        gradients=layout.reserved(Kind.GRAD),
        inputs=layout.reserved(Kind.INPUT),
        saved=saved,
        temporaries=arena - saved,
        engine=backend.limits.scratch,
        saving=0 if apart else copies,
        process=0 if apart else _resident(),
        drawing=0,
        hosted=layout.hosted,
    )
    rest = use.total - use.process
    return use if apart else replace(use, drawing=max(0, DRAWING - rest))


def gib(nbytes: float) -> str:
    """Bytes for people."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**29 else f"{nbytes / 2**20:.1f} MiB"


def _resident() -> int:
    """Bytes of this process in memory now."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak  # bytes on macOS, the only system without /proc that KRNL runs on
