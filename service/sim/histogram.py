"""Distributions in bounded memory: a histogram of logarithmic buckets."""

import math
from typing import Final

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]

_BUCKETS_PER_OCTAVE: Final = 32
_NUM_OCTAVES: Final = 64
_LEAST: Final = 2.0**-20  # smaller values share the first bucket, which stands for 0
_BATCH: Final = 4096  # values that are counted at once


class LogHistogram:
    """Count, mean, deviation, and quantiles within 1.1 %, of a distribution of values that are not negative.

    Bucket i holds values from 2^(i / 32) to 2^((i + 1) / 32) times the least one, the first also what is smaller. A
    quantile is its bucket's geometric middle, 0 in the first, but never outside what was seen. Mean and deviation are
    those of the values but for rounding. Some 100 KiB, however many values: new ones gather until they fill a batch.
    """

    def __init__(self) -> None:
        self._num_counted = 0
        self._sum = 0.0
        self._squares = 0.0  # of the differences from the mean, added up
        self._least = math.inf
        self._largest = 0.0
        self._counts: npt.NDArray[np.int64] = np.zeros(_BUCKETS_PER_OCTAVE * _NUM_OCTAVES, np.int64)
        self._new: list[float] = []
        self._new_arrays: list[Float64Array] = []
        self._num_in_new_arrays = 0

    def add(self, value: float) -> None:
        """Take in one value."""
        self._new.append(value)
        if len(self._new) >= _BATCH:
            self._count_new()

    def add_all(self, values: Float64Array) -> None:
        """Take in an array of values, which must not change any more."""
        if not len(values):
            return
        self._new_arrays.append(values)
        self._num_in_new_arrays += len(values)
        if self._num_in_new_arrays >= _BATCH:
            self._count_new()

    @property
    def count(self) -> int:
        """Values taken in."""
        return self._num_counted + len(self._new) + self._num_in_new_arrays

    @property
    def mean(self) -> float:
        """Mean of all values; 0 without any."""
        self._count_new()
        return self._sum / self._num_counted if self._num_counted else 0.0

    @property
    def std(self) -> float:
        """Standard deviation of all values; 0 without any."""
        self._count_new()
        return math.sqrt(self._squares / self._num_counted) if self._num_counted else 0.0

    @property
    def largest(self) -> float:
        """The largest value; 0 without any."""
        self._count_new()
        return self._largest

    def quantile(self, share: float) -> float:
        """The value that `share` of all values do not exceed; 0 without any."""
        self._count_new()
        if not self._num_counted:
            return 0.0
        rank = max(1, math.ceil(share * self._num_counted))
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank))
        middle = _LEAST * 2 ** ((bucket + 0.5) / _BUCKETS_PER_OCTAVE) if bucket else 0.0
        return float(min(max(middle, self._least), self._largest))

    def summary(self) -> dict[str, float | None]:
        """Mean, median, std, p90, p95, p99 and max; None without values."""
        if not self.count:
            return dict.fromkeys(("mean", "median", "std", "p90", "p95", "p99", "max"))
        return {
            "mean": self.mean,
            "median": self.quantile(0.5),
            "std": self.std,
            "p90": self.quantile(0.9),
            "p95": self.quantile(0.95),
            "p99": self.quantile(0.99),
            "max": self.largest,
        }

    def _count_new(self) -> None:
        if not self._new and not self._num_in_new_arrays:
            return
        values: Float64Array = np.concatenate([np.array(self._new, np.float64), *self._new_arrays])
        self._new, self._new_arrays, self._num_in_new_arrays = [], [], 0
        buckets = (np.log2(np.maximum(values, _LEAST) / _LEAST) * _BUCKETS_PER_OCTAVE).astype(np.int64)
        self._counts += np.bincount(buckets, minlength=len(self._counts))
        # Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
        old_mean, new_mean = self.mean, float(values.mean())
        self._squares += float(((values - new_mean) ** 2).sum())
        share = self._num_counted / (self._num_counted + len(values))
        self._squares += (new_mean - old_mean) ** 2 * len(values) * share
        self._num_counted += len(values)
        self._sum += float(values.sum())
        self._least = min(self._least, float(values.min()))
        self._largest = max(self._largest, float(values.max()))
