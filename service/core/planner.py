"""Fills one step: decode tokens, then chunks of prompts in progress, then admissions."""

import numpy as np

from service.core.batch_state import BatchState
from service.core.batching import Batching
from service.core.block_pool import BlockPool
from service.core.budget import ChunkBudget
from service.core.chunks import Chunks
from service.core.ordering import OrderingPolicy
from service.core.plan import StepPlan
from service.core.preemption import choose_victim
from service.core.reservation import Reservation
from service.core.roster import Roster
from service.core.scheduler_config import SchedulerConfig
from service.core.types import BoolArray, Int32Array, Int64Array
from service.core.waiting_queue import WaitingQueue


class Planner:
    """Chooses a step's tokens and reserves their blocks. Stateless between steps; used by Scheduler and LookAhead.

    1. Every decode row gets its token, and a block when its last one is full. Blocks missing are taken from sequences
       that the policy puts last, decoding or not, where they cost least; see `choose_victim`.
    2. Rows that catch up with a prompt share the rest of the token budget, short ones first. A chunk takes what blocks
       there are, and never preempts.
    3. Sequences are admitted by the rules of the batching. A step that has preempted admits nobody.

    So a step is never empty while there is work. Blocks promised to admitted prompts are free or lent to decode rows;
    a decode row that finds no block makes the last rank give up its own, so that one is left that can go on; without
    decode rows the promised blocks are free; and with no row at all the head fits, or it would have been refused.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        state: tuple[BatchState, BlockPool, WaitingQueue],
        policy: OrderingPolicy,
        budget: ChunkBudget,
        batching: Batching,
    ) -> None:
        self._config = config
        self._batch, self._pool, self._queue = state
        self._policy = policy
        self._budget = budget
        self._batching = batching
        self._ones: Int32Array = np.ones(config.max_num_seqs, np.int32)
        self._trues: BoolArray = np.ones(config.max_num_seqs, np.bool_)
        for constant in (self._ones, self._trues):
            constant.flags.writeable = False  # plans hand out slices of them

    def plan(self, step_id: int, reservation: Reservation) -> StepPlan:
        """The step for the present state, which must have work. Its changes are in `reservation`."""
        growing = self._growing_rows(reservation)
        roster = self._roster(reservation)
        chunks, num_spare_blocks = self.offer(roster, len(growing))
        if chunks is not None:
            if not reservation.preempted_rows:
                self._batching.admit(step_id, reservation, roster, chunks, num_spare_blocks)
            chunks.share()
        assert len(roster.decode_rows) or (chunks is not None and chunks.rows), "work exists, so a step exists"
        return self.fill(step_id, reservation, roster, growing, chunks)

    def offer(self, roster: Roster, num_growing: int) -> tuple[Chunks | None, int]:
        """What the prompts of `roster` may share, and the blocks that are left for others while these run.

        `num_growing` blocks go to decode rows. None: no prompt is in progress, and nobody waits who could have a row.
        """
        num_free = self._pool.num_free - num_growing
        is_closed = self._batch.num_rows == self._batch.max_num_seqs or not len(self._queue)
        if is_closed and not len(roster.prompt_rows):
            return None, num_free
        chunks = Chunks(self._config.block_size, self._budget.chunk_tokens(roster), num_free)
        num_promised = self._continue_prompts(roster, chunks)
        return chunks, num_free - num_promised - self._config.watermark_blocks

    def fill(
        self, step_id: int, reservation: Reservation, roster: Roster, growing: Int64Array, chunks: Chunks | None
    ) -> StepPlan:
        """The step of the decode rows and `chunks`. Their blocks are taken, one for each of the `growing` rows."""
        if chunks is not None and chunks.rows:
            reservation.grow(growing, chunks.rows, chunks.num_blocks)
            return self._mixed_plan(step_id, roster, chunks, reservation.copies)
        reservation.grow_each(growing)
        count = len(roster.decode_rows)
        ones, trues = self._ones[:count], self._trues[:count]
        return StepPlan(step_id, roster.decode_rows, ones, trues, count, count, *reservation.copies)

    def _roster(self, reservation: Reservation) -> Roster:
        """The rows that have not been preempted."""
        batch, num_decode_rows = self._batch, self._batch.num_decode_rows
        rows = batch.first_rows(batch.num_rows)
        decode_rows, prompt_rows = rows[:num_decode_rows], rows[num_decode_rows:]
        if reservation.preempted_rows:
            is_kept = reservation.is_kept(batch.num_rows)
            decode_rows, prompt_rows = decode_rows[is_kept[:num_decode_rows]], prompt_rows[is_kept[num_decode_rows:]]
        return Roster(decode_rows, prompt_rows, batch.num_computed_tokens)

    def _growing_rows(self, reservation: Reservation) -> Int64Array:
        """The decode rows that need a block; others are preempted until there are as many."""
        batch = self._batch
        num_decode_rows = batch.num_decode_rows
        held_tokens = batch.num_blocks[:num_decode_rows] * self._config.block_size
        is_full = batch.num_computed_tokens[:num_decode_rows] == held_tokens
        rows: Int64Array = is_full.nonzero()[0]
        while (num_missing := len(rows) - self._pool.num_free) > 0:
            may_lose = reservation.is_kept(batch.num_rows)
            victim = choose_victim(batch, self._pool, self._policy, may_lose, num_missing)
            reservation.preempt(victim)
            rows = rows[rows != victim]
        return rows

    def _continue_prompts(self, roster: Roster, chunks: Chunks) -> int:
        """Let admitted prompts share. Returns the blocks that these have yet to take, in this step or later."""
        batch, block_size, rows = self._batch, self._config.block_size, roster.prompt_rows
        if not len(rows):
            return 0
        rows = rows[self._policy.standing(batch, rows)]
        left = batch.num_tokens[rows] - roster.num_computed_tokens[rows]
        slots = batch.num_blocks[rows] * block_size - roster.num_computed_tokens[rows]
        columns = (rows, batch.admitted_step[rows], batch.num_admitted_tokens[rows], left, slots)
        for row, step_id, num_tokens, num_left, num_slots in zip(*(column.tolist() for column in columns), strict=True):
            chunks.join(row, chunks.turn(step_id, num_tokens), num_left, num_slots, is_new=False)
        return int(((left - slots + block_size - 1) // block_size).sum())

    def _mixed_plan(self, step_id: int, roster: Roster, chunks: Chunks, copies: tuple[Int32Array, ...]) -> StepPlan:
        num_decode_rows = len(roster.decode_rows)
        rows, counts = np.array(chunks.rows, np.int32), np.array(chunks.num_tokens, np.int32)
        samples = roster.num_computed_tokens[rows] + counts == self._batch.num_tokens[rows]
        # A prompt of one token is a decode row to the executor.
        is_single = samples & (counts == 1)
        num_single = int(np.count_nonzero(is_single))
        if num_single:
            order = np.argsort(~is_single, kind="stable")
            rows, counts, samples = rows[order], counts[order], samples[order]
        return StepPlan(
            step_id,
            self._joined(roster.decode_rows, rows),
            np.concatenate([self._ones[:num_decode_rows], counts]),
            np.concatenate([self._trues[:num_decode_rows], samples]),
            num_decode_rows + num_single,
            num_decode_rows + sum(chunks.num_tokens),
            *copies,
        )

    def _joined(self, decode_rows: Int32Array, rows: Int32Array) -> Int32Array:
        """`decode_rows`, then `rows`; as `BatchState.first_rows` if they are these, which `as_slice` knows at once."""
        first_rows = self._batch.first_rows(len(decode_rows) + len(rows))
        has_first_rows = isinstance(self._batch.as_slice(decode_rows), slice)
        if has_first_rows and rows.tolist() == first_rows[len(decode_rows) :].tolist():
            return first_rows
        return np.concatenate([decode_rows, rows])
