"""The front side before the engine."""

import asyncio

import pytest

from service.api.frontend import MAX_INLINE_CHARS, MAX_LONG_PROMPTS, MESSAGE_CHARS, prompt_chars
from service.api.params import ChatPrompt, GenerationParams, TextPrompt
from service.errors import InvalidRequestError
from tests.doubles import run_async, served_toy


@pytest.mark.parametrize(
    ("prompt", "num_chars"),
    [
        (TextPrompt("hello"), 5),
        (ChatPrompt([("user", "hi"), ("assistant", "")]), 4 + 2 + 9 + 2 * MESSAGE_CHARS),
        (ChatPrompt([("r" * 5000, "")]), 5000 + MESSAGE_CHARS),
    ],
)
def test_roles_and_messages_count_as_text_to_tokenise(prompt: TextPrompt | ChatPrompt, num_chars: int) -> None:
    assert prompt_chars(prompt) == num_chars


def test_many_empty_messages_are_no_short_prompt() -> None:
    assert prompt_chars(ChatPrompt([("user", "")] * 200)) > MAX_INLINE_CHARS


def test_long_prompts_give_their_places_back_however_they_end() -> None:
    async def main() -> None:
        prompt, params = TextPrompt("w1 " * MAX_INLINE_CHARS), GenerationParams(max_tokens=1)
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
