"""The CUDA simulator: what sound kernels compute, and that each planted fault is found and
named."""

import re
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cudasim import build
from cudasim.device import BACKWARD, FORWARD, KernelError
from cudasim.snippets import Array, body, filled, launch


def fault(kind: str, text: str, *arguments: Any, **settings: Any) -> str:
    """What the simulator says of a launch that must go wrong."""
    with pytest.raises(KernelError) as caught:
        launch(text, *arguments, **settings)
    assert caught.value.kind == kind, caught.value
    return str(caught.value)


def test_every_thread_of_a_grid_runs_once() -> None:
    y = filled(6 * 64, np.int32, 0)
    launch(
        body(
            "  const int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
            "  y[i] += 1000 * gridDim.x + i;",
            "int *y",
        ),
        y,
        groups=6,
        threads=64,
    )
    np.testing.assert_equal(y.values, 6000 + np.arange(6 * 64))


def test_parameters_are_passed_as_they_are_packed() -> None:
    struct = np.array([3, 4], np.int32).tobytes()
    y = filled(2, np.int32)
    text = body(
        "  if (threadIdx.x == 0) y[0] = pair.a, y[1] = pair.b + (none == nullptr);",
        "int *y, const __grid_constant__ Pair pair, const float *none",
        "struct Pair { int a, b; };",
    )
    launch(text, y, struct, bytes(8))
    assert y.values.tolist() == [3, 5]


def test_operations_of_a_warp() -> None:
    statements = """
  const int lane = threadIdx.x;
  y[lane] = __shfl_sync(~0u, lane * 10, 5) + __shfl_xor_sync(~0u, lane, 3);
  y[32 + lane] = __ballot_sync(~0u, lane % 3 == 0);
  y[64 + lane] = __reduce_min_sync(~0u, 40 - lane) + 100 * __reduce_max_sync(~0u, lane);
  y[96 + lane] = __popc(0xF0F) + __any_sync(~0u, lane == 7);
  y[128 + lane] = int(warp_sum(float(lane)));"""
    y = filled(160, np.int32)
    launch(body(statements, "int *y"), y)
    lane = np.arange(32)
    bits = sum(1 << i for i in range(0, 32, 3))
    want = [50 + (lane ^ 3), np.full(32, np.int64(bits).astype(np.int32)), np.full(32, 9 + 3100)]
    np.testing.assert_equal(y.values.reshape(5, 32)[:3], np.stack(want))
    assert (y.values[96:128] == 9).all() and (y.values[128:] == 496).all()


def test_a_blocks_sum_in_shared_memory() -> None:
    y = filled(3)
    text = body(
        "  __shared__ float scratch[kWarp];\n"
        "  const float sum = block_sum(float(threadIdx.x) + blockIdx.x, scratch);\n"
        "  if (threadIdx.x == 0) y[blockIdx.x] = sum;"
    )
    for order in (FORWARD, BACKWARD, 2, 3):
        launch(text, y, groups=3, threads=256, order=order)
        np.testing.assert_equal(y.values, 255 * 128 + 256 * np.arange(3))


def test_conversions_are_those_of_numpy() -> None:
    """All 16-bit numbers, and what lies between them."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    rng = np.random.default_rng(0)
    floats = rng.integers(0, 1 << 32, 1 << 16, np.uint32).view(np.float32)
    near = halves.view(np.float16).astype(np.float32)
    for dtype, name in ((np.float16, "f16"), (ml_dtypes.bfloat16, "bf16")):
        x, wide = Array(halves.view(dtype)), filled(1 << 16)
        with np.errstate(all="ignore"):
            between = near * np.float32(1 + 2.0**-11)
        given = Array(np.concatenate([floats, near, between]))
        narrow = Array(np.zeros(3 << 16, dtype))
        text = body(
            "  for (int i = threadIdx.x; i < 1 << 16; i += blockDim.x) wide[i] = to_float(x[i]);\n"
            "  for (int i = threadIdx.x; i < 3 << 16; i += blockDim.x)\n"
            f"    narrow[i] = from_float<{name}>(given[i]);",
            f"const {name} *x, float *wide, const float *given, {name} *narrow",
        )
        launch(text, x, wide, given, narrow, threads=1024)
        np.testing.assert_equal(wide.values, x.values.astype(np.float32))
        with np.errstate(all="ignore"):
            want = given.values.astype(dtype)
        np.testing.assert_equal(narrow.values.astype(np.float32), want.astype(np.float32))


# ---- Memory ----


@pytest.mark.parametrize("index", [16, 5000, -4000])
def test_an_access_beyond_a_buffer(index: int) -> None:
    """A page or a cache line further on: 16 floats are whole lines."""
    said = fault("out of bounds", body(f"  y[int(threadIdx.x) + {index}] = 1.0f;"), filled(16))
    assert "buffer 'y' of 64 bytes" in said and "snippet.cu:5" in said


def test_a_read_beyond_a_buffer() -> None:
    assert "byte 64" in fault("out of bounds", body("  y[0] = y[16];"), filled(16))


def test_a_write_between_a_buffer_and_its_end_of_line() -> None:
    """Nobody sees it at once: memory is handed out by cache lines."""
    assert "byte 60 of" in fault("out of bounds", body("  y[15] = 1.0f;"), filled(15))
    assert "byte -4" in fault("out of bounds", body("  y[-1] = 1.0f;"), filled(15))


def test_a_read_between_a_buffer_and_its_end_of_line_gives_nan() -> None:
    y = filled(15)
    launch(body("  y[0] = y[15];"), y)
    assert np.isnan(y.values[0])


@pytest.mark.skipif(
    "g++" not in build.compiler()[0], reason="clang does not check whence a struct is copied"
)
@pytest.mark.parametrize("type_", ["float4", "float2", "uint4"])
def test_a_vector_that_is_not_aligned(type_: str) -> None:
    text = body(f"  const {type_} x = *reinterpret_cast<{type_} *>(y + 1);\n  y[0] = x.x;")
    assert "snippet.cu:5" in fault("misaligned", text, filled(16))


def test_an_index_outside_an_array() -> None:
    text = body("  float x[4] = {};\n  y[0] = x[int(y[1])];")
    assert "index 7" in fault("array index", text, filled(16))


def test_shared_memory_that_nothing_wrote_is_nan() -> None:
    """In every block, not only in the first."""
    y = filled(6)
    text = body(
        "  __shared__ float x[32];\n  extern __shared__ float more[];\n"
        "  if (threadIdx.x == 0) y[2 * blockIdx.x] = x[1], y[2 * blockIdx.x + 1] = more[1];\n"
        "  __syncwarp();\n  x[threadIdx.x] = more[threadIdx.x] = 1.0f;"
    )
    launch(text, y, groups=3, shared=128)
    assert np.isnan(y.values).all()


@pytest.mark.parametrize("written", ["x[8]", "(&more[0])[8]"])
def test_a_write_behind_shared_memory(written: str) -> None:
    text = body(
        "  __shared__ float x[8], z[8];\n  extern __shared__ float more[];\n"
        "  x[threadIdx.x % 8] = z[threadIdx.x % 8] = more[threadIdx.x % 8] = 0.0f;\n"
        f"  float *p = &{written};\n  *p = 1.0f;"
    )
    with pytest.raises(KernelError, match=r"out of bounds|array index"):
        launch(text, filled(1), shared=32)


def test_more_shared_memory_than_there_is() -> None:
    text = body("  __shared__ float x[65536];\n  x[threadIdx.x] = 0.0f;")
    fault("shared memory", text, filled(1))


# ---- Threads ----

WITHOUT_BARRIER = body(
    "  __shared__ float x[64];\n  x[threadIdx.x] = threadIdx.x;\n"
    "  /* barrier */\n  y[threadIdx.x] = x[63 - threadIdx.x];"
)


def test_a_missing_barrier_shows_in_some_order() -> None:
    def results(text: str) -> list[bytes]:
        found = []
        for order in (FORWARD, BACKWARD, 2):
            y = filled(64)
            launch(text, y, threads=64, order=order)
            found.append(y.values.tobytes())
        return found

    assert len(set(results(WITHOUT_BARRIER))) > 1
    assert len(set(results(WITHOUT_BARRIER.replace("/* barrier */", "__syncthreads();")))) == 1


def test_a_barrier_that_some_never_reach() -> None:
    said = fault(
        "deadlock", body("  if (threadIdx.x < 40) __syncthreads();\n  y[0] = 1.0f;"), filled(1),
        threads=64,
    )  # fmt: skip
    assert "40 of 64 threads wait, 24 have ended" in said
    assert "40 threads from 0 on" in said and "barrier 0, at snippet.cu:5" in said


def test_a_named_barrier_for_other_numbers_of_threads() -> None:
    text = body("  sync_threads(1, threadIdx.x < 32 ? 64 : 96);")
    assert "expected" in fault("barrier", text, filled(1), threads=96)


def test_named_barriers_are_one_each() -> None:
    """A warp that fills and one that reads, and the first goes on at once."""
    statements = """
  __shared__ int x[32];
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 3; i++) {
    if (threadIdx.x < 32) {
      if (i > 0) sync_threads(2, 64);
      x[lane] = i * 32 + lane;
      arrive_threads(1, 64);
    } else {
      sync_threads(1, 64);
      y[i * 32 + lane] = x[31 - lane];
      if (i < 2) arrive_threads(2, 64);
    }
  }"""
    for order in (FORWARD, BACKWARD):
        y = filled(96, np.int32)
        launch(body(statements, "int *y"), y, threads=64, order=order)
        want = np.arange(96).reshape(3, 32)[:, ::-1]
        np.testing.assert_equal(y.values.reshape(3, 32), want)


def test_lanes_at_different_operations() -> None:
    text = body("  if (threadIdx.x < 7) __syncwarp();\n  else y[0] = __shfl_sync(~0u, 1.0f, 8);")
    assert "__syncwarp" in fault("divergent warp", text, filled(1))


def test_a_lane_that_does_not_come() -> None:
    text = body("  if (threadIdx.x > 0) y[0] = __shfl_sync(~0u, 1.0f, 8);")
    assert "31 threads from 1 on" in fault("deadlock", text, filled(1))


def test_a_loop_without_an_end() -> None:
    text = body("  volatile int x = 1;\n  while (x) {}")
    assert "snippet.cu:6" in fault("time", text, filled(1), seconds=1)


# ---- Kernels one behind the other ----


def test_a_kernel_that_does_not_wait_for_the_one_before() -> None:
    text = "__global__ void kernel(float *y) { if (threadIdx.x == 40) PreviousLaunch one(false); }"
    assert "ends without having waited" in fault("no wait", text, filled(1))


def test_memory_that_is_touched_before() -> None:
    text = "__global__ void kernel(float *y) { y[0] = 1; const PreviousLaunch previous(false); }"
    assert "buffer 'y' is touched" in fault("no wait", text, filled(4))


def test_memory_that_is_touched_beside_the_one_before() -> None:
    """By a kernel that may: it waits at its end, on every way there."""
    text = """__global__ void kernel(float *y, int32 beside) {
      const PreviousLaunch previous(beside);
      if (threadIdx.x >= 20) return;
      y[threadIdx.x] = 1.0f;
    }"""
    yes, no = struct.pack("i", 1), struct.pack("i", 0)
    y = filled(32)
    launch(text, y, yes, beside=True)
    np.testing.assert_equal(y.values, np.where(np.arange(32) < 20, 1, 7))
    launch(text, y, no, beside=True)
    launch(text, y, no)
    assert "buffer 'y' is touched" in fault("no wait", text, y, yes)


def test_a_kernel_that_lets_the_next_begin_too_early() -> None:
    """Which then waits for this one, and not for the one before it."""
    let, wait = (f'asm volatile("griddepcontrol.{x};");' for x in ("launch_dependents", "wait"))
    for beside in (False, True):
        text = f"__global__ void kernel(float *y) {{ {let} {wait} }}"
        said = fault("no wait", text, filled(1), beside=beside)
        assert "the next kernel may begin" in said
    launch(f"__global__ void kernel(float *y) {{ {wait} {let} }}", filled(1))


def test_kernels_that_cannot_be_launched() -> None:
    text = body("  y[0] = 1.0f;")
    assert "whole warps" in fault("launch", text, filled(1), threads=48)
    assert "clusters" in fault("launch", text, filled(1), groups=3, cluster=2)


# ---- Clusters ----

EXCHANGE = """
  __shared__ alignas(16) float x[32];
  const int rank = cluster_rank(), lane = threadIdx.x;
  sync_cluster();
  if (lane < 8) {
    const int peer = (rank + 1) % 4;
    store_peer(peer_address(x, peer) + lane * 16, {rank + 0.0f, lane + 0.0f, 2.0f, 3.0f});
  }
  sync_cluster();
  y[blockIdx.x * 32 + lane] = x[lane];"""


@pytest.mark.parametrize("order", [FORWARD, BACKWARD, 2])
def test_blocks_of_a_cluster_write_to_one_another(order: int) -> None:
    y = filled(8 * 32)
    launch(body(EXCHANGE), y, groups=8, cluster=4, order=order)
    got = y.values.reshape(2, 4, 8, 4)
    np.testing.assert_equal(got[..., 0], np.broadcast_to([[3], [0], [1], [2]], (2, 4, 8)))
    np.testing.assert_equal(got[..., 1], np.broadcast_to(np.arange(8), (2, 4, 8)))


def test_a_block_that_ends_before_others_write_to_it() -> None:
    end = "  if (rank == 1) return;\n  if (lane < 8) {"
    statements = EXCHANGE.replace("  if (lane < 8) {", end)
    statements = re.sub(r"\}\n  sync_cluster\(\);.*", "}", statements, flags=re.DOTALL)
    said = fault("out of bounds", body(statements), filled(8 * 32), groups=4, cluster=4, order=1)
    assert "has ended" in said or "in no array" in said


def test_a_block_that_does_not_come_to_the_clusters_barrier() -> None:
    text = body("  if (blockIdx.x != 1) sync_cluster();")
    said = fault("deadlock", text, filled(1), groups=2, cluster=2)
    assert "barrier of the cluster" in said
