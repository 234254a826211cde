"""Blocks of one sequence on their way into the prefix cache, and what names them there."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from service.core.block_hash import DIGEST_BYTES, chained_digests, split_digests
from service.core.types import NO_BLOCKS, NULL_BLOCK, Int32Array


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


class Chain(NamedTuple):
    """Full, computed blocks of one sequence that follow each other."""

    parent: int  # the cached block before them, or the null block
    num_before: int  # blocks of the sequence that come before them
    blocks: Int32Array  # [num_blocks], at least one; a view of where the sequence keeps them
    names: ChainNames  # of the sequence
