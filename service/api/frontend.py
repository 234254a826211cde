"""The front side of a generation before the engine: template, tokens, checks."""

import asyncio
from dataclasses import replace

from service.api.generation import Generation
from service.api.params import (
    ChatPrompt,
    GenerationParams,
    ModelLimits,
    Prompt,
    TextPrompt,
    TokenPrompt,
    prompt_chars,
)
from service.api.validate import (
    resolve_sampling,
    validate_length,
    validate_params,
    validate_prompt,
    validate_roles,
    validate_text,
)
from service.core.types import Int32Array
from service.engine.client import EngineClient, Terms
from service.engine.prefix_keys import PromptKeys
from service.errors import DeadlineExceededError, InvalidRequestError, OverloadedError
from service.text.chat import ChatTemplate
from service.text.tokenizer import Tokenizer

MAX_INLINE_CHARS = 4096
"""Longer prompts are tokenised, checked and hashed on a worker thread: a short one costs less than the hand-over."""

MAX_LONG_PROMPTS = 2
"""Longer texts that are at work there, and as many lists of ids, which do not wait behind texts.

Each takes a processor, and a text many times its own size in memory.
"""


class Frontend:
    """Takes requests to the engine. One per process; lives on the event loop's thread."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        limits: ModelLimits,
        max_preparing_chars: int,
    ) -> None:
        """All parts are ready and may be shared.

        `max_preparing_chars` bounds the longer prompts that are prepared or wait for that; a single one may have more.
        """
        self.engine = engine
        self.limits = limits
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._long_texts = asyncio.Semaphore(MAX_LONG_PROMPTS)
        self._long_ids = asyncio.Semaphore(MAX_LONG_PROMPTS)
        self._num_preparing = 0  # sequences whose long prompts are prepared, or wait for that
        self._num_preparing_chars = 0
        self._max_preparing_chars = max_preparing_chars

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return self._chat_template.is_available

    async def submit(
        self, prompt: Prompt, params: GenerationParams, tenant: str = "", timeout_s: float | None = None
    ) -> Generation:
        """`submit_samples` for one sample, whatever `params.n` says."""
        return (await self.submit_samples(prompt, replace(params, n=1), tenant, timeout_s))[0]

    async def submit_samples(
        self, prompt: Prompt, params: GenerationParams, tenant: str = "", timeout_s: float | None = None
    ) -> list[Generation]:
        """Check, tokenise, and hand over to the engine; as many generations as `params.n` says, one by default.

        Of `timeout_s` and that of `params` the earlier counts.

        Raises InvalidRequestError, and what `EngineClient.submit` raises; nothing is left behind then.
        """
        received_ns = self.engine.clock.now_ns()
        validate_params(params, self.limits)
        num_samples = params.n or 1
        timeout_s = min((each for each in (params.timeout_s, timeout_s) if each is not None), default=None)
        self.engine.check_room(num_samples, self._num_preparing)
        token_ids, keys = await self._prepare(prompt, tenant, num_samples, timeout_s)
        sampling = resolve_sampling(params, len(token_ids), self.limits)
        deadline_ns = None if timeout_s is None else received_ns + round(timeout_s * 1e9)
        terms = Terms(tenant, params.priority or 0, deadline_ns)
        # Sample i is the very answer that a request for one sample gets with the seed plus i.
        samplings = [replace(sampling, seed=sampling.seed + index) for index in range(num_samples)]
        return [
            Generation(self.engine, stream, self._tokenizer, params.stop_strings, received_ns)
            for stream in self.engine.submit_samples(token_ids, samplings, terms, keys)
        ]

    async def _prepare(
        self, prompt: Prompt, tenant: str, num_samples: int, timeout_s: float | None
    ) -> tuple[Int32Array, PromptKeys | None]:
        """The checked tokens, with the keys of a long prompt. Of a short one, the engine makes them."""
        if isinstance(prompt, TokenPrompt):
            validate_length(len(prompt.token_ids), self.limits)  # before such a prompt takes anybody's room
        num_chars = prompt_chars(prompt)
        if num_chars <= MAX_INLINE_CHARS:
            return self._token_ids(prompt), None
        if self._num_preparing and self._num_preparing_chars + num_chars > self._max_preparing_chars:
            limit = f"of {self._max_preparing_chars} that may"
            raise OverloadedError(f"{self._num_preparing_chars} characters or ids wait to be prepared, {limit}", 1.0)
        self._num_preparing += num_samples
        self._num_preparing_chars += num_chars
        try:
            async with asyncio.timeout(timeout_s):
                return await self._prepare_long(prompt, tenant)
        except TimeoutError:
            raise DeadlineExceededError("the request's deadline has passed") from None
        finally:
            self._num_preparing -= num_samples
            self._num_preparing_chars -= num_chars

    async def _prepare_long(self, prompt: Prompt, tenant: str) -> tuple[Int32Array, PromptKeys]:
        places = self._long_ids if isinstance(prompt, TokenPrompt) else self._long_texts
        await places.acquire()
        preparing = asyncio.ensure_future(asyncio.to_thread(self._with_keys, prompt, tenant))
        preparing.add_done_callback(lambda prepared: _free_place(places, prepared))
        # A caller that goes away leaves the thread at work: its place is free only once the thread is done.
        return await asyncio.shield(preparing)

    def _with_keys(self, prompt: Prompt, tenant: str) -> tuple[Int32Array, PromptKeys]:
        """Any thread."""
        token_ids = self._token_ids(prompt)
        return token_ids, self.engine.prompt_keys(token_ids, tenant)

    def _token_ids(self, prompt: Prompt) -> Int32Array:
        """Any thread."""
        token_ids = prompt.token_ids if isinstance(prompt, TokenPrompt) else self._encode(prompt)
        return validate_prompt(token_ids, self.limits)

    def _encode(self, prompt: TextPrompt | ChatPrompt) -> Int32Array:
        """Any thread."""
        if isinstance(prompt, TextPrompt):
            if not prompt.text:
                raise InvalidRequestError("prompt", "", "at least one character")
            validate_text(prompt.text, self._tokenizer.span, self.limits)
            return self._tokenizer.encode(prompt.text)
        validate_roles(prompt.messages)
        text = self._chat_template.render(prompt.messages)
        validate_text(text, self._tokenizer.span, self.limits)
        return self._tokenizer.encode(text, add_special_tokens=False)


def _free_place(places: asyncio.Semaphore, prepared: asyncio.Future[tuple[Int32Array, PromptKeys]]) -> None:
    places.release()
    if not prepared.cancelled():
        prepared.exception()  # known by now to whoever waited; else nobody does, and asyncio would log it as lost
