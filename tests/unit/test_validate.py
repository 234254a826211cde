"""Limits of every request field, at the limit and just beyond."""

import math

import numpy as np
import pytest

from service.api.params import GenerationParams, ModelLimits
from service.api.validate import resolve_sampling, validate_params, validate_prompt, validate_roles, validate_text
from service.core.types import SamplingParams
from service.errors import InvalidRequestError
from service.text.token_span import TokenSpan

LIMITS = ModelLimits(model_name="m", vocab_size=100, max_model_len=32, max_kv_tokens=1000)
NAN, INFINITY = math.nan, math.inf


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("temperature", [0.0, 100.0], [-0.001, 100.001, NAN, INFINITY, -INFINITY]),
        ("top_k", [0, 1, 2**32 - 1], [-1, 2**32]),
        ("top_p", [1e-6, 1.0], [0.0, -0.1, 1.001, NAN]),
        ("min_p", [0.0, 1.0], [-0.001, 1.001, NAN]),
        ("repetition_penalty", [0.01, float(np.float32(0.01)), 100.0], [0.0099, 0.0, -1.0, 100.1, NAN, INFINITY]),
        ("frequency_penalty", [-2.0, 2.0], [-2.001, 2.001, NAN]),
        ("presence_penalty", [-2.0, 2.0], [-2.001, 2.001, NAN]),
        ("seed", [-(2**63), 0, 2**63 - 1], [-(2**63) - 1, 2**63]),
        ("num_logprobs", [0, 20], [-1, 21]),
        ("min_tokens", [0], [-1]),
        ("max_tokens", [1], [0, -1]),
        ("logit_bias", [{}, {0: -100.0, 99: 100.0}], [{100: 0.0}, {-1: 0.0}, {1: 100.1}, {1: NAN}]),
        ("stop_token_ids", [[], [0, 99], [1] * 64], [[100], [-1], [1] * 65]),
        ("stop_strings", [[], ["x"], ["x" * 256], ["x"] * 16], [[""], ["x" * 257], ["x"] * 17]),
    ],
)
def test_field_is_accepted_at_its_limit_and_refused_beyond(field: str, good: list[object], bad: list[object]) -> None:
    for value in good:
        validate_params(GenerationParams(**{field: value}), LIMITS)
    for value in bad:
        with pytest.raises(InvalidRequestError) as caught:
            validate_params(GenerationParams(**{field: value}), LIMITS)
        assert caught.value.field == field
        assert caught.value.limit


@pytest.mark.parametrize(
    ("params", "limit"),
    [
        (GenerationParams(seed=2**63), "-9223372036854775808 to 9223372036854775807"),
        (GenerationParams(temperature=101), "0 to 100"),
        (GenerationParams(repetition_penalty=0), "0.01 to 100"),
    ],
)
def test_limits_are_told_exactly(params: GenerationParams, limit: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        validate_params(params, LIMITS)
    assert caught.value.limit == limit


def test_logit_bias_is_bounded_in_entries() -> None:
    wide = ModelLimits(model_name="m", vocab_size=5000, max_model_len=32, max_kv_tokens=1000)
    validate_params(GenerationParams(logit_bias=dict.fromkeys(range(1024), 1.0)), wide)
    with pytest.raises(InvalidRequestError, match="at most 1024"):
        validate_params(GenerationParams(logit_bias=dict.fromkeys(range(1025), 1.0)), wide)


def test_prompt_leaves_room_for_one_token() -> None:
    assert validate_prompt([1] * 31, LIMITS).tolist() == [1] * 31
    with pytest.raises(InvalidRequestError, match="at most 31 tokens, one less than the context of 32") as caught:
        validate_prompt([1] * 32, LIMITS)
    assert (caught.value.field, caught.value.value) == ("prompt", "32 tokens")


@pytest.mark.parametrize("token_ids", [[], np.array([], np.int32)])
def test_empty_prompt_is_refused(token_ids: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match="at least one token"):
        validate_prompt(token_ids, LIMITS)


@pytest.mark.parametrize("bad", [100, -1, 2**32, 2**70])
def test_token_outside_the_vocabulary_is_refused_and_named(bad: int) -> None:
    with pytest.raises(InvalidRequestError, match="0 to 99") as caught:
        validate_prompt([0, 99, bad, 5], LIMITS)
    assert caught.value.value == bad


def test_prompt_is_int32() -> None:
    assert validate_prompt([0, 99], LIMITS).dtype == np.int32


def test_max_tokens_fills_the_context_exactly() -> None:
    assert resolve_sampling(GenerationParams(max_tokens=22), 10, LIMITS).max_tokens == 22
    with pytest.raises(InvalidRequestError, match="at most 22: the context holds 32 tokens, the prompt has 10"):
        resolve_sampling(GenerationParams(max_tokens=23), 10, LIMITS)


def test_min_tokens_is_at_most_max_tokens() -> None:
    assert resolve_sampling(GenerationParams(max_tokens=5, min_tokens=5), 10, LIMITS).min_tokens == 5
    with pytest.raises(InvalidRequestError, match="at most max_tokens, 5"):
        resolve_sampling(GenerationParams(max_tokens=5, min_tokens=6), 10, LIMITS)


def test_unset_fields_have_the_documented_defaults() -> None:
    sampling = resolve_sampling(GenerationParams(seed=7), 10, LIMITS)
    assert sampling == SamplingParams(max_tokens=22, temperature=1.0, seed=7)


def test_unset_max_tokens_stays_within_the_kv_buffer() -> None:
    """A buffer of 16 positions holds the prompt's 10 and 6 fed-back tokens; the 7th is never fed back."""
    small = ModelLimits(model_name="m", vocab_size=100, max_model_len=32, max_kv_tokens=16)
    assert resolve_sampling(GenerationParams(), 10, small).max_tokens == 7


def test_unset_seed_is_drawn_anew_and_fits_63_bits() -> None:
    seeds = {resolve_sampling(GenerationParams(), 1, LIMITS).seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_zero_is_not_unset() -> None:
    assert resolve_sampling(GenerationParams(temperature=0.0, num_logprobs=0), 1, LIMITS).temperature == 0.0
    assert resolve_sampling(GenerationParams(num_logprobs=0), 1, LIMITS).num_logprobs == 0
    assert resolve_sampling(GenerationParams(), 1, LIMITS).num_logprobs == -1


def test_text_is_refused_by_its_bytes_before_it_becomes_tokens() -> None:
    span = TokenSpan(max_bytes=4, lost_bytes=b"\x04")
    validate_text("😀" * 31, span, LIMITS)
    validate_text("😀" * 31 + "\x04" * 100, span, LIMITS)
    validate_text("😀" * 1000, None, LIMITS)
    with pytest.raises(InvalidRequestError) as caught:
        validate_text("😀" * 31 + "a", span, LIMITS)
    expected = ("prompt", "125 bytes", "at most 124 bytes: 31 tokens of up to 4 bytes")
    assert expected == (caught.value.field, caught.value.value, caught.value.limit)


def test_roles_are_short_plain_text() -> None:
    validate_roles([("user", ""), ("r" * 64, "hi"), ("助手 2", "")])
    for role in ["", "r" * 65, "us\ner", "\x00", "\x85"]:
        with pytest.raises(InvalidRequestError) as caught:
            validate_roles([("user", "hi"), (role, "hi")])
        assert ("role", "1 to 64 characters, none of them a control character") == (
            caught.value.field,
            caught.value.limit,
        )
