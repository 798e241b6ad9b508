"""The kernels that the report measured and the engine does not use, one for each row of its tables.

They tell how a product's speed depends on element types (types.metal), on staging (ladder.metal),
on tiles and on how a tile is stored (tiles.metal). Sizes are multiples of the tile; nothing is
masked."""

from dataclasses import dataclass
from struct import pack

from krnl.dtypes import BF16, F16, F32, DType
from krnl.errors import PlanError
from krnl.kernels.launch import Launch
from krnl.plan.buffer import Buffer


@dataclass(frozen=True)
class Variant:
    """A product c = a b of `layout`: nn, tn (a is [k, m]) or nt (b is [n, k])."""

    name: str
    section: int  # of the report
    title: str  # of its row
    library: str
    function: str
    layout: str
    operand: DType
    accumulator: DType
    output: DType
    tile: tuple[int, int, int]  # rows and columns of a threadgroup, and its steps in k
    threads: int
    reported: int | None  # GF/s at m = n = k = 2048 on an M1 Pro with 16 cores


def _types(title: str, operand: DType, accumulator: DType, reported: int) -> Variant:
    name = f"types_{operand}_{accumulator}"
    return Variant(
        name, 1, title, "types", name, "nn", operand, accumulator, operand,
        (32, 32, 8), 32, reported,
    )  # fmt: skip


def _half(
    section: int,
    name: str,
    title: str,
    library: str,
    function: str,
    reported: int | None,
    *,
    tile: tuple[int, int, int] = (32, 32, 8),
    threads: int = 32,
    output: DType = F16,
) -> Variant:
    """Of half operands and float accumulators. The function's name begins with the layout."""
    return Variant(
        name, section, title, library, function, function[:2], F16, F32, output,
        tile, threads, reported,
    )  # fmt: skip


STAGED = (32, 32, 32)

VARIANTS = (
    _types("half, accumulated in float", F16, F32, 3296),
    _types("half, accumulated in half", F16, F16, 122),
    _types("float, accumulated in float", F32, F32, 223),
    _types("bfloat, accumulated in float", BF16, F32, 83),
    _half(2, "nn", "nn", "tiles", "nn_staged_f16", 3296),
    _half(2, "tn", "tn", "tiles", "tn_staged_f16", 3135),
    _half(2, "nt", "nt", "ladder", "nt_vector_f16", 2925, tile=STAGED),
    _half(3, "nt_naive", "transposed loads of device memory", "ladder", "nt_naive_f16", 2455),
    _half(3, "nt_scalar", "staged one value at a time",
          "ladder", "nt_scalar_f16", 2380, tile=STAGED),
    _half(3, "nt_natural", "staged as it lies, transposed loads of threadgroup memory",
          "ladder", "nt_natural_f16", 2754, tile=STAGED),
    _half(3, "nt_vector", "staged four values at a time, transposed by the writes",
          "ladder", "nt_vector_f16", 2925, tile=STAGED),
    _half(4, "tile_32x32", "32×32, one simdgroup", "tiles", "nn_staged_f16", 3296),
    _half(4, "tile_64x64", "64×64, four simdgroups, 32×32 output scratch each",
          "tiles", "nn_64x64_f16", 1256, tile=(64, 64, 16), threads=128),
    _half(4, "tile_64x64_small", "64×64, output written 8×8 at a time",
          "tiles", "nn_64x64_small_f16", 2353, tile=(64, 64, 16), threads=128),
    _half(4, "staging_32", "nt staged 32 wide in k", "ladder", "nt_vector_f16", 2872, tile=STAGED),
    _half(4, "staging_64", "nt staged 64 wide in k", "ladder", "nt_vector_k64_f16", 2624,
          tile=(32, 32, 64)),
    _half(4, "tile_32x64", "32×64 in one simdgroup, 32 accumulators",
          "tiles", "nn_32x64_f16", 261, tile=(32, 64, 8)),
    _half(4, "vector_output", "output stored four values at a time",
          "tiles", "nn_vector_output_f16", 3306),
    _half(4, "float_output", "output stored in float from registers",
          "tiles", "nn_float_output_f16", 3424, output=F32),
    _half(4, "half_output", "output converted and stored in half from registers",
          "tiles", "nn_half_output_f16", None),
)  # fmt: skip

BY_NAME = {variant.name: variant for variant in VARIANTS}


def launch(variant: Variant, a: Buffer, b: Buffer, c: Buffer, m: int, n: int, k: int) -> Launch:
    """c[m, n] = a b over k. Raises PlanError where a size is not a multiple of the tile's."""
    for letter, size, step in zip("mnk", (m, n, k), variant.tile, strict=True):
        if size <= 0 or size % step:
            raise PlanError(
                f"{variant.name} needs {letter} to be a multiple of {step}, not {size}: "
                "experiments check no edges. Choose another size."
            )
    rows, columns, _ = variant.tile
    return Launch(
        variant.library,
        variant.function,
        (a, b, c, pack("<3I", m, n, k)),
        (n // columns, m // rows, 1),
        variant.threads,
    )
