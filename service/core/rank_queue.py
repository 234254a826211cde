"""Sequences in the order of their ranks."""

import heapq
from collections import deque
from itertools import islice

from service.core.sequence import Sequence

_Entry = tuple[int, int]  # rank, seq_id


class RankQueue:
    """A queue of (rank, seq_id). Removed entries stay until they surface, or until they outnumber the live ones.

    Most sequences come in the order of their ranks: these are kept in that order, and the lowest is taken from the
    front, where a heap would compare its way through entries that the CPU's caches lost long ago. Others are in a heap.
    """

    def __init__(self) -> None:
        self.num_tokens = 0  # known tokens of all that are here
        self._in_order: deque[_Entry] = deque()  # ascending
        self._heap: list[_Entry] = []
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        """Sequences that are here."""
        return len(self._sequences)

    def num_tokens_of(self, longest: int | None) -> int:
        """Known tokens of all that are here, or of those that have `longest` at most."""
        if longest is None:
            return self.num_tokens
        lengths = (sequence.num_tokens for sequence in self._sequences.values())
        return sum(num_tokens for num_tokens in lengths if num_tokens <= longest)

    def push(self, sequence: Sequence) -> None:
        """Take in a sequence."""
        entry = (sequence.rank, sequence.seq_id)
        if not self._in_order or entry > self._in_order[-1]:
            self._in_order.append(entry)
        else:
            heapq.heappush(self._heap, entry)
        self._sequences[sequence.seq_id] = sequence
        self.num_tokens += sequence.num_tokens

    def remove(self, seq_id: int) -> None:
        """Take out a sequence. Raises KeyError when it is not here."""
        self.num_tokens -= self._sequences.pop(seq_id).num_tokens
        if len(self._in_order) + len(self._heap) > 2 * len(self._sequences) + 16:
            self._in_order = deque(sorted((sequence.rank, seq_id) for seq_id, sequence in self._sequences.items()))
            self._heap.clear()

    def head(self) -> Sequence | None:
        """The sequence of the lowest rank, None when there is none."""
        in_order, heap, sequences = self._in_order, self._heap, self._sequences
        while in_order and in_order[0][1] not in sequences:
            in_order.popleft()
        while heap and heap[0][1] not in sequences:
            heapq.heappop(heap)
        if not heap or (in_order and in_order[0] < heap[0]):
            return sequences[in_order[0][1]] if in_order else None
        return sequences[heap[0][1]]

    def first(self, count: int) -> list[Sequence]:
        """Up to `count` sequences of the lowest ranks, lowest first."""
        heap, sequences = self._heap, self._sequences
        entries = list(islice((entry for entry in self._in_order if entry[1] in sequences), count))
        popped: list[_Entry] = []
        while heap and len(popped) < count:
            entry = heapq.heappop(heap)
            # A sequence that was removed and pushed again may have several entries, all alike.
            if entry[1] in sequences and entry not in popped[-1:]:
                popped.append(entry)
        for entry in popped:
            heapq.heappush(heap, entry)
        lowest = sorted({*entries, *popped})[:count]
        return [sequences[seq_id] for _, seq_id in lowest]
