"""Whether a sampled token is its sequence's last. Arrays over the sampled rows, no loop."""

import numpy as np

from service.core.batch_state import BatchState, Rows
from service.core.types import BoolArray, FinishReason, Int8Array, StepResult

# Looking a member up in an enum takes longer than comparing a thousand rows.
_STOP, _LENGTH, _UNSERVICEABLE, _ERROR = (
    np.int8(reason)
    for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.UNSERVICEABLE, FinishReason.ERROR)
)


def finish_reasons(batch: BatchState, rows: Rows, result: StepResult, max_kv_tokens: int) -> Int8Array:
    """The FinishReason of each of `rows`, to which the tokens of `result` have just been appended.

    STOP: an end-of-sequence or stop token id, once `min_tokens` came before it. LENGTH: `max_tokens` or the model's
    context is full. UNSERVICEABLE: the next step would need K and V of more than `max_kv_tokens` tokens, which is all
    that the KV buffer holds, so that the sequence could not go on even alone. ERROR: `result` says that it failed,
    whatever else holds. Returns int8[num_sampled].
    """
    num_tokens = batch.num_tokens[rows]
    is_full: BoolArray = num_tokens >= batch.max_num_tokens[rows]
    reasons = np.zeros(len(num_tokens), np.int8)
    if np.count_nonzero(is_full):
        reasons[is_full] = _LENGTH
    if max_kv_tokens < batch.max_model_len:
        reasons[(num_tokens > max_kv_tokens) & ~is_full] = _UNSERVICEABLE
    # One comparison per stop token id: faster than all of them in two dimensions, since most batches have one or two.
    for stop_token_ids in batch.stop_token_ids:
        is_stop_token = stop_token_ids[rows] == result.token_ids
        if np.count_nonzero(is_stop_token):
            reasons[is_stop_token & (num_tokens > batch.min_num_tokens[rows])] = _STOP
    if len(result.failed):
        reasons[result.failed] = _ERROR
    return reasons
