"""Sequences in the order of their ranks."""

import heapq

from service.core.sequence import Sequence


class RankHeap:
    """A heap of (rank, seq_id). Removed entries stay until they surface, or until they outnumber the live ones."""

    def __init__(self) -> None:
        self.num_tokens = 0  # known tokens of all that are here
        self._heap: list[tuple[int, int]] = []
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        """Sequences that are here."""
        return len(self._sequences)

    def push(self, sequence: Sequence) -> None:
        """Take in a sequence."""
        heapq.heappush(self._heap, (sequence.rank, sequence.seq_id))
        self._sequences[sequence.seq_id] = sequence
        self.num_tokens += sequence.num_tokens

    def remove(self, seq_id: int) -> None:
        """Take out a sequence. Raises KeyError when it is not here."""
        self.num_tokens -= self._sequences.pop(seq_id).num_tokens
        if len(self._heap) > 2 * len(self._sequences) + 16:
            self._heap = [(sequence.rank, seq_id) for seq_id, sequence in self._sequences.items()]
            heapq.heapify(self._heap)

    def first(self, count: int) -> list[Sequence]:
        """Up to `count` sequences of the lowest ranks, lowest first."""
        heap, sequences = self._heap, self._sequences
        while heap and heap[0][1] not in sequences:
            heapq.heappop(heap)
        if count == 1 and heap:
            return [sequences[heap[0][1]]]
        entries: list[tuple[int, int]] = []
        while heap and len(entries) < count:
            entry = heapq.heappop(heap)
            # A sequence that was removed and pushed again may have two entries, side by side.
            if entry[1] in sequences and entry not in entries[-1:]:
                entries.append(entry)
        for entry in entries:
            heapq.heappush(heap, entry)
        return [sequences[seq_id] for _, seq_id in entries]
