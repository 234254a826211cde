"""The tokens of one sequence, on their way from the engine to whoever asked."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from service.core.types import FinishReason, TokenLogprobs
from service.errors import SlowConsumerError


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The tokens that gathered since the last batch; at least one."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]  # one per token, or empty when none were asked for
    finish_reason: FinishReason  # NONE: more will come


class TokenStream:
    """An async iterator of TokenBatch, for one reader. Lives on the event loop's thread alone.

    A reader that is quick gets every token at once; one that lags gets what gathered meanwhile in one batch. With an
    interval, tokens gather for at least so long after each batch: a step's tokens then go out with those before them,
    but for the first token, the last one, and those that fill the bound. Ends after the batch that carries a finish
    reason, or raises the error that ended the sequence, after the tokens that came before it.
    """

    def __init__(self, seq_id: int, num_prompt_tokens: int, max_pending_tokens: int, interval_ns: int = 0) -> None:
        self.seq_id = seq_id
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_prompt_tokens = 0  # that were not computed, but found: known from the first token on
        self.submitted_ns = 0
        self.first_token_ns = 0  # 0 until there is one
        self.last_token_ns = 0
        self._max_pending_tokens = max_pending_tokens
        self._interval_ns = interval_ns
        self._due_ns = 0  # when the next batch may go out
        self._is_due = False
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._finish_reason = FinishReason.NONE
        self._error: Exception | None = None
        self._is_over = False
        self._reader: asyncio.Future[None] | None = None

    def push(self, token_id: int, finish_reason: FinishReason, logprobs: TokenLogprobs | None, now_ns: int) -> None:
        """Add one token. Past the bound the stream fails with SlowConsumerError and drops what it held."""
        self.first_token_ns = self.first_token_ns or now_ns
        self.last_token_ns = now_ns
        if len(self._token_ids) >= self._max_pending_tokens:
            self._token_ids, self._logprobs = [], []
            self.fail(SlowConsumerError(f"the reader lags by {self._max_pending_tokens} tokens"))
            return
        self._token_ids.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        self._finish_reason = finish_reason
        if now_ns >= self._due_ns or self.has_ended or len(self._token_ids) >= self._max_pending_tokens:
            self._is_due = True
            self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream with `error`, unless it has ended already. Pending tokens are read first, at once."""
        if self.has_ended:
            return
        self._error = error
        self._is_due = bool(self._token_ids)
        self._wake()

    @property
    def has_ended(self) -> bool:
        """True when no further token will be pushed; the reader may not have read the last ones yet."""
        return self._error is not None or self._finish_reason is not FinishReason.NONE

    def __aiter__(self) -> AsyncIterator[TokenBatch]:
        """The stream itself."""
        return self

    async def __anext__(self) -> TokenBatch:
        """The next batch, as soon as there is one."""
        if self._is_over:
            raise StopAsyncIteration
        while not self._is_due:
            if self._error is not None:
                self._is_over = True
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        self._is_over = self._finish_reason is not FinishReason.NONE
        batch = TokenBatch(self._token_ids, self._logprobs, self._finish_reason)
        self._token_ids, self._logprobs = [], []
        self._is_due, self._due_ns = False, self.last_token_ns + self._interval_ns
        return batch

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
