"""The Metal driver, on the simulator: memory, programs, and its words when something is wrong."""

import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from krnl.backends.metal import LAUNCHES_PER_BUFFER, ON_PAPER, MetalBackend
from krnl.dtypes import BF16, F32, DType
from krnl.errors import BackendError, ConfigError, PlanError
from krnl.kernels.launch import GpuRow, Launch
from krnl.kernels.metal.sources import source
from krnl.plan.arena import plan
from krnl.plan.buffer import Buffer, FileRegion, Kind
from krnl.plan.lower import Table
from krnl.plan.op import Op, op
from krnl.plan.step import Call, Step
from metalsim.commands import CommandBuffer, CommandQueue
from metalsim.install import SimulatedBackend, installed, metal_backend
from metalsim.resources import Simulation

N = 96

SOURCE = """
#include <metal_stdlib>
using namespace metal;
constant bool has_shift [[function_constant(0)]];
constant uint times [[function_constant(1)]];
constant float factor [[function_constant(2)]];

kernel void scale(device const float *x [[buffer(0)]], device float *y [[buffer(1)]],
                  constant float &shift [[buffer(2), function_constant(has_shift)]],
                  uint i [[thread_position_in_grid]]) {
  float value = x[i];
  for (uint step = 0; step < times; step++) value *= factor;
  y[i] = has_shift ? value + shift : value;
}

kernel void multiply(device const float *x [[buffer(0)]], device const ushort *w [[buffer(1)]],
                     device float *y [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  y[i] = x[i] * as_type<float>(uint(w[i]) << 16);
}

kernel void accumulate(device const float *x [[buffer(0)]], device float *total [[buffer(1)]],
                       uint i [[thread_position_in_grid]]) {
  total[i] = total[i] * 0.75f + x[i];
}

kernel void runaway(device const float *x [[buffer(0)]], device float *y [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) {
  y[i + 100000000u] = x[i];
}
"""


@op("x[n] -> y[n]")
def scale(x: Any) -> Any:
    return 8 * x


@op("x[n] w[n]:bf16 -> y[n]")
def multiply(x: Any, w: Any) -> Any:
    return x * w


@op("x[n] -> +total[n]")
def accumulate(x: Any, total: Any) -> Any:
    return 0.75 * total + x


@op("x[n] -> y[n]")
def runaway(x: Any) -> Any:
    return x


def launch(call: Call, function: str, *extra: bytes | None, **given: Any) -> Launch:
    buffers = [b for b in (*call.inputs, *call.outputs) if isinstance(b, Buffer)]
    return Launch("own", function, (*buffers, *extra), (buffers[0].size // 32, 1, 1), 32, **given)


def scaled(constants: dict[int, Any], *extra: bytes | None) -> GpuRow:
    return GpuRow(
        "scale", launches=lambda call, _: [launch(call, "scale", *extra, constants=constants)]
    )


def plain(op: Op) -> GpuRow:
    return GpuRow(op.name, launches=lambda call, _: [launch(call, op.name)])


SCALE = scaled({0: False, 1: 3, 2: 2.0}, None)
ROWS = [SCALE, plain(multiply), plain(accumulate), plain(runaway)]


def own_source(library: str) -> str:
    assert library == "own"
    return SOURCE


def backend(rows: Sequence[GpuRow] = ROWS, **settings: Any) -> SimulatedBackend:
    settings.setdefault("source", own_source)
    return metal_backend(kernels=Table("metal", rows), **settings)


class Work:
    """A plan of one program over its own memory."""

    def __init__(self, emit: Callable[[Step], Any], device: SimulatedBackend | None = None):
        self.device = device or backend()
        step = Step("test", F32)
        emit(step)
        (self.plan,) = plan([step], self.device.kernels, self.device.limits.largest_block)
        self.memory = self.device.allocate(self.plan.layout)
        self.program = self.device.compile(self.plan, self.memory)


def vector(name: str, kind: Kind = Kind.INPUT, n: int = N, dtype: DType = F32) -> Buffer:
    return Buffer(name, (n,), dtype, kind)


def values(seed: int, n: int = N) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=n).astype(np.float32)


# Running


def test_a_program_runs_when_its_result_is_read() -> None:
    x, y = vector("x"), vector("y", Kind.STATE)
    work = Work(lambda step: step(scale, x, into=y))
    work.memory.write(x, values(0))
    work.program.run()
    assert not work.memory.view(y).any(), "nothing has waited yet"
    np.testing.assert_array_equal(work.memory.read(y), 8 * values(0))
    work.device.simulation.expect_clean()
    assert work.device.simulation.executed == {"scale": 1}


def test_writing_waits_for_what_was_enqueued() -> None:
    x, y = vector("x"), vector("y", Kind.STATE)
    work = Work(lambda step: step(accumulate, x, into=y))
    for seed in (1, 2):
        work.memory.write(x, values(seed))
        work.program.run()
    want = np.float32(0.75) * values(1) + values(2)
    np.testing.assert_allclose(work.memory.read(y), want, rtol=2 * F32.eps)


def test_views_are_bound_by_their_offset() -> None:
    x, y = vector("x", n=3 * N), vector("y", Kind.STATE, n=3 * N)
    work = Work(lambda step: step(scale, x.part("x", 40, (N,)), into=y.part("y", 65, (N,))))
    given = values(3, 3 * N)
    work.memory.write(x, given)
    work.program.run()
    want = np.zeros(3 * N, np.float32)
    want[65 : 65 + N] = 8 * given[40 : 40 + N]
    np.testing.assert_array_equal(work.memory.read(y), want)
    np.testing.assert_array_equal(work.memory.read(y.part("", 65, (N,))), want[65 : 65 + N])


def test_values_are_rounded_to_the_buffer_s_type() -> None:
    x, w, y = vector("x"), vector("w", dtype=BF16), vector("y", Kind.STATE)
    work = Work(lambda step: step(multiply, x, w, into=y))
    work.memory.write(x, values(4))
    work.memory.write(w, values(5))
    assert work.memory.read(w).dtype == BF16.numpy
    work.program.run()
    want = values(4) * values(5).astype(BF16.numpy).astype(np.float32)
    np.testing.assert_array_equal(work.memory.read(y), want)


def chain(length: int) -> tuple[Work, Buffer, Buffer]:
    x, total = vector("x"), vector("total", Kind.STATE)

    def emit(step: Step) -> None:
        for _ in range(length):
            step(accumulate, step(scale, x), into=total)

    return Work(emit), x, total


def test_a_replay_equals_its_dispatches_one_by_one() -> None:
    results = []
    for one_by_one in (False, True):
        work, x, total = chain(2 * LAUNCHES_PER_BUFFER)
        work.memory.write(x, values(6))
        for _ in range(2):
            if one_by_one:
                for dispatch in work.program._dispatches:
                    work.program._gpu.commit([dispatch])
                    work.program._gpu.wait()
            else:
                work.program.run()
        results.append(work.memory.read(total))
    np.testing.assert_array_equal(*results)
    assert results[0].any()


def test_a_replay_is_cut_into_command_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    committed: list[CommandBuffer] = []
    commit = CommandBuffer.commit

    def note(buffer: CommandBuffer) -> None:
        committed.append(buffer)
        pools.append(objc.pools)
        commit(buffer)

    monkeypatch.setattr(CommandBuffer, "commit", note)
    work, x, _ = chain(LAUNCHES_PER_BUFFER + 3)
    pools: list[int] = []
    objc = work.device._gpu.objc
    work.program.run()
    counts = [len(buffer._encoders) for buffer in committed]
    assert counts == [LAUNCHES_PER_BUFFER, LAUNCHES_PER_BUFFER, 6]
    assert committed[0].label() == "scale to accumulate"
    assert [encoder.label() for encoder in committed[2]._encoders] == ["scale", "accumulate"] * 3
    assert pools == [1, 1, 1], "an autorelease pool for each"
    assert objc.pools == 0
    work.memory.read(x)


def test_nothing_to_do_is_not_launched() -> None:
    x, y = vector("x", n=0), vector("y", Kind.STATE, n=0)
    work = Work(lambda step: step(scale, x, into=y))
    work.program.run()
    assert work.memory.read(y).shape == (0,)
    assert work.program.time() == [0.0]
    assert not work.device.simulation.executed


def test_a_view_of_no_bytes_is_bound() -> None:
    """It may lie at the end of its block, where Metal takes no offset."""
    x, y = vector("x"), vector("y", Kind.STATE)
    end = x.part("end", N, (0,))

    def launches(call: Call, workspace: Buffer | None) -> list[Launch]:
        given = launch(call, "scale", constants={0: True, 1: 3, 2: 2.0})
        return [replace(given, arguments=(x, y, end))]

    work = Work(lambda step: step(scale, x, into=y), backend([GpuRow("scale", launches=launches)]))
    work.memory.write(x, values(7))
    work.program.run()
    np.testing.assert_array_equal(work.memory.read(y), 8 * values(7) + values(7)[0])


def test_poison_fills_temps_with_nan() -> None:
    x, y = vector("x"), vector("y", Kind.STATE)
    work = Work(lambda step: step(scale, step(scale, x), into=y))
    work.memory.write(x, values(8))
    work.memory.poison()
    temp = next(b for b in work.plan.layout.places if b.kind is Kind.TEMP)
    assert np.isnan(work.memory.read(temp)).all()
    assert not np.isnan(work.memory.read(x)).any()
    work.program.run()
    np.testing.assert_array_equal(work.memory.read(y), 64 * values(8))


# Function constants


@pytest.mark.parametrize("shift", [None, 0.5])
def test_function_constants_have_the_type_that_the_source_gives_them(shift: float | None) -> None:
    extra = None if shift is None else np.float32(shift).tobytes()
    x, y = vector("x"), vector("y", Kind.STATE)
    row = scaled({0: shift is not None, 1: 2, 2: 0.5}, extra)
    work = Work(lambda step: step(scale, x, into=y), backend([row]))
    work.memory.write(x, values(9))
    work.program.run()
    np.testing.assert_array_equal(work.memory.read(y), values(9) / 4 + np.float32(shift or 0))


def test_a_kernel_is_specialised_once_for_each_set_of_constants() -> None:
    device = backend()
    x, y = vector("x"), vector("y", Kind.STATE)
    Work(lambda step: (step(scale, x, into=y), step(scale, x, into=y)), device)
    gpu = device._gpu
    assert len(gpu._pipelines) == 1
    device.kernels = Table("metal", [scaled({0: False, 1: 3, 2: 2.5}, None)])
    Work(lambda step: step(scale, x, into=y), device)
    assert len(gpu._pipelines) == 2
    assert len(gpu._libraries) == 1


# Weights in files


def mapped(tmp_path: Path, offset: int, **settings: Any) -> tuple[Work, Buffer, Buffer, np.ndarray]:
    """y = x * w, where w lies `offset` bytes deep in a file of odd length."""
    content = np.random.default_rng(10).normal(size=50_000).astype(BF16.numpy)
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(offset) + content.tobytes() + b"end")
    first = Buffer("first", (N,), BF16, Kind.WEIGHT, file=FileRegion(path, offset))
    last = Buffer(
        "last", (N,), BF16, Kind.WEIGHT, file=FileRegion(path, offset + content.nbytes - 2 * N)
    )
    x, y, z = vector("x"), vector("y", Kind.STATE), vector("z", Kind.STATE)
    work = Work(
        lambda step: (step(multiply, x, first, into=y), step(multiply, x, last, into=z)),
        backend(**settings),
    )
    work.memory.write(x, values(11))
    work.program.run()
    for buffer, weight in ((y, content[:N]), (z, content[-N:])):
        want = values(11) * weight.astype(np.float32)
        np.testing.assert_array_equal(work.memory.read(buffer), want)
    work.device.simulation.expect_clean()
    np.testing.assert_array_equal(work.memory.read(first), content[:N])
    return work, first, last, content


def shares_memory(work: Work, weight: Buffer) -> bool:
    """Whether the GPU sees the mapped file itself."""
    buffer, offset = work.memory.binding(weight)
    seen = np.frombuffer(buffer.contents().as_buffer(buffer.length()), np.uint8)
    return seen.ctypes.data + offset == work.memory.view(weight).ctypes.data


def test_weights_are_used_where_they_lie_in_their_file(tmp_path: Path) -> None:
    work, first, last, _ = mapped(tmp_path, 80)
    assert work.memory.binding(first)[0] is work.memory.binding(last)[0]
    assert shares_memory(work, first) and shares_memory(work, last)
    with pytest.raises(ValueError, match="read-only"):
        work.memory.write(first, np.zeros(N))


def test_a_file_larger_than_a_buffer_may_be_is_mapped_by_weights(tmp_path: Path) -> None:
    work, first, last, _ = mapped(tmp_path, 80, largest_buffer=65536)
    assert work.memory.binding(first)[0] is not work.memory.binding(last)[0]
    assert shares_memory(work, first) and shares_memory(work, last)


@pytest.mark.parametrize("largest", [1 << 30, 65536])
def test_a_weight_that_lies_askew_is_not_mapped(tmp_path: Path, largest: int) -> None:
    """Kernels read four elements of a weight at once: eight bytes of bf16. Plans hold such weights
    in memory."""
    with pytest.raises(AssertionError, match=r"first\[96\]:bf16 lies askew in .*safetensors"):
        mapped(tmp_path, 84, largest_buffer=largest)


# Times


def test_times_are_the_gpu_s(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.5, 11.0, 11.125])
    monkeypatch.setattr(CommandBuffer, "GPUStartTime", lambda buffer: next(clock))
    monkeypatch.setattr(CommandBuffer, "GPUEndTime", lambda buffer: next(clock))
    work, x, total = chain(1)
    work.memory.write(x, values(12))
    assert work.program.time() == [0.5, 0.125]
    np.testing.assert_array_equal(work.memory.read(total), 8 * values(12), "it ran once")


def test_a_gpu_that_tells_no_times_is_not_believed() -> None:
    work, _, _ = chain(1)
    with pytest.raises(BackendError, match=r"scale: KRNL Metal simulator does not tell when it"):
        work.program.time()


# What can go wrong


def test_a_machine_that_is_no_mac() -> None:
    if sys.platform == "darwin":
        pytest.skip("this is one")
    with pytest.raises(ConfigError, match="the GPU of a Mac, and this machine is none; use"):
        MetalBackend()


def test_a_mac_without_pyobjc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setitem(sys.modules, "Metal", None)
    with pytest.raises(ConfigError, match="pip install pyobjc-framework-Metal"):
        MetalBackend()


def test_a_mac_without_a_gpu_or_with_an_old_one() -> None:
    with pytest.raises(ConfigError, match="Metal finds no GPU on this machine; use --device cpu"):
        backend(has_device=False)
    with pytest.raises(
        ConfigError, match=r"needs Apple silicon \(M1 or later\); this GPU is 'KRNL"
    ):
        backend(families=1004)
    backend(families=1005)  # a virtual Mac on Apple silicon


def test_a_mac_with_an_old_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "mac_ver", lambda: ("13.6.9", ("", "", ""), "arm64"))
    with pytest.raises(ConfigError, match=r"needs macOS 14 or later, and this is 13\.6\.9"):
        backend()
    monkeypatch.setattr(platform, "mac_ver", lambda: ("14.0", ("", "", ""), "arm64"))
    backend()


def test_more_memory_than_the_gpu_may_use() -> None:
    with pytest.raises(PlanError, match=r"takes 0.25 GiB, and .* 0.06 GiB .*: 0.19 GiB too much"):
        Work(
            lambda step: step(scale, vector("x", n=1 << 25), into=vector("y", Kind.STATE, 1 << 25)),
            backend(working_set=1 << 26),
        )


def test_a_block_that_is_too_large() -> None:
    device = backend(largest_buffer=1 << 20)
    step = Step("test", F32)
    step(scale, vector("x", n=1 << 19), into=vector("y", Kind.STATE, 1 << 19))
    (planned,) = plan([step], device.kernels)  # without heed to the device
    with pytest.raises(PlanError, match="of 2,097,152 bytes is 1,048,576 more than this GPU"):
        device.allocate(planned.layout)


def test_memory_that_is_not_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    device = backend()
    monkeypatch.setattr(
        type(device._gpu.device), "newBufferWithLength_options_", lambda *given: None
    )
    with pytest.raises(BackendError, match=r"Metal grants no 384 bytes. Close other programs"):
        Work(lambda step: step(scale, vector("x"), into=vector("y", Kind.STATE)), device)


def compile_with(row: GpuRow = SCALE, **settings: Any) -> Work:
    def emit(step: Step) -> None:
        with step.scope("layers.3"):
            step(scale, vector("x"), into=vector("y", Kind.STATE))

    return Work(emit, backend([row], **settings))


def test_a_source_that_does_not_compile() -> None:
    broken = '#line 1 "own.metal"' + SOURCE.replace("value *= factor", "value *= faktor")
    with pytest.raises(BackendError) as caught:
        compile_with(source=lambda library: broken)
    first, *words = str(caught.value).splitlines()
    assert first == "layers.3/scale: Metal does not compile own.metal:"
    assert any("own.metal:11:" in line and "faktor" in line for line in words)
    assert len(words) < 15


def test_all_sources_that_do_not_compile_are_told() -> None:
    assert metal_backend("fast").refused_libraries() == []
    broken = {"loss", "norm"}
    device = metal_backend("fast", source=lambda name: "error" if name in broken else source(name))
    refusals = device.refused_libraries()
    assert [words.splitlines()[0] for words in refusals] == [
        "Metal does not compile loss.metal:",
        "Metal does not compile norm.metal:",
    ]


def test_kernels_that_are_not_there_or_not_specialised() -> None:
    missing = GpuRow("scale", launches=lambda call, _: [launch(call, "skale")])
    with pytest.raises(
        BackendError, match=r"^layers.3/scale: own.metal has no kernel 'skale'; it ha"
    ):
        compile_with(missing)
    with pytest.raises(
        BackendError,
        match=r"not specialise kernel 'scale' of own.metal: .*'factor' .index 2. has no",
    ):
        compile_with(scaled({0: False, 1: 3}, None))


def test_more_threads_than_the_kernel_runs_with() -> None:
    with pytest.raises(
        BackendError, match=r"launched with 32 threads .*; this GPU runs at most 16"
    ):
        compile_with(most_threads=16)


def test_a_failure_on_the_gpu_names_the_dispatch() -> None:
    x, y, z = vector("x"), vector("y", Kind.STATE), vector("z", Kind.STATE)

    def emit(step: Step) -> None:
        with step.scope("layers.7"):
            step(scale, x, into=z)
            step(runaway, x, into=y)
            step(scale, x, into=z)

    work = Work(emit, backend(mode="fast"))
    work.program.run()
    with pytest.raises(BackendError, match=r"^layers.7/runaway failed on the GPU: .+"):
        work.memory.read(z)
    work.memory.read(z)  # said once


def test_a_failure_whose_encoder_is_unknown_names_the_command_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new = CommandQueue._new
    monkeypatch.setattr(CommandQueue, "_new", lambda queue, status: new(queue, False))
    x, y = vector("x"), vector("y", Kind.STATE)
    fast = backend(mode="fast")
    work = Work(lambda step: (step(scale, x, into=y), step(runaway, x, into=y)), fast)
    work.program.run()
    with pytest.raises(BackendError, match=r"^One of scale to runaway failed on the GPU"):
        work.memory.read(y)


def test_a_hung_kernel_is_told_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metalsim.commands.FATAL", {"fault": 2})  # MTLCommandBufferErrorTimeout
    x, y = vector("x"), vector("y", Kind.STATE)
    work = Work(lambda step: step(runaway, x, into=y), backend(mode="fast"))
    work.program.run()
    with pytest.raises(BackendError, match=r"It took too long. Lower --tokens."):
        work.memory.read(y)


# What surrounds it


def test_pyobjc_is_told_that_new_buffers_are_owned() -> None:
    with installed(Simulation()) as objc:
        MetalBackend(Table("metal", ROWS), own_source)
    for selector in (
        b"newBufferWithLength:options:",
        b"newBufferWithBytesNoCopy:length:options:deallocator:",
    ):
        told = objc.metadata[selector]
        assert told["retval"]["already_retained"]
        assert set(told["arguments"]) == set(range(2, 2 + selector.count(b":")))


def test_limits_are_the_device_s() -> None:
    device = backend(working_set=5 << 30, largest_buffer=(3 << 30) + 5)
    assert device.limits.memory == 5 << 30
    assert device.limits.largest_block == 3 << 30
    assert [str(t) for t in device.limits.activations] == ["f16", "f32"]


def test_a_plan_needs_no_device() -> None:
    code = """
import sys
from krnl.backends.metal import ON_PAPER
print(ON_PAPER.name, "objc" in sys.modules)
"""
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert got.stdout.split() == ["metal", "False"]
    assert ON_PAPER.kernels.backend == "metal"


def test_local_includes_are_put_in_place_once(tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text('#pragma once\n#include "b.h"\nint a;\n')
    (tmp_path / "b.h").write_text("#pragma once\nint b;\n")
    (tmp_path / "k.metal").write_text(
        '#include <metal_stdlib>\n#include "b.h"\n  # include "a.h"  // for a\nint k;\n'
    )
    assert source("k", tmp_path).splitlines() == [
        '#line 1 "k.metal"',
        "#include <metal_stdlib>",
        '#line 1 "b.h"',
        "",
        "int b;",
        '#line 3 "k.metal"',
        '#line 1 "a.h"',
        "",
        "",
        "int a;",
        '#line 4 "k.metal"',
        "int k;",
    ]
