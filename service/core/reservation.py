"""What one plan has changed, and how to take it back."""

from dataclasses import dataclass

import numpy as np

from service.core.batch_state import BatchState
from service.core.block_pool import BlockPool
from service.core.sequence import Sequence, SequenceStatus
from service.core.types import NULL_BLOCK, BoolArray, Int32Array
from service.core.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class _Growth:
    """Blocks `blocks[i]` were written to `block_table[rows[i], columns[i]]`."""

    rows: Int32Array
    columns: Int32Array
    blocks: Int32Array


@dataclass(frozen=True, slots=True)
class _Preemption:
    """The row gave up `blocks`, which held `num_computed_tokens`."""

    row: int
    blocks: Int32Array
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class _Admission:
    """The sequence left the queue for the last row, past the sequences `passed`."""

    sequence: Sequence
    status: SequenceStatus
    num_skips: int
    passed: list[Sequence]


class Reservation:
    """The changes of one plan to batch, pool and queue, in order. Owned by the Scheduler, lives from plan to commit.

    A preempted row stays where it is, without blocks, until the commit removes it: so taking a plan back moves no
    row. `undo` inverts the changes last to first and leaves everything as it was, bit for bit.
    """

    def __init__(self, batch: BatchState, pool: BlockPool, queue: WaitingQueue) -> None:
        self.preempted_rows: list[int] = []
        self.num_lost_tokens = 0  # computed tokens that preempted rows gave up
        self._batch = batch
        self._pool = pool
        self._queue = queue
        self._changes: list[_Growth | _Preemption | _Admission] = []

    def is_kept(self, num_rows: int) -> BoolArray:
        """Which of the first `num_rows` rows have not been preempted: bool[num_rows]."""
        kept = np.ones(num_rows, np.bool_)
        kept[[row for row in self.preempted_rows if row < num_rows]] = False
        return kept

    def grow_each(self, rows: Int32Array) -> None:
        """Give every one of `rows` (all different) one more block. There must be as many."""
        columns = self._batch.num_blocks[rows]
        self._grow(_Growth(rows, columns, self._pool.take(len(rows))))
        self._batch.num_blocks[rows] += 1

    def grow_by(self, row_list: list[int], counts: list[int]) -> None:
        """Give each row (all different) as many more blocks as `counts` says. There must be as many."""
        rows, num_new = np.array(row_list, np.int32), np.array(counts, np.int32)
        total = int(num_new.sum())
        if total == 0:
            return
        # Entry i of a row that takes several goes behind the row's last block, i columns on.
        starts = np.repeat(self._batch.num_blocks[rows] - np.cumsum(num_new) + num_new, num_new)
        columns = (starts + np.arange(total)).astype(np.int32)
        self._grow(_Growth(np.repeat(rows, num_new), columns, self._pool.take(total)))
        self._batch.num_blocks[rows] += num_new

    def preempt(self, row: int) -> None:
        """Take all blocks from a row."""
        batch = self._batch
        blocks = batch.blocks_of(np.array([row], np.int32))
        num_computed_tokens = int(batch.num_computed_tokens[row])
        self._pool.release(blocks)
        batch.block_table[row] = NULL_BLOCK
        batch.num_blocks[row] = 0
        batch.num_computed_tokens[row] = 0
        self.preempted_rows.append(row)
        self.num_lost_tokens += num_computed_tokens
        self._changes.append(_Preemption(row, blocks, num_computed_tokens))

    def admit(self, sequence: Sequence, passed: list[Sequence]) -> int:
        """Move a sequence of the queue to a new row, without blocks, past those that go before it. Returns the row."""
        self._queue.admit(sequence)
        self._changes.append(_Admission(sequence, sequence.status, sequence.num_skips, passed))
        sequence.status = SequenceStatus.RUNNING
        sequence.num_skips = 0
        for other in passed:
            other.num_skips += 1
        return self._batch.add_row(sequence.request, sequence.token_ids, sequence.rank, sequence.tenant_slot)

    def undo(self) -> None:
        """Take all changes back."""
        for change in reversed(self._changes):
            match change:
                case _Growth(rows, columns, blocks):
                    self._batch.block_table[rows, columns] = NULL_BLOCK
                    np.subtract.at(self._batch.num_blocks, rows, 1)
                    self._pool.untake(blocks)
                case _Preemption(row, blocks, num_computed_tokens):
                    self._pool.unrelease(blocks)
                    self._batch.block_table[row, : len(blocks)] = blocks
                    self._batch.num_blocks[row] = len(blocks)
                    self._batch.num_computed_tokens[row] = num_computed_tokens
                case _Admission(sequence, status, num_skips, passed):
                    self._batch.pop_row()
                    sequence.status, sequence.num_skips = status, num_skips
                    for other in passed:
                        other.num_skips -= 1
                    self._queue.push(sequence)

    def _grow(self, growth: _Growth) -> None:
        self._batch.block_table[growth.rows, growth.columns] = growth.blocks
        self._changes.append(growth)
