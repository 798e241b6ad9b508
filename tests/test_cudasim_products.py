"""The CUDA simulator's matrix products against NumPy: fragments, descriptors, swizzles; and that
they are not done before they are waited for."""

from itertools import product

import ml_dtypes
import numpy as np
import pytest

from cudasim.device import BACKWARD, FORWARD
from cudasim.snippets import Array, body, filled, launch
from test_cudasim_engine import fault

TYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
every_type = pytest.mark.parametrize("name", TYPES)


def drawn(*shape: int, name: str = "bf16", seed: int = 0) -> np.ndarray:
    """Small whole numbers: all sums are exact."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(TYPES[name])


# ---- A warp's ----


@every_type
@pytest.mark.parametrize("order", [FORWARD, BACKWARD])
def test_a_warps_product(name: str, order: int) -> None:
    """a [16, 16] and b [16, 8] by way of ldmatrix, the second one transposed on the way."""
    statements = f"""
  __shared__ alignas(16) {name} a_tile[16 * 16], b_tile[16 * 8];
  const int lane = threadIdx.x, group = lane / 4, pair = lane % 4 * 2;
  for (int i = lane; i < 256; i += 32) a_tile[i] = a[i];
  for (int i = lane; i < 128; i += 32) b_tile[i] = b[i];
  __syncwarp();
  uint32 a_words[4], b_words[4];
  load_matrices(a_words, a_tile + lane % 16 * 16 + lane / 16 * 8);
  load_matrices_transposed(b_words, b_tile + lane % 16 * 8);
  float c[4] = {{1.0f, 2.0f, 3.0f, 4.0f}};
  multiply<{name}>(c, a_words, b_words[0], b_words[1]);
  for (int i = 0; i < 4; i++) y[(group + i / 2 * 8) * 8 + pair + i % 2] = c[i];"""
    a, b, y = Array(drawn(16, 16, name=name)), Array(drawn(16, 8, name=name, seed=1)), filled(128)
    launch(body(statements, f"const {name} *a, const {name} *b, float *y"), a, b, y, order=order)
    start = np.array([[1, 2], [3, 4]]).repeat(8, 0)
    want = a.values.astype(float) @ b.values.astype(float) + np.tile(start, (1, 4))
    np.testing.assert_equal(y.values.reshape(16, 8), want)


def test_matrices_are_stored_as_they_are_loaded() -> None:
    statements = """
  __shared__ alignas(16) bf16 tile[16 * 16], copy[16 * 16];
  const int lane = threadIdx.x, at = lane % 16 * 16 + lane / 16 * 8;
  for (int i = lane; i < 256; i += 32) tile[i] = a[i];
  __syncwarp();
  uint32 words[4];
  load_matrices(words, tile + at);
  store_matrices(copy + at, words);
  __syncwarp();
  for (int i = lane; i < 256; i += 32) y[i] = copy[i];"""
    a, y = Array(drawn(256)), Array(drawn(256, seed=1))
    text = body(statements, "const bf16 *a, bf16 *y")
    launch(text, a, y)
    np.testing.assert_equal(y.values, a.values)
    fault("misaligned", text.replace("(words, tile + at)", "(words, tile + at + 4)"), a, y)
    fault("out of bounds", text.replace("(words, tile + at)", "(words, tile + at + 256)"), a, y)


# ---- A warpgroup's ----


def swizzled(lines: np.ndarray) -> np.ndarray:
    """Lines of 64 elements, eight to a group of 1,024 bytes: 16-byte piece i of line r lies at
    i ^ r."""
    pieces = lines.reshape(-1, 8, 8)
    moved = np.empty_like(pieces)
    for line, row in enumerate(pieces):
        moved[line, np.arange(8) ^ line % 8] = row
    return moved.reshape(lines.shape)


def tile(matrix: np.ndarray, along_k: bool) -> np.ndarray:
    """A [size, 64] operand as a tile: lines along K, or strips of 64 with lines along the size."""
    if along_k:
        return swizzled(matrix)
    strips = [matrix[i : i + 64].T for i in range(0, len(matrix), 64)]
    return np.concatenate([swizzled(np.ascontiguousarray(strip)) for strip in strips])


def statements(name: str, columns: int, add: str, before: str = "") -> str:
    return f"""
  extern __shared__ __align__(1024) uint8 tiles[];
  constexpr int kBytesA = 64 * 128;
  for (int i = threadIdx.x; i < 64 * 64; i += 128) reinterpret_cast<{name} *>(tiles)[i] = a[i];
  for (int i = threadIdx.x; i < b_size; i += 128)
    reinterpret_cast<{name} *>(tiles + kBytesA)[i] = b[i];
  fence_async_proxy();
  __syncthreads();
  const int t = threadIdx.x, row = t / 32 * 16 + t % 32 / 4, column = t % 4 * 2;
  float sums[{columns} / 2];
  for (int i = 0; i < {columns} / 2; i++) sums[i] = 1.0f;
  {before}
  /* fence */ begin_products();
  for (int part = 0; part < 4; part++) {{ {add} }}
  end_products();
  /* wait */ wait_products<0>();
  for (int i = 0; i < {columns} / 2; i++)
    y[(row + i / 2 % 2 * 8) * {columns} + i / 4 * 8 + column + i % 2] = sums[i];
  /* late */"""


def from_tiles(name: str, columns: int, along_m: bool, along_n: bool) -> str:
    m, n = str(along_m).lower(), str(along_n).lower()
    return (
        f"Product<{name}, {columns}, {m}, {n}>::add(sums, "
        f"describe(tiles + part * ({m} ? 2048 : 32), kStripBytes), "
        f"describe(tiles + kBytesA + part * ({n} ? 2048 : 32), kStripBytes), adds);"
    )


def multiply(
    name: str, columns: int, along_m: bool, along_n: bool, add: str, before: str = "",
    adds: int = 1, order: int = FORWARD,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """What comes out, and what NumPy says."""
    # Strips are 64 wide.
    padded = -(-columns // 64) * 64 if along_n else columns
    a, b = drawn(64, 64, name=name), drawn(padded, 64, name=name, seed=1)
    given = [Array(tile(a, not along_m)), Array(tile(b, not along_n)), filled(64 * columns)]
    numbers = [x.to_bytes(4, "little") for x in (b.size, adds)]
    text = body(
        statements(name, columns, add, before),
        f"const {name} *a, const {name} *b, float *y, int b_size, int adds",
    )
    shared = 64 * 128 + padded * 128
    launch(text, *given, *numbers, threads=128, shared=shared, order=order)
    want = a.astype(float) @ b[:columns].astype(float).T + adds
    return given[2].values.reshape(64, columns), want


@every_type
@pytest.mark.parametrize("columns", [64, 96, 128, 192, 256])
def test_a_warpgroups_product_of_tiles(name: str, columns: int) -> None:
    for along_m, along_n in product((False, True), repeat=2):
        add = from_tiles(name, columns, along_m, along_n)
        got, want = multiply(name, columns, along_m, along_n, add)
        np.testing.assert_equal(got, want)


@every_type
@pytest.mark.parametrize("columns", [64, 96, 128])
def test_a_warpgroups_product_with_an_operand_in_registers(name: str, columns: int) -> None:
    load = f"""
  uint32 operand[4][4];
  for (int part = 0; part < 4; part++)
    for (int i = 0; i < 4; i++) {{
      const int at_row = row + i % 2 * 8, k = part * 16 + i / 2 * 8 + column;
      const {name} *const pair = reinterpret_cast<const {name} *>(tiles) + at_row * 64 +
                                 (k / 8 ^ at_row % 8) * 8 + k % 8;
      operand[part][i] = *reinterpret_cast<const uint32 *>(pair);
    }}"""
    for along_n in (False, True):
        n = str(along_n).lower()
        add = (
            f"ProductFromRegisters<{name}, {columns}, {n}>::add(sums, operand[part], "
            f"describe(tiles + kBytesA + part * ({n} ? 2048 : 32), kStripBytes), adds);"
        )
        got, want = multiply(name, columns, False, along_n, add, load)
        np.testing.assert_equal(got, want)


def test_a_product_that_replaces_the_sums() -> None:
    add = from_tiles("bf16", 64, False, False).replace("adds)", "part > 0)")
    got, want = multiply("bf16", 64, False, False, add, adds=0)
    np.testing.assert_equal(got, want)


PLAIN = body(
    statements("bf16", 64, from_tiles("bf16", 64, False, False)),
    "const bf16 *a, const bf16 *b, float *y, int b_size, int adds",
)


def plain(*change: str, order: int = FORWARD) -> np.ndarray:
    text = PLAIN.replace(*change) if change else PLAIN
    assert text != PLAIN or not change
    x, y = Array(drawn(64, 64)), filled(64 * 64)
    numbers = [i.to_bytes(4, "little") for i in (64 * 64, 1)]
    launch(text, x, x, y, *numbers, threads=128, shared=2 * 8192, order=order)
    return y.values


def plain_fault(kind: str, *change: str) -> str:
    text = PLAIN.replace(*change)
    assert text != PLAIN
    numbers = [i.to_bytes(4, "little") for i in (64 * 64, 1)]
    x, y = Array(drawn(64, 64)), filled(64 * 64)
    return fault(kind, text, x, x, y, *numbers, threads=128, shared=2 * 8192)


def test_sums_that_are_read_before_products_are_waited_for() -> None:
    moved = PLAIN.replace("/* wait */ wait_products<0>();", "").replace(
        "/* late */", "wait_products<0>();"
    )
    assert np.isfinite(plain()).all()
    assert np.isnan(plain(PLAIN, moved)).all()
    assert np.isnan(plain(PLAIN, moved.replace("/* late */", ""))).all()


def test_sums_that_are_written_while_products_run() -> None:
    said = plain_fault("sums in flight", "/* wait */", "sums[3] += 1.0f; sums[3] = 0.0f;")
    assert "register 3" in said


def test_a_tile_that_is_overwritten_while_products_run() -> None:
    """They read it when they are waited for."""
    zero = "reinterpret_cast<uint32 *>(tiles)[threadIdx.x] = 0;"
    for order in (FORWARD, BACKWARD):  # one warp before another; all behind all
        assert (plain() != plain("/* wait */", zero, order=order)).any()


def test_faults_around_products() -> None:
    assert "wgmma.fence" in plain_fault("products", "/* fence */ begin_products();", "")
    plain_fault("unfinished", "/* wait */ wait_products<0>();", "")
    plain_fault("out of bounds", "tiles + kBytesA + part", "tiles + 2 * kBytesA + part")
    plain_fault("divergent warpgroup", "part < 4;", "part < 4 - int(threadIdx.x == 70);")
    plain_fault("unfinished", "/* wait */", "if (threadIdx.x < 96)")
    swizzle = "describe(tiles + part * (false ? 2048 : 32), kStripBytes)"
    plain_fault("descriptor", swizzle, f"({swizzle} & ~(3ull << 62))")
