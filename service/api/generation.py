"""One generation on its way out: text, stop strings and timings."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType

from service.core.types import FinishReason, TokenLogprobs
from service.engine.client import EngineClient
from service.engine.stream import TokenBatch, TokenStream
from service.text.detokenizer import Detokenizer
from service.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextChunk:
    """New tokens with the text that they released."""

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs]  # one per token, or empty when none were asked for


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a generation's time went, in nanoseconds; see `Timings` in inference.proto."""

    prepare_ns: int
    first_token_ns: int
    decode_ns: int
    total_ns: int


class Generation:
    """One admitted generation, for one reader on the event loop. Used as a context: leaving it frees the sequence.

    A stop string that is found frees it at once. `finish_reason` and `stop_string` are known when the iteration, or
    `collect`, is through.
    """

    def __init__(
        self,
        engine: EngineClient,
        stream: TokenStream,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str],
        received_ns: int,
    ) -> None:
        """`received_ns` is when the request came in, by the engine's clock."""
        self._engine = engine
        self._stream = stream
        self._detokenizer = Detokenizer(tokenizer, stop_strings)
        self._has_stop_strings = bool(stop_strings)
        self._received_ns = received_ns
        self.num_prompt_tokens = stream.num_prompt_tokens
        self.num_completion_tokens = 0
        self.finish_reason = FinishReason.NONE
        self.stop_string: str | None = None

    def __enter__(self) -> "Generation":
        """The generation itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the sequence if it still runs."""
        self.close()

    def close(self) -> None:
        """End the sequence if it still runs. Idempotent."""
        self._engine.cancel(self._stream.seq_id)

    @property
    def has_ended(self) -> bool:
        """True once the last chunk has been read."""
        return self.finish_reason is not FinishReason.NONE

    @property
    def num_cached_prompt_tokens(self) -> int:
        """Tokens of the prompt whose keys and values were there already; known from the first chunk on."""
        return self._stream.num_cached_prompt_tokens

    @property
    def timings(self) -> Timings:
        """Times so far; phases that were not reached count as 0."""
        stream = self._stream
        first_ns, last_ns = stream.first_token_ns or stream.submitted_ns, stream.last_token_ns or stream.submitted_ns
        return Timings(
            prepare_ns=stream.submitted_ns - self._received_ns,
            first_token_ns=first_ns - stream.submitted_ns,
            decode_ns=last_ns - first_ns,
            total_ns=last_ns - self._received_ns,
        )

    def __aiter__(self) -> AsyncIterator[TextChunk]:
        """The generation itself: chunks as the tokens come."""
        return self

    async def __anext__(self) -> TextChunk:
        """The next chunk, with at least one token. Raises the error that ended the generation."""
        if self.finish_reason is not FinishReason.NONE:
            raise StopAsyncIteration
        return self._read(await anext(self._stream))

    async def collect(self) -> TextChunk:
        """Everything in one chunk. Tokens become text in one go at the end, unless a stop string must be found."""
        token_ids: list[int] = []
        texts: list[str] = []
        logprobs: list[TokenLogprobs] = []
        while self.finish_reason is FinishReason.NONE:
            batch = await anext(self._stream)
            if not self._has_stop_strings:
                token_ids += batch.token_ids
                logprobs += batch.logprobs
                if batch.finish_reason is not FinishReason.NONE:
                    return self._read(TokenBatch(token_ids, logprobs, batch.finish_reason))
                continue
            chunk = self._read(batch)
            token_ids += chunk.token_ids
            texts.append(chunk.text)
            logprobs += chunk.logprobs
        return TextChunk(token_ids, "".join(texts), logprobs)

    def _read(self, batch: TokenBatch) -> TextChunk:
        """Turn a batch into text, up to a stop string if one appears."""
        detokenizer, num_tokens, num_read_before = self._detokenizer, len(batch.token_ids), self._detokenizer.num_tokens
        # A token that ends the sequence belongs to the output's ids, not to its text.
        num_text_tokens = num_tokens - (batch.finish_reason is FinishReason.STOP)
        text = detokenizer.push(batch.token_ids[:num_text_tokens])
        self.finish_reason = batch.finish_reason
        if batch.finish_reason is not FinishReason.NONE:
            text += detokenizer.finish()
        if detokenizer.stopped:
            self.finish_reason, self.stop_string = FinishReason.STOP, detokenizer.stop_string
            num_tokens = detokenizer.num_tokens - num_read_before
            self.close()  # the engine knows nothing of stop strings
        self.num_completion_tokens += num_tokens
        return TextChunk(batch.token_ids[:num_tokens], text, batch.logprobs[:num_tokens])
