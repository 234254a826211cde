"""When sequences run out of time."""

import heapq
from collections.abc import Mapping

from service.core.sequence import Sequence, SequenceStatus
from service.core.types import FinishReason, Request

_SPARE_ENTRIES = 64


class Deadlines:
    """A heap of (time, seq_id, reason). Owned by the Scheduler.

    Entries of sequences that have ended, or were admitted before their wait was over, stay until they surface, or until
    they outnumber the live ones. While a plan in flight admits anybody, nothing is taken out: a sequence that it
    admits may have to wait on.
    """

    def __init__(self, live: Mapping[int, Sequence]) -> None:
        """`live` are all live sequences by id."""
        self._live = live
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
        """The earliest time, of a sequence that it still matters to or not; None without any."""
        return self._heap[0][0] if self._heap else None

    def has_due(self, now_ns: int) -> bool:
        """Whether a sequence has run out of time."""
        while self._heap and self._heap[0][0] <= now_ns:
            _, seq_id, reason = self._heap[0]
            if self._matters(seq_id, reason):
                return True
            heapq.heappop(self._heap)
        return False

    def due(self, now_ns: int) -> list[tuple[int, FinishReason]]:
        """Take out what has come of live sequences: (seq_id, reason), earliest first; one may come twice."""
        found = []
        while self.has_due(now_ns):
            _, seq_id, reason = heapq.heappop(self._heap)
            found.append((seq_id, reason))
        return found

    def prune(self) -> None:
        """Drop the entries of sequences that have ended, once they are the most."""
        if len(self._heap) > 4 * len(self._live) + _SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[1] in self._live]
            heapq.heapify(self._heap)

    def _matters(self, seq_id: int, reason: FinishReason) -> bool:
        sequence = self._live.get(seq_id)
        return sequence is not None and (reason is FinishReason.DEADLINE or sequence.status is SequenceStatus.WAITING)
