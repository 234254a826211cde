"""Steps on the null block, for warming up, measuring and capturing: they read zeros and write no KV."""

import numpy as np

from service.core.types import NULL_BLOCK, Int32Array
from service.executor.api import ExecutorLimits
from service.executor.step_inputs import StepInputs


def null_decode_step(num_rows: int) -> StepInputs:
    """`num_rows` sequences of one token."""
    return _null_step(np.ones(num_rows, np.int32), 1)


def null_chunks(num_tokens: int, num_seqs: int, block_size: int) -> StepInputs:
    """`num_tokens` in `num_seqs` sequences of as even a length as there is; each gets logits."""
    shortest, rest = divmod(num_tokens, num_seqs)
    num_scheduled = np.full(num_seqs, shortest, np.int32)
    num_scheduled[:rest] += 1
    return _null_step(num_scheduled, -(-int(num_scheduled[0]) // block_size))


def chunk_shapes(limits: ExecutorLimits) -> list[tuple[int, int]]:
    """Tokens and sequences of large steps: the most and half of them, in as few sequences as hold them and in most."""
    most = min(limits.max_num_batched_tokens, limits.max_num_seqs * limits.max_model_len)
    shapes = []
    for num_tokens in (most, -(-most // 2)):
        fewest = -(-num_tokens // limits.max_model_len)
        shapes += [(num_tokens, fewest), (num_tokens, min(limits.max_num_seqs, num_tokens))]
    return shapes


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
