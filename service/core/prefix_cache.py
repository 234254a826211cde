"""Which full block holds the keys and values of which prefix."""

from itertools import accumulate, islice

import numpy as np

from service.core.block_hash import DIGEST_BYTES, split_digests
from service.core.chain import NO_MATCH, Chain, ChainNames, Match
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

    def add(self, chains: list[Chain]) -> list[tuple[int, int]]:
        """Cache the blocks of chains.

        A block whose digest is cached already is not: the one that is takes its place in `Chain.blocks`. Returns
        (block, the one that took its place) of each.
        """
        new: list[Chain] = []
        known: list[Chain] = []
        grown: list[Chain] = []
        named: dict[bytes, int] = {}
        tails: dict[int, ChainNames] = {}
        leaves: set[int] = set()
        has_child = self._has_child[[chain.parent for chain in chains]].tolist()
        for chain, is_branch in zip(chains, has_child, strict=True):
            parent, num_before, blocks, names = chain
            if not (self._branches_off(chain, named) if is_branch else parent not in leaves):
                known.append(chain)
                continue
            new.append(chain)
            if not is_branch:
                leaves.add(parent)
                grown.append(chain)
            elif len(blocks) > 1:
                tails[blocks.item(0)] = self._hang(names, blocks.item(0), num_before + 1)
        for parent, num_before, _, names in grown:  # now, for a tail may have been named meanwhile
            if self._tails[names.head] is not names:
                tails[parent] = self._hang(names, parent, num_before)
        if new:
            self._insert(new, named, tails)
        return [pair for chain in known for pair in self._walk(chain)]

    def add_named(self, chain: Chain) -> None:
        """Cache blocks whose digests are known, all of them with their names. None of the digests is cached."""
        parent, num_before, blocks, names = chain
        self._name_tail(parent)  # for it has another child now
        digests = split_digests(names.digests[num_before * DIGEST_BYTES : (num_before + len(blocks)) * DIGEST_BYTES])
        named = dict(zip(digests, blocks.tolist(), strict=True))
        assert self._blocks.keys().isdisjoint(named), "the block that is cached has its place in the chain"
        self._insert([chain], named, {})

    def forget(self, blocks: Int32Array) -> None:
        """Drop cached blocks, and with each all its children."""
        self._log.add(self._remove(blocks))

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

    def _branches_off(self, chain: Chain, named: dict[bytes, int]) -> bool:
        """Whether a chain behind a block with children goes on with none of them, nor with one in `named`: it is then.

        `named` are new blocks by digest.
        """
        parent, num_before, blocks, names = chain
        parent_digest = self._digest_of(parent) if parent != NULL_BLOCK else NO_DIGEST  # quicker: most begin there
        start = num_before * DIGEST_BYTES
        digest = names.digests[start : start + DIGEST_BYTES] or next(names.after(num_before, parent_digest))
        if digest in self._blocks or digest in named:
            return False
        named[digest] = blocks.item(0)
        return True

    def _walk(self, chain: Chain) -> list[tuple[int, int]]:
        """Add one chain block by block, as far as its parents have children."""
        parent, num_before, blocks, names = chain
        replaced: list[tuple[int, int]] = []
        digests = names.after(num_before, self._digest_of(parent))
        for index, block in enumerate(blocks.tolist()):
            if not self._has_child[parent]:
                rest = Chain(parent, num_before + index, blocks[index:], names)
                self._insert([rest], {}, {parent: self._hang(names, parent, num_before + index)})
                break
            self._name_tail(parent)
            digest = next(digests)
            cached = self._blocks.get(digest)
            if cached is None:
                one = Chain(parent, num_before + index, blocks[index : index + 1], names)
                self._insert([one], {digest: block}, {})
            else:
                blocks[index] = cached
                replaced.append((block, cached))
            parent = blocks.item(index)
        return replaced

    def _insert(self, chains: list[Chain], named: dict[bytes, int], tails: dict[int, ChainNames]) -> None:
        """Take in chains of new blocks. Those in `named` get digests, others are, or will be, in `tails`."""
        parts = [chain.blocks for chain in chains]
        blocks = np.concatenate(parts).astype(np.int64)  # as an index several times faster than int32
        parents = np.empty_like(blocks)
        parents[1:] = blocks[:-1]
        parents[[0, *accumulate(map(len, parts[:-1]))]] = [chain.parent for chain in chains]
        self._log.save(self.parents, blocks)
        self._log.save(self._has_child, blocks)
        self._log.save(self._has_child, parents)
        self._log.save(self._next, parents)
        self.parents[blocks] = parents
        self.is_cached[blocks] = True
        self._has_child[blocks] = False
        self._has_child[parents] = True
        self._next[parents] = blocks
        self._log.add(lambda: self._remove(blocks))
        self._name(list(named.values()), list(named))
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
        self._log.save(self._tails, np.array([head]))
        self._tails[head] = None
        left: list[int] = []
        block = head
        while self._tails[block] is None:  # or another's tail begins
            child = self._next.item(block)
            # An evicted block can have been cached again, but never behind the same parent: that names the tail before.
            if not self.is_cached[child] or self.parents[child] != block:
                break
            left.append(child)
            block = child
        digests = list(islice(names.after(names.num_named, self._digests[head]), len(left)))
        self._name(left, digests)
        self._log.add(lambda: self._unname(left, digests))

    def _name(self, blocks: list[int], digests: list[bytes]) -> None:
        self._blocks.update(zip(digests, blocks, strict=True))
        self._digests[blocks] = digests
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
