"""The rare sampling features: what a request asks for beyond temperature, top-k, top-p and min-p.

Rows without them cost nothing here. A LogitEdit is made while the step's inputs are, since it reads the BatchState,
and is applied to the row's logits after the forward pass.
"""

from dataclasses import dataclass

import numpy as np

from service.core.batch_state import BatchState
from service.core.types import Float32Array, Int32Array, Int64Array, SamplingParams, TokenLogprobs
from service.executor.seen_tokens import SeenTokens


def is_edited(params: SamplingParams) -> bool:
    """True when the parameters may change logits before sampling."""
    return has_penalty(params) or bool(params.logit_bias) or params.min_tokens > 0


def has_penalty(params: SamplingParams) -> bool:
    """True when the tokens so far matter, the last one included."""
    return (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class LogitEdit:
    """What to change in one row of logits."""

    params: SamplingParams
    seen: Int32Array  # [num_seen] the different tokens so far where a penalty needs them, else none
    num_uses: Int32Array  # [num_seen] occurrences in the output; 0: in the prompt alone
    banned_token_ids: Int32Array  # tokens that may not be chosen now

    @classmethod
    def of(
        cls, batch: BatchState, row: int, params: SamplingParams, seen: SeenTokens, *, num_ahead: int = 0
    ) -> "LogitEdit":
        """Gather what editing the logits of `row` takes. `seen` is its sequence's, and is brought up to date.

        The row has `num_ahead` tokens more than the batch knows; then it has no penalty.
        """
        num_prompt, num_tokens = int(batch.num_prompt_tokens[row]), int(batch.num_tokens[row])
        if has_penalty(params):
            seen.update(batch.token_ids[row, :num_tokens], num_prompt)
        banned: tuple[int, ...] = ()
        if num_tokens + num_ahead - num_prompt < params.min_tokens:
            request = batch.requests[row]
            assert request is not None, "the row belongs to a sequence"
            banned = params.stop_token_ids + (() if params.ignore_eos else request.eos_token_ids)
        return cls(
            params=params,
            seen=seen.tokens,
            num_uses=seen.num_uses,
            banned_token_ids=np.asarray(banned, np.int32),
        )

    def apply(self, logits: Float32Array) -> None:
        """Change one row `[vocab_size]` in place: penalties, then bias, then bans."""
        params = self.params
        if len(self.seen):
            if params.repetition_penalty != 1.0:
                penalty = np.float32(params.repetition_penalty)
                values = logits[self.seen]
                logits[self.seen] = np.where(values > 0, values / penalty, values * penalty)
            is_used = self.num_uses > 0
            used = self.seen[is_used]
            logits[used] -= np.float32(params.frequency_penalty) * self.num_uses[is_used].astype(np.float32)
            logits[used] -= np.float32(params.presence_penalty)
        for token_id, bias in params.logit_bias:
            logits[token_id] += np.float32(bias)
        logits[self.banned_token_ids] = -np.inf


def log_softmax(logits: Float32Array) -> Float32Array:
    """Log-probabilities of one row `[vocab_size]`; the sum is taken in float64."""
    shifted: Float32Array = logits - logits.max()
    total = np.exp(shifted).sum(dtype=np.float64)
    shifted -= np.float32(np.log(total))
    return shifted


def token_logprobs(logprobs: Float32Array, token_id: int, num_top: int) -> TokenLogprobs:
    """The chosen token's entry of `logprobs` `[vocab_size]` and its `num_top` largest, the lower id first on a tie."""
    num_top = min(num_top, len(logprobs))
    top = np.empty(0, np.int32)
    if num_top > 0:
        threshold = np.partition(logprobs, -num_top)[-num_top]
        candidates = np.flatnonzero(logprobs >= threshold)
        order = np.argsort(-logprobs[candidates], kind="stable")[:num_top]
        top = candidates[order].astype(np.int32)
    return TokenLogprobs(chosen=float(logprobs[token_id]), top_token_ids=top, top_logprobs=logprobs[top])


def unusable_rows(logits: Float32Array) -> Int64Array:
    """Rows of `logits` `[num_rows, vocab_size]` that hold NaN or +inf, or nothing but -inf."""
    return np.flatnonzero(~np.isfinite(logits.max(axis=1)))
