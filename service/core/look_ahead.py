"""The step after the one in flight, planned before that one's tokens are known."""

from dataclasses import replace
from typing import Final

import numpy as np

from service.core.batch_state import BatchState
from service.core.batching import Batching
from service.core.block_pool import BlockPool
from service.core.ended_rows import EndedRows
from service.core.forks import Forks
from service.core.plan import StepPlan
from service.core.planner import Planner
from service.core.prefixes import Prefixes
from service.core.reservation import Reservation
from service.core.roster import Roster
from service.core.scheduler_config import SchedulerConfig
from service.core.types import Int32Array, Int64Array
from service.core.waiting_queue import WaitingQueue

_MOST_ENDED: Final = 8  # of so many rows, one may be seated though it has ended


class LookAhead:
    """Plans steps that go on with the rows of a step in flight. Used by the Scheduler alone.

    It does what the Planner would once that step has landed: decode rows compute the token that it samples, whatever
    that is, prompts go on with their next chunks, and a prompt that it completes is a decode row from then on. But
    nobody is admitted or preempted, and blocks are only taken. So no row moves, and none is out of its zone for those
    who look at the plan: its rows come in the order that it needs. A sequence that the step in flight ends stays in its
    row, with its blocks, as long as a step is in flight that may compute it; what it samples there is dropped. Rows
    that end by length are known, and left out.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        state: tuple[BatchState, BlockPool, WaitingQueue, Forks],
        prefixes: Prefixes,
        planner: Planner,
        batching: Batching,
        ended: EndedRows,
    ) -> None:
        self._config = config
        self._batch, self._pool, self._queue, self._forks = state
        self._prefixes = prefixes
        self._planner = planner
        self._batching = batching
        self._ended = ended

    def plan(self, step_id: int, landing: StepPlan) -> tuple[StepPlan, Reservation] | None:
        """The step after `landing`, the only one in flight. None when that has to land first.

        Then nothing has changed, but that cached blocks may have got their digests.
        """
        batch, pool = self._batch, self._pool
        sampled_rows = landing.rows if landing.is_decode_only else landing.rows[landing.samples]
        continues = self._continuing(sampled_rows)
        if self._has_to_make_room(len(sampled_rows) - len(continues)) or self._is_awaited(sampled_rows):
            return None
        going_rows = sampled_rows if len(continues) == len(sampled_rows) else sampled_rows[continues]
        roster = self._roster(landing, going_rows)
        decode_rows = batch.as_slice(roster.decode_rows)
        is_full = roster.num_computed_tokens[decode_rows] == batch.num_blocks[decode_rows] * self._config.block_size
        growing: Int64Array = roster.decode_rows[is_full].astype(np.int64)
        if len(growing) > pool.num_free:
            return None
        chunks, num_spare_blocks = self._planner.offer(roster, len(growing))
        is_published = not len(self._queue) or self._prefixes.is_published(landing.rows)
        if not self._batching.may_go_on(step_id, chunks, num_spare_blocks, is_published=is_published):
            return None
        if chunks is not None:
            chunks.share()
        if not len(roster.decode_rows) and (chunks is None or not chunks.rows):
            return None
        reservation = Reservation(batch, pool, self._queue, self._prefixes)
        plan = self._planner.fill(step_id, reservation, roster, growing, chunks)
        rows = batch.as_slice(plan.rows)
        num_in_flight = roster.num_computed_tokens[rows] - batch.num_computed_tokens[rows]
        return replace(plan, num_in_flight=num_in_flight, continues=continues), reservation

    def _has_to_make_room(self, num_ending: int) -> bool:
        """Whether rows that have ended, or that `landing` ends, are too many or in the way of a sequence that waits."""
        num_ended = len(self._ended)
        if len(self._queue):
            return num_ended + num_ending > 0
        return num_ended > 0 and num_ended * _MOST_ENDED > self._batch.num_rows

    def _is_awaited(self, sampled_rows: Int32Array) -> bool:
        """Whether others wait for the first token of one of the rows, to share its prompt."""
        return len(self._forks) > 0 and bool(self._forks.leaders_among(self._batch.seq_ids[sampled_rows]))

    def _continuing(self, sampled_rows: Int32Array) -> Int32Array:
        """The places of those rows that go on with what they sample, for all that is known: int32[num_continuing]."""
        batch = self._batch
        rows = batch.as_slice(sampled_rows)
        num_tokens = batch.num_tokens[rows] + 1
        goes_on = num_tokens < np.minimum(batch.max_num_tokens[rows], self._config.max_kv_tokens + 1)
        if self._ended:
            goes_on &= ~batch.has_ended[rows]
        if np.count_nonzero(goes_on) == len(goes_on):
            return batch.first_rows(len(goes_on))
        return np.flatnonzero(goes_on).astype(np.int32)

    def _roster(self, landing: StepPlan, going_rows: Int32Array) -> Roster:
        """What the next step finds: `going_rows`, and the rows that have more of their prompts left."""
        batch = self._batch
        num_computed_tokens = batch.num_computed_tokens.copy()
        num_computed_tokens[batch.as_slice(landing.rows)] += landing.num_scheduled
        # Decode rows are all in flight. The others were behind when the rows were last put in order.
        rows = batch.first_rows(batch.num_rows)[batch.num_decode_rows :]
        if not len(rows):
            return Roster(going_rows, rows, num_computed_tokens)
        left = batch.num_tokens[rows] - num_computed_tokens[rows]
        left[batch.has_ended[rows]] = 0
        return Roster(np.append(going_rows, rows[left == 1]), rows[left > 1], num_computed_tokens)
