"""Sequences that have ended, and keep their rows for a while."""

from dataclasses import replace

import numpy as np

from service.core.batch_state import BatchState
from service.core.plan import NO_ROWS, StepPlan
from service.core.types import FinishReason, Int8Array, Int32Array, StepResult

# Looking a member up in an enum takes longer than comparing a thousand rows.
_NONE, _ERROR = np.int8(FinishReason.NONE), np.int8(FinishReason.ERROR)


class EndedRows:
    """The rows that ended and stay: a step in flight computes them, or they leave with their batch.

    `BatchState.has_ended` says which they are, and nothing else: such a row may be cancelled, or its batch end, at any
    time. What it samples is dropped. Used by the Scheduler and its parts.
    """

    def __init__(self, batch: BatchState) -> None:
        self._batch = batch

    def __len__(self) -> int:
        """How many there are."""
        return int(np.count_nonzero(self._batch.has_ended))

    def holds(self, seq_id: int) -> bool:
        """True when the sequence has ended and keeps its row."""
        row = self._batch.row_of(seq_id) if self else None
        return row is not None and bool(self._batch.has_ended[row])

    def keep(self, rows: Int32Array, reasons: Int8Array) -> None:
        """`rows` have sampled; those with a reason, int8[number of rows], have ended.

        What computed an ERROR is not to be trusted.
        """
        has_reason = reasons != _NONE
        if np.count_nonzero(has_reason):
            places = has_reason.nonzero()[0]  # of bools it is found several times faster than of numbers
            ended_rows = rows[places]
            self._batch.has_ended[ended_rows] = True
            self._batch.has_failed[ended_rows] = reasons[places] == _ERROR

    def rows(self) -> tuple[Int32Array, Int32Array]:
        """All of them, and those that failed."""
        rows = self._batch.has_ended.nonzero()[0].astype(np.int32)
        return rows, rows[self._batch.has_failed[rows]]

    def live_part(self, plan: StepPlan, result: StepResult) -> tuple[StepPlan, StepResult]:
        """`plan` and `result`, not yet committed, without these rows: nothing about them changes any more."""
        if not self:
            return plan, result
        is_live = ~self._batch.has_ended[plan.rows]
        if is_live.all():
            return plan, result
        kept = np.flatnonzero(is_live[plan.samples])
        counts = plan.num_scheduled[is_live]
        live = replace(
            plan,
            rows=plan.rows[is_live],
            num_scheduled=counts,
            samples=plan.samples[is_live],
            num_decode_rows=int(np.count_nonzero(is_live[: plan.num_decode_rows])),
            num_tokens=int(counts.sum()),
            num_in_flight=NO_ROWS,
            continues=NO_ROWS,
        )
        return live, result.of(kept)
