"""Which full block holds the keys and values of which prefix."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Final

import numpy as np
import numpy.typing as npt

from service.core.block_hash import DIGEST_BYTES, chained_digests, split_digests
from service.core.types import NULL_BLOCK, BoolArray, Int32Array, Int64Array
from service.core.undo_log import Undo, UndoLog

ObjectArray = npt.NDArray[np.object_]

_NO_BLOCKS: Final[Int32Array] = np.empty(0, np.int32)
_NO_DIGEST: Final = b""


@dataclass(slots=True)
class Chain:
    """Full, computed blocks that follow each other, and their digests or what these are computed from."""

    parent: int  # the cached block before them, or the null block
    blocks: Int32Array  # [num_blocks], at least one
    digests: bytes  # of each, DIGEST_BYTES; or none, then
    tokens: bytes  # are the blocks' `token_bytes`
    root: bytes  # stands for the null block's digest
    num_named: int = 0  # of the blocks, the first ones that the cache has given digests

    def names(self, parent_digest: bytes) -> Iterator[bytes]:
        """The digests of the blocks without one, computed as they are asked for unless they are known.

        `parent_digest` is that of the block before.
        """
        if self.digests:
            return split_digests(self.digests[self.num_named * DIGEST_BYTES :])
        block_bytes = len(self.tokens) // len(self.blocks)
        return chained_digests(parent_digest or self.root, self.tokens[self.num_named * block_bytes :], block_bytes)


class PrefixCache:
    """Digest -> block, for blocks that are full and computed. Part of the BlockPool, which says what is evicted.

    The cached blocks form a tree: a block's parent holds the tokens just before its own, and is cached too. Most blocks
    are never asked for, and to hash and name them costs more than all else in the life of a sequence. So a chain
    behind a leaf hangs there as its tail, without names; its blocks get them when one is looked up, or another added,
    behind that leaf. Only a chain behind a block that has children gets its first block named, which is a leaf then.
    """

    def __init__(self, num_blocks: int, log: UndoLog) -> None:
        """`log` belongs to the pool."""
        self.is_cached: BoolArray = np.zeros(num_blocks, np.bool_)  # [num_blocks]
        self.parents: Int32Array = np.full(num_blocks, NULL_BLOCK, np.int32)  # [num_blocks] null block: it has none
        # [num_blocks] of a cached block: false for a leaf; true when its children may be gone, too
        self._has_child: BoolArray = np.zeros(num_blocks, np.bool_)
        self._has_child[NULL_BLOCK] = True
        self._blocks: dict[bytes, int] = {}  # by digest
        self._digests: ObjectArray = np.full(num_blocks, _NO_DIGEST, np.object_)  # [num_blocks] bytes
        self._tails: ObjectArray = np.full(num_blocks, None, np.object_)  # [num_blocks] the chain that hangs there
        self._is_key: BoolArray = np.zeros(num_blocks, np.bool_)  # [num_blocks] false: without digest and tail
        self._log = log

    def match(self, digests: bytes, max_blocks: int) -> Int32Array:
        """The blocks of the longest cached prefix of a chain with these digests: int32[num_matched]."""
        blocks: list[int] = []
        for offset in range(0, max_blocks * DIGEST_BYTES, DIGEST_BYTES):
            digest = digests[offset : offset + DIGEST_BYTES]
            block = self._blocks.get(digest)
            if block is None and blocks and self._tails[blocks[-1]] is not None:
                self._name_tail(blocks[-1])
                block = self._blocks.get(digest)
            if block is None:
                break
            blocks.append(block)
        return np.array(blocks, np.int32) if blocks else _NO_BLOCKS

    def add(self, chains: list[Chain]) -> list[tuple[int, int]]:
        """Cache the blocks of chains.

        A block whose digest is cached already is not: its place in the chain takes the one that is. Returns (block,
        the one that took its place) of each.
        """
        new: list[Chain] = []
        known: list[Chain] = []
        named: dict[bytes, int] = {}
        tails: dict[int, Chain] = {}
        for chain in chains:
            leaf = chain.parent
            if self._has_child[leaf]:
                parent_digest = self._digest_of(leaf) if leaf != NULL_BLOCK else _NO_DIGEST
                digest = chain.digests[:DIGEST_BYTES] or next(chain.names(parent_digest))
                if digest in self._blocks or digest in named:
                    known.append(chain)
                    continue
                named[digest] = leaf = int(chain.blocks[0])
                chain.num_named = 1
            elif leaf in tails:
                known.append(chain)
                continue
            new.append(chain)
            if chain.num_named < len(chain.blocks):
                tails[leaf] = chain
        if new:
            self._insert([chain.parent for chain in new], [chain.blocks for chain in new], named, tails)
        return [pair for chain in known for pair in self._walk(chain)]

    def forget(self, blocks: Int32Array) -> None:
        """Drop cached blocks, and with each all its children."""
        self._log.add(self._remove(blocks))

    def names(self, blocks: Int32Array) -> list[bytes]:
        """The digests of cached blocks."""
        return [self._digest_of(block) for block in blocks.tolist()]

    def entries(self) -> tuple[tuple[int, bytes, int], ...]:
        """(block, digest, parent) of every cached block; of a tail's, the digest is empty. For snapshots."""
        return tuple(
            (block, self._digests[block], int(self.parents[block])) for block in np.flatnonzero(self.is_cached).tolist()
        )

    def _walk(self, chain: Chain) -> list[tuple[int, int]]:
        """Add one chain block by block, as far as its parents have children."""
        parent, replaced = chain.parent, []
        names = chain.names(self._digest_of(parent))
        for index, block in enumerate(chain.blocks.tolist()):
            if not self._has_child[parent]:
                chain.num_named = index
                self._insert([parent], [chain.blocks[index:]], {}, {parent: chain})
                break
            self._name_tail(parent)
            digest = next(names)
            cached = self._blocks.get(digest)
            if cached is None:
                self._insert([parent], [chain.blocks[index : index + 1]], {digest: block}, {})
            else:
                chain.blocks[index] = cached
                replaced.append((block, cached))
            parent = int(chain.blocks[index])
        return replaced

    def _insert(
        self, heads: list[int], chains: list[Int32Array], named: dict[bytes, int], tails: dict[int, Chain]
    ) -> None:
        """Take in chains of new blocks, each behind its head. Those in `named` get digests, others are in `tails`."""
        blocks = np.concatenate(chains).astype(np.int64)  # as an index several times faster than int32
        parents = np.empty_like(blocks)
        parents[1:] = blocks[:-1]
        parents[[0, *accumulate(map(len, chains[:-1]))]] = heads
        self._log.save(self.parents, blocks)
        self._log.save(self._has_child, blocks)
        self._log.save(self._has_child, parents)
        self.parents[blocks] = parents
        self.is_cached[blocks] = True
        self._has_child[blocks] = False
        self._has_child[parents] = True
        self._log.add(lambda: self._remove(blocks))
        self._name(list(named.values()), list(named))
        leaves = list(tails)
        self._tails[leaves] = list(tails.values())
        self._is_key[leaves] = True
        self._log.add(lambda: self._tails.__setitem__(leaves, None))

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

    def _name_tail(self, block: int) -> None:
        """Give the tail of `block` digests, as far as it has not been evicted."""
        tail: Chain | None = self._tails[block]
        if tail is None:
            return
        self._log.save(self._tails, np.array([block]))
        self._tails[block] = None
        blocks = tail.blocks[tail.num_named :]
        # An evicted block can have been cached again, but never behind the same parent: that names the tail before.
        is_lost = ~self.is_cached[blocks] | (self.parents[blocks] != np.concatenate([[block], blocks[:-1]]))
        left = blocks[: int(np.argmax(np.append(is_lost, True)))]
        self._name(left.tolist(), list(islice(tail.names(self._digests[block]), len(left))))
        self._log.add(lambda: self._unname(left))

    def _name(self, blocks: list[int], digests: list[bytes]) -> None:
        self._blocks.update(zip(digests, blocks, strict=True))
        self._digests[blocks] = digests
        self._is_key[blocks] = True

    def _unname(self, blocks: Int32Array | Int64Array) -> None:
        """Take the digests from those of `blocks` that have one."""
        for digest in filter(None, self._digests[blocks].tolist()):
            del self._blocks[digest]
        self._digests[blocks] = _NO_DIGEST

    def _remove(self, blocks: Int32Array | Int64Array) -> Undo:
        """Drop blocks. Returns how to take it back."""
        blocks = blocks.astype(np.int64)  # as an index several times faster than int32
        keys = blocks[self._is_key[blocks]]
        digests, tails = self._digests[keys], self._tails[keys]
        self.is_cached[blocks] = False
        self._is_key[keys] = False
        self._unname(keys)
        self._tails[keys] = None

        def undo() -> None:
            self.is_cached[blocks] = True
            self._is_key[keys] = True
            self._digests[keys], self._tails[keys] = digests, tails
            self._blocks.update((digest, block) for digest, block in zip(digests, keys.tolist(), strict=True) if digest)

        return undo
