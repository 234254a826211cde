"""Counts that are kept up as a sequence grows, against counting it again."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.executor.seen_tokens import SeenTokens


def counts_of(seen: SeenTokens) -> dict[int, int]:
    tokens = seen.tokens.tolist()
    assert len(tokens) == len(set(tokens))
    return dict(zip(tokens, seen.num_uses.tolist(), strict=True))


def test_tokens_of_the_prompt_alone_have_no_uses() -> None:
    seen = SeenTokens()
    seen.update(np.array([8, 3, 8, 5, 3, 5], np.int32), 3)
    assert {8: 0, 3: 1, 5: 2} == counts_of(seen)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=60),
    st.integers(0, 60),
    st.lists(st.integers(0, 60), max_size=8),
)
def test_any_steps_come_to_the_same_counts(tokens: list[int], num_prompt: int, ends: list[int]) -> None:
    """One token more or many, none, or fewer than before: what the end is, is what counts."""
    token_ids, num_prompt, seen = np.array(tokens, np.int32), min(num_prompt, len(tokens)), SeenTokens()
    for end in [*ends, len(tokens)]:
        if end >= num_prompt:
            seen.update(token_ids[:end], num_prompt)
    expected = Counter(dict.fromkeys(tokens, 0))
    expected.update(tokens[num_prompt:])
    assert dict(expected) == counts_of(seen)


@pytest.mark.parametrize("num_more", [1, 16, 17, 40])
def test_new_tokens_find_room(num_more: int) -> None:
    """All different, one after the other, more than were left room for."""
    tokens, seen = np.arange(5 + num_more, dtype=np.int32), SeenTokens()
    for end in range(5, len(tokens) + 1):
        seen.update(tokens[:end], 5)
    assert {token: int(token >= 5) for token in tokens.tolist()} == counts_of(seen)


def test_what_was_handed_out_stays_as_it_was() -> None:
    seen = SeenTokens()
    seen.update(np.array([1, 2], np.int32), 1)
    before = seen.tokens, seen.num_uses
    seen.update(np.array([1, 2, 2, 3], np.int32), 1)
    assert ([1, 2], [0, 1]) == tuple(array.tolist() for array in before)
