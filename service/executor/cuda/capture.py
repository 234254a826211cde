"""Which decode steps replay a CUDA graph, and under which id.

A bucket is a number of rows that a graph is captured for; a step takes the smallest one that holds it and pads. Ids
start at 1 (ONNX Runtime replays 0 by default) and are never used twice: its graphs live as long as the session, so one
whose addresses are no longer true is forgotten, not replaced.
"""

import itertools
from collections.abc import Sequence
from typing import Final

from service.errors import ConfigError
from service.executor.config import Capture

_SMALL_BUCKETS: Final = (1, 4, 16)
_LARGE_STEP: Final = 64


def default_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """1, 4, 16, then multiples of 64 that double up to 256 and go on in steps of 256; the last is `max_num_seqs`.

    Few: each takes memory and time to capture. A decode step of some dozen rows mostly reads weights, so padding it
    costs little; above, buckets lie closer in proportion.
    """
    buckets = [bucket for bucket in _SMALL_BUCKETS if bucket < max_num_seqs]
    bucket = _LARGE_STEP
    while bucket < max_num_seqs:
        buckets.append(bucket)
        bucket += min(bucket, 256)
    return (*buckets, max_num_seqs)


def checked_buckets(buckets: Sequence[int] | None, max_num_seqs: int) -> tuple[int, ...]:
    """The buckets to use, ascending: those asked for, or the default. Raises ConfigError for one that never serves."""
    if buckets is None:
        return default_buckets(max_num_seqs)
    for bucket in buckets:
        if not 1 <= bucket <= max_num_seqs:
            raise ConfigError(f"capture_buckets: {bucket} is not within 1 and max_num_seqs, {max_num_seqs}")
    return tuple(sorted(set(buckets)))


class BucketGraphs:
    """The graphs of one session. Owned by the engine thread."""

    def __init__(self, buckets: tuple[int, ...], mode: Capture) -> None:
        """`buckets` ascend."""
        self.buckets = buckets if mode != "off" else ()  # those that can be captured, as far as is known
        self._ids = itertools.count(1)
        self._id_of: dict[int, int] = {}

    def bucket_for(self, num_rows: int) -> int | None:
        """The smallest bucket that holds `num_rows` and can be captured; None: run it eagerly, unpadded."""
        return next((bucket for bucket in self.buckets if bucket >= num_rows), None)

    def id_of(self, bucket: int) -> tuple[int, bool]:
        """The graph id to run `bucket` with, and whether it is new: then its first run captures."""
        is_new = bucket not in self._id_of
        if is_new:
            self._id_of[bucket] = next(self._ids)
        return self._id_of[bucket], is_new

    def has_graph(self, bucket: int) -> bool:
        """Whether a run of `bucket` has captured."""
        return bucket in self._id_of

    def give_up(self, bucket: int) -> None:
        """Never run `bucket` again: its capture failed."""
        self.buckets = tuple(each for each in self.buckets if each != bucket)
        self._id_of.pop(bucket, None)

    def forget(self) -> None:
        """Capture every bucket again when it is next run: an address that the graphs hold has changed."""
        self._id_of.clear()
