"""The CUDA engine without a GPU: on a driver that runs nothing, and what people are told where
there is none."""

import ctypes
import gc
import hashlib
import os
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fake_cuda import HOST_SEEN_FROM_GPU, FakeCompiler, FakeDriver, installed
from krnl.backends import cuda_cache, cuda_compiler, cuda_driver, cuda_memory
from krnl.backends.cuda import HELD_LAUNCHES, ON_PAPER, RESERVE, CudaBackend
from krnl.backends.cuda_cache import CubinFolder
from krnl.backends.cuda_compiler import WHEELS, Compiler, Kernel, architecture
from krnl.backends.cuda_driver import STEPWISE_VARIABLE
from krnl.bench import trainer
from krnl.dtypes import BF16, F16, F32, I32, DType
from krnl.errors import BackendError, ConfigError, PlanError
from krnl.kernels.launch import GpuRow, Launch, TensorMap
from krnl.ops.pointwise import embedding
from krnl.plan.arena import Block, Plan, plan
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.lower import Table
from krnl.plan.op import op
from krnl.plan.step import Call, Step
from krnl.training.memory import memory_use
from tiny import ALL, Run, write_model


@op("x[p] -> y[p]")
def twice(x: Any) -> Any:
    """Stands for any op: its launches are what a test says."""
    return 2 * x


X, Y = (Buffer(name, (64,), BF16, Kind.STATE) for name in "xy")


def launch(*arguments: Any, **options: Any) -> Launch:
    given: dict[str, Any] = {"groups": (3, 2, 1), "threads": 128, **options}
    return Launch("lib", "twice", arguments or (X, Y), types=(BF16,), **given)


def table(*launches: Launch) -> Table:
    return Table("cuda", [GpuRow("twice", launches=lambda call, workspace: list(launches))])


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No file of this machine's user is read or written; kernels have no sources."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(STEPWISE_VARIABLE, raising=False)
    monkeypatch.setattr(cuda_memory, "STAGING", 4096)
    monkeypatch.setattr(Compiler.__init__, "__defaults__", (lambda library: "source", dict))


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    with installed(FakeDriver()) as driver:
        yield driver


def planned(kernels: Table, calls: int = 1, name: str = "program") -> Plan:
    step = Step(name, BF16)
    for index in range(calls):
        with step.scope(f"call {index}"):
            step(twice, X, into=Y)
    (made,) = plan([step], kernels)
    return made


def buffers(*made: Buffer) -> Plan:
    """A plan that has them, and does nothing with them."""
    step = Step("nothing", BF16)
    for buffer in made:
        step(
            twice,
            buffer.part("", 0, (buffer.size,)),
            into=Buffer("y", (buffer.size,), BF16, Kind.TEMP),
        )
    (result,) = plan([step], table())
    return result


def test_a_backend_tells_what_it_runs_on(driver: FakeDriver) -> None:
    backend = CudaBackend()
    assert (backend.name, backend.device_name) == ("cuda", "Fake GPU")
    assert backend.driver == "CUDA 13.0, NVRTC 13.0"
    limits = backend.limits
    assert limits.memory == limits.largest_block == 1 << 30
    assert limits.activations == (BF16, F16, F32)
    assert limits.mapped_alignment is None and limits.own_memory
    assert ON_PAPER.limits.activations == limits.activations
    assert ON_PAPER.limits.mapped_alignment is None and ON_PAPER.limits.own_memory


VALUES = {
    "of the buffer's type": lambda dtype: np.arange(6000).astype(dtype.numpy),
    "of another type": lambda dtype: np.arange(6000) % 200,
    "far apart": lambda dtype: np.arange(24000).astype(dtype.numpy)[::4],
    "one for all": lambda dtype: np.full(1, 3.0),
}


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_memory_gives_back_what_was_written(dtype: DType, values: str, driver: FakeDriver) -> None:
    """Through stagings that are filled several times."""
    buffer = Buffer("buffer", (6000,), dtype, Kind.STATE)
    given = VALUES[values](dtype)
    memory = CudaBackend(table()).allocate(buffers(buffer).layout)
    memory.write(buffer, given)
    expected = np.empty(6000, dtype.numpy)
    expected[...] = given
    got = memory.read(buffer)
    assert got.dtype == dtype.numpy and got.tobytes() == expected.tobytes()


def test_what_waits_to_be_copied_is_not_overwritten(driver: FakeDriver) -> None:
    """Small writes do not wait; when there is no more room, what lies there is copied first."""
    buffer = Buffer("buffer", (512,), F32, Kind.STATE)
    memory = CudaBackend(table()).allocate(buffers(buffer).layout)
    for i in range(512):
        memory.write(buffer.part("", i, (1,)), np.array([i]))
    assert driver.calls.count("cuStreamSynchronize") == 0
    np.testing.assert_array_equal(memory.read(buffer), np.arange(512))


def test_small_writes_do_not_wait(driver: FakeDriver) -> None:
    buffer = Buffer("buffer", (512,), F32, Kind.STATE)
    memory = CudaBackend(table()).allocate(buffers(buffer).layout)
    before = len(driver.queue)
    for _ in range(2):
        memory.write(buffer, np.zeros(512))
    assert len(driver.queue) == before + 2 and "cuEventSynchronize" not in driver.calls


def test_a_view_is_written_and_read_where_it_lies(driver: FakeDriver) -> None:
    buffer = Buffer("buffer", (10, 6), F32, Kind.STATE)
    memory = CudaBackend(table()).allocate(buffers(buffer).layout)
    memory.write(buffer, np.zeros((10, 6)))
    memory.write(buffer.rows(3, 5), np.ones((2, 6)))
    assert memory.read(buffer).sum() == memory.read(buffer.rows(3, 5)).sum() == 12
    assert memory.read(buffer.rows(4, 4)).shape == (0, 6)
    memory.write(buffer.rows(4, 4), np.zeros((0, 6)))


IDS = Buffer("ids", (3,), I32, Kind.INPUT)
GATHERING = Table(
    "cuda", [GpuRow("embedding", launches=lambda call, _: [launch(call.arguments["table"])])]
)


def gathering(*tables: Buffer) -> Plan:
    """A plan that reads rows of tables. Its kernels are handed the tables and nothing else."""
    step = Step("gathering", BF16, Buffer("live", (1,), I32, Kind.INPUT))
    for table in tables:
        step(embedding, IDS, table)
    (made,) = plan([step], GATHERING, host_tables=True)
    return made


def test_a_gpu_reads_a_table_in_the_hosts_memory(driver: FakeDriver) -> None:
    """At the address that the driver gives for it. It takes none of the GPU's memory."""
    tables = [Buffer(name, (100, 40), BF16, Kind.WEIGHT) for name in "ab"]
    made = gathering(*tables, tables[1].rows(7, 20))
    backend = CudaBackend(GATHERING)
    before = dict(driver.host)
    memory = backend.allocate(made.layout)
    (address,) = driver.host.keys() - before.keys()
    starts = [memory.address(table) - address for table in tables]
    assert sorted(starts) == [HOST_SEEN_FROM_GPU, HOST_SEEN_FROM_GPU + 8000]
    assert driver.host[address][1] == made.layout.hosted == 16000
    program = backend.compile(made, memory)
    program.run()
    memory.read(IDS)
    handed = [parameters(config, [8])[0] for config in driver.launched]
    assert [int.from_bytes(value, "little") - address for value in handed] == [
        *starts,
        starts[1] + 7 * 40 * BF16.size,
    ]
    assert sum(nbytes for _, nbytes in driver.blocks.values()) == sum(
        block.nbytes for block in made.layout.blocks if not block.host
    )
    del memory
    assert address in driver.host, "the program still uses it"
    del program
    assert driver.host.keys() == before.keys() and not driver.blocks


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_a_table_in_the_hosts_memory_holds_what_one_in_the_gpus_does(
    dtype: DType, values: str, driver: FakeDriver
) -> None:
    """Bit for bit: zeros at first, then what is written to it or to rows of it."""
    table = Buffer("table", (60, 100), dtype, Kind.WEIGHT)
    rows, given = table.rows(3, 5), VALUES[values](dtype)
    found = []
    for made in (gathering(table), buffers(table)):
        memory = CudaBackend(GATHERING).allocate(made.layout)
        assert not memory.read(table).any()
        memory.write(table, given.reshape(60, 100) if given.size > 1 else given)
        memory.write(rows, np.full((2, 100), 3.3))
        memory.write(table.rows(4, 4), np.zeros((0, 100)))
        assert memory.read(rows).tobytes() == np.full((2, 100), 3.3, dtype.numpy).tobytes()
        found.append(memory.read(table))
        assert found[-1].dtype == dtype.numpy
        memory.write(table, 0)
    assert found[0].any() and found[0].tobytes() == found[1].tobytes()


def test_the_hosts_memory_is_written_when_nothing_reads_it(driver: FakeDriver) -> None:
    table = Buffer("table", (4, 8), F32, Kind.WEIGHT)
    made = gathering(table)
    backend = CudaBackend(GATHERING)
    memory = backend.allocate(made.layout)
    memory.write(table, np.ones((4, 8)))
    backend.compile(made, memory).run()
    address = memory.address(table) - HOST_SEEN_FROM_GPU
    seen = []
    driver._enqueue(lambda: seen.append(ctypes.c_float.from_address(address).value))
    memory.write(table, np.zeros((4, 8)))
    assert seen == [1.0] and len(driver.launched) == 1 and not driver.queue
    driver._enqueue(lambda: seen.append(ctypes.c_float.from_address(address).value))
    assert not memory.read(table).any() and seen == [1.0, 0.0]


def test_too_little_of_the_hosts_memory_is_told_in_numbers(driver: FakeDriver) -> None:
    backend = CudaBackend(GATHERING)
    made = gathering(Buffer("table", (3 << 17, 2048), BF16, Kind.WEIGHT))
    driver.failing = {"cuMemHostAlloc": "OUT_OF_MEMORY"}
    with pytest.raises(PlanError, match=r"^1\.50 GiB of weights .* the host has no room for that"):
        backend.allocate(made.layout)
    assert not driver.blocks


def test_what_lies_in_the_hosts_memory_is_none_of_the_gpus(driver: FakeDriver) -> None:
    """In what is told when the GPU has too little; and it is given back then."""
    backend = CudaBackend(GATHERING)
    before = set(driver.host)
    made = gathering(Buffer("table", (1 << 20, 2048), BF16, Kind.WEIGHT))
    layout = replace(made.layout, blocks=[*made.layout.blocks, Block(Kind.STATE, 3 << 29)])
    with pytest.raises(PlanError) as raised:
        backend.allocate(layout)
    assert "This takes 1.50 GiB of the GPU's memory (1.50 GiB of adapter" in str(raised.value)
    del raised
    assert driver.host.keys() == before and not driver.blocks


@pytest.mark.parametrize("kind", ["llama", "untied"])
def test_what_is_planned_is_what_is_allocated(
    kind: str, driver: FakeDriver, tmp_path: Path
) -> None:
    """A whole training session, on the GPU and on the host."""
    backend = CudaBackend()
    before = set(driver.host)
    model = write_model(tmp_path / "model", kind)
    run = Run(model, ALL, backend, activation=BF16)
    use = memory_use(run.planned, backend)
    assert use.total - RESERVE == sum(nbytes for _, nbytes in driver.blocks.values())
    hosted = [nbytes for at, (_, nbytes) in driver.host.items() if at not in before]
    assert sum(hosted) == use.hosted and (use.hosted > 0) == (kind == "untied")
    for name, buffer in run.planned.decoder.weights.held.items():
        np.testing.assert_array_equal(run.memory.read(buffer), model.checkpoint.read(name))


def test_the_peak_of_a_benchmark_is_what_the_gpu_holds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trainer, "open_backend", lambda device: CudaBackend())
    model, rows = write_model(tmp_path / "model", "untied"), trainer.Rows(2, 16)
    with installed(FakeDriver(capability=86)) as driver:
        step = trainer.training_step(model, "cuda", "bf16", [rows.packed(model.config.vocab_size)])
        assert step().peak == sum(nbytes for _, nbytes in driver.blocks.values())


def test_poison_fills_temps_and_nothing_else(driver: FakeDriver) -> None:
    step, temp = Step("step", F32), Buffer("temp", (64,), F32, Kind.TEMP)
    state = Buffer("state", (64,), F32, Kind.STATE)
    step(twice, state, into=temp)
    (made,) = plan([step], table())
    memory = CudaBackend(table()).allocate(made.layout)
    memory.write(state, np.zeros(64))
    memory.poison()
    assert np.isnan(memory.read(temp)).all() and not memory.read(state).any()


def test_memory_is_given_back(driver: FakeDriver) -> None:
    backend = CudaBackend(table(launch()))
    made = planned(backend.kernels)
    memory = backend.allocate(made.layout)
    program = backend.compile(made, memory)
    assert driver.blocks
    del memory
    assert driver.blocks, "the program still uses it"
    del program
    assert not driver.blocks and "cuGraphExecDestroy" in driver.calls


def test_too_little_memory_is_told_in_numbers(driver: FakeDriver) -> None:
    backend = CudaBackend(table())
    big = [
        Buffer(f"b{i}", (3 << 27,), BF16, kind) for i, kind in enumerate((Kind.WEIGHT, Kind.GRAD))
    ]
    with pytest.raises(PlanError) as raised:
        backend.allocate(buffers(*big).layout)
    message = str(raised.value)
    assert "This takes 2.25 GiB of the GPU's memory (0.75 GiB of weights, 0.75 GiB of" in message
    assert "1.00 of 1.00 GiB are free. Lower --tokens" in message
    del raised
    assert not driver.blocks


@pytest.mark.parametrize(
    "function",
    ["cuModuleLoadData", "cuFuncSetAttribute", "cuGraphInstantiate", "cuGraphUpload"],
)
def test_too_little_memory_beside_the_blocks_comes_with_advice(
    function: str, driver: FakeDriver
) -> None:
    """For code and graphs. What was made until then is given back."""
    backend = CudaBackend(table(launch()))
    made = planned(backend.kernels)
    memory = backend.allocate(made.layout)
    driver.failing = {function: "OUT_OF_MEMORY"}
    with pytest.raises(
        PlanError, match=rf"{function} fails: .* Lower --tokens, train with a lower"
    ):
        backend.compile(made, memory)
    driver.failing = {}
    backend.compile(made, memory).run()
    assert driver.captured is None


def test_a_capture_that_fails_is_ended(driver: FakeDriver) -> None:
    backend = CudaBackend(table(launch()))
    made = planned(backend.kernels)
    memory = backend.allocate(made.layout)
    for status, error in (("OUT_OF_MEMORY", PlanError), ("ILLEGAL_ADDRESS", BackendError)):
        driver.failing = {"cuLaunchKernelEx": status}
        with pytest.raises(error):
            backend.compile(made, memory)
        assert driver.captured is None and driver.calls[-1] == "cuStreamEndCapture"


def test_what_the_engine_takes_beside_a_plan_is_planned_for(driver: FakeDriver) -> None:
    """On the device and on paper alike; the context is no part of what is free."""
    before = CudaBackend().limits
    assert before.scratch == ON_PAPER.limits.scratch == RESERVE > 0
    driver._memory(1 << 20)  # as a context takes it
    assert CudaBackend().limits.memory == before.memory - (1 << 20)


def parameters(config: Any, sizes: list[int]) -> list[bytes]:
    """What a launch hands to its kernel."""
    pointers = (ctypes.c_void_p * len(sizes)).from_address(config.pointers)
    return [ctypes.string_at(p, size) for p, size in zip(pointers, sizes, strict=True)]


def test_a_launch_is_as_the_table_says(driver: FakeDriver) -> None:
    """Grid, block, shared memory, cluster, and parameters as C++ takes them."""
    struct_bytes = struct.pack("<3i", 1, 2, 3)
    map_ = TensorMap(X, rows=4, columns=16, stride=16, box_rows=2, box_columns=8)
    given = (X.part("view", 8, (8,)), None, struct_bytes, (Y, None), (map_, None))
    kernels = table(launch(*given, shared=60 << 10, cluster=3))
    backend = CudaBackend(kernels)
    made = planned(kernels)
    memory = backend.allocate(made.layout)
    program = backend.compile(made, memory)
    program.run()
    assert not driver.launched, "a run is enqueued, not waited for"
    memory.read(X)
    (config,) = driver.launched
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (3, 2, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (128, 1, 1)
    assert config.sharedMemBytes == 60 << 10 and driver.shared == {config.function: 60 << 10}
    assert config.function == "_Ztwice<bf16>"
    overlap, cluster = config.attrs
    assert overlap.id.name == "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
    assert overlap.value.programmaticStreamSerializationAllowed == 1
    assert cluster.id.name == "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"
    size = cluster.value.clusterDim
    assert (size.x, size.y, size.z) == (3, 1, 1)
    view, nothing, three, pointers, maps = parameters(config, [8, 8, 12, 16, 256])
    address = {b: memory.address(b).to_bytes(8, "little") for b in (X, Y)}
    assert int.from_bytes(view, "little") == memory.address(X) + 16
    assert nothing == bytes(8) and three == struct_bytes
    assert pointers == address[Y] + bytes(8)
    assert maps == b"M" * 128 + bytes(128)
    ((dtype, rank, start, extent, strides, box, steps, *modes),) = driver.maps
    names = driver.CUtensorMapDataType
    assert dtype == names.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 and rank == 2
    assert start.value == memory.address(X)
    assert (list(extent), list(strides), list(box), list(steps)) == ([16, 4], [32], [8, 2], [1, 1])
    assert modes == [
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    ]


def test_launches_overlap_from_hopper_on() -> None:
    with installed(FakeDriver(capability=86)) as driver:
        backend = CudaBackend(table(launch()))
        made = planned(backend.kernels)
        memory = backend.allocate(made.layout)
        backend.compile(made, memory).run()
        memory.read(X)
        assert driver.launched[0].attrs == []


@pytest.mark.parametrize(
    "map_",
    [
        TensorMap(X.part("askew", 1, (8,)), 1, 8, 8, 1, 8),
        TensorMap(X, 4, 12, 12, 2, 8),
        TensorMap(X, 1, 64, 64, 1, 72),
        TensorMap(X, 1, 64, 64, 257, 64),
    ],
    ids=["start", "stride", "wide", "tall"],
)
def test_a_map_that_the_copy_engine_does_not_take(map_: TensorMap, driver: FakeDriver) -> None:
    backend = CudaBackend(table(launch((map_,))))
    made = planned(backend.kernels)
    with pytest.raises(BackendError, match=r"call 0/twice: .* cannot be fetched in boxes"):
        backend.compile(made, backend.allocate(made.layout))


def test_more_shared_memory_than_there_is(driver: FakeDriver) -> None:
    backend = CudaBackend(table(launch(shared=100 << 10)))
    made = planned(backend.kernels)
    with pytest.raises(
        BackendError, match=r"lib\.cu: it takes 102,400 bytes of shared memory.* has 101,376"
    ):
        backend.compile(made, backend.allocate(made.layout))


def test_a_replay_is_one_graph_launch(driver: FakeDriver) -> None:
    """Captured and uploaded once; every run launches all of it, in order."""
    backend = CudaBackend(table(launch(), launch(groups=(5, 1, 1)), launch(groups=(0, 1, 1))))
    made = planned(backend.kernels, calls=3)
    memory = backend.allocate(made.layout)
    program = backend.compile(made, memory)
    driver.calls.clear()
    for _ in range(2):
        program.run()
    assert driver.calls == ["cuGraphLaunch"] * 2
    memory.read(X)
    assert [config.gridDimX for config in driver.launched] == [3, 5] * 3 * 2


def test_times_are_of_dispatches_without_gaps(driver: FakeDriver) -> None:
    """The stream is held while many are enqueued, but no more than its queue takes; none overlaps
    the last, and one without launches takes no time."""
    kernels = Table("cuda", [GpuRow("twice", launches=some)])
    calls = HELD_LAUNCHES * 3 - 1
    backend = CudaBackend(kernels)
    made = planned(kernels, calls)
    memory = backend.allocate(made.layout)
    seconds = backend.compile(made, memory).time()
    assert seconds == [0.0 if i % 3 == 2 else 0.0015 for i in range(calls)]
    firsts, others = driver.launched[::2], driver.launched[1::2]
    assert len(firsts) == len(others) == HELD_LAUNCHES * 2
    assert all(config.attrs == [] for config in firsts)
    assert all(len(config.attrs) == 1 for config in others)
    assert driver.held == 4


def test_what_waits_for_the_gpu_cannot_be_timed(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under CUDA_LAUNCH_BLOCKING: the stream is let go after a while, and that is told."""
    monkeypatch.setattr(cuda_driver, "HELD_SECONDS", 0.1)
    backend = CudaBackend(table(launch()))
    made = planned(backend.kernels)
    program = backend.compile(made, backend.allocate(made.layout))
    start = FakeDriver._start

    def blocks(self: FakeDriver, configs: list[Any]) -> None:
        start(self, configs)
        flag = ctypes.c_uint32.from_address(program._gpu._held)
        while not flag.value:
            time.sleep(0.01)

    monkeypatch.setattr(FakeDriver, "_start", blocks)
    with pytest.raises(BackendError, match="Nothing can be timed while the host waits"):
        program.time()


def test_a_kernel_that_cannot_be_loaded_is_named(driver: FakeDriver) -> None:
    backend = CudaBackend(table(launch()))
    made = planned(backend.kernels)
    memory = backend.allocate(made.layout)
    for function in ("cuModuleLoadData", "cuFuncSetAttribute", "cuLaunchKernelEx"):
        driver.failing = {function: "MISMATCH"}
        with pytest.raises(BackendError, match=rf"^'twice<bf16>' of lib.cu: {function} fails"):
            backend.compile(made, memory)


def test_a_device_gives_back_everything(driver: FakeDriver) -> None:
    backend = CudaBackend(table(launch()))
    made = planned(backend.kernels)
    backend.compile(made, backend.allocate(made.layout)).time()
    calls = driver.calls
    calls.clear()
    del backend
    gc.collect()
    assert {"cuStreamDestroy", "cuMemFreeHost", "cuEventDestroy", "cuModuleUnload"} <= set(calls)


def some(call: Call, workspace: Buffer | None) -> list[Launch]:
    return [] if int(call.label.split("/")[0].split()[1]) % 3 == 2 else [launch(), launch()]


def test_a_failure_names_what_was_run(driver: FakeDriver) -> None:
    """Told at the next wait, or by whatever is called before."""
    backend = CudaBackend(table(launch()))
    made = planned(backend.kernels, name="accumulate")
    memory = backend.allocate(made.layout)
    program = backend.compile(made, memory)
    program.run()
    for function, act in (
        ("cuStreamSynchronize", lambda: memory.read(X)),
        ("cuMemcpyHtoDAsync", lambda: memory.write(X, np.zeros(64))),
        ("cuGraphLaunch", program.run),
    ):
        driver.failing = {function: "ILLEGAL_ADDRESS"}
        with pytest.raises(BackendError) as raised:
            act()
        assert str(raised.value) == (
            "accumulate failed on the GPU: in the driver's words (CUDA_ERROR_ILLEGAL_ADDRESS). "
            "Set KRNL_CUDA_STEPWISE=1 to learn in which dispatch."
        )
    driver.failing = {}
    memory.read(X)
    driver.failing = {"cuStreamSynchronize": "MISMATCH"}
    with pytest.raises(BackendError, match=r"^cuStreamSynchronize fails: in the driver's words"):
        memory.read(X)


def test_step_by_step_a_failure_names_the_dispatch(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STEPWISE_VARIABLE, "1")
    backend = CudaBackend(table(launch()))
    made = planned(backend.kernels, calls=2)
    memory = backend.allocate(made.layout)
    program = backend.compile(made, memory)
    program.run()
    assert len(driver.launched) == 2 and "cuGraphLaunch" not in driver.calls
    driver.failing = {"cuStreamSynchronize": "ILLEGAL_ADDRESS"}
    with pytest.raises(BackendError, match=r"^call 0/twice failed on the GPU"):
        program.run()
    monkeypatch.setenv(STEPWISE_VARIABLE, "yes")
    with pytest.raises(ConfigError, match="KRNL_CUDA_STEPWISE is 'yes'; it must be 0 or 1"):
        CudaBackend()


def test_other_threads_may_use_the_device(driver: FakeDriver) -> None:
    buffer = Buffer("buffer", (4,), F32, Kind.STATE)
    memory = CudaBackend(table()).allocate(buffers(buffer).layout)
    before = driver.threads
    thread = threading.Thread(target=lambda: memory.write(buffer, np.ones(4)))
    thread.start()
    thread.join()
    assert driver.threads == before + 1
    assert memory.read(buffer).sum() == 4


# What is wrong with the GPU, which function fails and how, and what is said.
OPENED: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "no GPU": ({}, {"cuInit": "NO_DEVICE"}, r"finds no GPU \(see nvidia-smi"),
    "a driver that does not start": (
        {}, {"cuInit": "MISMATCH"}, r"driver does not start: cuInit fails: in the driver's words",
    ),
    "an old driver": (
        {"version": 12080}, {},
        r"driver here is for CUDA 12\.8, and the installed compiler \(NVRTC\) is of CUDA 13\.0",
    ),
    "an old GPU": (
        {"capability": 75}, {}, r"8\.0 or later \(Ampere\); this is 'Fake GPU' with 7\.5\.",
    ),
    "a new GPU": (
        {"capability": 131}, {}, r"does not know GPUs of compute capability 13\.1: pip install",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OPENED)
def test_a_device_that_cannot_be_used_is_told_in_a_sentence(case: str) -> None:
    device, failing, words = OPENED[case]
    driver = FakeDriver(**device)
    driver.failing = failing
    with installed(driver), pytest.raises(ConfigError, match=words):
        CudaBackend()


def test_a_machine_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "has_driver", lambda: False)
    with pytest.raises(ConfigError, match=r"this machine has no driver; use --device cpu\."):
        CudaBackend()


def test_a_machine_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "has_driver", lambda: True)
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'krnl-lora\[cuda\]'"):
        CudaBackend()


def test_gpus_are_compiled_for_as_closely_as_can_be() -> None:
    offered = [75, 80, 86, 89, 90, 100, 120]
    found = {c: architecture(c, offered) for c in (80, 87, 89, 90, 100, 103, 120, 121)}
    assert found == {
        80: "sm_80", 87: "sm_86", 89: "sm_89", 90: "sm_90a", 100: "sm_100", 103: "sm_100",
        120: "sm_120", 121: "sm_120",
    }  # fmt: skip


def test_kernels_are_named_as_cxx_names_them() -> None:
    made = Launch("lib", "f", (), (1, 1, 1), 32, (BF16, F32), {2: 64, 0: True, 1: False})
    assert Kernel.of(made) == Kernel("lib", "f<bf16, f32, true, false, 64>")
    assert str(Kernel.of(Launch("lib", "f", (), (1, 1, 1), 32))) == "'f' of lib.cu"


class Kept:
    """A compiler with one source and one header, which a test may change."""

    def __init__(self, folder: Path):
        self.fake, self.folder = FakeCompiler(), folder
        self.source, self.header = "source", "header"

    def compile(self, name: str = "f", architecture: str = "sm_80") -> bytes:
        made = Compiler(
            self.fake, architecture, self.folder, lambda library: self.source,
            lambda: {"common.h": self.header},
        )  # fmt: skip
        kernel = Kernel("lib", name)
        return made.compile([kernel, kernel])[kernel].image


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "cubins")


def test_what_was_compiled_is_kept(kept: Kept) -> None:
    first = kept.compile()
    assert kept.compile() == first == b"code of "
    assert kept.fake.compiled == ["f"]
    assert [path.suffix for path in kept.folder.iterdir()] == [".cubin"]


def test_everything_with_a_part_in_the_code_has_one_in_its_name(kept: Kept) -> None:
    kept.compile()
    kept.compile("g")
    kept.compile(architecture="sm_90a")
    kept.source = "other source"
    kept.compile()
    kept.header = "other header"
    kept.compile()
    kept.fake.version = (13, 1)
    kept.compile()
    assert kept.fake.compiled == ["f", "g", "f", "f", "f", "f"]
    assert len(list(kept.folder.iterdir())) == 6


def checked(content: bytes) -> bytes:
    return hashlib.sha256(content).digest() + content


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[:-1],
        lambda b: b"",
        lambda b: b[:40] + b"x" + b[41:],
        # Whole, but written by something else.
        lambda b: checked(b'{"entry": "f", "log": "", "more": 1}\ncode'),
        lambda b: checked(b'{"entry": "f"}\ncode'),
        lambda b: checked(b'{"entry": "f", "log": 3}\ncode'),
        lambda b: checked(b'["entry", "log"]\ncode'),
        lambda b: checked(b"\xff{}\ncode"),
        lambda b: checked(b""),
    ],
)
def test_a_damaged_file_is_compiled_again(damage: Any, kept: Kept) -> None:
    kept.compile()
    (path,) = kept.folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert kept.compile() == b"code of "
    assert kept.fake.compiled == ["f", "f"]
    assert path.read_bytes() == whole


@pytest.mark.parametrize("wheel", WHEELS)
def test_every_build_of_the_compiler_has_its_own_files(
    wheel: str, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVRTC itself tells two numbers of its version, the wheel that it is in has more."""
    for build in ("13.0.48", "13.0.88"):
        monkeypatch.setattr(cuda_compiler, "version", {wheel: build}.__getitem__)
        monkeypatch.setattr(cuda_compiler, "PackageNotFoundError", KeyError)
        kept.compile()
        kept.compile()
    assert kept.fake.compiled == ["f", "f"]


def age(path: Path, days: float) -> None:
    moment = time.time() - 86400 * days
    os.utime(path, (moment, moment))


def test_files_that_nobody_uses_are_removed(kept: Kept) -> None:
    """When something is compiled; what a killed process left too. A file that is read is used."""
    kept.compile("old")
    (old,) = kept.folder.iterdir()
    kept.compile("used")
    (used,) = set(kept.folder.iterdir()) - {old}
    left, other = kept.folder / f".{old.name}.0123abcd.tmp", kept.folder / "notes.txt"
    for path in (left, other):
        path.write_bytes(b"")
    for path in (old, used, left, other):
        age(path, 91)
    kept.compile("used")
    assert old.exists(), "nothing was compiled"
    kept.compile("new")
    assert not old.exists() and not left.exists()
    assert used.exists() and other.exists() and len(list(kept.folder.iterdir())) == 3


def test_files_beyond_the_room_are_removed_by_age(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Path] = []
    for days, name in enumerate("abcd"):
        kept.compile(name)
        (path,) = set(kept.folder.iterdir()) - set(found)
        found.append(path)
        age(path, 10 - days)
    nbytes = found[0].stat().st_size
    monkeypatch.setattr(cuda_cache, "MOST_BYTES", 3 * nbytes + nbytes // 2)
    kept.compile("e")
    assert [path.exists() for path in found] == [False, False, True, True]


def test_processes_may_trim_at_once(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another has removed meanwhile is no error, nor what it is not allowed to remove."""
    folder = CubinFolder(kept.folder)
    for name in "ab":
        kept.compile(name)
    for path in kept.folder.iterdir():
        age(path, 91)
    files = folder._files()
    monkeypatch.setattr(folder, "_files", lambda: files)
    CubinFolder(kept.folder).trim()
    folder.trim()
    assert not list(kept.folder.iterdir())
    CubinFolder(kept.folder / "nowhere").trim()


def test_what_is_not_wanted_any_more_is_not_compiled(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure, and after Ctrl-C: only what had begun is waited for."""
    for error in (BackendError("broken"), KeyboardInterrupt()):
        made = Compiler(kept.fake, "sm_80", kept.folder, lambda library: "source", dict)
        begun = list[str]()

        def slow(kernel: Kernel, error: BaseException = error, begun: list[str] = begun) -> None:
            begun.append(kernel.expression)
            time.sleep(0.02)
            raise error

        monkeypatch.setattr(made, "_cubin", slow)
        with pytest.raises(type(error)):
            made.compile(Kernel("lib", f"f{i}") for i in range(500))
        assert len(begun) < 100


def test_a_folder_that_cannot_be_written_costs_time_alone(kept: Kept) -> None:
    kept.folder.write_text("a file")
    for _ in range(2):
        assert kept.compile() == b"code of "
    assert kept.fake.compiled == ["f", "f"]


@pytest.mark.parametrize(
    "note",
    [
        "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async is serialized",
        "ptxas warning (C7512) whatever it says",
        "setmaxnreg ignored to maintain minimum register requirement",
    ],
)
def test_of_serialised_products_is_warned_once(note: str, kept: Kept) -> None:
    """They are right. Also when the code comes from the folder."""
    kept.fake.log = f"one\n{note}\n"
    for _ in range(2):
        made = Compiler(kept.fake, "sm_80", kept.folder, lambda library: "source", dict)
        kernels = [Kernel("lib", name) for name in "fg"]
        with pytest.warns(UserWarning, match=r"slow code of 'f' of lib.cu and of 1 other") as told:
            for _ in range(2):
                assert set(made.compile(kernels)) == set(kernels)
        assert len(told) == 1
    assert sorted(kept.fake.compiled) == ["f", "g"]


def test_the_compilers_words_are_passed_on(kept: Kept) -> None:
    kept.fake.broken, kept.fake.log = True, "\n".join(f"line {i}" for i in range(40))
    with pytest.raises(BackendError) as raised:
        kept.compile()
    lines = str(raised.value).splitlines()
    assert lines[0] == "NVRTC does not compile 'f' of lib.cu for sm_80 (NVRTC_ERROR_COMPILATION):"
    assert lines[1] == "line 0" and lines[-1] == "…" and len(lines) < 20
    assert not kept.folder.exists()
