"""One request on its way through the scheduler."""

import enum
from dataclasses import dataclass

from service.core.types import Int32Array, Request


class SequenceStatus(enum.Enum):
    """Where a live sequence is. A finished one is forgotten, and only counted."""

    WAITING = "waiting"  # in the queue, never run
    RUNNING = "running"  # has a row of the BatchState
    PREEMPTED = "preempted"  # in the queue, its blocks were taken away


@dataclass(slots=True, eq=False)
class Sequence:
    """What is kept of a sequence outside its row. Owned by the Scheduler.

    `token_ids` are the known tokens (prompt, then output) as of the last time the sequence was in the queue; while
    it runs, the tokens in its row of the BatchState are the true ones.
    """

    request: Request
    rank: int  # place in the order of the policy; of two sequences the lower goes first
    tenant_slot: int  # the policy's number of the tenant
    token_ids: Int32Array  # [num_tokens]
    status: SequenceStatus = SequenceStatus.WAITING
    num_preemptions: int = 0
    num_skips: int = 0  # admissions that passed it since it came to the queue
    num_computed_tokens: int = 0  # when it was last preempted
    root: bytes = b""  # what its chain of digests starts from
    block_digests: bytes = b""  # of its first full blocks; more are added when needed

    @property
    def seq_id(self) -> int:
        """The request's id."""
        return self.request.seq_id

    @property
    def num_tokens(self) -> int:
        """Tokens to compute when it is admitted from the queue."""
        return len(self.token_ids)
