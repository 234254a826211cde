"""Steps on the null block, for warming up, measuring and capturing: they read zeros and write no KV."""

import numpy as np

from service.core.types import NULL_BLOCK, Int32Array
from service.executor.api import ExecutorLimits
from service.executor.step_inputs import StepInputs


def null_decode_step(num_rows: int) -> StepInputs:
    """`num_rows` sequences of one token."""
    return _null_step(np.ones(num_rows, np.int32), 1)


def null_chunks(limits: ExecutorLimits) -> StepInputs:
    """As many tokens as one step may have, in as few sequences as hold them."""
    num_tokens = min(limits.max_num_batched_tokens, limits.max_num_seqs * limits.max_model_len)
    num_full, rest = divmod(num_tokens, limits.max_model_len)
    num_scheduled = [limits.max_model_len] * num_full + [rest] * (rest > 0)
    return _null_step(np.array(num_scheduled, np.int32), -(-max(num_scheduled) // limits.block_size))


def _null_step(num_scheduled: Int32Array, num_blocks: int) -> StepInputs:
    ends = np.cumsum(num_scheduled, dtype=np.int32)
    num_tokens = int(ends[-1])
    return StepInputs(
        token_ids=np.zeros(num_tokens, np.int32),
        positions=np.zeros(num_tokens, np.int32),
        slot_mapping=np.full(num_tokens, -1, np.int32),
        cu_seqlens=np.concatenate([np.zeros(1, np.int32), ends]),
        context_lens=num_scheduled,
        block_table=np.full((len(num_scheduled), num_blocks), NULL_BLOCK, np.int32),
        logit_indices=ends - 1,
    )
