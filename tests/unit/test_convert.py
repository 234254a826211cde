"""Requests that a client cannot send."""

import math

import pytest

from service.api.convert import params_of, prompt_of, request_message
from service.api.params import GenerationParams, TextPrompt
from service.errors import InvalidRequestError

HUGE = 10**400  # as JSON can hold it


def test_terms_and_samples_are_read_back() -> None:
    params = GenerationParams(n=16, priority=-10, timeout_s=86_400.0, logit_bias={7: -1.5}, stop_strings=["x"])
    request = request_message(TextPrompt("p"), params)
    assert (prompt_of(request), params_of(request)) == (
        TextPrompt("p"),
        GenerationParams(
            n=16, priority=-10, timeout_s=86_400.0, logit_bias={7: -1.5}, stop_strings=["x"], stop_token_ids=[]
        ),
    )


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"n": 0}, "n: 0 is not allowed: 1 to 16"),
        ({"n": -1}, "n: -1 is not allowed: 1 to 16"),
        ({"n": 17}, "n: 17 is not allowed: 1 to 16"),
        ({"priority": 11}, "priority: 11 is not allowed: -10 to 10"),
        ({"priority": 2**80}, f"priority: {2**80} is not allowed: -10 to 10"),
        ({"timeout_s": math.nan}, "timeout_s: nan is not allowed: 0 to 86400"),
        ({"timeout_s": math.inf}, "timeout_s: inf is not allowed: 0 to 86400"),
        ({"timeout_s": -0.001}, "timeout_s: -0.001 is not allowed: 0 to 86400"),
        ({"temperature": HUGE}, "temperature: 1000"),
        ({"max_tokens": 2**32}, "max_tokens: 4294967296 is not allowed: 1 to 4294967295"),
        ({"min_tokens": 2**32}, "min_tokens: 4294967296 is not allowed: 0 to 4294967295"),
        ({"top_k": 2**63}, "top_k: 9223372036854775808 is not allowed: 0 to 4294967295"),
        ({"logit_bias": {2**32: 1.0}}, "logit_bias: {4294967296: 1.0} is not allowed: "),
        ({"logit_bias": {1: HUGE}}, "logit_bias: {1: 1000"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids: [-1] is not allowed: "),
        ({"stop_strings": ["\ud800"]}, r"stop_strings: ['\ud800'] is not allowed: "),
    ],
)
def test_what_is_refused_anyway_is_not_sent(fields: dict[str, object], complaint: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request_message(TextPrompt("p"), GenerationParams(**fields))  # type: ignore[arg-type]
    assert str(caught.value).startswith(complaint)
