"""Arrays at fixed addresses, allocated once."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

CACHE_LINE_BYTES = 64
HUGE_PAGE_BYTES = 2 << 20


def aligned_zeros(
    shape: tuple[int, ...], dtype: npt.DTypeLike, alignment_bytes: int = CACHE_LINE_BYTES
) -> npt.NDArray[Any]:
    """A C-ordered array of zeros whose address is a multiple of `alignment_bytes`.

    Large ones take memory only as they are written to, and numpy asks for huge pages for them where the system has
    them on request.
    """
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(num_bytes + alignment_bytes, np.uint8)
    start = -memory.ctypes.data % alignment_bytes
    return memory[start : start + num_bytes].view(dtype).reshape(shape)
