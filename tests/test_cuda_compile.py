"""Every CUDA kernel that the tables launch for the op suite's sizes and for training of models of
usual shapes, compiled for three generations of GPUs; none is needed for that. NVRTC must accept
it without spilling registers or serialising products, and its code must have the parameters,
threads and shared memory that the launch gives it."""

import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cubin import shape
from krnl.backends.base import Paper
from krnl.backends.cuda import ON_PAPER
from krnl.backends.cuda_cache import Cubin
from krnl.backends.cuda_compiler import SERIALISED, Compiler, Kernel, architecture
from krnl.backends.cuda_launch import MAP_BYTES, parameters
from krnl.bench.models import SHAPES
from krnl.bench.trainer import ADAPTER
from krnl.bench.workloads import BlockShape
from krnl.dtypes import BF16, F16, F32, DType
from krnl.errors import BackendError
from krnl.formats.peft import AdapterConfig
from krnl.kernels.cuda.attention_wgmma import WIDTHS, key_splits
from krnl.kernels.cuda.sources import libraries
from krnl.kernels.cuda.table import table
from krnl.kernels.cuda.target import Target
from krnl.kernels.launch import Launch, TensorMap
from krnl.kernels.launch import launches as launched
from krnl.model import imagined_weights
from krnl.models.config import linear_paths, parse
from krnl.models.training_programs import Recomputed
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.lower import Dispatch, lower
from krnl.training.session import plan_training
from op_bench import SIZES, WEIGHTS, chosen, keys_shared_by
from op_cases import CASES, Case

nvrtc: Any = pytest.importorskip(
    "cuda.bindings.nvrtc", reason="NVIDIA's compiler is not installed (it is in krnl-lora[dev])"
)
try:
    OFFERED = nvrtc.nvrtcGetSupportedArchs()[1]
except RuntimeError:
    pytest.skip("the wheel nvidia-cuda-nvrtc is not installed", allow_module_level=True)

# Compute capability, and bytes of shared memory that a block may have on the least of its GPUs.
SHARED = {80: 99 << 10, 90: 227 << 10, 120: 99 << 10}
# The register file of a multiprocessor; a warp is given registers by 256.
REGISTERS, GRANULE, WARP = 65536, 256, 32
# Bytes that a thread may keep in memory for want of registers. Some of NVRTC's versions keep a
# number or two of a thread that fetches tiles there, which it needs once a tile.
MAY_SPILL = {"gemm_wgmma": 8}
SPILL = re.compile(r"^.*[Rr]egisters are spilled.*, (\d+) bytes spill stores.*$", re.MULTILINE)
ACTIVATIONS = (BF16, F16, F32)
# Beside the small ones: heads of all usual sizes, and what large models are made of.
MORE_SIZES: list[dict[str, Any]] = [
    *({**SIZES["whole"], "d": d} for d in (32, 80, 96, 128)),
    *(
        {"n": 512, "c": 2048, "f": 5632, "v": 32000, "t": 512, "m": 4096, "d": 128, "h": 16, "g": 4}
        | {"p": r, "q": r, "o": (2048, 512, 512), "r": (r, r, r), "elements": 2**20}
        for r in (8, 16, 64)
    ),
]
# With two layers each: more launch the same kernels more often.
TRAINED = {name: {**shape, "num_hidden_layers": 2} for name, shape in SHAPES.items()}
LARGE = TRAINED["llama-3.2-1b"]
# A model around the block of `krnl bench step`, whose adapters are on gate and up.
BLOCK = {**LARGE, "hidden_size": BlockShape().width, "intermediate_size": BlockShape().ffn}
BLOCK_ADAPTER = AdapterConfig(BlockShape().rank, 32.0, targets=("gate_proj", "up_proj"))


def of_op(case: Case, capability: int) -> Iterator[Dispatch]:
    """Calls of an op in all types and sizes, on aligned addresses and on others."""
    weighted = any(p.name in WEIGHTS and p.dtype is None for p in case.op.inputs)
    free = any(p.any_float for p in case.op.outputs)
    kernels = table(Target(capability))
    for activation, sizes in product(ACTIVATIONS, [*SIZES.values(), *MORE_SIZES]):
        # What other types of weights change, they change on all GPUs alike.
        weights = ACTIVATIONS if weighted and capability == min(SHARED) else (activation,)
        others = ACTIVATIONS if case.op.name == "cast" else (activation, F32)
        for weight, target, shift in product(weights, others if free else (activation,), (0, 1)):
            bench = chosen(case, sizes, activation, weight, target)
            bench.shift = shift
            yield from lower(bench.emit()[0].calls, kernels)


def of_training(
    shape: dict[str, Any],
    capability: int,
    activation: DType = BF16,
    tokens: int = 4096,
    adapter: AdapterConfig = ADAPTER,
    recomputed: Recomputed = 0,
) -> Iterator[Dispatch]:
    """The programs of a model."""
    config = parse(shape, "test")
    backend = Paper("cuda", ON_PAPER.limits, table(Target(capability)))
    weights = imagined_weights(config, BF16, backend.limits.mapped_alignment)
    paths = adapter.select(linear_paths(config))
    planned = plan_training(
        config, weights, adapter, paths, backend, activation, tokens, recomputed
    )
    for program in (planned.accumulate, planned.evaluate, planned.update):
        yield from program.dispatches


def of_shared_keys() -> Iterator[Dispatch]:
    """Attention's backward on Hopper with each number of blocks that may share a sum."""
    case = next(case for case in CASES if case.op.name == "attention_backward")
    for activation, d in product((BF16, F16), WIDTHS):
        bench = chosen(case, {**SIZES["whole"], "d": d}, activation)
        for split in key_splits(d):
            yield from lower(bench.emit()[0].calls, keys_shared_by(split))


def of_large_models(capability: int) -> Iterator[Dispatch]:
    """All that models of usual sizes train with, and in other types and ways what one does."""
    dropped = replace(ADAPTER, dropout=0.1)
    for activation in ACTIVATIONS:
        yield from of_training(LARGE, capability, activation)
        yield from of_training(LARGE, capability, activation, adapter=dropped, recomputed="layer")
    for trained, tokens in product(TRAINED.values(), (512, 2048, 8192)):
        yield from of_training(trained, capability, tokens=tokens)
    for tokens in (512, 4096):
        yield from of_training(BLOCK, capability, tokens=tokens, adapter=BLOCK_ADAPTER)


@cache
def launches(capability: int) -> dict[Kernel, list[Launch]]:
    """Of everything above, by kernel; one for each packing of its parameters."""
    found: dict[tuple[Any, ...], Launch] = {}
    dispatches = [d for case in CASES for d in of_op(case, capability)]
    if Target(capability).hopper:
        dispatches += of_shared_keys()
    for dispatch in [*dispatches, *of_large_models(capability)]:
        for launch in launched(dispatch):
            kernel = Kernel.of(launch)
            found.setdefault((kernel, launch.threads, launch.shared, sizes(launch)), launch)
    by_kernel: dict[Kernel, list[Launch]] = {}
    for (kernel, *_), launch in found.items():
        by_kernel.setdefault(kernel, []).append(launch)
    return by_kernel


def sizes(launch: Launch) -> tuple[int, ...]:
    """Bytes of its parameters."""
    return tuple(map(len, parameters(launch, False, lambda buffer: 0, lambda m: bytes(MAP_BYTES))))


def complaints(kernel: Kernel, cubin: Cubin, launch: Launch, most_shared: int) -> Iterator[str]:
    """What is wrong with launching this code so."""
    there = shape(cubin.image, cubin.entry)
    if there.parameters != sizes(launch):
        yield f"takes parameters of {there.parameters} bytes and is given {sizes(launch)}"
    if there.most_threads is not None and launch.threads > there.most_threads:
        yield f"allows {there.most_threads} threads and is given {launch.threads}"
    if launch.threads % WARP:
        yield f"is given {launch.threads} threads, which are no whole warps"
    warp = -(-there.registers * WARP // GRANULE) * GRANULE
    if warp * (launch.threads // WARP) > REGISTERS:
        yield f"takes {there.registers} registers, too many for {launch.threads} threads"
    if there.shared + launch.shared > most_shared:
        yield f"takes {there.shared} + {launch.shared} bytes of shared memory"
    if launch.cluster > 1 and launch.groups[0] % launch.cluster:
        yield f"has {launch.groups[0]} blocks in clusters of {launch.cluster}"
    x, y, z = launch.groups
    if x >= 2**31 or max(y, z) > 65535:
        yield f"has a grid of {launch.groups}"


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest) -> Path:
    """What earlier runs compiled from the same text is not compiled again."""
    cache = request.config.cache
    assert cache is not None
    return cache.mkdir("cuda")


@pytest.mark.parametrize("capability", SHARED)
def test_every_kernel_fits_its_launches(capability: int, folder: Path) -> None:
    compiler = Compiler(nvrtc, architecture(capability, OFFERED), folder)
    wanted, faults = launches(capability), list[str]()
    for kernel, made in compiler.try_each(wanted):
        if isinstance(made, BackendError):
            faults.append(str(made))
            continue
        most = MAY_SPILL.get(kernel.expression.partition("<")[0], 0)
        if SERIALISED.search(made.log):
            faults.append(f"{kernel} is slow: {made.log}")
        faults += [x[0] for x in SPILL.finditer(made.log) if int(x[1]) > most]
        for launch in wanted[kernel]:
            told = complaints(kernel, made, launch, SHARED[capability])
            faults += [f"{kernel} {fault}" for fault in told]
    print(f"{compiler.architecture}: {len(wanted)} kernels")
    assert not faults, "\n".join(faults)


def test_every_source_is_launched() -> None:
    """A source of which no table launches anything would be compiled by nobody."""
    used = {kernel.library for capability in SHARED for kernel in launches(capability)}
    assert used == set(libraries())


SOURCE = """
struct Numbers { int of[3]; };
struct __align__(64) Maps { unsigned char opaque[2][128]; };
template <int kThreads>
__global__ void __launch_bounds__(kThreads) sound(const Numbers numbers, float *y, Maps maps, int) {
  __shared__ float scratch[100];
  scratch[threadIdx.x] = y[threadIdx.x] + maps.opaque[1][threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = scratch[(threadIdx.x + numbers.of[2]) % 96];
}
template <int kCount>
__global__ void __launch_bounds__(1024, 2) crowded(float *y) {
  float held[kCount];
  for (int i = 0; i < kCount; i++) held[i] = y[i * 1024 + threadIdx.x];
  __syncthreads();
  for (int i = 0; i < kCount; i++) y[i * 1024 + threadIdx.x] = held[i] * held[(i + 7) % kCount];
}
"""


def test_what_the_code_says_is_understood(tmp_path: Path) -> None:
    compiler = Compiler(nvrtc, "sm_80", tmp_path, lambda library: SOURCE, dict)
    buffer = Buffer("y", (96,), F32, Kind.STATE)
    map_ = TensorMap(buffer, 1, 96, 96, 1, 32)
    given = (struct.pack("<3i", 1, 2, 3), buffer, (map_, None))
    good = Launch("lib", "sound", given, (4, 1, 1), 96, (), {0: 96})
    kernel = Kernel.of(good)
    cubin = compiler.compile([kernel])[kernel]
    there = shape(cubin.image, cubin.entry)
    assert (there.parameters, there.most_threads) == ((12, 8, 256, 4), 96)
    assert there.shared == 400 and 8 <= there.registers <= 64
    assert not list(complaints(kernel, cubin, good, 99 << 10)) and not SPILL.findall(cubin.log)
    for change, words in (
        (
            {"arguments": given[:2]},
            "takes parameters of (12, 8, 256, 4) bytes and is given (12, 8, 4)",
        ),
        ({"arguments": (*given[:2], (buffer, None))}, "is given (12, 8, 16, 4)"),
        ({"threads": 128}, "allows 96 threads and is given 128"),
        ({"threads": 72}, "72 threads, which are no whole warps"),
        ({"shared": 99 << 10}, "takes 400 + 101376 bytes of shared memory"),
        ({"cluster": 3}, "has 4 blocks in clusters of 3"),
        ({"groups": (1, 65536, 1)}, "has a grid of (1, 65536, 1)"),
    ):
        (told,) = complaints(kernel, cubin, replace(good, **change), 99 << 10)
        assert words in told
    crowded = Kernel("lib", "crowded<64>")
    assert SPILL.findall(compiler.compile([crowded])[crowded].log)
