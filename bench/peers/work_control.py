"""Answers every line with the machine's peak right now."""

import json
import sys

from krnl.backends.cpu import CpuBackend

backend = CpuBackend()
print(json.dumps({}), flush=True)
for _ in sys.stdin:
    roof = backend.measure_roof()
    peaks = {str(dtype): rate for dtype, rate in roof.flops.items()}
    print(json.dumps({**peaks, "nbytes": roof.nbytes}), flush=True)
