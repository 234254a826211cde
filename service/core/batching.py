"""The generations before continuous batching, to compare it with: a batch starts and ends together.

`static`: when a batch has ended, the next one is formed of what waits then. `dynamic`: the same, but a batch that is
not full waits until its first request has waited for a time window. They run through the same executor and pay what
they always paid: who comes while a batch runs waits for its end; a row that has finished computes on until the last one
has, and what it samples is thrown away; memory is set aside for the longest answer that each request may get. They use
no cached prefixes, and never preempt.
"""

from dataclasses import replace
from typing import Final

import numpy as np

from service.core.batch_state import BatchState
from service.core.chunks import Chunks
from service.core.plan import StepPlan
from service.core.planner import Planner
from service.core.prefixes import PrefixHit
from service.core.reservation import Reservation
from service.core.types import Int32Array, StepResult

_NO_ROWS: Final[Int32Array] = np.empty(0, np.int32)


class BatchPlanner(Planner):
    """Admits into an empty batch only, as many as rows and memory hold when all of them get their longest answer."""

    def not_before_ns(self) -> int:
        """When the next step may begin: at once while a batch runs, or is full."""
        window_ns = self._config.batch_window_ns
        if not window_ns or self._batch.num_rows or len(self._queue) >= self._config.max_num_seqs:
            return 0
        (head,) = self._queue.first(1)
        return head.request.arrival_ns + window_ns

    def _admit(self, step_id: int, reservation: Reservation, chunks: Chunks, num_spare_blocks: int) -> None:  # noqa: ARG002
        batch, config = self._batch, self._config
        if batch.num_rows:
            return
        num_blocks_left = config.num_blocks - 1
        while batch.num_rows < batch.max_num_seqs:
            for sequence in self._queue.first(1):
                sampling, num_tokens = sequence.request.sampling, sequence.num_tokens
                longest = min(num_tokens + sampling.max_tokens, config.max_model_len)
                num_blocks_left -= -(-longest // config.block_size)
                if batch.num_rows and num_blocks_left < 0:
                    return
                hit = PrefixHit(_NO_ROWS, 0, 0, -(-num_tokens // config.block_size), 0)
                row = reservation.admit(sequence, hit, [])
                batch.admitted_step[row] = step_id
                chunks.join(row, step_id, num_tokens, 0, is_new=False)
                break
            else:
                return


def landed_part(plan: StepPlan, result: StepResult, batch: BatchState) -> tuple[StepPlan, StepResult]:
    """`plan` and `result` without the rows that had ended before: nothing about those changes any more."""
    is_live = ~batch.has_ended[plan.rows]
    if is_live.all():
        return plan, result
    kept = np.flatnonzero(is_live[plan.samples])
    places = {old: new for new, old in enumerate(kept.tolist())}
    counts = plan.num_scheduled[is_live]
    live = replace(
        plan,
        rows=plan.rows[is_live],
        num_scheduled=counts,
        samples=plan.samples[is_live],
        num_decode_rows=int(np.count_nonzero(is_live[: plan.num_decode_rows])),
        num_tokens=int(counts.sum()),
    )
    return live, StepResult(
        token_ids=result.token_ids[kept],
        logprobs={places[old]: entry for old, entry in result.logprobs.items() if old in places},
        failed=np.array([places[old] for old in result.failed.tolist() if old in places], np.int64),
    )


def leaving_rows(finished_rows: Int32Array, batch: BatchState) -> Int32Array:
    """The rows that leave the batch when `finished_rows` have ended: all of them once the last one has, else none."""
    batch.has_ended[finished_rows] = True
    has_ended = batch.has_ended[: batch.num_rows]
    return np.arange(batch.num_rows, dtype=np.int32) if has_ended.all() else _NO_ROWS
