"""Which full block holds the keys and values of which prefix."""

from itertools import islice

import numpy as np

from service.core.block_hash import DIGEST_BYTES, split_digests
from service.core.chain import NO_MATCH, ChainNames, Chains, Match
from service.core.types import NO_DIGEST, NULL_BLOCK, BoolArray, Int32Array, Int64Array, ObjectArray
from service.core.undo_log import Undo, UndoLog


class PrefixCache:
    """Digest -> block, for blocks that are full and computed. Part of the BlockPool, which says what is evicted.

    The cached blocks form a tree: a block's parent holds the tokens just before its own, and is cached too. Most blocks
    are never asked for, and to hash and name them costs more than all else in the life of a sequence. So a chain
    behind a leaf hangs there as its tail, without names; its blocks get them when one is looked up, or another added,
    behind that leaf. Only a chain behind a block that has children gets its first block named, which is a leaf then.
    What the sequence computes later makes its tail longer.
    """

    def __init__(self, num_blocks: int, log: UndoLog) -> None:
        """`log` belongs to the pool."""
        self.is_cached: BoolArray = np.zeros(num_blocks, np.bool_)  # [num_blocks]
        self.parents: Int32Array = np.full(num_blocks, NULL_BLOCK, np.int32)  # [num_blocks] null block: it has none
        # [num_blocks] of a cached block: false for a leaf; true when its children may be gone, too
        self._has_child: BoolArray = np.zeros(num_blocks, np.bool_)
        self._has_child[NULL_BLOCK] = True
        self._blocks: dict[bytes, int] = {}  # by digest
        self._digests: ObjectArray = np.full(num_blocks, NO_DIGEST, np.object_)  # [num_blocks] bytes
        self._tails: ObjectArray = np.full(num_blocks, None, np.object_)  # [num_blocks] the names of what hangs there
        self._next: Int32Array = np.full(num_blocks, NULL_BLOCK, np.int32)  # [num_blocks] of those in or before a tail
        self._is_key: BoolArray = np.zeros(num_blocks, np.bool_)  # [num_blocks] false: without digest and tail
        self._versions: Int32Array = np.zeros(num_blocks, np.int32)  # [num_blocks] another when the digest is gone
        self._log = log

    def match(self, digests: bytes, max_blocks: int, last: Match = NO_MATCH) -> Match:
        """The blocks of the longest cached prefix of a chain with these digests, `max_blocks` at most.

        `last` is what was found for it before: what of that is cached still is not looked up again.
        """
        old, versions = last
        num_known = int(np.append(self._versions[old] == versions, False).argmin()) if len(old) else 0
        blocks: list[int] = []
        head = old.item(num_known - 1) if num_known else NULL_BLOCK
        for offset in range(num_known * DIGEST_BYTES, max_blocks * DIGEST_BYTES, DIGEST_BYTES):
            digest = digests[offset : offset + DIGEST_BYTES]
            block = self._blocks.get(digest)
            if block is None and head != NULL_BLOCK and self._tails[head] is not None:
                self._name_tail(head)
                block = self._blocks.get(digest)
            if block is None:
                break
            blocks.append(block)
            head = block
        if not blocks and num_known == len(old):
            return last
        matched = np.concatenate([old[:num_known], np.array(blocks, np.int32)])
        return Match(matched, self._versions[matched])

    def add(self, chains: Chains) -> list[tuple[int, int]]:
        """Cache the blocks of chains.

        A block whose digest is cached already is not: the one that is takes its place in `chains.blocks`. Returns
        (block, the one that took its place) of each.
        """
        new: list[int] = []
        known: list[int] = []  # begin as another one does, perhaps
        grown: dict[int, int] = {}  # by the leaf that a chain goes on behind: its index
        named: dict[bytes, int] = {}
        tails: dict[int, ChainNames] = {}
        parents, heads = chains.parents.tolist(), chains.blocks[chains.starts].tolist()
        has_child = self._has_child[chains.parents].tolist()
        starts = chains.starts.tolist()
        ends = [*starts[1:], len(chains.blocks)]
        for index, (parent, head, is_branch) in enumerate(zip(parents, heads, has_child, strict=True)):
            num_before, names = chains.num_before[index], chains.names[index]
            if not is_branch and parent not in grown:
                grown[parent] = index
            elif is_branch and (digest := self._branch(parent, num_before, names, named)):
                named[digest] = head
                if ends[index] - starts[index] > 1:
                    tails[head] = self._hang(names, head, num_before + 1)
            else:
                known.append(index)
                continue
            new.append(index)
        for parent, index in grown.items():  # now, for a tail may have been named meanwhile
            names = chains.names[index]
            if self._tails[names.head] is not names:
                tails[parent] = self._hang(names, parent, chains.num_before[index])
        self._insert(chains.only(new) if known else chains, named, tails)
        return [pair for index in known for pair in self._walk(chains, index)]

    def add_named(self, parent: int, num_before: int, names: ChainNames, blocks: Int32Array) -> None:
        """Cache a chain whose digests are known, all its blocks with their names. None of the digests is cached."""
        self._name_tail(parent)  # for it has another child now
        digests = split_digests(names.digests[num_before * DIGEST_BYTES : (num_before + len(blocks)) * DIGEST_BYTES])
        named = dict(zip(digests, blocks.tolist(), strict=True))
        assert self._blocks.keys().isdisjoint(named), "the block that is cached has its place in the chain"
        self._insert(Chains.of_one(parent, num_before, names, blocks), named, {})

    def forget(self, blocks: Int32Array) -> None:
        """Drop cached blocks, and with each all its children."""
        self._log.add(self._remove(blocks))

    def behind(self, blocks: Int32Array) -> Int64Array:
        """Cached `blocks` and all whose prefixes they hold. Takes numpy time in all blocks."""
        is_behind = np.zeros(len(self.parents), np.bool_)
        is_behind[blocks] = True
        ancestors = np.where(self.is_cached, self.parents, NULL_BLOCK)
        while np.count_nonzero(ancestors):  # at each turn twice as far away
            is_behind |= is_behind[ancestors]
            ancestors = ancestors[ancestors]
        return np.flatnonzero(is_behind)

    def known(self, blocks: Int32Array) -> list[bytes]:
        """The digests of cached blocks, empty of those that have none yet."""
        digests: list[bytes] = self._digests[blocks].tolist()
        return digests

    def all(self, blocks: Int32Array) -> list[bytes]:
        """The digests of cached blocks. Those without get theirs."""
        return [self._digest_of(block) for block in blocks.tolist()]

    def entries(self) -> tuple[tuple[int, bytes, int], ...]:
        """(block, digest, parent) of every cached block; of a tail's, the digest is empty. For snapshots."""
        return tuple(
            (block, self._digests[block], int(self.parents[block])) for block in np.flatnonzero(self.is_cached).tolist()
        )

    def _branch(self, parent: int, num_before: int, names: ChainNames, named: dict[bytes, int]) -> bytes:
        """The digest of a chain's first block, if neither a child of its parent has it nor one in `named`; else none.

        `named` are new blocks by digest.
        """
        parent_digest = self._digest_of(parent) if parent != NULL_BLOCK else NO_DIGEST  # quicker: most begin there
        start = num_before * DIGEST_BYTES
        digest = names.digests[start : start + DIGEST_BYTES] or next(names.after(num_before, parent_digest))
        return NO_DIGEST if digest in self._blocks or digest in named else digest

    def _walk(self, chains: Chains, index: int) -> list[tuple[int, int]]:
        """Add one of the chains block by block, as far as its parents have children."""
        parent, num_before, names = chains.parents.item(index), chains.num_before[index], chains.names[index]
        blocks = chains.blocks_of(index)
        replaced: list[tuple[int, int]] = []
        digests = names.after(num_before, self._digest_of(parent))
        for offset, block in enumerate(blocks.tolist()):
            if not self._has_child[parent]:
                rest = Chains.of_one(parent, num_before + offset, names, blocks[offset:])
                self._insert(rest, {}, {parent: self._hang(names, parent, num_before + offset)})
                break
            self._name_tail(parent)
            digest = next(digests)
            cached = self._blocks.get(digest)
            if cached is None:
                one = Chains.of_one(parent, num_before + offset, names, blocks[offset : offset + 1])
                self._insert(one, {digest: block}, {})
            else:
                blocks[offset] = cached
                replaced.append((block, cached))
            parent = blocks.item(offset)
        return replaced

    def _insert(self, chains: Chains, named: dict[bytes, int], tails: dict[int, ChainNames]) -> None:
        """Take in chains of new blocks. Those in `named` get digests, others are, or will be, in `tails`.

        `chains.blocks` is kept to undo it: nobody writes to it any more.
        """
        blocks = chains.blocks
        parents = np.empty_like(blocks)
        parents[1:] = blocks[:-1]
        parents[chains.starts] = chains.parents
        self._log.save(self.parents, blocks)
        self._log.save(self._has_child, blocks)
        self._log.save(self._has_child, parents)
        self._log.save(self._next, parents)
        self._log.add(lambda: self._remove(blocks))
        self.parents[blocks] = parents
        self.is_cached[blocks] = True
        self._has_child[blocks] = False
        self._has_child[parents] = True
        self._next[parents] = blocks
        self._name(named)
        if tails:
            heads = list(tails)
            self._tails[heads] = list(tails.values())
            self._is_key[heads] = True
            self._log.add(lambda: self._tails.__setitem__(heads, None))

    def _hang(self, names: ChainNames, head: int, num_named: int) -> ChainNames:
        """Let what they name hang behind `head`, from the block on that `num_named` come before. Returns them."""
        if self._log.is_open:
            old = names.head, names.num_named
            self._log.add(lambda: names.restore_place(*old))
        names.head, names.num_named = head, num_named
        return names

    def _digest_of(self, block: int) -> bytes:
        """The digest of a cached block, which may be in a tail yet. Its children have theirs then, too.

        Empty for the null block.
        """
        path = [block]
        while path[-1] != NULL_BLOCK and not self._digests[path[-1]]:
            path.append(int(self.parents[path[-1]]))
        for ancestor in reversed(path):
            self._name_tail(ancestor)
        digest: bytes = self._digests[block]
        return digest

    def _name_tail(self, head: int) -> None:
        """Give the tail of `head` digests, as far as it has not been evicted."""
        names: ChainNames | None = self._tails[head]
        if names is None:
            return
        self._tails[head] = None
        self._log.add(lambda: self._tails.__setitem__(head, names))
        left: list[int] = []
        block = head
        while self._tails[block] is None:  # or another's tail begins
            child = self._next.item(block)
            # An evicted block can have been cached again, but never behind the same parent: that names the tail before.
            if not self.is_cached[child] or self.parents[child] != block:
                break
            left.append(child)
            block = child
        digests = islice(names.after(names.num_named, self._digests[head]), len(left))
        named = dict(zip(digests, left, strict=True))
        self._name(named)
        self._log.add(lambda: self._unname(left, list(named)))

    def _name(self, named: dict[bytes, int]) -> None:
        """Give blocks their digests."""
        if named:
            self._blocks.update(named)
            blocks = list(named.values())
            self._digests[blocks] = list(named)
            self._is_key[blocks] = True

    def _unname(self, blocks: list[int] | Int64Array, digests: list[bytes]) -> None:
        """Take their `digests` from those of `blocks` that have one."""
        for digest in filter(None, digests):
            del self._blocks[digest]
        self._digests[blocks] = NO_DIGEST
        self._versions[blocks] += 1

    def _remove(self, blocks: Int32Array | Int64Array) -> Undo:
        """Drop blocks. Returns how to take it back."""
        blocks = blocks.astype(np.int64)  # as an index several times faster than int32
        keys = blocks[self._is_key[blocks]]
        digests, tails = self._digests[keys], self._tails[keys]
        self.is_cached[blocks] = False
        self._is_key[keys] = False
        self._unname(keys, digests.tolist())
        self._tails[keys] = None

        def undo() -> None:
            self.is_cached[blocks] = True
            self._is_key[keys] = True
            self._digests[keys], self._tails[keys] = digests, tails
            self._blocks.update((digest, block) for digest, block in zip(digests, keys.tolist(), strict=True) if digest)

        return undo
