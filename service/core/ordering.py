"""In which order sequences are admitted, and who keeps blocks when they run out: one class per policy."""

from typing import Protocol

import numpy as np

from service.core.batch_state import BatchState, Rows
from service.core.fair_share import FairShare
from service.core.rank_queue import RankQueue
from service.core.scheduler_config import OrderingConfig
from service.core.sequence import Sequence
from service.core.types import Int32Array, Int64Array, Request

NO_TENANT = 0
"""The tenant slot of a policy that does not tell tenants apart."""


class OrderingPolicy(Protocol):
    """What the scheduler and its queue ask of a policy.

    Between `plan` and `commit` or `abort`, only `enter`, `leave`, `push`, `remove` and `admit` are called; what
    `admit` changes is final with `commit`, and gone with `abort`.
    """

    def enter(self, request: Request) -> tuple[int, int]:
        """Take in a new request: its rank and its tenant's slot. Of two ranks the lower goes first."""
        ...

    def leave(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        ...

    def push(self, sequence: Sequence) -> None:
        """A sequence waits, again perhaps."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """A sequence waits no more."""
        ...

    def head(self) -> Sequence | None:
        """The waiting sequence that is the next one, None when none waits."""
        ...

    def first(self, count: int) -> list[Sequence]:
        """Up to `count` waiting sequences, the next one first."""
        ...

    def num_tokens_before(self, request: Request, longest: int | None = None) -> int:
        """Known tokens of the sequences that are expected to be admitted before a new request.

        With a limit, only of those that have `longest` at most: that looks at each of them.
        """
        ...

    def standing(self, batch: BatchState, rows: Int32Array) -> Int64Array:
        """Indices into `rows`, best first: who computes its prompt first, and keeps its blocks longest."""
        ...

    def admit(self, sequence: Sequence, num_new_tokens: int) -> None:
        """The plan in the making gives a row to a waiting sequence, which `remove` takes out of the queue.

        It computes `num_new_tokens` of its known ones; the others are in the prefix cache.
        """
        ...

    def commit(self, batch: BatchState, sampled_rows: Rows) -> None:
        """The plan is final, and `sampled_rows` got a token each."""
        ...

    def abort(self) -> None:
        """The plan is taken back."""
        ...

    def counters(self) -> tuple[tuple[str, float], ...]:
        """What the policy has counted, by name: for snapshots."""
        ...


class FirstComeFirstServed:
    """Ranks are the order of arrival at the scheduler."""

    def __init__(self) -> None:
        self._num_ranked = 0
        self._waiting = RankQueue()

    def enter(self, request: Request) -> tuple[int, int]:  # noqa: ARG002  other policies look at the request
        """The next rank."""
        self._num_ranked += 1
        return self._num_ranked - 1, NO_TENANT

    def leave(self, sequence: Sequence) -> None:
        """Nothing is kept of a sequence."""

    def push(self, sequence: Sequence) -> None:
        """Wait at the place of the rank."""
        self._waiting.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Wait no more."""
        self._waiting.remove(sequence.seq_id)

    def head(self) -> Sequence | None:
        """The lowest rank."""
        return self._waiting.head()

    def first(self, count: int) -> list[Sequence]:
        """The lowest ranks."""
        return self._waiting.first(count)

    def num_tokens_before(self, request: Request, longest: int | None = None) -> int:  # noqa: ARG002  see `enter`
        """All that wait, though some of them may be passed."""
        return self._waiting.num_tokens_of(longest)

    def standing(self, batch: BatchState, rows: Int32Array) -> Int64Array:
        """By rank."""
        return np.argsort(batch.rank[rows], kind="stable")

    def admit(self, sequence: Sequence, num_new_tokens: int) -> None:
        """Nothing is counted."""

    def commit(self, batch: BatchState, sampled_rows: Rows) -> None:
        """Nothing is counted."""

    def abort(self) -> None:
        """Nothing was counted."""

    def counters(self) -> tuple[tuple[str, float], ...]:
        """Nothing is counted."""
        return ()


class PriorityWithAging(FirstComeFirstServed):
    """Higher priorities first; each `aging_ns` of waiting makes up for one level, so that nothing starves.

    All sequences age alike, so that of two the same one leads at all times: the rank is a constant, the time of
    arrival less what the priority is worth. That is the rule of "urgency numbers" in Jackson, "Some problems in
    queueing with dynamic priorities" (1960). A sequence is passed only by those that came at most `aging_ns` times
    the difference of their priorities later.
    """

    def __init__(self, aging_ns: int) -> None:
        super().__init__()
        self._aging_ns = aging_ns

    def enter(self, request: Request) -> tuple[int, int]:
        """When the request came, or would have come with priority 0."""
        return request.arrival_ns - request.priority * self._aging_ns, NO_TENANT

    def num_tokens_before(self, request: Request, longest: int | None = None) -> int:  # noqa: ARG002
        """None: it may pass everybody."""
        return 0


def create_policy(config: OrderingConfig) -> OrderingPolicy:
    """The policy that the configuration names."""
    match config.policy:
        case "fcfs":
            return FirstComeFirstServed()
        case "priority":
            return PriorityWithAging(config.aging_ns)
        case "fair":
            return FairShare(config)
