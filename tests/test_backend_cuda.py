"""The CUDA engine without a GPU: on a driver that runs nothing, and what people are told where
there is none."""

import ctypes
import gc
import struct
import threading
import time
from typing import Any

import numpy as np
import pytest

from cuda_programs import X, Y, buffers, launch, parameters, planned, table, twice
from fake_cuda import FakeDriver, installed
from krnl.backends import cuda_driver
from krnl.backends.cuda import HELD_LAUNCHES, ON_PAPER, CudaBackend
from krnl.backends.cuda_driver import STEPWISE_VARIABLE
from krnl.dtypes import BF16, F16, F32
from krnl.errors import BackendError, ConfigError, PlanError
from krnl.kernels.launch import GpuRow, Launch, TensorMap
from krnl.plan.arena import plan
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.lower import Table
from krnl.plan.step import Call, Step

pytestmark = pytest.mark.usefixtures("apart")


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


def test_a_capture_that_fails_is_ended(driver: FakeDriver) -> None:
    backend = CudaBackend(table(launch()))
    made = planned(backend.kernels)
    memory = backend.allocate(made.layout)
    for status, error in (("OUT_OF_MEMORY", PlanError), ("ILLEGAL_ADDRESS", BackendError)):
        driver.failing = {"cuLaunchKernelEx": status}
        with pytest.raises(error):
            backend.compile(made, memory)
        assert driver.captured is None and driver.calls[-1] == "cuStreamEndCapture"


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


@pytest.mark.parametrize("capability, beside", [(86, [0, 0, 0, 0]), (90, [0, 1, 1, 1])])
def test_launches_overlap_from_hopper_on(capability: int, beside: list[int]) -> None:
    """And are told which need not wait: here two calls make one buffer of another, and have two
    launches each, of which the second needs nothing of the first."""
    with installed(FakeDriver(capability=capability)) as driver:
        backend = CudaBackend(table(launch(), launch(independent=True)))
        step = Step("program", BF16)
        for y in (Y, Buffer("z", (64,), BF16, Kind.STATE)):
            step(twice, X, into=y)
        (made,) = plan([step], backend.kernels)
        memory = backend.allocate(made.layout)
        backend.compile(made, memory).run()
        memory.read(X)
        assert all(len(config.attrs) == (capability >= 90) for config in driver.launched)
        told = [parameters(config, [8, 8, 4])[-1] for config in driver.launched]
        assert [int.from_bytes(flag, "little") for flag in told] == beside


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
    backend = CudaBackend(table(launch(shared=228 << 10)))
    made = planned(backend.kernels)
    with pytest.raises(
        BackendError, match=r"lib\.cu: it takes 233,472 bytes of shared memory.* has 232,448"
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
