"""The rare sampling features: what a request asks for beyond temperature, top-k, top-p and min-p.

Rows without them cost nothing here. A LogitEdit is made while the step's inputs are, since it reads the BatchState,
and is applied to the row's logits after the forward pass.
"""

from dataclasses import dataclass

import numpy as np

from service.core.batch_state import BatchState
from service.core.types import Float32Array, Int32Array, Int64Array, SamplingParams, TokenLogprobs


def is_edited(params: SamplingParams) -> bool:
    """True when the parameters may change logits before sampling."""
    return (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or bool(params.logit_bias)
        or params.min_tokens > 0
    )


@dataclass(frozen=True, slots=True)
class LogitEdit:
    """What to change in one row of logits."""

    params: SamplingParams
    token_ids: Int32Array  # [num_tokens] prompt, then output; a copy where a penalty needs it, else empty
    num_prompt_tokens: int
    banned_token_ids: Int32Array  # tokens that may not be chosen now

    @classmethod
    def of(cls, batch: BatchState, row: int, params: SamplingParams) -> "LogitEdit":
        """Gather what editing the logits of `row` takes."""
        num_prompt, num_tokens = int(batch.num_prompt_tokens[row]), int(batch.num_tokens[row])
        has_penalty = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)
        banned: tuple[int, ...] = ()
        if num_tokens - num_prompt < params.min_tokens:
            banned = params.stop_token_ids + (() if params.ignore_eos else batch.eos_token_ids[row])
        return cls(
            params=params,
            token_ids=batch.token_ids[row, : num_tokens if has_penalty else 0].copy(),
            num_prompt_tokens=num_prompt,
            banned_token_ids=np.asarray(banned, np.int32),
        )

    @property
    def has_penalty(self) -> bool:
        """True when the tokens so far matter, the last one included."""
        return len(self.token_ids) > 0

    def apply(self, logits: Float32Array) -> None:
        """Change one row `[vocab_size]` in place: penalties, then bias, then bans."""
        params = self.params
        if self.has_penalty:
            seen = np.unique(self.token_ids)
            if params.repetition_penalty != 1.0:
                penalty = np.float32(params.repetition_penalty)
                values = logits[seen]
                logits[seen] = np.where(values > 0, values / penalty, values * penalty)
            used, counts = np.unique(self.token_ids[self.num_prompt_tokens :], return_counts=True)
            logits[used] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
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
