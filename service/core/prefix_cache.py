"""Which full block holds the keys and values of which prefix."""

from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from service.core.block_hash import chained_digests
from service.core.types import NULL_BLOCK, BoolArray, Int32Array
from service.core.undo_log import UndoLog

_NO_BLOCKS: Final[Int32Array] = np.empty(0, np.int32)
_NO_DIGEST: Final = b""


class Chain(NamedTuple):
    """Full, computed blocks of one row that follow each other, to be cached behind `parent` or the null block."""

    parent: int
    blocks: Int32Array  # [num_blocks]
    digests: Iterable[bytes]  # of `blocks`, which may be computed one by one
    tokens: bytes  # their `token_bytes`; empty: the digests are there anyway


class Tail(NamedTuple):
    """Cached blocks without digests, and what to compute these from."""

    blocks: Int32Array  # [num_blocks]
    tokens: bytes


class PrefixCache:
    """Digest -> block, for blocks that are full and computed. Part of the BlockPool, which says what is evicted.

    The cached blocks form a tree: a block's parent holds the tokens just before its own, and is cached too. Output is
    seldom asked for again, and hashing it costs more than all else at the end of a sequence: so it hangs as a tail,
    without digests, on the last block before it that has no child. They are computed when a block is looked up, or
    another added, behind that block; until then nobody holds one of the tail but the row that gives it up.
    """

    def __init__(self, num_blocks: int, log: UndoLog) -> None:
        """`log` belongs to the pool."""
        self.is_cached: BoolArray = np.zeros(num_blocks, np.bool_)  # [num_blocks]
        self.parents: Int32Array = np.full(num_blocks, NULL_BLOCK, np.int32)  # [num_blocks] null block: it has none
        # [num_blocks] of a cached block: whether one was added behind it, and may be there still
        self._has_child: BoolArray = np.zeros(num_blocks, np.bool_)
        self._has_child[NULL_BLOCK] = True  # every root is there
        self._is_named: BoolArray = np.zeros(num_blocks, np.bool_)  # [num_blocks] whether it has a digest
        self._digests: npt.NDArray[np.object_] = np.full(num_blocks, _NO_DIGEST, np.object_)  # [num_blocks] bytes
        self._blocks: dict[bytes, int] = {}
        self._tails: dict[int, Tail] = {}  # by the block that they hang on
        self._log = log

    def match(self, digests: Iterable[bytes]) -> Int32Array:
        """The blocks of the longest cached prefix of a chain of digests: int32[num_matched]."""
        blocks: list[int] = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None and blocks and blocks[-1] in self._tails:
                self._hash_tail(blocks[-1])
                block = self._blocks.get(digest)
            if block is None:
                break
            blocks.append(block)
        return np.array(blocks, np.int32) if blocks else _NO_BLOCKS

    def is_leaf(self, blocks: Int32Array) -> BoolArray:
        """Which of `blocks`, cached ones, surely have no child, so that a tail can hang there; the null block has."""
        return ~self._has_child[blocks]

    def add(self, blocks: Int32Array, parents: Int32Array, digests: list[bytes]) -> bool:
        """Cache blocks of any number of chains at once, if none of their digests is cached or there twice.

        Else, or when a tail hangs on one of the parents, returns False and does nothing.
        """
        named = dict(zip(digests, blocks.tolist(), strict=True))
        is_new = len(named) == len(digests) and self._blocks.keys().isdisjoint(named)
        if not is_new or not self._tails.keys().isdisjoint(parents.tolist()):
            return False
        self._mark(blocks, parents)
        self._name(blocks, digests)
        return True

    def hang(self, blocks: Int32Array, parents: Int32Array, tails: dict[int, Tail]) -> None:
        """Cache tails behind leaves, at once. `blocks` are those of all `tails`, which are by the leaves."""
        self._mark(blocks, parents)
        self._tails.update(tails)
        self._log.add(lambda: [self._tails.pop(leaf) for leaf in tails])

    def extend(self, chain: Chain) -> Int32Array:
        """Cache one chain. Where a block's digest is cached already, that block takes its place.

        Returns the blocks that hold the chain now: int32[num_blocks]. What comes behind a leaf becomes its tail, if
        the chain's tokens are there.
        """
        parent, held = chain.parent, chain.blocks.copy()
        block_bytes = len(chain.tokens) // len(held)
        digests = iter(chain.digests)
        for index in range(len(held)):
            rest = held[index:]
            if chain.tokens and not self._has_child[parent]:
                parents = np.concatenate([[np.int32(parent)], rest[:-1]])
                self.hang(rest, parents, {parent: Tail(rest, chain.tokens[index * block_bytes :])})
                break
            self._hash_tail(parent)
            digest = next(digests)
            cached = self._blocks.get(digest)
            if cached is None:
                self._mark(rest[:1].copy(), np.array([parent], np.int32))
                self._name(rest[:1], [digest])
            else:
                held[index] = cached
            parent = int(held[index])
        return held

    def forget(self, blocks: Int32Array) -> None:
        """Drop cached blocks, and with each all its children."""
        named, digests, tails = self._remove(blocks)
        self._log.add(lambda: self._restore(blocks, named, digests, tails))

    def digest_of(self, block: int) -> bytes:
        """A cached block's digest; empty when it has none, as the null block."""
        digest: bytes = self._digests[block]
        return digest

    def entries(self) -> tuple[tuple[int, bytes, int], ...]:
        """(block, digest, parent) of every cached block; of a tail's, the digest is empty. For snapshots."""
        return tuple(
            (block, self._digests[block], int(self.parents[block])) for block in np.flatnonzero(self.is_cached).tolist()
        )

    def _mark(self, blocks: Int32Array, parents: Int32Array) -> None:
        """Note that `blocks` are cached, without children but for each other."""
        self._log.save(self.parents, blocks)
        self._log.save(self._has_child, blocks)
        self._log.save(self._has_child, parents)
        self.parents[blocks] = parents
        self.is_cached[blocks] = True
        self._has_child[blocks] = False
        self._has_child[parents] = True
        self._log.add(lambda: self._remove(blocks))

    def _hash_tail(self, block: int) -> None:
        """Give the tail that hangs on `block` digests, as far as it has not been evicted."""
        tail = self._tails.pop(block, None)
        if tail is None:
            return
        # An evicted block can have been cached again, but never behind the same parent: that hashes the tail before.
        is_lost = ~self.is_cached[tail.blocks]
        is_lost |= self.parents[tail.blocks] != np.concatenate([[block], tail.blocks[:-1]])
        left = tail.blocks[: int(np.argmax(np.append(is_lost, True)))]
        block_bytes = len(tail.tokens) // len(tail.blocks)
        tokens = tail.tokens[: len(left) * block_bytes]
        self._name(left, list(chained_digests(self._digests[block], tokens, block_bytes)))

        def undo() -> None:
            self._unname(left)
            self._tails[block] = tail

        self._log.add(undo)

    def _name(self, blocks: Int32Array, digests: list[bytes]) -> None:
        self._digests[blocks] = digests
        self._is_named[blocks] = True
        self._blocks.update(zip(digests, blocks.tolist(), strict=True))

    def _unname(self, blocks: Int32Array) -> tuple[Int32Array, list[bytes]]:
        """Take the digests from those of `blocks` that have one. Returns these and their digests."""
        named = blocks[self._is_named[blocks]]
        digests = self._digests[named].tolist()
        for digest in digests:
            del self._blocks[digest]
        self._digests[named] = _NO_DIGEST
        self._is_named[named] = False
        return named, digests

    def _remove(self, blocks: Int32Array) -> tuple[Int32Array, list[bytes], dict[int, Tail]]:
        self.is_cached[blocks] = False
        named, digests = self._unname(blocks)
        # A tail hangs on a block with a digest, or it could not get its own.
        tails = {block: self._tails.pop(block) for block in self._tails.keys() & named.tolist()}
        return named, digests, tails

    def _restore(self, blocks: Int32Array, named: Int32Array, digests: list[bytes], tails: dict[int, Tail]) -> None:
        self.is_cached[blocks] = True
        self._name(named, digests)
        self._tails |= tails
