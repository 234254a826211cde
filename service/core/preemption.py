"""Who gives up its blocks when they run out, and when it gets them back."""

from typing import Final

import numpy as np

from service.core.batch_state import BatchState
from service.core.block_pool import BlockPool
from service.core.ordering import OrderingPolicy
from service.core.types import BoolArray, Int32Array, Int64Array

SETTLING_TOKENS: Final = 16
"""A sequence that came back from a preemption generates so many tokens before it is taken again, if others can be; and
it comes back only when there are blocks for all that run to grow so far. Else it would be in and out at every block."""

_TAIL: Final = 4
_MAX_TAIL_ROWS: Final = 64


def choose_victim(
    batch: BatchState, pool: BlockPool, policy: OrderingPolicy, may_lose: BoolArray, num_missing: int
) -> int:
    """The row to preempt among `may_lose`, bool[num_rows], when `num_missing` blocks are missing. There must be one.

    Policy first: only the last quarter in its order comes into question (64 rows at most, one at least), never the
    first row. Of these, the one with the least to compute again for each block that helps: blocks that others hold
    too are not freed, and more than are missing do not help. Rows that have just come back count only when there is no
    other. Its tokens are computed again later ("recompute").
    """
    rows = np.flatnonzero(may_lose).astype(np.int32)
    rows = rows[policy.standing(batch, rows)]
    others = rows[1:] if len(rows) > 1 else rows
    is_settled = batch.num_tokens[others] - batch.num_resumed_tokens[others] >= SETTLING_TOKENS
    for candidates in (others[is_settled], others):
        tail = candidates[-min(_MAX_TAIL_ROWS, max(1, len(candidates) // _TAIL)) :]
        num_helping = np.minimum(_num_freed_blocks(batch, pool, tail), num_missing)
        if num_helping.any():
            # Of equals the last one: so the costs are looked at from the end.
            costs = batch.num_computed_tokens[tail] / np.where(num_helping, num_helping, np.nan)
            return int(tail[::-1][np.nanargmin(costs[::-1])])
    return int(others[-1])


def settling_blocks(num_rows: int, block_size: int) -> int:
    """Blocks that so many running sequences, and one more, may take while they generate `SETTLING_TOKENS` each."""
    return -(-(num_rows + 1) * SETTLING_TOKENS // block_size)


def _num_freed_blocks(batch: BatchState, pool: BlockPool, rows: Int32Array) -> Int64Array:
    """For each of `rows`, the blocks that nobody else holds: int64[number of rows]."""
    num_blocks = batch.num_blocks[rows]
    width = int(num_blocks.max(initial=0))
    is_alone = pool.ref_counts[batch.block_table[rows, :width]] == 1
    freed: Int64Array = np.count_nonzero(is_alone & (np.arange(width) < num_blocks[:, None]), axis=1)
    return freed
