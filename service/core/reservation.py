"""What one plan has changed, and how to take it back."""

from typing import NamedTuple

import numpy as np

from service.core.batch_state import BatchState
from service.core.block_pool import BlockPool
from service.core.plan import NO_COPIES, NO_ROWS
from service.core.prefixes import Prefixes, PrefixHit
from service.core.sequence import Sequence, SequenceStatus
from service.core.types import NULL_BLOCK, BoolArray, Int32Array, Int64Array
from service.core.waiting_queue import WaitingQueue


class _Growth(NamedTuple):
    """New blocks were written to `block_table[rows[i], columns[i]]`."""

    rows: Int64Array
    columns: Int64Array


class _Preemption(NamedTuple):
    """The row gave up `blocks`, which held `num_computed_tokens`."""

    row: int
    blocks: Int32Array
    num_computed_tokens: int
    num_published_blocks: int


class Admission(NamedTuple):
    """The sequence left the queue for a new row, with the prefix `hit` from the cache, past `passed`, which it delays.

    `status` and `num_skips` are what it had in the queue.
    """

    sequence: Sequence
    status: SequenceStatus
    num_skips: int
    passed: list[Sequence]
    hit: PrefixHit


class Reservation:
    """The changes of one plan to batch, pool and queue, in order. Owned by the Scheduler, lives from plan to commit.

    A preempted row stays where it is, without blocks, until the commit removes it: so taking a plan back moves no
    row. `undo` takes the changes back and leaves everything as it was, bit for bit; `accept` makes them final.
    """

    def __init__(self, batch: BatchState, pool: BlockPool, queue: WaitingQueue, prefixes: Prefixes) -> None:
        self.preempted_rows: list[int] = []
        self.admissions: list[Admission] = []  # in order; none in a plan that preempts
        self._batch = batch
        self._pool = pool
        self._queue = queue
        self._prefixes = prefixes
        self._changes: list[_Growth | _Preemption] = []
        self._taken: list[Int32Array] = []
        self._inherited: list[Int32Array] = []  # taken by a later plan that was undone, and written to perhaps
        self._inherited_host: list[int] = []  # likewise, of host memory
        self._copies: list[tuple[int, int, int]] = []  # (source block, row, column of the target block)
        pool.begin()

    @property
    def preempted(self) -> list[tuple[int, int]]:
        """(row, computed tokens that it gave up) of each preempted row."""
        return [(c.row, c.num_computed_tokens) for c in self._changes if isinstance(c, _Preemption)]

    @property
    def copies(self) -> tuple[Int32Array, Int32Array, Int32Array]:
        """`block_copies`, `offload` and `restore` of the StepPlan, once all blocks are taken."""
        block_copies, host = NO_COPIES, self._pool.host
        if self._copies:
            sources, rows, columns = np.array(self._copies, np.int32).T
            block_copies = np.stack([sources, self._batch.block_table[rows, columns]], axis=1)
        return (block_copies, NO_COPIES, NO_COPIES) if host is None else (block_copies, *host.copies)

    def is_kept(self, num_rows: int) -> BoolArray:
        """Which of the first `num_rows` rows have not been preempted: bool[num_rows]."""
        kept = np.ones(num_rows, np.bool_)
        kept[[row for row in self.preempted_rows if row < num_rows]] = False
        return kept

    def grow_each(self, rows: Int64Array) -> None:
        """Give every one of `rows` (all different) one more block. There must be as many."""
        if not len(rows):
            return
        columns = self._batch.num_blocks[rows]
        self._grow(rows, columns.astype(np.int64), self._pool.take(len(rows)))
        self._batch.num_blocks[rows] = columns + 1

    def grow(self, single_rows: Int64Array, row_list: list[int], counts: list[int]) -> None:
        """Give each of `single_rows` one more block, then each of the other rows as many as `counts` says.

        All rows are different. There must be as many blocks.
        """
        num_blocks = self._batch.num_blocks
        rows, num_new = np.array(row_list), np.array(counts)
        single_columns, first_columns, ends = num_blocks[single_rows], num_blocks[rows], num_new.cumsum()
        # Entry i of a row that takes several goes behind the row's last block, i columns on.
        columns = np.arange(ends[-1]) + (first_columns - ends + num_new).repeat(num_new)
        taken_rows = np.concatenate([single_rows, rows.repeat(num_new)])
        self._grow(taken_rows, np.concatenate([single_columns, columns]), self._pool.take(len(taken_rows)))
        num_blocks[single_rows] = single_columns + 1
        num_blocks[rows] = first_columns + num_new

    def preempt(self, row: int) -> None:
        """Take all blocks from a row; the full ones stay cached while nobody needs them."""
        batch, rows = self._batch, np.array([row], np.int32)
        blocks = batch.blocks_of(rows)
        counts = int(batch.num_computed_tokens[row]), int(batch.num_published_blocks[row])
        self._prefixes.publish(rows)
        self._pool.release(batch.blocks_of(rows))
        batch.block_table[row] = NULL_BLOCK
        batch.num_blocks[row] = 0
        batch.num_published_blocks[row] = 0
        batch.num_computed_tokens[row] = 0
        self.preempted_rows.append(row)
        self._changes.append(_Preemption(row, blocks, *counts))

    def admit(self, sequence: Sequence, hit: PrefixHit, passed: list[Sequence]) -> int:
        """Move a sequence of the queue to a new row, past those that go before it. Returns the row.

        The row begins with the blocks of `hit`, and no others; one that it is to copy is in `copies`.
        """
        batch = self._batch
        self._queue.admit(sequence, sequence.num_tokens - hit.num_tokens)
        self.admissions.append(Admission(sequence, sequence.status, sequence.num_skips, passed, hit))
        sequence.status = SequenceStatus.RUNNING
        sequence.num_skips = 0
        for other in passed:
            other.num_skips += 1
        row = batch.add_row(sequence.request, sequence.token_ids, sequence.rank, sequence.tenant_slot)
        if hit.num_tokens:
            self._begin_with(row, hit, sequence)
        if sequence.num_preemptions:
            batch.num_resumed_tokens[row] = sequence.num_tokens
        return row

    def _begin_with(self, row: int, hit: PrefixHit, sequence: Sequence) -> None:
        """Give a new row what was found of its prefix."""
        batch, num_held, num_blocks = self._batch, len(hit.blocks), len(hit.blocks) + len(hit.host_blocks)
        self._pool.hold(hit.blocks)
        batch.block_table[row, :num_held] = hit.blocks
        if num_held < num_blocks:
            batch.block_table[row, num_held:num_blocks] = self._restore(sequence, hit)
        batch.num_blocks[row] = num_blocks
        batch.num_published_blocks[row] = hit.num_published_blocks
        batch.num_computed_tokens[row] = hit.num_tokens
        if hit.copied_block != NULL_BLOCK:
            self._copies.append((hit.copied_block, row, num_blocks))

    def accept(self) -> None:
        """Make the changes final."""
        self._pool.accept()

    def undo(self) -> None:
        """Take all changes back."""
        self._pool.roll_back()
        for change in reversed(self._changes):
            match change:
                case _Growth(rows, columns):
                    self._batch.block_table[rows, columns] = NULL_BLOCK
                    np.subtract.at(self._batch.num_blocks, rows, 1)
                case _Preemption(row, blocks, num_computed_tokens, num_published_blocks):
                    self._batch.block_table[row, : len(blocks)] = blocks
                    self._batch.num_blocks[row] = len(blocks)
                    self._batch.num_computed_tokens[row] = num_computed_tokens
                    self._batch.num_published_blocks[row] = num_published_blocks
        for sequence, status, num_skips, passed, _ in reversed(self.admissions):
            self._batch.pop_row()
            sequence.status, sequence.num_skips = status, num_skips
            for other in passed:
                other.num_skips -= 1
            self._queue.push(sequence)

    def inherit(self, later: "Reservation", overwritten_host_blocks: Int32Array) -> None:
        """Drop what `later` may have overwritten, which was undone; again, should this one be undone as well."""
        self._inherited += later._taken
        self._inherited_host += overwritten_host_blocks.tolist()
        self._drop(np.concatenate([*later._taken, NO_ROWS]), overwritten_host_blocks)

    def drop_overwritten(self, block_size: int, overwritten_host_blocks: Int32Array) -> None:
        """After `undo`: give up what the step may have overwritten before it failed.

        Blocks that the plan took had held cached prefixes, or tokens of the rows that it preempted. The former are
        cached no more, the latter have tokens to compute again.
        """
        batch, taken = self._batch, np.unique(np.concatenate([*self._taken, *self._inherited, NO_ROWS]))
        for row in self.preempted_rows:
            blocks = batch.block_table[row, : batch.num_blocks[row]]
            kept = int(np.argmax(np.append(np.isin(blocks, taken), True)))
            self._pool.release(blocks[kept:])
            blocks[kept:] = NULL_BLOCK
            if kept < len(blocks):
                batch.num_computed_tokens[row] = kept * block_size
            batch.num_blocks[row] = kept
            batch.num_published_blocks[row] = min(kept, int(batch.num_published_blocks[row]))
        self._drop(taken, np.unique([*overwritten_host_blocks.tolist(), *self._inherited_host]).astype(np.int32))
        if self.preempted_rows:
            batch.num_decode_rows = 0  # they may be no decode rows any more
            batch.arrange(np.ones(batch.num_rows, np.bool_))

    def _drop(self, blocks: Int32Array, host_blocks: Int32Array) -> None:
        if self._pool.host is not None:
            self._pool.host.lose(host_blocks)
        self._pool.spoil(blocks)

    def _restore(self, sequence: Sequence, hit: PrefixHit) -> Int32Array:
        """New blocks for what of a prefix is in host memory."""
        blocks = self._pool.restore(hit.host_blocks, hit.blocks, sequence.names)
        self._taken.append(blocks)
        return blocks

    def _grow(self, rows: Int64Array, columns: Int64Array, blocks: Int32Array) -> None:
        self._batch.block_table[rows, columns] = blocks
        self._changes.append(_Growth(rows, columns))
        self._taken.append(blocks)
