"""What sequences find in the prefix cache, and what they leave there."""

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from service.core.batch_state import BatchState
from service.core.block_hash import extend_digests, token_bytes
from service.core.block_pool import BlockPool
from service.core.prefix_cache import Chain
from service.core.scheduler_config import SchedulerConfig
from service.core.sequence import Sequence, SequenceStatus
from service.core.types import NULL_BLOCK, Int32Array

_NO_BLOCKS: Final[Int32Array] = np.empty(0, np.int32)


class PrefixHit(NamedTuple):
    """What of a queued sequence is there already, and what it still needs."""

    blocks: Int32Array  # [num_hit_blocks]
    num_tokens: int  # that they hold, and the copied block
    num_revived_blocks: int  # of them, evictable as long as nobody holds them
    num_needed_blocks: int  # free ones that go to the sequence: revived ones, and new ones for its other known tokens
    num_published_blocks: int  # of `blocks`, cached
    copied_block: int = NULL_BLOCK  # what the first new block is to begin with, if any


class Prefixes:
    """Looks sequences up in the prefix cache and publishes their blocks. Used by the Scheduler and its parts.

    Blocks of a prompt are published as soon as they are computed, so that requests which run at the same time share
    them. Blocks that decoding fills, or a prompt's last token alone in its chunk, are hashed and published when the
    sequence gives them up: most are never asked for, and a running sequence shares them with nobody. With the cache
    off, nothing is found and nothing published.
    """

    def __init__(
        self, config: SchedulerConfig, batch: BatchState, pool: BlockPool, sequences: Mapping[int, Sequence]
    ) -> None:
        """`sequences` are all live ones by id."""
        # Batches that end together give up no blocks before that, and begin together: they would find little.
        self._is_on = config.prefix_cache and config.batching == "continuous"
        self._block_size = config.block_size
        self._batch = batch
        self._pool = pool
        self._sequences = sequences

    def find(self, sequence: Sequence) -> PrefixHit:
        """The prompt of the sequence that this one is a fork of, or else the longest cached prefix.

        The last token is always recomputed: a full hit would leave no logits to sample from.
        """
        leader = sequence.request.fork_of
        if leader is not None and sequence.status is SequenceStatus.WAITING:
            fork = self._fork(sequence, leader)
            if fork is not None:
                return fork
        num_tokens = sequence.num_tokens
        num_blocks = -(-num_tokens // self._block_size)
        if not self._is_on:
            return PrefixHit(_NO_BLOCKS, 0, 0, num_blocks, 0)
        if len(sequence.block_digests) < num_tokens // self._block_size:
            extend_digests(sequence.block_digests, sequence.root, sequence.token_ids, self._block_size)
        max_hit_blocks = (num_tokens - 1) // self._block_size
        blocks = self._pool.cache.match(sequence.block_digests[:max_hit_blocks])
        if not len(blocks):
            return PrefixHit(_NO_BLOCKS, 0, 0, num_blocks, 0)
        num_held = int(np.count_nonzero(self._pool.ref_counts[blocks]))
        num_hit = len(blocks)
        return PrefixHit(blocks, num_hit * self._block_size, num_hit - num_held, num_blocks - num_held, num_hit)

    def _fork(self, sequence: Sequence, leader: int) -> PrefixHit | None:
        """All but the last token of a prompt that is in another row's blocks. None when it is not, or not yet.

        The block of the last token is written to: a fork gets a copy of what comes before it there.
        """
        batch, row = self._batch, self._batch.row_of(leader)
        if row is None or batch.num_computed_tokens[row] < sequence.num_tokens:
            return None
        num_blocks, num_copied = divmod(sequence.num_tokens - 1, self._block_size)
        table = batch.block_table[row]
        return PrefixHit(
            blocks=table[:num_blocks].copy(),
            num_tokens=sequence.num_tokens - 1,
            num_revived_blocks=0,
            num_needed_blocks=1,
            num_published_blocks=min(num_blocks, int(batch.num_published_blocks[row])),
            copied_block=int(table[num_blocks]) if num_copied else NULL_BLOCK,
        )

    def publish_prompts(self, rows: Int32Array) -> None:
        """Publish the computed blocks of `rows` whose digests are known: those of prompts."""
        if self._is_on:
            self._publish(rows, with_output=False)

    def publish_all(self, rows: Int32Array) -> None:
        """Publish every full block of `rows` that is computed; the rows give them up next."""
        if self._is_on and len(rows):
            self._publish(rows, with_output=True)

    def _publish(self, rows: Int32Array, *, with_output: bool) -> None:
        batch, sequences = self._batch, self._sequences
        starts = batch.num_published_blocks[rows]
        ends = batch.num_computed_tokens[rows] // self._block_size
        columns = (rows, batch.seq_ids[rows], starts, ends)
        chains: list[tuple[int, int, Chain]] = []  # row, its first new block, its new blocks
        for row, seq_id, start, end in zip(*(column.tolist() for column in columns), strict=True):
            sequence = sequences[seq_id]
            is_unknown = len(sequence.block_digests) <= start
            if start >= end or (is_unknown and not with_output):
                continue
            if is_unknown:
                first = batch.token_ids[row, : (start + 1) * self._block_size]
                extend_digests(sequence.block_digests, sequence.root, first, self._block_size)
            chains.append((row, start, self._chain(row, sequence, (start, end), with_output=with_output)))
        if not chains:
            return
        if self._pool.publish([chain for _, _, chain in chains]):
            for row, start, chain in chains:
                blocks = chain.blocks + chain.tail
                batch.block_table[row, start : start + len(blocks)] = blocks
        published = [start + len(chain.blocks) for _, start, chain in chains]
        batch.num_published_blocks[[row for row, _, _ in chains]] = published

    def _chain(self, row: int, sequence: Sequence, span: tuple[int, int], *, with_output: bool) -> Chain:
        """The row's blocks in `span`, and with its output those without a digest too."""
        (start, end), table = span, self._batch.block_table[row]
        known_end = min(end, len(sequence.block_digests))
        parent = int(table[start - 1]) if start else NULL_BLOCK
        digests = sequence.block_digests[start:known_end]
        if not with_output or known_end == end:
            return Chain(parent, table[start:known_end].tolist(), digests, [], b"")
        blocks, num_known = table[start:end].tolist(), known_end - start
        tokens = self._batch.token_ids[row, known_end * self._block_size : end * self._block_size]
        return Chain(parent, blocks[:num_known], digests, blocks[num_known:], token_bytes(tokens))
