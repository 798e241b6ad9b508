"""Memory of the CUDA engine, the GPU's and the host's, on a driver that runs nothing."""

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuda_programs import buffers, launch, parameters, planned, table, twice
from fake_cuda import HOST_SEEN_FROM_GPU, FakeDriver, installed
from generation import make
from krnl.backends import cuda_memory
from krnl.backends.cuda import ON_PAPER, RESERVE, CudaBackend
from krnl.bench import trainer
from krnl.data.packing import pack
from krnl.dtypes import BF16, F16, F32, I32, DType
from krnl.errors import PlanError
from krnl.kernels.launch import GpuRow
from krnl.ops.pointwise import embedding
from krnl.plan.arena import Block, Plan, plan
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.lower import Table
from krnl.plan.step import Step
from krnl.training.memory import memory_use
from tiny import ALL, Run, make_documents, write_model

pytestmark = pytest.mark.usefixtures("apart")

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
    """Small writes do not wait; when there is no more room, what lies there is copied first, while
    copies from the other staging may still be to come."""
    buffer = Buffer("buffer", (512,), F32, Kind.STATE)
    memory = CudaBackend(table()).allocate(buffers(buffer).layout)
    to_come = []
    for i in range(512):
        memory.write(buffer.part("", i, (1,)), np.array([i]))
        to_come.append(len(driver.queue))
    in_a_staging = cuda_memory.STAGING // 64
    assert in_a_staging < min(to_come[in_a_staging:]) and max(to_come) < 3 * in_a_staging
    assert driver.calls.count("cuStreamSynchronize") == 0
    np.testing.assert_array_equal(memory.read(buffer), np.arange(512))


def test_what_runs_sees_what_was_written_before_it(driver: FakeDriver) -> None:
    """However far the host is ahead, whatever becomes of its arrays, and whether writes are smaller
    or larger than a staging."""
    buffer = Buffer("buffer", (3000,), F32, Kind.STATE)
    memory = CudaBackend(table()).allocate(buffers(buffer).layout)
    assert buffer.nbytes > 2 * cuda_memory.STAGING
    inside = (ctypes.c_float * buffer.size).from_address(memory.address(buffer))
    rng, content, furthest = np.random.default_rng(3), np.zeros(buffer.size, np.float32), 0
    seen: list[np.ndarray] = []
    expected: list[np.ndarray] = []
    for _ in range(400):
        size = int(rng.integers(0, buffer.size if rng.random() < 0.1 else 60))
        start = int(rng.integers(0, buffer.size - size + 1))
        values = rng.random(size, dtype=np.float32)
        memory.write(buffer.part("", start, (size,)), values)
        content[start : start + size] = values
        values[:] = -1
        driver._enqueue(lambda: seen.append(np.array(inside)))
        expected.append(content.copy())
        furthest = max(furthest, len(driver.queue))
    np.testing.assert_array_equal(memory.read(buffer), content)
    np.testing.assert_array_equal(seen, expected)
    assert furthest > 20 and driver.calls.count("cuStreamSynchronize") == 1


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
    for each in tables:
        step(embedding, IDS, each)
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


COPY_IN, COPY_OUT, WAIT = "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuStreamSynchronize"


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_an_update_asks_little_of_the_driver(
    dropout: float, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A copy and a graph for each pass, a copy and a graph for the optimizer, and what came of it
    is waited for once."""
    monkeypatch.setattr(cuda_memory, "STAGING", 1 << 20)
    adapter = replace(ALL, dropout=dropout)
    run = Run(write_model(tmp_path / "model"), adapter, CudaBackend(), activation=BF16)
    first, second = (pack(make_documents(lengths), 64)[0] for lengths in ((20, 30), (9, 14)))
    calls, inputs = driver.calls, run.planned.programs.inputs
    calls.clear()
    for work in (first, second):
        run.session.loss_scale = 8.0
        run.session.accumulate(run.session.inputs_of(work, 3))
    assert calls == [COPY_IN, COPY_IN, "cuGraphLaunch", COPY_IN, "cuGraphLaunch"]  # and the scale
    calls.clear()
    run.session.update(np.arange(inputs.hyper.size))
    assert calls == [COPY_IN, "cuGraphLaunch", COPY_OUT, WAIT]
    live, targets = second.live, len(second.target)
    slot = np.full(live, -1)
    slot[second.target_row] = np.arange(targets)
    expected: dict[Buffer | None, Any] = {
        inputs.live: [live],
        inputs.live_targets: [targets],
        inputs.live_chunk: [targets],
        inputs.tokens: second.tokens,
        inputs.position: second.position,
        inputs.start[None]: second.doc_start,
        inputs.stop: np.arange(live) + 1,
        inputs.target_row: second.target_row,
        inputs.target: second.target,
        inputs.slot: slot,
        inputs.document: second.document,
        inputs.dropout_key: [5, 3],
        inputs.loss_scale: [8.0],
        inputs.hyper: np.arange(inputs.hyper.size),
    }
    assert (None in expected) == (dropout == 0)
    for buffer, values in expected.items():
        if buffer is not None:
            np.testing.assert_array_equal(run.memory.read(buffer.rows(0, len(values))), values)


def test_a_token_asks_little_of_the_driver(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the model reads next is one copy."""
    monkeypatch.setattr(cuda_memory, "STAGING", 1 << 20)
    generator = make(write_model(tmp_path / "model"), CudaBackend(), 40, slots=3, activation=BF16)
    driver.calls.clear()
    generator._run(True, np.array([7, 8]), [(0, 12, 1), (2, 5, 1)], [0, 1])
    assert driver.calls == [COPY_IN, "cuGraphLaunch", COPY_OUT, WAIT]
    inputs = generator._next_inputs
    for buffer, values in (
        (inputs.live, [2]), (inputs.live_picks, [2]), (inputs.tokens, [7, 8]),
        (inputs.position, [12, 5]), (inputs.row, [12, 85]), (inputs.start[None], [0, 80]),
        (inputs.stop, [13, 86]), (inputs.pick, [0, 1]),
    ):  # fmt: skip
        got = generator._memory.read(buffer.rows(0, len(values)))
        np.testing.assert_array_equal(got, values)


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


def test_what_the_engine_takes_beside_a_plan_is_planned_for(driver: FakeDriver) -> None:
    """On the device and on paper alike; the context is no part of what is free."""
    before = CudaBackend().limits
    assert before.scratch == ON_PAPER.limits.scratch == RESERVE > 0
    driver._memory(1 << 20)  # as a context takes it
    assert CudaBackend().limits.memory == before.memory - (1 << 20)
