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

    def __init__(self, live: Mapping[int, Sequence], max_queue_wait_ns: int) -> None:
        """`live` are all live sequences by id. A limit of 0 lets them wait as long as it takes."""
        self._live = live
        self._max_queue_wait_ns = max_queue_wait_ns
        self._heap: list[tuple[int, int, FinishReason]] = []

    def bound_answer(self, request: Request) -> None:
        """Let the deadline count, if there is one."""
        if request.deadline_ns is not None:
            self._add(request.deadline_ns, request.seq_id, FinishReason.DEADLINE)

    def bound_wait(self, request: Request) -> None:
        """Let the wait for admission count, from the arrival on."""
        if self._max_queue_wait_ns:
            self._add(request.arrival_ns + self._max_queue_wait_ns, request.seq_id, FinishReason.QUEUE_WAIT)

    @property
    def next_ns(self) -> int | None:
        """The earliest time, of a sequence that it still matters to or not; None without any."""
        return self._heap[0][0] if self._heap else None

    def may_have_due(self, now_ns: int) -> bool:
        """Whether a sequence may have run out of time. Takes nothing out."""
        return bool(self._heap) and self._heap[0][0] <= now_ns

    def has_due(self, now_ns: int) -> bool:
        """Whether a sequence has run out of time."""
        while self._heap and self._heap[0][0] <= now_ns:
            _, seq_id, reason = self._heap[0]
            if self._matters(seq_id, reason):
                return True
            heapq.heappop(self._heap)
        return False

    def due(self, now_ns: int) -> dict[int, FinishReason]:
        """Take out what has come of live sequences: the first reason of each by seq_id, earliest first."""
        due: dict[int, FinishReason] = {}
        while self.has_due(now_ns):
            _, seq_id, reason = heapq.heappop(self._heap)
            due.setdefault(seq_id, reason)
        return due

    def prune(self) -> None:
        """Drop the entries of sequences that have ended, once they are the most."""
        if len(self._heap) > 4 * len(self._live) + _SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[1] in self._live]
            heapq.heapify(self._heap)

    def _add(self, at_ns: int, seq_id: int, reason: FinishReason) -> None:
        heapq.heappush(self._heap, (at_ns, seq_id, reason))

    def _matters(self, seq_id: int, reason: FinishReason) -> bool:
        sequence = self._live.get(seq_id)
        return sequence is not None and (reason is FinishReason.DEADLINE or sequence.status is SequenceStatus.WAITING)
