"""What sequences find in the prefix cache, and what they leave there."""

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import numpy as np

from service.core.batch_state import NEVER_RESUMED, BatchState, Rows
from service.core.block_hash import DIGEST_BYTES, extend_digests, tenant_root, token_bytes
from service.core.block_pool import BlockPool
from service.core.chain import ChainNames, Chains
from service.core.scheduler_config import SchedulerConfig
from service.core.sequence import Sequence, SequenceStatus
from service.core.types import NO_BLOCKS, NULL_BLOCK, BoolArray, Int32Array, Int64Array, Request


class PrefixHit(NamedTuple):
    """What of a queued sequence is there already, and what it still needs."""

    blocks: Int32Array  # [num_hit_blocks]
    num_tokens: int  # that they hold, and the copied block
    num_revived_blocks: int  # of them, evictable as long as nobody holds them
    num_needed_blocks: int  # free ones that go to the sequence: revived ones, and new ones for its other known tokens
    num_published_blocks: int  # of `blocks`, cached
    copied_block: int = NULL_BLOCK  # what the first new block is to begin with, if any
    host_blocks: Int32Array = NO_BLOCKS  # [num_restored_blocks] follow `blocks`, and are copied to new ones


@cache  # no more entries than a sequence has blocks; to make a tuple at each admission takes 1 % of a large step
def no_hit(num_needed_blocks: int) -> PrefixHit:
    """Nothing of the sequence is there."""
    return PrefixHit(NO_BLOCKS, 0, 0, num_needed_blocks, 0)


def root_of(request: Request) -> bytes:
    """What the digests of its blocks start from."""
    return request.cache_root or tenant_root("", request.tenant)


class Prefixes:
    """Looks sequences up in the prefix cache and publishes their blocks. Used by the Scheduler and its parts.

    Blocks of a prompt are published as soon as they are computed and nothing is in flight, so that requests which run
    at the same time share them; after a preemption, with what of the output the same chunk has computed again. Blocks
    that decoding fills are published when the sequence gives them up: most are never asked for, and a running sequence
    shares them with nobody.
    With the cache off, nothing is found and nothing published.

    When a sequence fails, what is wrong may be in any block that it attended to, and whoever finds that block fails as
    well. So all that it has published or found is dropped with it: nothing says which block it was, and to compute some
    again costs less than to fail again. But what another sequence holds that has sampled with it is taken to be right.
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
        self._computed_rows: list[Int32Array] = []  # of prompts, by steps that have landed; not yet published

    def find(self, sequence: Sequence, max_needed_blocks: int) -> PrefixHit | None:
        """The prompt of the sequence that this one is a fork of, or else the longest cached prefix.

        None when it needs more blocks than that. The last token is always recomputed: a full hit would leave no logits
        to sample from.
        """
        leader = sequence.request.fork_of
        if leader is not None and sequence.status is SequenceStatus.WAITING:
            fork = self._fork(sequence, leader)
            if fork is not None:
                return fork if fork.num_needed_blocks <= max_needed_blocks else None
        return self._cached(sequence, max_needed_blocks)

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens of a new prompt that it would find if it were admitted now."""
        if not self._is_on:
            return 0
        num_blocks = (len(request.prompt_token_ids) - 1) // self._block_size
        digests = request.block_digests
        if len(digests) < num_blocks * DIGEST_BYTES:
            digests = extend_digests(digests, root_of(request), request.prompt_token_ids, self._block_size)
        num_hit = len(self._pool.cache.match(digests, num_blocks).blocks)
        if self._pool.host is not None and num_hit < num_blocks:
            num_hit += len(self._pool.host.find(digests, num_hit, num_blocks))
        return num_hit * self._block_size

    def _cached(self, sequence: Sequence, max_needed_blocks: int) -> PrefixHit | None:
        num_tokens = sequence.num_tokens
        num_blocks = -(-num_tokens // self._block_size)
        if not self._is_on:
            return no_hit(num_blocks) if num_blocks <= max_needed_blocks else None
        names = sequence.names
        if len(names.digests) < num_tokens // self._block_size * DIGEST_BYTES:
            names.digests = extend_digests(names.digests, names.root, sequence.token_ids, self._block_size)
        max_blocks = (num_tokens - 1) // self._block_size
        # Who lacks blocks is looked up in every step: what of its prefix was found before, and is there, is kept.
        sequence.match = self._pool.cache.match(names.digests, max_blocks, sequence.match)
        blocks, host_blocks = sequence.match.blocks, NO_BLOCKS
        num_hit = len(blocks)
        num_held = int(np.count_nonzero(self._pool.ref_counts[blocks])) if num_hit else 0
        if num_blocks - num_held > max_needed_blocks:
            return None  # whatever is in host memory
        if self._pool.host is not None and num_hit < max_blocks:
            host_blocks = self._pool.host.find(names.digests, num_hit, max_blocks)
            num_hit += len(host_blocks)
        if not num_hit:
            return no_hit(num_blocks)
        return PrefixHit(
            blocks,
            num_tokens=num_hit * self._block_size,
            num_revived_blocks=len(blocks) - num_held,
            num_needed_blocks=num_blocks - num_held,
            num_published_blocks=num_hit,
            host_blocks=host_blocks,
        )

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

    def note_computed(self, rows: Int32Array, computed: Rows) -> None:
        """A step of `rows` lands: what it computes of prompts will be published. `computed`: a slice, if they are one.

        The rows stay where they are until that is done.
        """
        prompt_rows = rows[self._are_prompts(computed)]
        if len(prompt_rows):
            self._computed_rows.append(prompt_rows)

    def is_published(self, rows: Int32Array) -> bool:
        """Whether nothing is left to publish, not even when a step of `rows` has landed."""
        return not self._is_on or not (self._computed_rows or self._are_prompts(self._batch.as_slice(rows)).any())

    def publish_steps(self, finished_rows: Int32Array, failed_rows: Int32Array) -> None:
        """Publish what steps have computed of prompts, and what finished rows hold.

        What a failed sequence computed is not to be trusted.
        """
        if not self._computed_rows and not len(finished_rows):
            return
        is_to_publish = np.zeros(self._batch.num_rows, np.bool_)  # a row may be in all three
        for prompt_rows in self._computed_rows:
            is_to_publish[prompt_rows] = True
        self._computed_rows.clear()
        is_to_publish[finished_rows] = True
        is_to_publish[failed_rows] = False
        self.publish(is_to_publish.nonzero()[0])

    def doubtful(self, failed_rows: Int32Array, going_rows: Int32Array) -> tuple[Int32Array, Int32Array]:
        """(Published blocks of `failed_rows` that may be wrong, those of the `going_rows` that hold one).

        These have sampled nothing yet and begin anew only once: else requests that fail again and again could keep
        others, which share a prefix with them, from ever getting done.
        """
        batch = self._batch
        counts = batch.num_published_blocks[failed_rows].tolist()
        shared = [batch.block_table[row, :count] for row, count in zip(failed_rows.tolist(), counts, strict=True)]
        is_new = batch.num_tokens[going_rows] == batch.num_prompt_tokens[going_rows]
        is_new &= batch.num_resumed_tokens[going_rows] == NEVER_RESUMED
        blocks = np.setdiff1d(np.concatenate(shared), batch.blocks_of(going_rows[~is_new]))
        others = going_rows[is_new]
        return blocks, others[np.isin(batch.block_table[others], blocks).any(axis=1)]

    def _are_prompts(self, rows: Rows) -> BoolArray:
        """Which of `rows` have more of their prompts to compute: bool[number of rows]."""
        return self._batch.num_computed_tokens[rows] < self._batch.num_prompt_tokens[rows]

    def publish(self, rows: Int32Array | Int64Array) -> None:
        """Publish every full block of `rows` that is computed."""
        if not self._is_on or not len(rows):
            return
        batch, rows = self._batch, rows.astype(np.int64)  # as an index several times faster than int32
        starts, ends = batch.num_published_blocks[rows], batch.num_computed_tokens[rows] // self._block_size
        is_new = ends > starts
        num_new = np.count_nonzero(is_new)
        if not num_new:
            return
        if num_new < len(rows):
            rows, starts, ends = rows[is_new], starts[is_new], ends[is_new]
        counts = ends - starts
        firsts = counts.cumsum() - counts
        # Entry i of a row that begins at entry `first` is its block `start` + i - `first`.
        columns = np.arange(firsts[-1] + counts[-1]) + (starts - firsts).repeat(counts)
        cells = rows.repeat(counts), columns
        parents = batch.block_table[rows, starts - 1].astype(np.int64)  # of no meaning where `start` is 0
        parents[starts == 0] = NULL_BLOCK
        blocks = batch.block_table[cells].astype(np.int64)
        chains = Chains(parents, starts.tolist(), self._names(rows, ends), firsts, blocks)
        if self._pool.publish(chains):
            batch.block_table[cells] = chains.blocks
        batch.num_published_blocks[rows] = ends

    def _names(self, rows: Int64Array, ends: Int32Array) -> list[ChainNames]:
        """What names the blocks of each of `rows` before block `ends`: the tokens without digests are noted there."""
        token_ids, block_size = self._batch.token_ids, self._block_size
        found: list[ChainNames] = []
        for row, seq_id, end in zip(rows.tolist(), self._batch.seq_ids[rows].tolist(), ends.tolist(), strict=True):
            names = self._sequences[seq_id].names
            num_known = len(names.digests) // DIGEST_BYTES
            if end > num_known:
                names.tokens = token_bytes(token_ids[row, num_known * block_size : end * block_size])
            found.append(names)
        return found
