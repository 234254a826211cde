"""The sequences without a row, in the order of the policy."""

from service.core.ordering import OrderingPolicy
from service.core.sequence import Sequence, SequenceStatus


class WaitingQueue:
    """New and preempted sequences. A preempted one comes back with its old rank, so it keeps its place.

    Owned by the Scheduler. Which one is next is the policy's to say; this counts and finds them.
    """

    def __init__(self, policy: OrderingPolicy) -> None:
        self.num_tokens = 0  # known tokens of all sequences in the queue
        self.num_preempted = 0
        self._policy = policy
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        """Sequences in the queue."""
        return len(self._sequences)

    def __contains__(self, seq_id: int) -> bool:
        """True when the sequence is in the queue."""
        return seq_id in self._sequences

    def in_order(self) -> list[Sequence]:
        """All sequences, the next one first. Sorts: for snapshots, not for steps."""
        return self.first(len(self))

    def head(self) -> Sequence | None:
        """The next sequence, None when nobody waits."""
        return self._policy.head()

    def first(self, count: int) -> list[Sequence]:
        """Up to `count` sequences, the next one first."""
        return self._policy.first(count)

    def push(self, sequence: Sequence) -> None:
        """Take in a sequence, at its place."""
        assert sequence.seq_id not in self._sequences, "a sequence is queued twice"
        self._sequences[sequence.seq_id] = sequence
        self._policy.push(sequence)
        self.num_tokens += sequence.num_tokens
        self.num_preempted += sequence.status is SequenceStatus.PREEMPTED

    def admit(self, sequence: Sequence, num_new_tokens: int) -> None:
        """Take out a sequence that gets a row, to compute `num_new_tokens` of its known ones."""
        self._policy.admit(sequence, num_new_tokens)
        self.remove(sequence.seq_id)

    def remove(self, seq_id: int) -> Sequence:
        """Take out one sequence wherever it is. Raises KeyError when it is not here."""
        sequence = self._sequences.pop(seq_id)
        self._policy.remove(sequence)
        self.num_tokens -= sequence.num_tokens
        self.num_preempted -= sequence.status is SequenceStatus.PREEMPTED
        return sequence
