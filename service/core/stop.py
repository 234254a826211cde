"""Whether a sampled token is its sequence's last. Arrays over the sampled rows, no loop."""

import numpy as np

from service.core.batch_state import BatchState, Rows
from service.core.types import FinishReason, Int8Array, Int32Array


def finish_reasons(batch: BatchState, rows: Rows, token_ids: Int32Array, max_kv_tokens: int) -> Int8Array:
    """The FinishReason of each of `rows`, to which `token_ids` (int32[num_sampled]) have just been appended.

    STOP: an end-of-sequence or stop token id, once `min_tokens` came before it. LENGTH: `max_tokens` or the model's
    context is full. UNSERVICEABLE: the next step would need K and V of more than `max_kv_tokens` tokens, which is all
    that the KV buffer holds, so that the sequence could not go on even alone. Returns int8[num_sampled].
    """
    num_tokens = batch.num_tokens[rows]
    reasons = np.full(len(token_ids), FinishReason.NONE, np.int8)
    reasons[num_tokens > max_kv_tokens] = FinishReason.UNSERVICEABLE
    reasons[num_tokens >= batch.max_num_tokens[rows]] = FinishReason.LENGTH
    is_stop_token = (batch.stop_token_ids[:, rows] == token_ids).any(axis=0)
    reasons[is_stop_token & (num_tokens > batch.min_num_tokens[rows])] = FinishReason.STOP
    return reasons
