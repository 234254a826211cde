"""Who gives up its blocks when they run out."""

import numpy as np

from service.core.batch_state import BatchState
from service.core.ordering import OrderingPolicy
from service.core.types import BoolArray


def choose_victim(batch: BatchState, policy: OrderingPolicy, may_lose: BoolArray) -> int:
    """The row to preempt: the one that the policy puts last among `may_lose`, bool[num_rows].

    There must be one. Its blocks are given up and its tokens are computed again later ("recompute").
    """
    rows = np.flatnonzero(may_lose).astype(np.int32)
    return int(rows[policy.standing(batch, rows)[-1]])
