"""The element types KRNL stores: name, size in bytes, NumPy type, unit roundoff spacing."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class DType:
    """An element type. `eps` is the distance from 1 to the next larger value (0 for integers)."""

    name: str
    numpy: np.dtype
    eps: float

    @property
    def size(self) -> int:
        """Bytes per element."""
        return self.numpy.itemsize

    @property
    def is_float(self) -> bool:
        return self.eps > 0

    def __repr__(self) -> str:
        return self.name


F32 = DType("f32", np.dtype(np.float32), 2.0**-23)
F16 = DType("f16", np.dtype(np.float16), 2.0**-10)
BF16 = DType("bf16", np.dtype(ml_dtypes.bfloat16), 2.0**-7)
I32 = DType("i32", np.dtype(np.int32), 0.0)

BY_NAME = {dtype.name: dtype for dtype in (F32, F16, BF16, I32)}
