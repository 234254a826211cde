"""The front side before the engine."""

import pytest

from service.api.frontend import MAX_INLINE_CHARS, MESSAGE_CHARS, prompt_chars
from service.api.params import ChatPrompt, TextPrompt


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
