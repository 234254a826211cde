"""Fills one step: decode tokens, then chunks of prompts in progress, then admissions."""

import numpy as np

from service.core.batch_state import BatchState
from service.core.block_pool import BlockPool
from service.core.budget import ChunkBudget
from service.core.chunks import Chunks
from service.core.ordering import OrderingPolicy
from service.core.plan import StepPlan
from service.core.preemption import choose_victim, settling_blocks
from service.core.prefixes import Prefixes, PrefixHit
from service.core.reservation import Reservation
from service.core.scheduler_config import SchedulerConfig
from service.core.sequence import Sequence, SequenceStatus
from service.core.types import BoolArray, Int32Array
from service.core.waiting_queue import WaitingQueue


class Planner:
    """Chooses a step's tokens and reserves their blocks. Stateless between steps; used by the Scheduler alone.

    1. Every decode row gets its token, and a block when its last one is full. Blocks missing are taken from sequences
       that the policy puts last, decoding or not, where they cost least; see `choose_victim`.
    2. Rows that catch up with a prompt share the rest of the token budget, short ones first. A chunk takes what blocks
       there are, and never preempts.
    3. The queue's head is admitted while rows, tokens and blocks allow, with the longest prefix that is cached: all
       its other blocks must be there, beside those that admitted prompts have yet to take and beside the watermark.
       With nothing running the watermark does not count. A head whose blocks or tokens are not there may be passed by
       a few that come behind it, a bounded number of times. A preempted one comes back when there are blocks to grow.
       A step that has preempted admits nobody.

    So a step is never empty while there is work. Blocks promised to admitted prompts are free or lent to decode rows;
    a decode row that finds no block makes the last rank give up its own, so that one is left that can go on; without
    decode rows the promised blocks are free; and with no row at all the head fits, or it would have been refused.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        state: tuple[BatchState, BlockPool, WaitingQueue],
        parts: tuple[OrderingPolicy, Prefixes],
        budget: ChunkBudget,
    ) -> None:
        batch, pool, queue = state
        self._config = config
        self._policy, self._prefixes = parts
        self._batch = batch
        self._pool = pool
        self._queue = queue
        self._budget = budget
        self._all_rows: Int32Array = np.arange(config.max_num_seqs, dtype=np.int32)
        self._ones: Int32Array = np.ones(config.max_num_seqs, np.int32)
        self._trues: BoolArray = np.ones(config.max_num_seqs, np.bool_)
        for constant in (self._all_rows, self._ones, self._trues):
            constant.flags.writeable = False  # plans hand out slices of them

    def not_before_ns(self) -> int:
        """When the next step may begin: at once."""
        return 0

    def plan(self, step_id: int, reservation: Reservation) -> StepPlan:
        """The step for the present state, which must have work. Its changes are in `reservation`."""
        self._grow_decode_rows(reservation)
        num_decode_rows = self._batch.num_decode_rows
        decode_rows = self._all_rows[:num_decode_rows]
        if reservation.preempted_rows:
            decode_rows = decode_rows[reservation.is_kept(num_decode_rows)]
        count = len(decode_rows)
        chunks = self._chunks(step_id, reservation, count)
        assert count or (chunks and chunks.rows), "work exists, so a step exists"
        if chunks is None or not chunks.rows:
            return StepPlan(step_id, decode_rows, self._ones[:count], self._trues[:count], count, count)
        return self._mixed_plan(step_id, decode_rows, chunks, reservation.block_copies)

    def _grow_decode_rows(self, reservation: Reservation) -> None:
        batch = self._batch
        num_decode_rows = batch.num_decode_rows
        held_tokens = batch.num_blocks[:num_decode_rows] * self._config.block_size
        is_full = batch.num_computed_tokens[:num_decode_rows] == held_tokens
        rows = is_full.nonzero()[0]
        if not len(rows):
            return
        while (num_missing := len(rows) - self._pool.num_free) > 0:
            may_lose = reservation.is_kept(batch.num_rows)
            victim = choose_victim(batch, self._pool, self._policy, may_lose, num_missing)
            reservation.preempt(victim)
            rows = rows[rows != victim]
        if len(rows):
            reservation.grow_each(rows.astype(np.int32))

    def _chunks(self, step_id: int, reservation: Reservation, num_decode_tokens: int) -> Chunks | None:
        """Every chunk, of prompts in progress and of those admitted now, with its blocks reserved; None: no prompts."""
        batch = self._batch
        if batch.num_decode_rows == batch.num_rows and (batch.num_rows == batch.max_num_seqs or not len(self._queue)):
            return None
        num_tokens = self._budget.chunk_tokens(num_decode_tokens, batch)
        chunks = Chunks(self._config.block_size, num_tokens, self._pool.num_free)
        num_promised = self._continue_prompts(reservation, chunks)
        if not reservation.preempted_rows:
            num_spare_blocks = self._pool.num_free - num_promised - self._config.watermark_blocks
            self._admit(step_id, reservation, chunks, num_spare_blocks)
        chunks.share()
        reservation.grow_by(chunks.rows, chunks.num_blocks)
        return chunks

    def _continue_prompts(self, reservation: Reservation, chunks: Chunks) -> int:
        """Let admitted prompts share. Returns the blocks that these have yet to take, in this step or later."""
        batch, block_size = self._batch, self._config.block_size
        first, end = batch.num_decode_rows, batch.num_rows
        if first == end:
            return 0
        rows = first + np.flatnonzero(reservation.is_kept(end)[first:])
        rows = rows[self._policy.standing(batch, rows.astype(np.int32))]
        left = batch.num_tokens[rows] - batch.num_computed_tokens[rows]
        slots = batch.num_blocks[rows] * block_size - batch.num_computed_tokens[rows]
        columns = (rows, batch.admitted_step[rows], left, slots)
        for row, step_id, num_left, num_slots in zip(*(column.tolist() for column in columns), strict=True):
            chunks.join(row, chunks.turn(step_id, num_left), num_left, num_slots, is_new=False)
        return int(((left - slots + block_size - 1) // block_size).sum())

    def _admit(self, step_id: int, reservation: Reservation, chunks: Chunks, num_spare_blocks: int) -> None:
        """Admit sequences while tokens, rows and `num_spare_blocks` suffice, and let them share."""
        batch = self._batch
        # With nothing left for a prompt of one chunk there is nothing for any.
        while batch.num_rows < batch.max_num_seqs and chunks.has_tokens_at(step_id + 1):
            # With nothing running the head fits, whatever the watermark says.
            max_blocks = num_spare_blocks if batch.num_rows else self._config.num_blocks
            admission = self._next_admission(step_id, chunks, max_blocks)
            if admission is None:
                return
            sequence, hit, passed = admission
            num_spare_blocks -= hit.num_needed_blocks
            chunks.revive(hit.num_revived_blocks)
            row = reservation.admit(sequence, hit, passed)
            # What is copied takes slots of the first new block.
            num_slots = len(hit.blocks) * self._config.block_size - hit.num_tokens
            batch.admitted_step[row] = step_id
            num_wanted = sequence.num_tokens - hit.num_tokens
            chunks.join(row, chunks.turn(step_id, num_wanted), num_wanted, num_slots, is_new=True)

    def _next_admission(
        self, step_id: int, chunks: Chunks, max_blocks: int
    ) -> tuple[Sequence, PrefixHit, list[Sequence]] | None:
        """The first sequence that `max_blocks` and the step's tokens suffice for, its prefix, and those it passes.

        None when a sequence that may not be passed comes before, or none within the window fits.
        """
        ordering = self._config.ordering
        passed: list[Sequence] = []
        for count in (1, 1 + ordering.skip_window):  # the head mostly fits, and it is quicker to find alone
            for sequence in self._queue.first(count)[len(passed) :]:
                hit = self._prefixes.find(sequence)
                turn = chunks.turn(step_id, sequence.num_tokens - hit.num_tokens)
                num_blocks = hit.num_needed_blocks
                if sequence.status is SequenceStatus.PREEMPTED and self._batch.num_rows:
                    num_blocks += settling_blocks(self._batch, self._config.block_size)
                if num_blocks <= max_blocks and chunks.has_tokens_at(turn):
                    return sequence, hit, passed
                # A preempted one is in the middle of its answer: whoever passes it takes the blocks it waits for.
                if sequence.num_skips >= ordering.max_skips or sequence.status is SequenceStatus.PREEMPTED:
                    return None
                passed.append(sequence)
        return None

    def _mixed_plan(self, step_id: int, decode_rows: Int32Array, chunks: Chunks, block_copies: Int32Array) -> StepPlan:
        batch, num_decode_rows = self._batch, len(decode_rows)
        rows, counts = np.array(chunks.rows, np.int32), np.array(chunks.num_tokens, np.int32)
        samples = batch.num_computed_tokens[rows] + counts == batch.num_tokens[rows]
        # A prompt of one token is a decode row to the executor.
        is_single = samples & (counts == 1)
        order = np.argsort(~is_single, kind="stable")
        num_scheduled = np.concatenate([self._ones[:num_decode_rows], counts[order]])
        return StepPlan(
            step_id,
            np.concatenate([decode_rows, rows[order]]),
            num_scheduled,
            np.concatenate([self._trues[:num_decode_rows], samples[order]]),
            num_decode_rows + int(np.count_nonzero(is_single)),
            int(num_scheduled.sum()),
            block_copies,
        )
