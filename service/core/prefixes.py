"""What sequences find in the prefix cache, and what they leave there."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from service.core.batch_state import BatchState
from service.core.block_hash import extend_digests
from service.core.block_pool import BlockPool
from service.core.scheduler_config import SchedulerConfig
from service.core.sequence import Sequence
from service.core.types import NULL_BLOCK, Int32Array

_NO_BLOCKS: Final[Int32Array] = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What of a queued sequence is cached, and what it still needs."""

    blocks: Int32Array  # [num_hit_blocks]
    num_tokens: int  # that they hold
    num_revived_blocks: int  # of them, evictable as long as nobody holds them
    num_needed_blocks: int  # free ones that go to the sequence: revived ones, and new ones for its other known tokens


class Prefixes:
    """Looks sequences up in the prefix cache and publishes their blocks. Used by the Scheduler and its parts.

    Blocks of a prompt are published as soon as they are computed, so that requests which run at the same time share
    them. Blocks that decoding fills are hashed and published when the sequence gives them up: most are never asked
    for, and a running sequence shares them with nobody. With the cache off, nothing is found and nothing published.
    """

    def __init__(
        self, config: SchedulerConfig, batch: BatchState, pool: BlockPool, sequences: Mapping[int, Sequence]
    ) -> None:
        """`sequences` are all live ones by id."""
        self._is_on = config.prefix_cache
        self._block_size = config.block_size
        self._batch = batch
        self._pool = pool
        self._sequences = sequences

    def find(self, sequence: Sequence) -> PrefixHit:
        """The longest cached prefix of a queued sequence.

        The last token is always recomputed: a full hit would leave no logits to sample from.
        """
        num_blocks = -(-sequence.num_tokens // self._block_size)
        if not self._is_on:
            return PrefixHit(_NO_BLOCKS, 0, 0, num_blocks)
        extend_digests(sequence.block_digests, sequence.root, sequence.token_ids, self._block_size)
        max_hit_blocks = (sequence.num_tokens - 1) // self._block_size
        blocks = self._pool.cache.match(sequence.block_digests[:max_hit_blocks])
        num_held = int(np.count_nonzero(self._pool.ref_counts[blocks]))
        return PrefixHit(blocks, len(blocks) * self._block_size, len(blocks) - num_held, num_blocks - num_held)

    def publish_prompts(self, rows: Int32Array) -> None:
        """Publish the computed blocks of `rows` whose digests are known: those of prompts."""
        if not self._is_on:
            return
        num_full = self._batch.num_computed_tokens[rows] // self._block_size
        is_behind = self._batch.num_published_blocks[rows] < num_full
        for row in rows[is_behind].tolist():
            self._publish(row, self._sequences[int(self._batch.seq_ids[row])])

    def publish_all(self, rows: Int32Array) -> None:
        """Publish every full block of `rows` that is computed; output that was never hashed is now."""
        if not self._is_on:
            return
        batch = self._batch
        for row in rows.tolist():
            sequence = self._sequences[int(batch.seq_ids[row])]
            computed = batch.token_ids[row, : batch.num_computed_tokens[row]]
            extend_digests(sequence.block_digests, sequence.root, computed, self._block_size)
            self._publish(row, sequence)

    def _publish(self, row: int, sequence: Sequence) -> None:
        batch = self._batch
        start = int(batch.num_published_blocks[row])
        end = min(int(batch.num_computed_tokens[row]) // self._block_size, len(sequence.block_digests))
        if start >= end:
            return
        table = batch.block_table[row]
        parent = int(table[start - 1]) if start else NULL_BLOCK
        table[start:end] = self._pool.publish(table[start:end].copy(), sequence.block_digests[start:end], parent)
        batch.num_published_blocks[row] = end
