"""Continuous batching: sequences are admitted in every step, and leave when they end."""

from collections.abc import Iterator

import numpy as np

from service.core.batch_state import BatchState
from service.core.budget import ChunkBudget
from service.core.chunks import Chunks
from service.core.preemption import settling_blocks
from service.core.prefixes import Prefixes, PrefixHit
from service.core.reservation import Reservation
from service.core.roster import Roster
from service.core.scheduler_config import SchedulerConfig
from service.core.sequence import Sequence, SequenceStatus
from service.core.waiting_queue import WaitingQueue


class ContinuousBatching:
    """The queue's head is admitted while rows, tokens and blocks allow, with the longest prefix that is cached.

    All its other blocks must be there, beside those that admitted prompts have yet to take and beside the watermark.
    With nothing running the watermark does not count. A preempted one comes back when there are blocks to grow, too. A
    head whose blocks are not there, or that would get no token because prompts in progress have the earlier turns, may
    be passed by a few that come behind it: by any number that do not delay it, a bounded number of times by others.
    """

    def __init__(
        self, config: SchedulerConfig, batch: BatchState, queue: WaitingQueue, prefixes: Prefixes, budget: ChunkBudget
    ) -> None:
        self._config = config
        self._batch = batch
        self._queue = queue
        self._prefixes = prefixes
        self._budget = budget

    def not_before_ns(self) -> int:
        """At once."""
        return 0

    def may_leave(self) -> bool:
        """At once."""
        return True

    def may_go_on(self, step_id: int, chunks: Chunks | None, num_spare_blocks: int, *, is_published: bool) -> bool:
        """Unless a sequence that waits fits, or might with a prefix that is not yet published."""
        if chunks is None or not len(self._queue) or self._batch.num_rows == self._batch.max_num_seqs:
            return True
        if not chunks.has_tokens_at(step_id + 1):
            return True
        return is_published and self._next_admission(step_id, chunks, num_spare_blocks) is None

    def admit(
        self, step_id: int, reservation: Reservation, roster: Roster, chunks: Chunks, num_spare_blocks: int
    ) -> None:
        """Admit sequences while tokens, rows and `num_spare_blocks` suffice, and let them share."""
        batch, block_size, num_old_rows = self._batch, self._config.block_size, self._batch.num_rows
        num_restored_blocks = 0  # a step waits for them: not many more than it may compute
        # With nothing left for a prompt of one chunk there is nothing for any.
        while batch.num_rows < batch.max_num_seqs and chunks.has_tokens_at(step_id + 1):
            if num_restored_blocks * block_size >= self._config.max_num_batched_tokens:
                return
            # With nothing running the head fits, whatever the watermark says.
            max_blocks = num_spare_blocks if batch.num_rows else self._config.num_blocks
            admission = self._next_admission(step_id, chunks, max_blocks)
            if admission is None:
                return
            sequence, hit, turn, passed = admission
            num_spare_blocks -= hit.num_needed_blocks
            chunks.count_out(hit.num_revived_blocks + len(hit.host_blocks))
            row = reservation.admit(sequence, hit, passed)
            if len(hit.host_blocks):
                num_restored_blocks += len(hit.host_blocks)
                copying_ns = num_restored_blocks * self._config.host_block_ns
                prompt_rows = np.append(roster.prompt_rows, batch.first_rows(batch.num_rows)[num_old_rows:])
                chunks.lower(self._budget.chunk_tokens(roster._replace(prompt_rows=prompt_rows), copying_ns), turn)
            # What is copied takes slots of the first new block.
            num_slots = (len(hit.blocks) + len(hit.host_blocks)) * block_size - hit.num_tokens
            num_wanted = sequence.num_tokens - hit.num_tokens
            batch.admitted_step[row], batch.num_admitted_tokens[row] = step_id, num_wanted
            chunks.join(row, turn, num_wanted, num_slots, is_new=True)

    def _next_admission(
        self, step_id: int, chunks: Chunks, max_blocks: int
    ) -> tuple[Sequence, PrefixHit, int, list[Sequence]] | None:
        """The first sequence that blocks and tokens suffice for, its prefix and turn, and those that it delays.

        None when none within the window fits, or when it delays one that may be delayed no more.
        """
        ordering = self._config.ordering
        passed: list[Sequence] = []
        others: Iterator[Sequence] | None = None
        sequence = self._queue.head()  # mostly fits, and is quicker to find alone
        num_settling_blocks = 0
        while sequence is not None:
            # Who passes a preempted one leaves blocks to grow as well: else it would soon be among the preempted.
            if sequence.status is SequenceStatus.PREEMPTED and self._batch.num_rows:
                num_settling_blocks = settling_blocks(self._batch.num_rows, self._config.block_size)
            hit = self._prefixes.find(sequence, max_blocks - num_settling_blocks)
            if hit is not None:
                turn = chunks.turn(step_id, sequence.num_tokens - hit.num_tokens)
                if chunks.has_tokens_at(turn):
                    delayed = [head for head in passed if self._is_delayed(head, sequence, hit, max_blocks)]
                    if any(head.num_skips >= ordering.max_skips for head in delayed):
                        return None
                    return sequence, hit, turn, delayed
            passed.append(sequence)
            others = others or iter(self._queue.first(1 + ordering.skip_window)[1:])
            sequence = next(others, None)
        return None

    def _is_delayed(self, head: Sequence, passing: Sequence, hit: PrefixHit, num_spare_blocks: int) -> bool:
        """Whether the head may wait longer when `passing` is admitted before it, with `hit`.

        It does when no row is left; when it would have its blocks but for this one and those admitted while it waited;
        and when it had no room beside them even if those that were there before had ended. Else it waits for these.
        What others grow by is not foreseen.
        """
        batch, num_rows, block_size = self._batch, self._batch.num_rows, self._config.block_size
        own_hit = self._prefixes.find(head, self._config.num_blocks)
        if num_rows + 1 == batch.max_num_seqs or own_hit is None:
            return True
        later = batch.num_tokens[:num_rows][batch.admitted_step[:num_rows] >= head.queued_step]
        num_later_blocks = int((-(-later // block_size)).sum())
        num_needed_blocks = own_hit.num_needed_blocks
        num_settled_blocks = num_later_blocks - (-passing.num_tokens // block_size) - (-head.num_tokens // block_size)
        if head.status is SequenceStatus.PREEMPTED and num_rows:
            num_needed_blocks += settling_blocks(num_rows, block_size)
            num_settled_blocks += settling_blocks(len(later) + 1, block_size)
        if num_spare_blocks - hit.num_needed_blocks < num_needed_blocks <= num_spare_blocks + num_later_blocks:
            return True
        return num_settled_blocks + self._config.watermark_blocks >= self._config.num_blocks  # one is the null block
