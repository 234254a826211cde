"""When sequences run out of time."""

import heapq
from collections.abc import Container, Sized
from typing import Protocol

from service.core.types import FinishReason, Request

_SPARE_ENTRIES = 64


class _Live(Sized, Container[int], Protocol):
    """The live sequences' ids."""


class Deadlines:
    """A heap of (time, seq_id, reason). Owned by the Scheduler.

    Entries of sequences that have ended stay until they surface, or until they outnumber the live ones.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, FinishReason]] = []

    def add(self, at_ns: int, seq_id: int, reason: FinishReason) -> None:
        """From `at_ns` on the sequence has run out of time, for `reason`."""
        heapq.heappush(self._heap, (at_ns, seq_id, reason))

    def enter(self, request: Request, max_queue_wait_ns: int) -> None:
        """Add what bounds a new request: its deadline, and the wait for admission unless the limit is 0."""
        if request.deadline_ns is not None:
            self.add(request.deadline_ns, request.seq_id, FinishReason.DEADLINE)
        if max_queue_wait_ns:
            self.add(request.arrival_ns + max_queue_wait_ns, request.seq_id, FinishReason.QUEUE_WAIT)

    @property
    def next_ns(self) -> int | None:
        """The earliest time, of a live sequence or of one that has ended; None without any."""
        return self._heap[0][0] if self._heap else None

    def due(self, now_ns: int) -> list[tuple[int, FinishReason]]:
        """Take out what has come: (seq_id, reason), earliest first."""
        found = []
        while self._heap and self._heap[0][0] <= now_ns:
            _, seq_id, reason = heapq.heappop(self._heap)
            found.append((seq_id, reason))
        return found

    def prune(self, live: _Live) -> None:
        """Drop the entries of sequences that are not in `live`, once they are the most."""
        if len(self._heap) > 4 * len(live) + _SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapq.heapify(self._heap)
