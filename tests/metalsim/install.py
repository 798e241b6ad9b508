"""Runs krnl.backends.metal on the simulator.

    backend = metal_backend("checked")            # or "fast": see build.py
    … allocate, compile, run …
    backend.simulation.expect_clean()             # fails if a check reported anything
    backend.simulation.counters["device_loads"]   # summed over all launches
    backend.simulation.executed                   # launches, by function

`installed` is for code that opens the backend itself, such as the command line.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from krnl.backends.metal import MetalBackend
from krnl.plan.lower import Table

from .metal import metal_module
from .objc import ObjcModule
from .resources import Simulation


class SimulatedBackend(MetalBackend):
    simulation: Simulation


@contextmanager
def installed(simulation: Simulation) -> Iterator[ObjcModule]:
    """Inside, `import Metal` and `import objc` give the simulator's."""
    objc = ObjcModule()
    modules = {"Metal": metal_module(simulation), "objc": objc}
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield objc
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def metal_backend(
    mode: str = "checked",
    kernels: Table | None = None,
    source: Callable[[str], str] | None = None,
    **settings: Any,
) -> SimulatedBackend:
    """The Metal backend on a simulated device of its own; `settings` are Simulation's. `kernels`
    and `source` replace KRNL's own."""
    simulation = Simulation(mode=mode, **settings)
    given: dict[str, Any] = {"kernels": kernels, "source": source}
    with installed(simulation):
        backend = SimulatedBackend(**{k: v for k, v in given.items() if v is not None})
    backend.simulation = simulation
    return backend
