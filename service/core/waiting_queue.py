"""The sequences without a row, in the order of their ranks."""

import heapq

from service.core.sequence import Sequence, SequenceStatus


class WaitingQueue:
    """New and preempted sequences. A preempted one comes back with its old rank, so it keeps its place.

    Owned by the Scheduler. A heap of (rank, seq_id); cancelled entries stay in it until they surface, or until they
    outnumber the live ones.
    """

    def __init__(self) -> None:
        self.num_tokens = 0  # known tokens of all sequences in the queue
        self.num_preempted = 0
        self._heap: list[tuple[int, int]] = []
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        """Sequences in the queue."""
        return len(self._sequences)

    def __contains__(self, seq_id: int) -> bool:
        """True when the sequence is in the queue."""
        return seq_id in self._sequences

    def in_order(self) -> list[Sequence]:
        """All sequences, the next one first. Sorts: for snapshots, not for steps."""
        return sorted(self._sequences.values(), key=lambda sequence: sequence.rank)

    def push(self, sequence: Sequence) -> None:
        """Take in a sequence, at the place of its rank."""
        assert sequence.seq_id not in self._sequences, "a sequence is queued twice"
        heapq.heappush(self._heap, (sequence.rank, sequence.seq_id))
        self._sequences[sequence.seq_id] = sequence
        self.num_tokens += sequence.num_tokens
        self.num_preempted += sequence.status is SequenceStatus.PREEMPTED

    def peek(self) -> Sequence | None:
        """The next sequence, or None when the queue is empty."""
        while self._heap and self._heap[0][1] not in self._sequences:
            heapq.heappop(self._heap)
        return self._sequences[self._heap[0][1]] if self._heap else None

    def pop(self) -> Sequence:
        """Take out the next sequence. The queue must not be empty."""
        sequence = self.peek()
        assert sequence is not None, "the queue is empty"
        heapq.heappop(self._heap)
        self._forget(sequence)
        return sequence

    def remove(self, seq_id: int) -> Sequence:
        """Take out one sequence wherever it is. Raises KeyError when it is not here."""
        sequence = self._sequences[seq_id]
        self._forget(sequence)
        if len(self._heap) > 2 * len(self._sequences) + 16:
            self._heap = [entry for entry in self._heap if entry[1] in self._sequences]
            heapq.heapify(self._heap)
        return sequence

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.seq_id]
        self.num_tokens -= sequence.num_tokens
        self.num_preempted -= sequence.status is SequenceStatus.PREEMPTED
