"""What each tiling of the matrix products takes in a training update, on an NVIDIA Hopper GPU.

    python lab/tilings_cuda.py [--model NAME] [--rows 1] [--length 512] [--layers N] [--json FILE]

The model has random weights. Launches of all its layers run one behind the other, each waiting for
the one before: printed is one launch's part of the median replay, beside the clocks that
Tiling.clocks estimates. No gate watches and nobody rests: trust the order. 128×256/2 are tiles of
128 rows and 256 columns that two blocks share; + is a tiling that hands over. Products that
gemm_wgmma does not make are left out, and tilings whose estimate is hopeless. The first run
compiles some hundreds of kernels.
"""

import argparse
import sys
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from krnl.backends.cuda import CudaBackend
from krnl.backends.cuda_launch import Launcher
from krnl.backends.cuda_memory import CudaMemory
from krnl.bench.models import SHAPES, write
from krnl.bench.trainer import ADAPTER, Rows, first_modules
from krnl.dtypes import BF16
from krnl.errors import ConfigError, KrnlError
from krnl.formats.files import check_writable, write_json_atomic
from krnl.kernels.cuda.gemm_wgmma import TILINGS, Job, Tiling, jobs
from krnl.kernels.cuda.target import Target
from krnl.kernels.launch import Launch
from krnl.model import Model
from krnl.plan.arena import Plan
from krnl.training.session import Session, plan_training

LAUNCHES, REPLAYS, SHOWN = 32, 5, 5
# A tiling is hopeless from so many times the least estimate, and so many clocks more, on.
TIMES, MORE_CLOCKS = 3, 8000


@dataclass(frozen=True)
class Timing:
    """What a launch takes, and was thought to take."""

    tiling: Tiling
    tiles: int
    microseconds: float
    clocks: float

    def __str__(self) -> str:
        t = self.tiling
        name = f"{t.rows}×{t.columns}" + f"/{t.split}" * (t.split > 1) + "+" * t.hands_over
        return f"{name:9} {self.microseconds:9.1f} µs {self.clocks:11,.0f} clocks estimated"


def ready(backend: CudaBackend, shape: dict[str, object], rows: Rows) -> tuple[Plan, CudaMemory]:
    """The program of an update's only pass, and its memory after one run."""
    with TemporaryDirectory(prefix="krnl-lab-") as folder:
        write(shape, "the model", Path(folder))
        model = Model.open(folder)
        config, weights = model.config, model.weights(backend.limits.mapped_alignment)
        modules, work = first_modules(config), rows.packed(config.vocab_size)
        paths, tokens = tuple(modules), work.capacity
        planned = plan_training(config, weights, ADAPTER, paths, backend, BF16, tokens)
        session = Session(planned, model, modules, backend, 0)
        session.accumulate(session.inputs_of(work, 1))
        backend._gpu.wait()
    assert isinstance(session._memory, CudaMemory)
    return planned.accumulate, session._memory


def alike(program: Plan) -> dict[tuple[str, int, int], list[Job]]:
    """The jobs of all layers, those together that take equally long."""
    found: dict[tuple[str, int, int], list[Job]] = {}
    for dispatch in program.dispatches:
        op, kernel = dispatch.call.op.name, dispatch.row.name
        by_wgmma = op.startswith("lora_") and kernel.endswith("_wgmma")
        for job in jobs(dispatch.call)[0] if by_wgmma else []:
            columns = " + ".join(str(member.columns) for member in job.members)
            what = f"{op} {job.first.layout}, {job.first.rows} × {columns}, {job.steps} steps"
            found.setdefault((what, job.written_bytes, job.moved_bytes), []).append(job)
    return found


def microseconds(launcher: Launcher, launches: list[Launch], memory: CudaMemory) -> float:
    """Of one of them, in the median replay of a graph; the first is nobody's time."""
    bound = [launcher.bind(launch, memory, beside=False) for launch in launches]
    gpu, (start, end), times = launcher.gpu, launcher.marks(2), []
    graph = launcher.graph_of(islice(cycle(bound), LAUNCHES))
    for _ in range(1 + REPLAYS):
        gpu("cuEventRecord", start, gpu.stream)
        gpu("cuGraphLaunch", graph, gpu.stream)
        gpu("cuEventRecord", end, gpu.stream)
        gpu.wait()
        times.append(float(gpu("cuEventElapsedTime", start, end)))
    gpu("cuGraphExecDestroy", graph)
    return 1e3 * median(times[1:]) / LAUNCHES


def timings(
    launcher: Launcher, same: list[Job], memory: CudaMemory, target: Target
) -> list[Timing]:
    """Of all tilings but the hopeless, the fastest first."""
    job = same[0]
    clocks = {tiling: tiling.clocks(job, target) for tiling in filter(job.allows, TILINGS)}
    most = TIMES * min(clocks.values()) + MORE_CLOCKS
    tried = [tiling for tiling in clocks if clocks[tiling] < most]
    launcher.prepare([job.launch(tiling, target) for tiling in tried])
    found = []
    for tiling in tried:
        launches = [job.launch(tiling, target) for job in same[:LAUNCHES]]
        time = microseconds(launcher, launches, memory)
        found.append(Timing(tiling, job.tiles(tiling), time, clocks[tiling]))
    return sorted(found, key=lambda timing: timing.microseconds)


def run(options: argparse.Namespace) -> None:
    backend = CudaBackend()
    launcher, gpu = backend._launcher, backend._gpu
    target = Target(gpu.capability, gpu.multiprocessors)
    if not target.hopper:
        raise ConfigError(f"Only a Hopper GPU has these tilings; this is '{gpu.name}'.")
    if options.rows < 1 or options.length < 2:
        raise ConfigError("There must be a row or more, of two tokens or more.")
    if options.json:
        check_writable(Path(options.json))
    layers = {} if options.layers is None else {"num_hidden_layers": options.layers}
    rows = Rows(options.rows, options.length)
    program, memory = ready(backend, SHAPES[options.model] | layers, rows)
    total, least, written = 0.0, 0.0, []
    for (what, written_bytes, moved_bytes), same in alike(program).items():
        count, found = len(same), timings(launcher, same, memory, target)
        choice = same[0].tiling(target)
        chosen = next(timing for timing in found if timing.tiling == choice)
        total += count * chosen.microseconds
        least += count * found[0].microseconds
        print(f"{what}, {count} {'launch' if count == 1 else 'launches'}\n  chosen {chosen}")
        for place, timing in enumerate(found[:SHOWN], 1):
            print(f"  {place:<6} {timing}", flush=True)
        sizes = {"steps": same[0].steps, "written_bytes": written_bytes, "moved_bytes": moved_bytes}
        times = {"chosen": asdict(choice), "timings": [asdict(timing) for timing in found]}
        written.append({"job": what, "launches": count, **sizes, **times})
    print(f"All products: {total:,.1f} µs; the best tilings would save {total - least:,.1f} µs.")
    if options.json:
        given = {**vars(options), "device": gpu.name, "target": asdict(target)}
        write_json_atomic(Path(options.json), {**given, "jobs": written})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--layers", type=int, help="instead of as many as the model has")
    parser.add_argument(
        "--json", metavar="FILE", help="for all timings, and what estimates are made of"
    )
    try:
        run(parser.parse_args())
    except KrnlError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
