"""The machine's read bandwidth, as threads of this process get it."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

_BUFFER_BYTES: Final = 256 << 20  # far above any last-level cache share
_UNROLLED_BYTES: Final = 1 << 16


class ReadBandwidth:
    """Measures how fast `num_threads` threads read a buffer that no cache holds. A context manager: it owns threads."""

    def __init__(self, num_threads: int) -> None:
        """Fill the buffer."""
        self._buffer: npt.NDArray[Any] = np.ones(_BUFFER_BYTES // 4, np.float32)
        self._parts = np.array_split(self._buffer.reshape(-1, _UNROLLED_BYTES // 4), num_threads)
        self._threads = ThreadPoolExecutor(num_threads)

    def measure(self, num_passes: int = 3) -> float:
        """Bytes per second of the fastest of `num_passes` passes over the buffer."""
        best_s = float("inf")
        for _ in range(num_passes):
            started_s = time.perf_counter()
            list(self._threads.map(np.sum, self._parts))
            best_s = min(best_s, time.perf_counter() - started_s)
        return _BUFFER_BYTES / best_s

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the threads."""
        self._threads.shutdown()
