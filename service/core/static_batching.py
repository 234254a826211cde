"""The generations before continuous batching, to compare it with: a batch starts and ends together.

`static`: when a batch has ended, the next one is formed of what waits then. `dynamic`: the same, but a batch that is
not full waits until its first request has waited for a time window. They run through the same executor and pay what
they always paid: who comes while a batch runs waits for its end; a row that has finished computes on until the last one
has, and what it samples is thrown away; memory is set aside for the longest answer that each request may get. They use
no cached prefixes, and never preempt.
"""

from service.core.batch_state import BatchState
from service.core.chunks import Chunks
from service.core.prefixes import no_hit
from service.core.reservation import Reservation
from service.core.roster import Roster
from service.core.scheduler_config import SchedulerConfig
from service.core.waiting_queue import WaitingQueue


class StaticBatching:
    """Admits into an empty batch only, as many as rows and memory hold when all of them get their longest answer."""

    def __init__(self, config: SchedulerConfig, batch: BatchState, queue: WaitingQueue) -> None:
        self._config = config
        self._batch = batch
        self._queue = queue

    def not_before_ns(self) -> int:
        """At once while a batch runs, or is full."""
        window_ns = self._config.batch_window_ns
        if not window_ns or self._batch.num_rows or len(self._queue) >= self._config.max_num_seqs:
            return 0
        oldest_ns = min(sequence.request.arrival_ns for sequence in self._queue.first(len(self._queue)))
        return oldest_ns + window_ns  # whoever the policy lets go first

    def admit(
        self,
        step_id: int,
        reservation: Reservation,
        roster: Roster,  # noqa: ARG002
        chunks: Chunks,
        num_spare_blocks: int,  # noqa: ARG002
    ) -> None:
        """Form a batch, if there is none."""
        batch, config = self._batch, self._config
        if batch.num_rows:
            return
        num_blocks_left = config.num_blocks - 1
        while batch.num_rows < batch.max_num_seqs:
            sequence = self._queue.head()
            if sequence is None:
                return
            sampling, num_tokens = sequence.request.sampling, sequence.num_tokens
            longest = min(num_tokens + sampling.max_tokens, config.max_model_len)
            num_blocks_left -= -(-longest // config.block_size)
            if batch.num_rows and num_blocks_left < 0:
                return
            row = reservation.admit(sequence, no_hit(-(-num_tokens // config.block_size)), [])
            batch.admitted_step[row], batch.num_admitted_tokens[row] = step_id, num_tokens
            chunks.join(row, step_id, num_tokens, 0, is_new=False)

    def may_go_on(
        self,
        step_id: int,  # noqa: ARG002
        chunks: Chunks | None,  # noqa: ARG002
        num_spare_blocks: int,  # noqa: ARG002
        *,
        is_published: bool,  # noqa: ARG002
    ) -> bool:
        """Never: rows that have ended compute on, and nobody compares how fast that is."""
        return False

    def may_leave(self) -> bool:
        """Once the last one has ended."""
        return bool(self._batch.has_ended[: self._batch.num_rows].all())
