"""The CUDA simulator's copies to shared memory: what arrives, where, and not before it is waited
for."""

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cudasim.device import BACKWARD, FORWARD, encoded
from cudasim.snippets import Array, body, filled, launch
from krnl.dtypes import BF16
from krnl.kernels.launch import TensorMap
from krnl.plan.buffer import Buffer, Kind
from test_cudasim_engine import fault

# ---- A thread's own ----

COPY = """
  __shared__ alignas(16) float x[128];
  const int i = threadIdx.x * 4;
  copy_16_async(x + i, from + i, threadIdx.x != 3);
  end_copies();
  /* wait */
  __syncwarp();
  for (int j = 0; j < 4; j++) y[i + j] = x[124 - i + j];"""
PARAMETERS = "const float *from, float *y"


def test_copies_arrive_where_they_are_waited_for() -> None:
    x, y = Array(np.arange(128, dtype=np.float32)), filled(128)
    text = body(COPY, PARAMETERS)
    launch(text.replace("/* wait */", "wait_copies<0>();"), x, y)
    want = x.values.copy().reshape(32, 4)
    want[3] = 0
    np.testing.assert_equal(y.values.reshape(32, 4), want[::-1])


def test_copies_that_nobody_waits_for() -> None:
    """What was there is not there any more, and the copy not yet."""
    x, y = filled(128), filled(128)
    text = body(COPY.replace("124 - i + j", "i + j"), PARAMETERS)
    said = fault("unfinished", text, x, y)
    assert "copies of its own" in said
    late = text.rstrip("}\n") + "\n  wait_copies<0>();\n}\n"
    launch(late, x, y)
    assert np.isnan(y.values).all()


def test_groups_of_copies_are_counted() -> None:
    statements = """
  __shared__ alignas(4) float x[64];
  copy_4_async(x + threadIdx.x, from, true);
  end_copies();
  copy_4_async(x + 32 + threadIdx.x, from + 1, true);
  end_copies();
  wait_copies<1>();
  y[threadIdx.x] = x[threadIdx.x];
  y[32 + threadIdx.x] = x[32 + threadIdx.x];
  wait_copies<0>();"""
    y = filled(64)
    launch(body(statements, PARAMETERS), Array(np.array([1, 2], np.float32)), y)
    assert (y.values[:32] == 1).all() and np.isnan(y.values[32:]).all()


def test_a_copy_that_is_not_aligned() -> None:
    text = body(COPY, PARAMETERS)
    arrays = filled(132), filled(128)
    odd = text.replace("from + i", "from + i + 1")
    assert "from address" in fault("misaligned", odd, *arrays)
    odd = text.replace("x + i", "x + i + 2")
    assert "shared memory" in fault("misaligned", odd, *arrays)


# ---- The copy engine's ----

ROWS, COLUMNS, STRIDE, BOX_ROWS = 20, 72, 80, 32

FETCH = """
  extern __shared__ __align__(1024) uint8 tile[];
  __shared__ uint64 full;
  if (threadIdx.x == 0) {
    init_barrier(&full, 1);
    fence_barrier_init();
    arrive_and_expect(&full, bytes);
    fetch_box(tile, &map, &full, column, row);
  }
  __syncthreads();
  wait(&full, 0);
  for (int i = threadIdx.x; i < 32 * 64; i += blockDim.x) {
    const int line = i / 64, piece = i % 64 / 8;
    y[i] = reinterpret_cast<const bf16 *>(tile)[line * 64 + (piece ^ line % 8) * 8 + i % 8];
  }"""
FETCH_PARAMETERS = "const __grid_constant__ TensorMap map, bf16 *y, int column, int row, int bytes"


@cache
def matrix() -> Array:
    values = np.arange(ROWS * STRIDE).reshape(ROWS, STRIDE) % 31
    return Array(values.astype(ml_dtypes.bfloat16))


def tensor_map(x: Array) -> bytes:
    buffer = Buffer("x", x.values.shape, BF16, Kind.INPUT)
    return encoded(TensorMap(buffer, ROWS, COLUMNS, STRIDE, BOX_ROWS, 64), x.address)


def number(value: int) -> bytes:
    return value.to_bytes(4, "little", signed=True)


def fetch(column: int, row: int, text: str = FETCH, expected: int = 32 * 128) -> Any:
    x, y = matrix(), Array(np.zeros(32 * 64, ml_dtypes.bfloat16))
    arguments = [tensor_map(x), y, number(column), number(row), number(expected)]
    return x, y, (body(text, FETCH_PARAMETERS), *arguments)


@pytest.mark.parametrize("row", [0, 5, -3, 19, 40])
@pytest.mark.parametrize("column", [0, 8, -16, 64, 72, -64, 3, -5])
def test_a_box_of_a_matrix_and_zeros_around_it(column: int, row: int) -> None:
    """Unswizzled as the hardware swizzles: 16-byte pieces of a line change places by its number."""
    x, y, call = fetch(column, row)
    launch(*call, threads=64, shared=32 * 128)
    padded = np.zeros((200, 400))
    padded[50 : 50 + ROWS, 100 : 100 + COLUMNS] = x.values[:, :COLUMNS]
    want = padded[50 + row :, 100 + column :][:32, :64]
    np.testing.assert_equal(y.values.astype(np.float64).reshape(32, 64), want)


def test_swizzles_go_by_the_address() -> None:
    """A tile that begins at another line than a multiple of eight."""
    x, y, call = fetch(0, 0)
    text = call[0].replace("fetch_box(tile", "fetch_box(tile + 384")
    text = text.replace("[line * 64 + ", "[192 + line * 64 + ").replace(
        "line % 8", "(line + 3) % 8"
    )
    launch(text, *call[1:], threads=64, shared=35 * 128)
    np.testing.assert_equal(y.values.reshape(32, 64)[:ROWS], x.values[:, :64])


@pytest.mark.parametrize("wrong", [32 * 128 + 16, 32 * 128 - 16])
def test_other_bytes_than_those_announced(wrong: int) -> None:
    _, _, call = fetch(0, 0, expected=wrong)
    said = fault("deadlock", *call, threads=64, shared=32 * 128)
    assert f"0 arrivals and {wrong - 32 * 128} bytes are to come" in said
    assert "snippet.cu:15" in said


def test_a_box_that_is_read_before_it_is_waited_for() -> None:
    _, y, call = fetch(0, 0, FETCH.replace("  wait(&full, 0);\n", "") + "\n  wait(&full, 0);")
    launch(*call, threads=64, shared=32 * 128)
    assert np.isnan(y.values.astype(np.float32)).all()


def test_a_box_that_nobody_waits_for() -> None:
    _, _, call = fetch(0, 0, FETCH.replace("  wait(&full, 0);\n", ""))
    assert "still on its way" in fault("unfinished", *call, threads=64, shared=32 * 128)


@pytest.mark.parametrize(
    "kind, change",
    [
        ("barrier", ("    fence_barrier_init();\n", "")),
        ("barrier", ("    init_barrier(&full, 1);\n", "")),
        ("barrier", ("arrive_and_expect(&full, bytes);", "arrive(&full);arrive(&full + 1);")),
        ("misaligned", ("fetch_box(tile", "fetch_box(tile + 64")),
        ("out of bounds", ("fetch_box(tile", "fetch_box(tile + 1024")),
        ("tensor map", ("&map", "reinterpret_cast<const TensorMap *>(tile)")),
    ],
)
def test_faults_around_a_box(kind: str, change: tuple[str, str]) -> None:
    assert change[0] in FETCH
    _, _, call = fetch(0, 0, FETCH.replace(*change))
    fault(kind, *call, threads=64, shared=32 * 128)


def test_a_phase_in_which_more_arrive_than_are_expected() -> None:
    text = body(
        "  __shared__ uint64 barrier;\n  if (threadIdx.x == 0) init_barrier(&barrier, 7);\n"
        "  __syncthreads();\n  if (threadIdx.x < 8) arrive(&barrier);\n  wait(&barrier, 0);\n"
        "  if (threadIdx.x < 8) y[threadIdx.x] = 1.0f;"
    )
    y = filled(8)
    launch(text, y)  # the eighth is the first of the next phase
    assert (y.values == 1).all()
    late = text.replace("init_barrier(&barrier, 7)", "init_barrier(&barrier, 9)")
    assert "1 arrivals and 0 bytes" in fault("deadlock", late, y)


def test_bytes_that_are_no_box() -> None:
    statements = """
  __shared__ alignas(16) float x[16];
  __shared__ uint64 full;
  if (threadIdx.x == 0) {
    init_barrier(&full, 1);
    fence_barrier_init();
    arrive_and_expect(&full, 64);
    fetch_bytes(x, from, 64, &full);
  }
  __syncthreads();
  wait(&full, 0);
  if (threadIdx.x < 16) y[threadIdx.x] = x[threadIdx.x];"""
    x, y = Array(np.arange(20, dtype=np.float32)), filled(16)
    launch(body(statements, PARAMETERS), x, y)
    np.testing.assert_equal(y.values, np.arange(16))
    fault("misaligned", body(statements.replace("(x, from,", "(x, from + 2,"), PARAMETERS), x, y)


def test_what_nobody_waits_for_lands_last() -> None:
    """In whichever order it was asked for: into memory that was taken for free."""
    statements = """
  __shared__ alignas(16) float x[2][16];
  __shared__ uint64 full[2];
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) init_barrier(&full[i], 1);
    fence_barrier_init();
    for (int i = 0; i < 2; i++) {
      arrive_and_expect(&full[i], 64);
      fetch_bytes(x[i], from, 64, &full[i]);
    }
  }
  __syncthreads();
  wait(&full[AWAITED], 0);
  if (threadIdx.x < 16) x[1 - AWAITED][threadIdx.x] = -1.0f;
  __syncthreads();
  wait(&full[1 - AWAITED], 0);
  if (threadIdx.x < 16) y[threadIdx.x] = x[1 - AWAITED][threadIdx.x];"""
    for order in (FORWARD, BACKWARD, 2):
        for awaited in "01":
            x, y = Array(np.arange(20, dtype=np.float32)), filled(16)
            launch(body(statements.replace("AWAITED", awaited), PARAMETERS), x, y, order=order)
            np.testing.assert_equal(y.values, np.arange(16))


# A ring as the kernels have it: one warp fetches, a warpgroup reads.
RING = """
  extern __shared__ __align__(1024) uint8 tiles[];
  __shared__ uint64 full[2], empty[2];
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) init_barrier(&full[i], 1), init_barrier(&empty[i], 4);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 128) {
    for (int i = 0; i < 8; i++) {
      wait(&empty[i % 2], (i / 2 + 1) % 2);
      arrive_and_expect(&full[i % 2], 4096);
      fetch_box(tiles + i % 2 * 4096, &map, &full[i % 2], 0, i);
    }
  } else if (threadIdx.x < 128) {
    float sum = 0.0f;
    for (int i = 0; i < 8; i++) {
      wait(&full[i % 2], i / 2 % 2);
      /* early */
      __syncwarp();
      sum += to_float(reinterpret_cast<const bf16 *>(tiles + i % 2 * 4096)[threadIdx.x % 8]);
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive(&empty[i % 2]);
    }
    y[threadIdx.x] = from_float<bf16>(sum);
  }
  __syncwarp();"""


def test_a_ring_of_tiles_and_a_stage_that_is_released_too_early() -> None:
    for order in (FORWARD, BACKWARD, 2):
        x, y, call = fetch(0, 0, RING)
        launch(*call, threads=160, shared=8192, order=order)
        want = x.values[:8, :8].astype(np.float64).sum(0)
        np.testing.assert_equal(y.values[:128].astype(np.float64), np.tile(want, 16))
    early = "if (threadIdx.x % 32 == 0) arrive(&empty[i % 2]);\n      __syncwarp();"
    text = RING.replace("/* early */", early)
    text = text.replace("      if (threadIdx.x % 32 == 0) arrive(&empty[i % 2]);\n    }", "    }")
    wrong = False
    for order in (FORWARD, BACKWARD, 2, 3):
        _, y, call = fetch(0, 0, text)
        launch(*call, threads=160, shared=8192, order=order)
        wrong |= bool(np.isnan(y.values[:128].astype(np.float32)).any())
    assert wrong
