"""Cached blocks without a reference, in the order in which they are given up."""

import numpy as np

from service.core.types import BoolArray, Int32Array, Int64Array
from service.core.undo_log import UndoLog

_MIN_SCAN = 64


class EvictionQueue:
    """A queue of blocks, each at most once. Part of the BlockPool.

    A block that is taken out of the middle leaves its entry behind: an entry counts only while its block's place is
    there. `compact` drops the dead entries. Every operation costs numpy time in its own blocks.
    """

    def __init__(self, num_blocks: int, log: UndoLog) -> None:
        """`log` belongs to the pool."""
        self.num_blocks = 0
        self._places: Int32Array = np.full(num_blocks, -1, np.int32)  # [num_blocks] of the block's entry; -1: none
        self._entries: Int32Array = np.zeros(4 * num_blocks, np.int32)
        self._head = 0  # entries before it are gone
        self._tail = 0
        self._log = log

    def push(self, blocks: Int32Array) -> None:
        """Append `blocks`, which are not in the queue; the last one is given up last."""
        self._save_sizes()
        end = self._tail + len(blocks)
        if end > len(self._entries):
            self._entries = np.concatenate([self._entries, np.zeros(end, np.int32)])
        self._entries[self._tail : end] = blocks
        self._log.save(self._places, blocks)
        self._places[blocks] = np.arange(self._tail, end)
        self._tail = end
        self.num_blocks += len(blocks)

    def remove(self, blocks: Int32Array) -> None:
        """Take `blocks` out, wherever they are."""
        assert self._places[blocks].min(initial=0) >= 0, "only queued blocks can be taken out"
        self._save_sizes()
        self._log.save(self._places, blocks)
        self._places[blocks] = -1
        self.num_blocks -= len(blocks)

    def pop(self, count: int) -> Int32Array:
        """Take out the first `count` blocks, which there must be. Returns int32[count]."""
        assert count <= self.num_blocks, "the queue is shorter"
        self._save_sizes()
        found: list[Int32Array] = []
        num_missing, num_scanned = count, count + _MIN_SCAN  # mostly enough: entries die in the middle
        while num_missing:
            end = min(self._head + num_scanned, self._tail)
            num_scanned *= 2
            live = self._live(self._head, end)[:num_missing]
            found.append(self._entries[live])
            num_missing -= len(live)
            self.num_blocks -= len(live)
            self._head = end if num_missing else int(live[-1]) + 1
        blocks = np.concatenate(found) if found else np.empty(0, np.int32)
        index = blocks.astype(np.int64)  # several times faster than int32
        self._log.save(self._places, index)
        self._places[index] = -1
        return blocks

    @property
    def end(self) -> int:
        """The place of the next block that is pushed."""
        return self._tail

    def num_before(self, place: int) -> int:
        """How many blocks have an earlier place."""
        return self.num_blocks - len(self._live(max(place, self._head), self._tail))

    def contains(self, blocks: Int32Array) -> BoolArray:
        """Which of `blocks` are in the queue: bool[len(blocks)]."""
        is_in: BoolArray = self._places[blocks] >= 0
        return is_in

    def in_order(self) -> Int32Array:
        """The blocks, the next one to go first. For snapshots."""
        return self._entries[self._live(self._head, self._tail)]

    def compact(self) -> None:
        """Drop dead entries when they are many. Never while changes may be undone."""
        if self._tail <= len(self._entries) // 2:
            return
        blocks = self.in_order()
        self._head, self._tail = 0, len(blocks)
        self._entries[: self._tail] = blocks
        self._places[blocks] = np.arange(self._tail)

    def _live(self, start: int, end: int) -> Int64Array:
        """The places from `start` to `end` whose entries count. `start` is not before the head."""
        if self._tail - self._head == self.num_blocks:  # no entry is dead
            return np.arange(start, end)
        places: Int32Array = np.arange(start, end, dtype=np.int32)
        blocks = self._entries[start:end].astype(np.int64)  # as an index several times faster than int32
        live: Int64Array = start + (self._places[blocks] == places).nonzero()[0]
        return live

    def _save_sizes(self) -> None:
        sizes = (self._head, self._tail, self.num_blocks)
        self._log.add(lambda: self._restore_sizes(sizes))

    def _restore_sizes(self, sizes: tuple[int, int, int]) -> None:
        self._head, self._tail, self.num_blocks = sizes
