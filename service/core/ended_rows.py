"""Sequences that have ended, and keep their rows for a while."""

from dataclasses import replace

import numpy as np

from service.core.batch_state import BatchState
from service.core.plan import NO_ROWS, StepPlan
from service.core.types import Int32Array, StepResult


class EndedRows:
    """The rows that ended and stay: a step in flight computes them, or they leave with their batch.

    Owned by the Scheduler; `BatchState.has_ended` says which they are. What such a row samples is dropped.
    """

    def __init__(self, batch: BatchState) -> None:
        self._batch = batch
        self._num_rows = 0
        self._failed_seq_ids: list[int] = []

    def __len__(self) -> int:
        """How many there are."""
        return self._num_rows

    def holds(self, seq_id: int) -> bool:
        """True when the sequence has ended and keeps its row."""
        row = self._batch.row_of(seq_id) if self._num_rows else None
        return row is not None and bool(self._batch.has_ended[row])

    def keep(self, finished_rows: Int32Array, failed_rows: Int32Array) -> None:
        """`finished_rows` have ended; those of them in `failed_rows` have computed what is not to be trusted."""
        if len(finished_rows):
            self._batch.has_ended[finished_rows] = True
            self._num_rows += len(finished_rows)
            self._failed_seq_ids += self._batch.seq_ids[failed_rows].tolist()

    def release(self) -> tuple[Int32Array, Int32Array]:
        """All of them, which are to leave now, and those that failed."""
        if not self._num_rows:
            return NO_ROWS, NO_ROWS
        batch = self._batch
        rows = np.flatnonzero(batch.has_ended[: batch.num_rows]).astype(np.int32)
        failed_rows = rows[np.isin(batch.seq_ids[rows], self._failed_seq_ids)] if self._failed_seq_ids else NO_ROWS
        self._num_rows = 0
        self._failed_seq_ids.clear()
        return rows, failed_rows

    def live_part(self, plan: StepPlan, result: StepResult) -> tuple[StepPlan, StepResult]:
        """`plan` and `result`, not yet committed, without these rows: nothing about them changes any more."""
        if not self._num_rows:
            return plan, result
        is_live = ~self._batch.has_ended[plan.rows]
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
            continues=NO_ROWS,
        )
        return live, StepResult(
            token_ids=result.token_ids[kept],
            logprobs={places[old]: entry for old, entry in result.logprobs.items() if old in places},
            failed=np.array([places[old] for old in result.failed.tolist() if old in places], np.int64),
        )
