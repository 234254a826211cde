"""What sequences find in the prefix cache, and what they leave there."""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import numpy as np

from service.core.batch_state import BatchState
from service.core.block_hash import TOKEN_BYTES, chained_digests, extend_digests, token_bytes
from service.core.block_pool import BlockPool
from service.core.prefix_cache import Chain, Tail
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
        if not self._is_on:
            return
        span = self._unpublished(rows)
        if span is None:
            return
        rows, starts, ends = span
        digests: list[bytes] = []
        pieces = list(
            zip(*(column.tolist() for column in (rows, self._batch.seq_ids[rows], starts, ends)), strict=True)
        )
        for _, seq_id, start, end in pieces:
            digests += self._sequences[seq_id].block_digests[start:end]
        blocks, parents = self._batch.blocks_between(rows, starts, ends)
        if len(digests) == len(blocks) and self._pool.cache.add(blocks, parents, digests):
            self._batch.num_published_blocks[rows] = ends
            return
        for row, seq_id, start, end in pieces:
            known = self._sequences[seq_id].block_digests[start:end]
            if known:
                self._publish(row, start, start + len(known), known)

    def publish_all(self, rows: Int32Array) -> None:
        """Publish every full block of `rows` that is computed; the rows give them up next."""
        if not self._is_on or not len(rows):
            return
        span = self._unpublished(rows)
        if span is None:
            return
        batch, cache = self._batch, self._pool.cache
        rows, starts, ends = span
        leaves = np.where(starts > 0, batch.block_table[rows, starts - 1], NULL_BLOCK)
        is_leaf = cache.is_leaf(leaves)
        if len(set(leaves.tolist())) < len(leaves):  # of one leaf, whose tail would be one of them only
            is_leaf[:] = False
        if np.count_nonzero(is_leaf):
            self._hang(rows[is_leaf], starts[is_leaf], ends[is_leaf], leaves[is_leaf].tolist())
        columns = (column[~is_leaf].tolist() for column in (rows, batch.seq_ids[rows], starts, ends))
        for row, seq_id, start, end in zip(*columns, strict=True):
            tokens = self._tokens(row, start, end)
            root = cache.digest_of(int(batch.block_table[row, start - 1])) if start else self._sequences[seq_id].root
            digests = chained_digests(root, tokens, self._block_size * TOKEN_BYTES)
            self._publish(row, start, end, digests, tokens)

    def _unpublished(self, rows: Int32Array) -> tuple[Int32Array, Int32Array, Int32Array] | None:
        """Those of `rows` with full blocks that are computed and not published, the first of them and their end."""
        starts = self._batch.num_published_blocks[rows]
        ends = self._batch.num_computed_tokens[rows] // self._block_size
        is_new = ends > starts
        num_new = np.count_nonzero(is_new)
        if num_new == len(rows):
            return rows, starts, ends
        return (rows[is_new], starts[is_new], ends[is_new]) if num_new else None

    def _hang(self, rows: Int32Array, starts: Int32Array, ends: Int32Array, leaves: list[int]) -> None:
        """Publish blocks of `rows` as tails of `leaves`, which hold what is before them."""
        blocks, parents = self._batch.blocks_between(rows, starts, ends)
        tails, place = {}, 0
        columns = (rows.tolist(), starts.tolist(), ends.tolist(), leaves)
        for row, start, end, leaf in zip(*columns, strict=True):
            tails[leaf] = Tail(blocks[place : place + end - start], self._tokens(row, start, end))
            place += end - start
        self._pool.cache.hang(blocks, parents, tails)

    def _publish(self, row: int, start: int, end: int, digests: Iterable[bytes], tokens: bytes = b"") -> None:
        table = self._batch.block_table[row]
        parent = int(table[start - 1]) if start else NULL_BLOCK
        table[start:end] = self._pool.publish(Chain(parent, table[start:end].copy(), digests, tokens))
        self._batch.num_published_blocks[row] = end

    def _tokens(self, row: int, start: int, end: int) -> bytes:
        """The `token_bytes` of the row's blocks from `start` to `end`."""
        return token_bytes(self._batch.token_ids[row, start * self._block_size : end * self._block_size])
