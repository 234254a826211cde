"""Samples of one prompt that wait until the first of them has computed it."""

import numpy as np

from service.core.sequence import Sequence
from service.core.types import Int64Array


class Forks:
    """Sequences by the sequence whose prompt they share. Owned by the Scheduler.

    They come to the queue when that one has its first token, or has ended: then its prompt is there to be shared, and
    nobody computes it twice.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, dict[int, Sequence]] = {}  # leader -> seq_id -> sequence
        self._leaders: dict[int, int] = {}  # seq_id -> leader

    def __len__(self) -> int:
        """Sequences that wait here."""
        return len(self._leaders)

    def __contains__(self, seq_id: int) -> bool:
        """True when the sequence waits here."""
        return seq_id in self._leaders

    def leaders_among(self, seq_ids: Int64Array) -> list[int]:
        """Those of `seq_ids` that are waited for."""
        leaders = list(self._waiting)
        return [leader for leader, is_in in zip(leaders, np.isin(leaders, seq_ids).tolist(), strict=True) if is_in]

    def in_order(self) -> list[Sequence]:
        """All that wait, by leader and then as they came."""
        return [sequence for group in self._waiting.values() for sequence in group.values()]

    def push(self, sequence: Sequence) -> None:
        """Let `sequence` wait for the one that it is a fork of."""
        leader = sequence.request.fork_of
        assert leader is not None, "only a fork waits for another sequence"
        self._waiting.setdefault(leader, {})[sequence.seq_id] = sequence
        self._leaders[sequence.seq_id] = leader

    def pop(self, leader: int) -> list[Sequence]:
        """Take out those that wait for `leader`, in the order of their coming."""
        group = self._waiting.pop(leader, {})
        for seq_id in group:
            del self._leaders[seq_id]
        return list(group.values())

    def remove(self, seq_id: int) -> None:
        """Take out one sequence."""
        leader = self._leaders.pop(seq_id)
        group = self._waiting[leader]
        del group[seq_id]
        if not group:
            del self._waiting[leader]
