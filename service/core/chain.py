"""Blocks of sequences on their way into the prefix cache, and what names them there."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import numpy as np

from service.core.block_hash import DIGEST_BYTES, chained_digests, split_digests
from service.core.types import NO_BLOCKS, NULL_BLOCK, Int32Array, Int64Array


@dataclass(slots=True)
class ChainNames:
    """What the digests of one sequence's blocks are, or are computed from. Grows with the sequence."""

    digests: bytes  # of its first blocks, DIGEST_BYTES each
    root: bytes  # stands for the null block's digest
    block_bytes: int  # `token_bytes` of a block
    tokens: bytes = b""  # those of the published blocks that have no digest above
    head: int = NULL_BLOCK  # the block that its blocks without digests in the cache hang behind, if they do
    num_named: int = 0  # and how many come before these

    def restore_place(self, head: int, num_named: int) -> None:
        """Take back where they hang."""
        self.head, self.num_named = head, num_named

    def after(self, num_blocks: int, parent_digest: bytes) -> Iterator[bytes]:
        """The digests from block `num_blocks` on, computed as they are asked for unless they are known.

        `parent_digest` is that of the block before.
        """
        known = self.digests[num_blocks * DIGEST_BYTES :]
        yield from split_digests(known)
        num_bytes = max(0, num_blocks - len(self.digests) // DIGEST_BYTES) * self.block_bytes
        parent_digest = known[-DIGEST_BYTES:] or parent_digest or self.root
        yield from chained_digests(parent_digest, self.tokens[num_bytes:], self.block_bytes)


class Match(NamedTuple):
    """The blocks of a cached prefix, as of a lookup."""

    blocks: Int32Array  # [num_matched]
    versions: Int32Array  # [num_matched] of what the cache knew them as


NO_MATCH: Final = Match(NO_BLOCKS, NO_BLOCKS)


class Chains(NamedTuple):
    """Full, computed blocks of sequences. Those of one sequence, a chain, follow each other."""

    parents: Int64Array  # [num_chains] the cached block before each chain, or the null block
    num_before: list[int]  # [num_chains] blocks of the sequence that come before the chain
    names: list[ChainNames]  # [num_chains] of the sequences
    starts: Int64Array  # [num_chains] where in `blocks` each begins; it has one block at least
    blocks: Int64Array  # [num_blocks] one chain's after the other's

    @classmethod
    def of_one(cls, parent: int, num_before: int, names: ChainNames, blocks: Int32Array | Int64Array) -> Self:
        """A single chain."""
        return cls(np.array([parent]), [num_before], [names], np.zeros(1, np.int64), blocks.astype(np.int64))

    def blocks_of(self, index: int) -> Int64Array:
        """A view of the blocks of one chain."""
        end = self.starts.item(index + 1) if index + 1 < len(self.starts) else len(self.blocks)
        return self.blocks[self.starts.item(index) : end]

    def only(self, indices: list[int]) -> Self:
        """Some of the chains; their blocks are copied."""
        parts = [self.blocks_of(index) for index in indices]
        counts = np.array([len(part) for part in parts], np.int64)
        return type(self)(
            self.parents[indices],
            [self.num_before[index] for index in indices],
            [self.names[index] for index in indices],
            counts.cumsum() - counts,
            np.concatenate([*parts, np.empty(0, np.int64)]),
        )
