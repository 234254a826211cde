"""One request on its way through the scheduler."""

import enum
from dataclasses import dataclass, field, replace

from service.core.chain import NO_MATCH, ChainNames, Match
from service.core.types import NULL_BLOCK, Int32Array, Request


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
    names: ChainNames  # of its full blocks; digests are added when needed
    status: SequenceStatus = SequenceStatus.WAITING
    num_preemptions: int = 0
    queued_step: int = 0  # the first that was planned after it came to the queue
    num_skips: int = 0  # admissions that passed it, and may delay it by that, since then
    num_computed_tokens: int = 0  # when it was last preempted
    match: Match = NO_MATCH  # of its known tokens, when it was last looked up

    seq_id: int = field(init=False)  # the request's
    num_tokens: int = field(init=False)  # to compute when it is admitted from the queue

    def __post_init__(self) -> None:
        """Note what is asked for often."""
        self.seq_id = self.request.seq_id
        self.num_tokens = len(self.token_ids)

    def preempt(self, token_ids: Int32Array, num_computed_tokens: int, step_id: int) -> None:
        """Its blocks are taken away, and it will wait from step `step_id` on with the tokens that it has now."""
        self.token_ids = token_ids
        self.num_tokens = len(token_ids)
        self.status = SequenceStatus.PREEMPTED
        self.num_preemptions += 1
        self.queued_step = step_id
        self.names = replace(self.names, tokens=b"", head=NULL_BLOCK)  # the cache keeps the others
        self.num_computed_tokens = num_computed_tokens
