"""The front side before the engine."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

import service.api.frontend as frontend_module
import service.engine.prefix_keys as prefix_keys_module
from service.api.frontend import MAX_INLINE_CHARS, MAX_LONG_PROMPTS
from service.api.params import (
    MESSAGE_CHARS,
    ChatPrompt,
    GenerationParams,
    Prompt,
    TextPrompt,
    TokenPrompt,
    prompt_chars,
)
from service.api.validate import validate_prompt
from service.core.block_hash import extend_digests
from service.engine.settings import EngineSettings
from service.errors import DeadlineExceededError, DrainingError, InvalidRequestError, OverloadedError
from service.executor.api import ExecutorLimits
from tests.doubles import DEADLINE_S, LIMITS, Served, run_async, served_toy

LONG_PROMPT = TextPrompt("w1 " * MAX_INLINE_CHARS)


@pytest.mark.parametrize(
    ("prompt", "num_chars"),
    [
        (TextPrompt("hello"), 5),
        (ChatPrompt([("user", "hi"), ("assistant", "")]), 4 + 2 + 9 + 2 * MESSAGE_CHARS),
        (ChatPrompt([("r" * 5000, "")]), 5000 + MESSAGE_CHARS),
        (TokenPrompt([7, 8, 900]), 3),
    ],
)
def test_roles_messages_and_token_ids_count_as_text_to_tokenise(prompt: Prompt, num_chars: int) -> None:
    assert prompt_chars(prompt) == num_chars


def test_many_empty_messages_are_no_short_prompt() -> None:
    assert prompt_chars(ChatPrompt([("user", "")] * 200)) > MAX_INLINE_CHARS


LONG_CONTEXT = replace(LIMITS, num_blocks=4096, max_num_batched_tokens=4096, max_model_len=3 * MAX_INLINE_CHARS)
SHORT_IDS, LONG_IDS = TokenPrompt([5] * MAX_INLINE_CHARS), TokenPrompt([5] * (MAX_INLINE_CHARS + 1))


@pytest.mark.parametrize(("prompt", "is_loops_work"), [(SHORT_IDS, True), (LONG_IDS, False), (LONG_PROMPT, False)])
def test_long_prompts_are_checked_and_hashed_off_the_loop(
    prompt: Prompt, is_loops_work: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def recorded(work: Callable[..., object]) -> Callable[..., object]:
        def record(*args: object) -> object:
            threads.append(threading.get_ident())
            return work(*args)

        return record

    monkeypatch.setattr(frontend_module, "validate_prompt", recorded(validate_prompt))
    monkeypatch.setattr(prefix_keys_module, "extend_digests", recorded(extend_digests))

    async def main() -> None:
        async with served_toy(LONG_CONTEXT) as served:
            with await served.frontend.submit(prompt, GenerationParams(max_tokens=1)) as generation:
                await generation.collect()
        assert [thread == threading.get_ident() for thread in threads] == [is_loops_work] * 2

    run_async(main())


def test_keys_of_a_long_prompt_are_its_tenants() -> None:
    async def main() -> None:
        num_cached = []
        async with served_toy(LONG_CONTEXT) as served:
            for tenant in ("a", "a", "b"):
                with await served.frontend.submit(LONG_IDS, GenerationParams(max_tokens=1), tenant) as generation:
                    await generation.collect()
                num_cached.append(generation.num_cached_prompt_tokens)
        assert num_cached == [0, MAX_INLINE_CHARS, 0]

    run_async(main())


def test_long_prompts_give_their_places_back_however_they_end() -> None:
    async def main() -> None:
        prompt, params = LONG_PROMPT, GenerationParams(max_tokens=1)
        async with served_toy() as served:
            calls = [asyncio.create_task(served.frontend.submit(prompt, params)) for _ in range(3 * MAX_LONG_PROMPTS)]
            await asyncio.sleep(0)
            for call in calls[::2]:
                call.cancel()
            ends = await asyncio.gather(*calls, return_exceptions=True)
            with pytest.raises(InvalidRequestError):
                await served.frontend.submit(prompt, params)
        kinds = [type(end) for end in ends]
        assert [asyncio.CancelledError, InvalidRequestError] * (len(calls) // 2) == kinds

    run_async(main())


@asynccontextmanager
async def toy_without_end_of_tokenising(
    monkeypatch: pytest.MonkeyPatch,
    max_waiting_requests: int = 100,
    max_preparing_chars: int = 1 << 26,
    limits: ExecutorLimits = LIMITS,
) -> AsyncIterator[Served]:
    """Tokenising a long prompt takes until the end of the context."""
    end = threading.Event()
    settings = EngineSettings(max_waiting_requests=max_waiting_requests)
    async with served_toy(limits, settings, max_preparing_chars=max_preparing_chars) as served:
        monkeypatch.setattr(served.frontend, "_encode", lambda _: end.wait(DEADLINE_S))
        try:
            yield served
        finally:
            end.set()


def test_prompts_that_wait_to_be_tokenised_are_requests_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with toy_without_end_of_tokenising(monkeypatch, 5) as served:
            two = GenerationParams(max_tokens=1, n=2)
            calls = [asyncio.create_task(served.frontend.submit_samples(LONG_PROMPT, two)) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError, match="4 requests wait already, of 5 that may"):
                await served.frontend.submit_samples(LONG_PROMPT, two)
            for call in calls:
                call.cancel()

    run_async(main())


def test_what_was_wrong_with_a_prompt_whose_caller_has_gone_is_no_lost_error(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, is_gone, lost = threading.Event(), threading.Event(), []

    def refuse(prompt: TextPrompt | ChatPrompt) -> None:
        begun.set()
        is_gone.wait(DEADLINE_S)
        raise InvalidRequestError("prompt", "", "none")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
        async with served_toy() as served:
            monkeypatch.setattr(served.frontend, "_encode", refuse)
            call = asyncio.create_task(served.frontend.submit(LONG_PROMPT, GenerationParams(max_tokens=1)))
            await asyncio.to_thread(begun.wait, DEADLINE_S)
            call.cancel()
            await asyncio.wait({call})
            del call
            is_gone.set()
            for _ in range(MAX_LONG_PROMPTS):
                with pytest.raises(InvalidRequestError):
                    await served.frontend.submit(LONG_PROMPT, GenerationParams(max_tokens=1))
            gc.collect()

    run_async(main())
    assert lost == []


def test_characters_that_wait_to_be_tokenised_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        num_chars = prompt_chars(LONG_PROMPT)
        async with toy_without_end_of_tokenising(monkeypatch, max_preparing_chars=2 * num_chars) as served:
            one = GenerationParams(max_tokens=1)
            calls = [asyncio.create_task(served.frontend.submit(LONG_PROMPT, one)) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError, match=f"{2 * num_chars} characters or ids wait"):
                await served.frontend.submit(LONG_PROMPT, one)
            for call in calls:
                call.cancel()

    run_async(main())


@asynccontextmanager
async def all_places_of_texts_taken(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    """Two long texts are tokenised without end, and a third waits."""
    num_texts = MAX_LONG_PROMPTS + 1
    num_chars = num_texts * prompt_chars(LONG_PROMPT) + prompt_chars(LONG_IDS)
    async with toy_without_end_of_tokenising(monkeypatch, max_preparing_chars=num_chars, limits=LONG_CONTEXT) as served:
        one = GenerationParams(max_tokens=1)
        calls = [asyncio.create_task(served.frontend.submit(LONG_PROMPT, one)) for _ in range(num_texts)]
        await asyncio.sleep(0)
        yield served
        assert not any(call.done() for call in calls)
        for call in calls:
            call.cancel()


def test_ids_do_not_wait_behind_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with all_places_of_texts_taken(monkeypatch) as served:
            with await served.frontend.submit(LONG_IDS, GenerationParams(max_tokens=1)) as generation:
                await generation.collect()
            assert generation.num_completion_tokens == 1

    run_async(main())


def test_more_ids_than_the_context_has_are_refused_at_once_and_take_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with all_places_of_texts_taken(monkeypatch) as served:
            max_model_len = LONG_CONTEXT.max_model_len
            for num_ids in (max_model_len, 100 * max_model_len):
                submit = served.frontend.submit(TokenPrompt([5] * num_ids), GenerationParams(max_tokens=1))
                with pytest.raises(InvalidRequestError, match=f"{num_ids} tokens"):
                    submit.send(None)  # without the loop: it waits for nothing

    run_async(main())


def test_deadline_passes_also_while_a_prompt_waits_to_be_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with toy_without_end_of_tokenising(monkeypatch) as served:
            for _ in range(MAX_LONG_PROMPTS + 1):
                with pytest.raises(DeadlineExceededError):
                    await served.frontend.submit(LONG_PROMPT, GenerationParams(max_tokens=1), timeout_s=0.01)

    run_async(main())


def test_server_that_drains_tokenises_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with served_toy() as served:
            served.engine.drain()
            monkeypatch.setattr(served.frontend, "_encode", lambda _: pytest.fail("tokenised in vain"))
            with pytest.raises(DrainingError):
                await served.frontend.submit(LONG_PROMPT, GenerationParams(max_tokens=1))

    run_async(main())
