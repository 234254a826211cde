"""The step after the one in flight, planned before that one's tokens are known."""

from dataclasses import replace
from typing import Final

import numpy as np

from service.core.batch_state import BatchState
from service.core.batching import Batching
from service.core.block_pool import BlockPool
from service.core.ended_rows import EndedRows
from service.core.plan import StepPlan
from service.core.planner import Planner
from service.core.prefixes import Prefixes
from service.core.reservation import Reservation
from service.core.scheduler_config import SchedulerConfig
from service.core.types import Int32Array
from service.core.waiting_queue import WaitingQueue

_MOST_ENDED: Final = 8  # of so many rows, one may be seated though it has ended


class LookAhead:
    """Plans steps that go on with the rows of a decode step in flight. Used by the Scheduler alone.

    Nothing else happens in such a step: nobody is admitted or preempted, no prompt is computed, blocks are only taken.
    So it moves no row, and its input tokens are those that the step before samples, whatever they are. A sequence that
    one of these ends stays in its row, with its blocks, as long as a step is in flight that may compute it; what it
    samples there is dropped. Rows that a step in flight ends by length are known, and left out.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        state: tuple[BatchState, BlockPool, WaitingQueue],
        prefixes: Prefixes,
        planner: Planner,
        batching: Batching,
        ended: EndedRows,
    ) -> None:
        self._config = config
        self._batch, self._pool, self._queue = state
        self._prefixes = prefixes
        self._planner = planner
        self._batching = batching
        self._ended = ended

    def plan(self, step_id: int, landing: StepPlan) -> tuple[StepPlan, Reservation] | None:
        """The step after `landing`, the only one in flight. None when that has to land first.

        Then nothing has changed, but that cached blocks may have got their digests.
        """
        batch, queue = self._batch, self._queue
        # A row behind the decode rows has a prompt to catch up with, or was admitted by the step in flight.
        if not landing.is_decode_only or batch.num_decode_rows < batch.num_rows or self._has_to_make_room():
            return None
        rows = batch.as_slice(landing.rows)
        num_computed_tokens = batch.num_computed_tokens[rows]
        if np.count_nonzero(num_computed_tokens < batch.num_prompt_tokens[rows]):
            return None  # the last token of a prompt, which is published when it has landed
        continues = self._continuing(landing)
        num_rows = len(continues)
        if num_rows < len(landing.rows) and (len(queue) or not num_rows):
            return None
        going_rows = landing.rows if num_rows == len(landing.rows) else landing.rows[continues]
        going = batch.as_slice(going_rows)
        is_full = batch.num_computed_tokens[going] + 1 == batch.num_blocks[going] * self._config.block_size
        growing = going_rows[is_full].astype(np.int64)
        num_free = self._pool.num_free - len(growing)
        if num_free < 0 or not self._batching.may_go_on(step_id, num_rows, num_free):
            return None
        reservation = Reservation(batch, self._pool, queue, self._prefixes)
        reservation.grow_each(growing)
        return replace(self._planner.decode_plan(step_id, going_rows, reservation), continues=continues), reservation

    def _has_to_make_room(self) -> bool:
        """Whether ended rows are too many, or in the way of a sequence that waits."""
        num_ended = len(self._ended)
        return num_ended > 0 and (num_ended * _MOST_ENDED > self._batch.num_rows or len(self._queue) > 0)

    def _continuing(self, landing: StepPlan) -> Int32Array:
        """The places in `landing` of the rows that go on after it, for all that is known: int32[num_continuing]."""
        batch = self._batch
        rows = batch.as_slice(landing.rows)
        num_tokens = batch.num_tokens[rows] + 1
        goes_on = num_tokens < np.minimum(batch.max_num_tokens[rows], self._config.max_kv_tokens + 1)
        if self._ended:
            goes_on &= ~batch.has_ended[rows]
        if np.count_nonzero(goes_on) == len(goes_on):
            return batch.first_rows(len(goes_on))
        return np.flatnonzero(goes_on).astype(np.int32)
