"""From the engine thread's step deltas to the streams on the event loop."""

import asyncio
from collections.abc import Callable

from service.clock import Clock
from service.core.types import FinishReason, StepDelta
from service.engine.stream import TokenStream
from service.errors import (
    ChairliftError,
    DeadlineExceededError,
    ExecutorError,
    OverloadedError,
    UnserviceableError,
)

MAX_RETRY_AFTER_S = 60.0

_REASONS = {int(reason): reason for reason in FinishReason}
_FAILURES: dict[int, Callable[[], ChairliftError]] = {
    FinishReason.UNSERVICEABLE: lambda: UnserviceableError("the request needs more KV blocks than there are"),
    FinishReason.ERROR: lambda: ExecutorError("the model gave the request no logits to sample from"),
    FinishReason.DEADLINE: lambda: DeadlineExceededError("the request's deadline has passed"),
}


class OutputRouter:
    """Owns the open streams. `publish` and `fail` are for the engine thread, the rest for the loop's.

    Each call from the engine thread costs one `call_soon_threadsafe`, however many sequences it concerns.
    `on_abandoned` is called on the loop's thread with the sequence whose stream ended before its sequence did.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock, on_abandoned: Callable[[int], None]) -> None:
        self._loop = loop
        self._clock = clock
        self._on_abandoned = on_abandoned
        self._streams: dict[int, TokenStream] = {}
        self.waiting_requests = 0  # open streams without a token yet
        self.waiting_tokens = 0  # their prompt tokens
        self.first_token_s = 1.0  # recent time from submit to first token, smoothed

    @property
    def retry_after_s(self) -> float:
        """In how many seconds a new request may be admitted at once, by how long recent ones took."""
        return min(self.first_token_s, MAX_RETRY_AFTER_S)

    @property
    def num_open(self) -> int:
        """Streams whose sequence is still being generated."""
        return len(self._streams)

    def open(self, stream: TokenStream) -> None:
        """Deliver to `stream` from now on."""
        self._streams[stream.seq_id] = stream
        self.waiting_requests += 1
        self.waiting_tokens += stream.num_prompt_tokens

    def close(self, seq_id: int) -> bool:
        """Deliver no more to the sequence. False when it had ended, or was closed, before."""
        stream = self._streams.pop(seq_id, None)
        if stream is None:
            return False
        if not stream.first_token_ns:
            self._leave_queue(stream)
        return True

    def publish(self, delta: StepDelta) -> None:
        """Hand one step's tokens over. Engine thread."""
        if len(delta.seq_ids) or delta.cached_prompt_tokens:
            self._loop.call_soon_threadsafe(self._deliver, delta)

    def end(self, ended: list[tuple[int, FinishReason]]) -> None:
        """End streams whose sequences ran out of time: (seq_id, reason) each. Engine thread."""
        self._loop.call_soon_threadsafe(self._end, ended)

    def fail(self, seq_id: int, error: Exception) -> None:
        """End one sequence's stream with `error`. Engine thread."""
        self._loop.call_soon_threadsafe(self._fail, seq_id, error)

    def fail_all(self, error: Exception) -> None:
        """End every open stream with `error`, and abandon their sequences. Loop's thread."""
        for seq_id in list(self._streams):
            self._fail(seq_id, error)
            self._on_abandoned(seq_id)

    def _deliver(self, delta: StepDelta) -> None:
        now_ns = self._clock.now_ns()
        for seq_id, num_cached in delta.cached_prompt_tokens.items():
            if seq_id in self._streams:
                self._streams[seq_id].num_cached_prompt_tokens = num_cached
        columns = zip(delta.seq_ids.tolist(), delta.token_ids.tolist(), delta.finish_reasons.tolist(), strict=True)
        for index, (seq_id, token_id, reason) in enumerate(columns):
            stream = self._streams.get(seq_id)
            if stream is None:  # cancelled while the step was in flight
                continue
            if not stream.first_token_ns:
                self._leave_queue(stream)
                self.first_token_s += 0.2 * ((now_ns - stream.submitted_ns) / 1e9 - self.first_token_s)
            if reason in _FAILURES:
                stream.fail(_FAILURES[reason]())
            else:
                stream.push(token_id, _REASONS[reason], delta.logprobs.get(index), now_ns)
            if stream.has_ended:
                del self._streams[seq_id]
                if not reason:
                    self._on_abandoned(seq_id)

    def _end(self, ended: list[tuple[int, FinishReason]]) -> None:
        for seq_id, reason in ended:
            if reason is FinishReason.QUEUE_WAIT:
                self._fail(seq_id, OverloadedError("the request has waited for too long", self.retry_after_s))
            else:
                self._fail(seq_id, _FAILURES[reason]())

    def _fail(self, seq_id: int, error: Exception) -> None:
        stream = self._streams.get(seq_id)
        if stream is not None:
            self.close(seq_id)
            stream.fail(error)

    def _leave_queue(self, stream: TokenStream) -> None:
        self.waiting_requests -= 1
        self.waiting_tokens -= stream.num_prompt_tokens
