"""Who owns which block of the KV buffer."""

from typing import Final

import numpy as np

from service.core.chain import ChainNames, Chains
from service.core.eviction_queue import EvictionQueue
from service.core.host_tier import HostTier
from service.core.prefix_cache import PrefixCache
from service.core.types import NULL_BLOCK, Int32Array, Int64Array
from service.core.undo_log import UndoLog

_ONE: Final = np.int32(1)  # with an int of Python, numpy converts at every block: ten times slower


class OutOfBlocksError(Exception):
    """Fewer blocks are free than asked for. Stays inside the core: the scheduler preempts or waits instead."""


class BlockPool:
    """Reference counts, blank blocks and evictable ones. Owned by the Scheduler.

    A block is referenced (rows hold it), evictable (cached, and nobody holds it) or blank. Block 0 is the null block,
    and is never handed out. Rows that hold a cached block hold its parent too (`publish` sees to it), and a row's last
    block is given up first: so the queue of evictable blocks has every block before its parent, and the least
    recently used leaf in front.

    Changes between `begin` and `roll_back` are taken back exactly. Two plans may be open: see `UndoLog`.
    """

    def __init__(self, num_blocks: int, host: HostTier | None = None) -> None:
        """`host` keeps what is evicted."""
        self.num_blocks = num_blocks
        self.num_blank = num_blocks - 1
        self.ref_counts: Int32Array = np.zeros(num_blocks, np.int32)  # [num_blocks] rows that hold the block
        self.host = host
        self._log = UndoLog() if host is None else host.log
        self.cache = PrefixCache(num_blocks, self._log)
        self._evictable = EvictionQueue(num_blocks, self._log)
        # [num_blocks - 1] the first num_blank are blank, the last of them goes first; block 1 at the very start
        self._stack: Int32Array = np.arange(num_blocks - 1, NULL_BLOCK, -1, dtype=np.int32)
        self._marks: Int64Array = np.zeros(num_blocks, np.int64)  # scratch of `_distinct`

    @property
    def num_evictable(self) -> int:
        """Cached blocks that nobody holds."""
        return self._evictable.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be taken: blank and evictable ones."""
        return self.num_blank + self._evictable.num_blocks

    def blank_blocks(self) -> Int32Array:
        """The blank blocks in stack order, a copy: int32[num_blank]."""
        return self._stack[: self.num_blank].copy()

    def evictable_blocks(self) -> Int32Array:
        """The evictable blocks, the next one to go first: int32[num_evictable]."""
        return self._evictable.in_order()

    def begin(self) -> None:
        """From here on, changes can be taken back: those of one plan, or of the plan that is made ahead after it."""
        if not self._log.is_open:
            self._evictable.compact()
        if self.host is not None:
            self.host.begin()
        self._log.open()

    def accept(self) -> None:
        """Keep the changes from the first open `begin` to the next, if there is one."""
        self._log.close()
        if self.host is not None:
            self.host.accept()

    def roll_back(self) -> None:
        """Take back the changes since the last `begin`: the pool is what it was, bit for bit."""
        self._log.undo()
        if self.host is not None:
            self.host.roll_back()

    def take(self, count: int) -> Int32Array:
        """Hand out `count` blocks with reference count 1. Cached ones are evicted only when blank ones run out.

        Returns int32[count]. Raises OutOfBlocksError, and takes nothing, when fewer are free.
        """
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks asked for, {self.num_free} free")
        num_from_stack = min(count, self.num_blank)
        blocks = self._stack[self.num_blank - num_from_stack : self.num_blank][::-1].copy()
        self._set_num_blank(self.num_blank - num_from_stack)
        if num_from_stack < count:
            evicted = self._evictable.pop(count - num_from_stack)
            if self.host is not None:
                self.host.offload(evicted, self.cache)
            self.cache.forget(evicted)
            blocks = np.concatenate([blocks, evicted])
        places = blocks.astype(np.int64)  # as an index several times faster than int32
        self._log.add(lambda: self.ref_counts.__setitem__(places, 0))
        self.ref_counts[places] = 1
        return blocks

    def restore(self, host_blocks: Int32Array, held: Int32Array, names: ChainNames) -> Int32Array:
        """Take a block for each of `host_blocks`, and cache it behind the chain `held` under what `names` calls it.

        They hold what the host blocks hold when the plan runs. There must be as many free blocks. Returns int32[len].
        """
        assert self.host is not None, "what was found in host memory is there"
        self.host.use(host_blocks)  # first, for `take` may copy other blocks out
        blocks = self.host.copy_in(host_blocks, self.take(len(host_blocks)), len(held))
        parent = int(held[-1]) if len(held) else NULL_BLOCK
        self.cache.add_named(parent, len(held), names, blocks)
        return blocks

    def hold(self, blocks: Int32Array) -> None:
        """Add one reference to each of `blocks`, as often as it is named; each is cached or held already."""
        if len(blocks) == 0:
            return
        unheld = self._distinct(blocks[self.ref_counts[blocks] == 0])
        if len(unheld):
            self._evictable.remove(unheld)
        self._log.save(self.ref_counts, blocks)
        np.add.at(self.ref_counts, blocks, _ONE)

    def release(self, blocks: Int32Array) -> None:
        """Give up one reference to each of `blocks`, as often as it is named; one row's after the other's, in order.

        Cached blocks that nobody holds any more become evictable, a row's last one first; others become blank, and
        the first one is the next to be taken.
        """
        if len(blocks) == 0:
            return
        blocks = blocks.astype(np.int64)  # as an index several times faster than int32
        self._log.save(self.ref_counts, blocks)
        unheld = self._unheld_after(blocks)[::-1]
        is_cached = self.cache.is_cached[unheld]
        evictable, blank = unheld[is_cached], unheld[~is_cached]
        if len(evictable):
            self._evictable.push(evictable)
        if len(blank):
            self._push_blank(blank)

    def spoil(self, blocks: Int32Array) -> None:
        """Drop those of `blocks` from the cache that are in it, for what they held is lost; nobody holds them.

        With a block its children are to be dropped.
        """
        spoilt = blocks[self.cache.is_cached[blocks]]
        self._evictable.remove(spoilt)
        self.cache.forget(spoilt)
        self._push_blank(spoilt)

    def distrust(self, blocks: Int32Array) -> None:
        """Drop cached `blocks`, all cached ones that were computed behind them, and the host's copies of these.

        Nobody holds any of them. What is in host memory only, further behind, goes when a request fails that finds it.
        """
        spoilt = self.cache.behind(blocks).astype(np.int32)
        if self.host is not None:
            self.host.lose(self.host.holding(self.cache.all(spoilt)))
        self.spoil(spoilt)

    def publish(self, chains: Chains) -> bool:
        """Cache chains of blocks that rows hold, with the parents of them.

        A block whose digest is cached already is given up for the one that is: then `chains.blocks` has changed, and
        this returns True; the rows are to hold what is there.
        """
        replaced = self.cache.add(chains)
        if replaced:
            own, cached = np.array(replaced, np.int32).T
            self.hold(cached)
            self.release(own)
        return bool(replaced)

    def _unheld_after(self, blocks: Int32Array) -> Int32Array:
        """Count down the references to `blocks`. Returns those without one, each where it comes first."""
        is_alone = np.count_nonzero(self.ref_counts[blocks] == 1) == len(blocks)
        np.subtract.at(self.ref_counts, blocks, _ONE)
        counts = self.ref_counts[blocks]
        if is_alone and not np.count_nonzero(counts):  # so each was named once
            return blocks
        assert counts.min() >= 0, "a block was released more often than it was taken"
        return self._distinct(blocks[counts == 0][::-1])[::-1]

    def _push_blank(self, blocks: Int32Array) -> None:
        end = self.num_blank + len(blocks)
        self._log.save(self._stack, slice(self.num_blank, end))
        self._stack[self.num_blank : end] = blocks
        self._set_num_blank(end)

    def _set_num_blank(self, num_blank: int) -> None:
        old = self.num_blank
        self._log.add(lambda: setattr(self, "num_blank", old))
        self.num_blank = num_blank

    def _distinct(self, blocks: Int32Array) -> Int32Array:
        """Each of `blocks` once, where it comes last."""
        order = np.arange(len(blocks))
        self._marks[blocks] = order
        last: Int32Array = blocks[self._marks[blocks] == order]
        return last
