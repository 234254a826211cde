"""A quantity over time in bounded memory."""

from typing import Final

import numpy as np
import numpy.typing as npt

_NUM_BINS: Final = 512
_FIRST_WIDTH_NS: Final = 1_000_000


class TimeSeries:
    """The time-weighted mean of a step function of time, in at most 512 bins of equal width.

    When time runs past the last bin, neighbours are merged and the width doubles. The mean over all time stays exact.
    """

    def __init__(self) -> None:
        self._width_ns = _FIRST_WIDTH_NS
        self._areas: npt.NDArray[np.float64] = np.zeros(_NUM_BINS)  # value times nanoseconds
        self._spans: npt.NDArray[np.float64] = np.zeros(_NUM_BINS)  # nanoseconds with a value
        self.largest = 0.0

    def add(self, start_ns: int, end_ns: int, value: float) -> None:
        """The quantity was `value` from `start_ns` to `end_ns`, both at least 0. Nothing, when no time lies between."""
        if start_ns >= end_ns:
            return
        while end_ns > self._width_ns * _NUM_BINS:
            self._merge()
        self.largest = max(self.largest, value)
        width_ns = self._width_ns
        while start_ns < end_ns:
            bin_number = start_ns // width_ns
            until_ns = min(end_ns, (bin_number + 1) * width_ns)
            self._areas[bin_number] += value * (until_ns - start_ns)
            self._spans[bin_number] += until_ns - start_ns
            start_ns = until_ns

    @property
    def mean(self) -> float:
        """Mean over all time that has a value; 0 without any."""
        span_ns = float(self._spans.sum())
        return float(self._areas.sum()) / span_ns if span_ns else 0.0

    def points(self) -> list[tuple[float, float]]:
        """(seconds at the middle of a bin, mean in it), of the bins that have a value."""
        bins = np.flatnonzero(self._spans)
        seconds = (bins + 0.5) * self._width_ns / 1e9
        values = self._areas[bins] / self._spans[bins]
        return list(zip(seconds.round(6).tolist(), values.round(6).tolist(), strict=True))

    def _merge(self) -> None:
        half = _NUM_BINS // 2
        for bins in (self._areas, self._spans):
            bins[:half] = bins[::2] + bins[1::2]
            bins[half:] = 0.0
        self._width_ns *= 2
