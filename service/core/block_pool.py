"""Who owns which block of the KV buffer."""

import numpy as np

from service.core.types import NULL_BLOCK, Int32Array


class OutOfBlocksError(Exception):
    """Fewer blocks are free than asked for. Stays inside the core: the scheduler preempts or waits instead."""


class BlockPool:
    """Reference counts and a stack of free blocks. Owned by the Scheduler.

    Block 0 is the null block: it is never handed out. Every operation has an exact inverse, so that a plan can be
    taken back: `untake` undoes `take` and `unrelease` undoes `release`, when called in reverse order.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.ref_counts: Int32Array = np.zeros(num_blocks, np.int32)  # [num_blocks] rows that hold the block
        # [num_blocks - 1] the first num_free are free, the last of them goes first; block 1 at the very start
        self._stack: Int32Array = np.arange(num_blocks - 1, NULL_BLOCK, -1, dtype=np.int32)

    def free_blocks(self) -> Int32Array:
        """The free blocks in stack order, a copy: int32[num_free]."""
        return self._stack[: self.num_free].copy()

    def take(self, count: int) -> Int32Array:
        """Hand out `count` free blocks with reference count 1.

        Returns int32[count]. Raises OutOfBlocksError, and takes nothing, when fewer are free.
        """
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks asked for, {self.num_free} free")
        blocks = self._stack[self.num_free - count : self.num_free][::-1].copy()
        self.num_free -= count
        self.ref_counts[blocks] = 1
        return blocks

    def untake(self, blocks: Int32Array) -> None:
        """Undo the last `take`, which returned `blocks`."""
        self.ref_counts[blocks] = 0
        self._stack[self.num_free : self.num_free + len(blocks)] = blocks[::-1]
        self.num_free += len(blocks)

    def release(self, blocks: Int32Array) -> None:
        """Give up one reference to each of `blocks`; those that nobody holds any more become free, first one on top."""
        counts = self.ref_counts[blocks]
        assert counts.min(initial=1) > 0, "a block was released more often than it was taken"
        if counts.max(initial=1) == 1:
            self.ref_counts[blocks] = 0
            freed = blocks
        else:
            np.subtract.at(self.ref_counts, blocks, 1)
            freed = self._unheld(blocks)
        self._stack[self.num_free : self.num_free + len(freed)] = freed[::-1]
        self.num_free += len(freed)

    def unrelease(self, blocks: Int32Array) -> None:
        """Undo the last `release`, which was given `blocks`."""
        self.num_free -= len(self._unheld(blocks))
        np.add.at(self.ref_counts, blocks, 1)

    def _unheld(self, blocks: Int32Array) -> Int32Array:
        """Those of `blocks` without a reference, each once."""
        return np.unique(blocks[self.ref_counts[blocks] == 0])
