"""Which full block holds the keys and values of which prefix."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from service.core.block_hash import chained_digests
from service.core.types import NULL_BLOCK, BoolArray, Int32Array
from service.core.undo_log import UndoLog

_NO_BLOCKS: Final[Int32Array] = np.empty(0, np.int32)


@dataclass(slots=True)
class Chain:
    """Full, computed blocks of one row that follow each other, to be cached.

    `parent` is the cached block before them, or the null block. Those in `tail` come behind the others, and have no
    digests yet; without others there are none.
    """

    parent: int
    blocks: list[int]
    digests: list[bytes]  # of `blocks`
    tail: list[int]
    tail_tokens: bytes  # the tail's `token_bytes`


class _Tail(NamedTuple):
    """Cached blocks without digests, and what to compute these from."""

    blocks: list[int]
    tokens: bytes


class PrefixCache:
    """Digest -> block, for blocks that are full and computed. Part of the BlockPool, which says what is evicted.

    The cached blocks form a tree: a block's parent holds the tokens just before its own, and is cached too. Output is
    seldom asked for again, and hashing it costs more than all else at the end of a sequence: so of a chain's tail the
    digests are computed when a block is looked up, or another added, behind the block that the tail hangs on. Until
    then that block has no other children, and nobody holds one of the tail but the row that gives it up.
    """

    def __init__(self, num_blocks: int, log: UndoLog) -> None:
        """`log` belongs to the pool."""
        self.is_cached: BoolArray = np.zeros(num_blocks, np.bool_)  # [num_blocks]
        self.parents: Int32Array = np.full(num_blocks, NULL_BLOCK, np.int32)  # [num_blocks] null block: it has none
        self._digests: dict[int, bytes] = {}  # of cached blocks, those of tails excepted
        self._blocks: dict[bytes, int] = {}
        self._tails: dict[int, _Tail] = {}  # by the block that they hang on
        self._new_blocks: list[int] = []  # named already, not yet marked in the arrays
        self._new_parents: list[int] = []
        self._replaced: list[tuple[int, int]] = []  # (block of a chain, the block that is cached under its digest)
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

    def add(self, chains: list[Chain]) -> list[tuple[int, int]]:
        """Cache the blocks of chains.

        A block whose digest is cached already is not: its place in the chain takes the one that is. Returns (block,
        the one that took its place) of each.
        """
        for chain in chains:
            self._add(chain)
        self._mark_new()
        replaced, self._replaced = self._replaced, []
        return replaced

    def forget(self, blocks: Int32Array) -> None:
        """Drop cached blocks, and with each all its children."""
        digests, tails = self._remove(blocks)
        self._log.add(lambda: self._restore(blocks, digests, tails))

    def entries(self) -> tuple[tuple[int, bytes, int], ...]:
        """(block, digest, parent) of every cached block; of a tail's, the digest is empty. For snapshots."""
        return tuple(
            (block, self._digests.get(block, b""), int(self.parents[block]))
            for block in np.flatnonzero(self.is_cached).tolist()
        )

    def _add(self, chain: Chain) -> None:
        parent, known = chain.parent, self._blocks
        self._hash_tail(parent)
        if known.keys().isdisjoint(chain.digests):  # mostly: then they are named at once
            known.update(zip(chain.digests, chain.blocks, strict=True))
            self._digests.update(zip(chain.blocks, chain.digests, strict=True))
            blocks = chain.blocks + chain.tail
            self._new_blocks += blocks
            self._new_parents.append(parent)
            self._new_parents += blocks[:-1]
            if chain.tail:
                self._tails[chain.blocks[-1]] = _Tail(chain.tail, chain.tail_tokens)
            return
        is_new = False
        for index, (block, digest) in enumerate(zip(chain.blocks, chain.digests, strict=True)):
            cached = known.get(digest)
            is_new = cached is None
            if cached is None:
                known[digest] = cached = block
                self._digests[block] = digest
                self._new_blocks.append(block)
                self._new_parents.append(parent)
            else:
                self._hash_tail(cached)
                chain.blocks[index] = cached
                self._replaced.append((block, cached))
            parent = cached
        if not chain.tail:
            return
        if is_new:
            self._tails[parent] = _Tail(chain.tail, chain.tail_tokens)
            self._new_blocks += chain.tail
            self._new_parents += [parent, *chain.tail[:-1]]
        else:
            digests = chained_digests(chain.digests[-1], chain.tail_tokens, len(chain.tail_tokens) // len(chain.tail))
            self._add(Chain(parent, chain.tail, digests, [], b""))

    def _mark_new(self) -> None:
        if not self._new_blocks:
            return
        places = np.array(self._new_blocks, np.int32)
        self._log.save(self.parents, places)
        self.parents[places] = self._new_parents
        self.is_cached[places] = True
        self._new_blocks, self._new_parents = [], []
        self._log.add(lambda: self._remove(places))

    def _hash_tail(self, block: int) -> None:
        """Give the tail that hangs on `block` digests, as far as it has not been evicted."""
        tail = self._tails.pop(block, None)
        if tail is None:
            return
        self._mark_new()
        blocks = np.array(tail.blocks, np.int32)
        # An evicted block can have been cached again, but never behind the same parent: that hashes the tail before.
        is_lost = ~self.is_cached[blocks] | (self.parents[blocks] != [block, *tail.blocks[:-1]])
        left = tail.blocks[: int(np.argmax(np.append(is_lost, True)))]
        block_bytes = len(tail.tokens) // len(tail.blocks)
        digests = chained_digests(self._digests[block], tail.tokens[: len(left) * block_bytes], block_bytes)
        self._name(left, digests)

        def undo() -> None:
            self._unname(left)
            self._tails[block] = tail

        self._log.add(undo)

    def _name(self, blocks: list[int], digests: list[bytes]) -> None:
        self._digests.update(zip(blocks, digests, strict=True))
        self._blocks.update(zip(digests, blocks, strict=True))

    def _unname(self, blocks: Iterable[int]) -> dict[int, bytes]:
        """Take the digests from those of `blocks` that have one. Returns them by block."""
        digests = {block: self._digests.pop(block) for block in self._digests.keys() & blocks}
        for digest in digests.values():
            del self._blocks[digest]
        return digests

    def _remove(self, blocks: Int32Array) -> tuple[dict[int, bytes], dict[int, _Tail]]:
        numbers = blocks.tolist()
        self.is_cached[blocks] = False
        tails = {block: self._tails.pop(block) for block in self._tails.keys() & numbers}
        return self._unname(numbers), tails

    def _restore(self, blocks: Int32Array, digests: dict[int, bytes], tails: dict[int, _Tail]) -> None:
        self.is_cached[blocks] = True
        self._name(list(digests), list(digests.values()))
        self._tails |= tails
