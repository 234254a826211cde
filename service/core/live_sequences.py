"""Every live sequence, from its coming to its end."""

from collections.abc import Collection, Iterator

import numpy as np

from service.core.batch_state import BatchState
from service.core.block_hash import TOKEN_BYTES
from service.core.block_pool import BlockPool
from service.core.chain import ChainNames
from service.core.deadlines import Deadlines
from service.core.forks import Forks
from service.core.ordering import OrderingPolicy
from service.core.prefixes import Prefixes, root_of
from service.core.reservation import Admission
from service.core.scheduler_config import SchedulerConfig
from service.core.sequence import Sequence, SequenceStatus
from service.core.snapshot import SchedulerCounters
from service.core.totals import Totals
from service.core.types import FinishReason, Int8Array, Int32Array, Int64Array, Request
from service.core.waiting_queue import WaitingQueue


class LiveSequences:
    """The sequences that have not ended: each is in the queue, waits as a fork, or has a row. Owned by the Scheduler.

    Brings them in, takes them out of wherever they are, and counts. The wait for admission is bounded for the first of
    a prompt's samples: the others have begun with it, and wait for its prompt, or for a row, as long as it takes. When
    it ends without a token they are on their own.
    """

    def __init__(self, config: SchedulerConfig, batch: BatchState, pool: BlockPool, policy: OrderingPolicy) -> None:
        self.by_id: dict[int, Sequence] = {}
        self.queue = WaitingQueue(policy)
        self.forks = Forks()
        self.prefixes = Prefixes(config, batch, pool, self.by_id)
        self.totals = Totals()
        self.num_steps = 0  # committed ones: also the step that is planned next with none in flight
        self.deadlines = Deadlines(self.by_id, config.max_queue_wait_ns)
        self._batch = batch
        self._pool = pool
        self._policy = policy
        self._block_bytes = config.block_size * TOKEN_BYTES

    def counters(self) -> SchedulerCounters:
        """Sizes and totals."""
        host = self._pool.host
        return SchedulerCounters(
            totals=self.totals,
            num_waiting=len(self.queue) - self.queue.num_preempted + len(self.forks),
            num_preempted=self.queue.num_preempted,
            num_running=self._batch.num_rows,
            num_waiting_tokens=self.queue.num_tokens,
            num_free_blocks=self._pool.num_free,
            num_evictable_blocks=self._pool.num_evictable,
            num_blocks=self._pool.num_blocks,
            num_host_blocks=0 if host is None else host.num_used,
            num_offloaded_blocks=0 if host is None else host.num_copied_out,
        )

    def count_admissions(self, admissions: list[Admission]) -> dict[int, int]:
        """Count what a committed step has admitted. Returns `StepDelta.cached_prompt_tokens`."""
        if not admissions:
            return {}
        self.totals = self.totals.with_admissions(admissions)
        return {
            sequence.seq_id: hit.num_tokens
            for sequence, status, _, _, hit in admissions
            if hit.num_tokens and status is SequenceStatus.WAITING
        }

    def num_tokens_to_answer(self, request: Request) -> Iterator[int]:
        """Tokens to compute before a new request has its first one: a number quick to find, then one no larger.

        The first counts all that are expected to be admitted before it, less what such prompts mostly find in the
        cache, and its own. The second leaves out what is cached of its own, and prompts that are longer: it passes
        them (see `Chunks`). A fork has the prompt of its leader, live as that is, but for the last token.
        """
        is_fork, uncached_share = request.fork_of in self.by_id, self.totals.uncached_share
        num_own_tokens = 1 if is_fork else len(request.prompt_token_ids)
        yield num_own_tokens + round(self._policy.num_tokens_before(request) * uncached_share)
        if not is_fork:
            num_own_tokens -= self.prefixes.num_cached_tokens(request)
        yield num_own_tokens + round(self._policy.num_tokens_before(request, num_own_tokens) * uncached_share)

    def enter(self, request: Request) -> None:
        """Queue a new sequence, or let it wait for the one that computes its prompt."""
        sequence = Sequence(
            request,
            *self._policy.enter(request),
            request.prompt_token_ids,
            ChainNames(request.block_digests, root_of(request), self._block_bytes),
            queued_step=self.num_steps,
        )
        leader = self._leader_of(request)
        self.by_id[request.seq_id] = sequence
        self.deadlines.bound_answer(request)
        if leader is None:
            self.deadlines.bound_wait(request)
        (self.queue if leader is None or self._has_output(leader) else self.forks).push(sequence)
        self.totals = self.totals._replace(num_submitted=self.totals.num_submitted + 1)

    def end_waiting(self, seq_id: int) -> bool:
        """End a live sequence that has no row. Returns False, and does nothing, when it has one."""
        if seq_id in self.queue:
            self.queue.remove(seq_id)
        elif seq_id in self.forks:
            self.forks.remove(seq_id)
        else:
            return False
        self._forget([seq_id])
        return True

    def end_running(self, seq_ids: Collection[int]) -> None:
        """End running sequences while no plan is in flight."""
        is_ending = np.isin(self._batch.seq_ids[: self._batch.num_rows], list(seq_ids))
        rows = np.flatnonzero(is_ending).astype(np.int32)
        self.prefixes.publish(rows)
        self._end_rows(rows)
        self._batch.arrange(~is_ending)

    def settle(self, finished_rows: Int32Array, cancelled: Collection[int], preempted: list[tuple[int, int]]) -> None:
        """After a step, end the sequences of `finished_rows` and those with the ids `cancelled`, which all have rows.

        `preempted` are (row, computed tokens that it gave up): what has not ended of them goes back to the queue. The
        rest is put in order. Of a failed one, so do those that hold what it has shared (see `Prefixes`), as preempted.
        """
        batch, ending_rows = self._batch, finished_rows
        keep = np.ones(batch.num_rows, np.bool_)
        keep[finished_rows] = False
        if cancelled:
            is_cancelled = np.isin(batch.seq_ids[: batch.num_rows], list(cancelled))
            self.prefixes.publish(np.flatnonzero(keep & is_cancelled).astype(np.int32))
            keep &= ~is_cancelled
            ending_rows = np.flatnonzero(~keep).astype(np.int32)
        self._end_rows(ending_rows)
        failed_rows = finished_rows[batch.has_failed[finished_rows]]
        if len(failed_rows):
            preempted = preempted + self._begin_anew(failed_rows, np.flatnonzero(keep).astype(np.int32))
        for row, num_computed_tokens in preempted:
            if keep[row]:
                self._requeue(row, num_computed_tokens)
                keep[row] = False
        if preempted:
            self.totals = self.totals._replace(num_preemptions=self.totals.num_preemptions + len(preempted))
        batch.arrange(keep)

    def _begin_anew(self, failed_rows: Int32Array, going_rows: Int32Array) -> list[tuple[int, int]]:
        """Drop what failed rows have shared and may be wrong. Returns `preempted` of the `going_rows` that hold it."""
        blocks, begun_rows = self.prefixes.doubtful(failed_rows, going_rows)
        self._pool.release(self._batch.blocks_of(begun_rows))
        self._pool.distrust(blocks)
        counts = self._batch.num_computed_tokens[begun_rows]
        return list(zip(begun_rows.tolist(), counts.tolist(), strict=True))

    def _requeue(self, row: int, num_computed_tokens: int) -> None:
        """Put the sequence of a preempted row back in the queue, with the output it has so far."""
        batch = self._batch
        sequence = self.by_id[int(batch.seq_ids[row])]
        token_ids = batch.token_ids[row, : batch.num_tokens[row]].copy()
        sequence.preempt(token_ids, num_computed_tokens, self.num_steps)
        self.queue.push(sequence)

    def release_forks_of(self, seq_ids: Int64Array, reasons: Int8Array, cancelled: Collection[int]) -> None:
        """Queue the forks of those that have got a token: of `seq_ids`, int64[num_sampled].

        Those that failed and the `cancelled` ones end without one.
        """
        if self.forks:
            for leader in self.forks.leaders_among(seq_ids[reasons != FinishReason.ERROR]):
                if leader not in cancelled:
                    for sequence in self.forks.pop(leader):
                        self.queue.push(sequence)

    def _end_rows(self, rows: Int32Array) -> None:
        """End the sequences of `rows`, and free their blocks; the rows stay there."""
        self._pool.release(self._batch.blocks_of(rows))
        self._forget(self._batch.seq_ids[rows].tolist())

    def _forget(self, seq_ids: list[int]) -> None:
        for seq_id in seq_ids:
            self._policy.leave(self.by_id.pop(seq_id))
        if self.forks:
            for seq_id in seq_ids:
                self._orphan_forks(seq_id)
        self.totals = self.totals._replace(num_finished=self.totals.num_finished + len(seq_ids))

    def _orphan_forks(self, leader: int) -> None:
        """Queue the forks of one that has ended without a token."""
        for sequence in self.forks.pop(leader):
            self.deadlines.bound_wait(sequence.request)
            self.queue.push(sequence)

    def _leader_of(self, request: Request) -> Sequence | None:
        """The live sequence that the request is a fork of, None when there is none, or it has failed."""
        leader = None if request.fork_of is None else self.by_id.get(request.fork_of)
        row = None if leader is None else self._batch.row_of(leader.seq_id)
        return None if row is not None and self._batch.has_failed[row] else leader

    def _has_output(self, sequence: Sequence) -> bool:
        """Whether a live sequence has got a token."""
        row = self._batch.row_of(sequence.seq_id)
        num_tokens = sequence.num_tokens if row is None else int(self._batch.num_tokens[row])
        return num_tokens > len(sequence.request.prompt_token_ids)
