"""How many tokens a step may compute, and how fast recent steps computed them."""

import math
from dataclasses import dataclass

_HORIZON_S = 10.0
_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 60.0
_UNKNOWN_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class ChunkBudget:
    """Shares a step's tokens: every decode row gets its one token first, chunks share what is left.

    `max_chunk_tokens` bounds the prompt tokens of one step, all its chunks together; 0 sets no bound of its own.
    """

    max_num_batched_tokens: int
    max_chunk_tokens: int = 0

    def chunk_tokens(self, num_decode_tokens: int) -> int:
        """Prompt tokens that a step with `num_decode_tokens` may compute."""
        left = self.max_num_batched_tokens - num_decode_tokens
        return min(left, self.max_chunk_tokens) if self.max_chunk_tokens else left


@dataclass(frozen=True, slots=True)
class TokenRate:
    """Prompt tokens computed per second: how fast the queue drains. Smoothed over the last ten seconds or so of steps,

    those without a prompt included. Zero until the first prompt.
    """

    tokens_per_s: float = 0.0

    def observe(self, num_tokens: int, elapsed_ns: int) -> "TokenRate":
        """The rate after a step of `num_tokens` that took `elapsed_ns`."""
        if elapsed_ns <= 0:
            return self
        measured = num_tokens * 1e9 / elapsed_ns
        if self.tokens_per_s == 0.0:
            return TokenRate(measured)
        share = 1.0 - math.exp(-elapsed_ns / (_HORIZON_S * 1e9))
        return TokenRate(self.tokens_per_s + share * (measured - self.tokens_per_s))

    def seconds_for(self, num_tokens: float) -> float:
        """A rough time to compute `num_tokens`, between 0.1 and 60 s; 1 s while no step has been measured."""
        if self.tokens_per_s == 0.0:
            return _UNKNOWN_RETRY_S
        return min(max(num_tokens / self.tokens_per_s, _MIN_RETRY_S), _MAX_RETRY_S)
