"""Fills one step: decode tokens, then chunks of prompts in progress, then admissions."""

import numpy as np

from service.core.batch_state import BatchState
from service.core.block_pool import BlockPool
from service.core.budget import ChunkBudget
from service.core.plan import StepPlan
from service.core.preemption import choose_victim
from service.core.reservation import Reservation
from service.core.scheduler_config import SchedulerConfig
from service.core.types import BoolArray, Int32Array
from service.core.waiting_queue import WaitingQueue


class Planner:
    """Chooses a step's tokens and reserves their blocks. Stateless between steps; used by the Scheduler alone.

    1. Every decode row gets its token, and a block when its last one is full. Blocks missing are taken from the
       sequences of the highest rank, decoding or not.
    2. Rows that catch up with a prompt share the rest of the token budget, lowest rank first. A chunk takes what
       blocks there are, and never preempts.
    3. The queue's head is admitted while rows, tokens and blocks allow: all its blocks must be there, beside those
       that admitted prompts have yet to take and beside the watermark. With nothing running the watermark does not
       count. A step that has preempted admits nobody.

    So a step is never empty while there is work. Blocks promised to admitted prompts are free or lent to decode rows;
    a decode row that finds no block makes the last rank give up its own, so that one is left that can go on; without
    decode rows the promised blocks are free; and with no row at all the head fits, or it would have been refused.
    """

    def __init__(
        self, config: SchedulerConfig, batch: BatchState, pool: BlockPool, queue: WaitingQueue, budget: ChunkBudget
    ) -> None:
        self._config = config
        self._batch = batch
        self._pool = pool
        self._queue = queue
        self._budget = budget
        self._all_rows: Int32Array = np.arange(config.max_num_seqs, dtype=np.int32)
        self._ones: Int32Array = np.ones(config.max_num_seqs, np.int32)
        self._trues: BoolArray = np.ones(config.max_num_seqs, np.bool_)
        for constant in (self._all_rows, self._ones, self._trues):
            constant.flags.writeable = False  # plans hand out slices of them

    def plan(self, step_id: int, reservation: Reservation) -> StepPlan:
        """The step for the present state, which must have work. Its changes are in `reservation`."""
        self._grow_decode_rows(reservation)
        num_decode_rows = self._batch.num_decode_rows
        decode_rows = self._all_rows[:num_decode_rows]
        if reservation.preempted_rows:
            decode_rows = decode_rows[reservation.is_kept(num_decode_rows)]
        chunks = self._chunks(reservation, len(decode_rows))
        assert len(decode_rows) or chunks, "work exists, so a step exists"
        return self._assemble(step_id, decode_rows, chunks)

    def _grow_decode_rows(self, reservation: Reservation) -> None:
        batch = self._batch
        num_decode_rows = batch.num_decode_rows
        held_tokens = batch.num_blocks[:num_decode_rows] * self._config.block_size
        is_full = batch.num_computed_tokens[:num_decode_rows] == held_tokens
        while np.count_nonzero(is_full) > self._pool.num_free:
            victim = choose_victim(batch, reservation.is_kept(batch.num_rows))
            reservation.preempt(victim)
            if victim < num_decode_rows:
                is_full[victim] = False
        rows = np.flatnonzero(is_full).astype(np.int32)
        if len(rows):
            reservation.grow_each(rows)

    def _chunks(self, reservation: Reservation, num_decode_tokens: int) -> list[tuple[int, int]]:
        """(row, tokens) of every chunk: prompts in progress, then admissions."""
        left = self._budget.chunk_tokens(num_decode_tokens)
        chunks: list[tuple[int, int]] = []
        for row in self._rows_in_progress(reservation):
            if left == 0:
                break
            left -= self._add_chunk(row, left, reservation, chunks)
        if not reservation.preempted_rows:
            self._admit(left, reservation, chunks)
        return chunks

    def _rows_in_progress(self, reservation: Reservation) -> list[int]:
        """The rows that catch up with a prompt and still have their blocks, lowest rank first."""
        first, end = self._batch.num_decode_rows, self._batch.num_rows
        rows = first + np.argsort(self._batch.rank[first:end])
        return [row for row in rows.tolist() if row not in reservation.preempted_rows]

    def _add_chunk(self, row: int, left: int, reservation: Reservation, chunks: list[tuple[int, int]]) -> int:
        """Schedule as much of a row as `left` tokens and the free blocks allow. Returns the number of tokens."""
        batch, block_size = self._batch, self._config.block_size
        num_computed_tokens = int(batch.num_computed_tokens[row])
        num_blocks = int(batch.num_blocks[row])
        room = (num_blocks + self._pool.num_free) * block_size - num_computed_tokens
        num_tokens = min(int(batch.num_tokens[row]) - num_computed_tokens, left, room)
        if num_tokens > 0:
            reservation.grow(row, self._blocks_for(num_computed_tokens + num_tokens) - num_blocks)
            chunks.append((row, num_tokens))
        return num_tokens

    def _admit(self, left: int, reservation: Reservation, chunks: list[tuple[int, int]]) -> None:
        batch = self._batch
        promised = self._promised_blocks()
        while left > 0 and batch.num_rows < self._config.max_num_seqs:
            head = self._queue.peek()
            if head is None:
                return
            num_blocks = self._blocks_for(head.num_tokens)
            spare = self._pool.num_free - promised - self._config.watermark_blocks
            if batch.num_rows and num_blocks > spare:
                return
            row = reservation.admit()
            left -= self._add_chunk(row, left, reservation, chunks)
            promised += num_blocks - int(batch.num_blocks[row])

    def _promised_blocks(self) -> int:
        """Blocks that the prompts in progress have yet to take."""
        rows = slice(self._batch.num_decode_rows, self._batch.num_rows)
        block_size = self._config.block_size
        needed = (self._batch.num_tokens[rows] + block_size - 1) // block_size
        return int((needed - self._batch.num_blocks[rows]).sum())

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.block_size)

    def _assemble(self, step_id: int, decode_rows: Int32Array, chunks: list[tuple[int, int]]) -> StepPlan:
        num_decode_rows = len(decode_rows)
        if not chunks:
            trues, ones = self._trues[:num_decode_rows], self._ones[:num_decode_rows]
            return StepPlan(step_id, decode_rows, ones, trues, num_decode_rows, num_decode_rows)
        batch = self._batch
        rows, counts = np.array(chunks, np.int32).T
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
        )
