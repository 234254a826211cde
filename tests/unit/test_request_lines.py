"""Lines of the offline batch."""

import json

import pytest

from service.api.params import ChatPrompt, GenerationParams, TextPrompt, TokenPrompt
from service.commands.request_lines import RequestLine, error_line, parse_line
from service.commands.run import longest_first
from service.errors import ChairliftError, InvalidRequestError


def line(**fields: object) -> str:
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"prompt": "hello"}, TextPrompt("hello")),
        ({"prompt_token_ids": [1, 2]}, TokenPrompt([1, 2])),
        ({"messages": [{"role": "user", "content": "hi"}]}, ChatPrompt([("user", "hi")])),
    ],
)
def test_prompt_comes_in_three_forms(fields: dict[str, object], prompt: object) -> None:
    parsed = parse_line(line(id="a", **fields))
    assert parsed == RequestLine("a", (prompt, GenerationParams()))


def test_every_sampling_field_is_read() -> None:
    sampling = {
        "max_tokens": 5,
        "temperature": 0,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "frequency_penalty": -1,
        "presence_penalty": 1.5,
        "seed": -7,
        "num_logprobs": 2,
        "min_tokens": 1,
        "ignore_eos": True,
        "stop_token_ids": [9],
        "stop_strings": ["x"],
    }
    parsed = parse_line(line(id=1, prompt="p", logit_bias={"12": -3, "4": 0.5}, **sampling))
    assert parsed.request == (TextPrompt("p"), GenerationParams(logit_bias={12: -3, 4: 0.5}, **sampling))


def test_a_line_may_say_whose_it_is() -> None:
    assert parse_line(line(id=1, prompt="p", tenant="team-a")) == RequestLine(
        1, (TextPrompt("p"), GenerationParams()), "team-a"
    )
    assert parse_line(line(prompt="p", tenant=None)).tenant == ""


def test_stop_may_be_one_string() -> None:
    _, params = parse_line(line(prompt="p", stop="x")).request
    assert params.stop_strings == ["x"]


def test_null_is_unset() -> None:
    assert parse_line(line(id="a", prompt="p", seed=None, messages=None)).request == (
        TextPrompt("p"),
        GenerationParams(),
    )


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("{", "line"),
        ("[]", "line"),
        ('"x"', "line"),
        ("[" * 100_000, "line"),
        ("{}", "prompt"),
        (line(prompt="p", messages=[]), "prompt"),
        (line(prompt=3), "prompt"),
        (line(prompt_token_ids=[1, "2"]), "prompt_token_ids"),
        (line(prompt_token_ids=[True]), "prompt_token_ids"),
        (line(messages="x"), "messages"),
        (line(messages=[{"role": "user"}]), "messages"),
        (line(prompt="p", temprature=1), "temprature"),
        (line(prompt="p", max_tokens=1.5), "max_tokens"),
        (line(prompt="p", max_tokens=True), "max_tokens"),
        (line(prompt="p", temperature="hot"), "temperature"),
        (line(prompt="p", ignore_eos=1), "ignore_eos"),
        (line(prompt="p", stop=[1]), "stop"),
        (line(prompt="p", stop="x", stop_strings=["y"]), "stop"),
        (line(prompt="p", logit_bias={"x": 1}), "logit_bias"),
        (line(prompt="p", logit_bias=[1]), "logit_bias"),
        (line(prompt="p", tenant=1), "tenant"),
        (line(prompt="p", tenant="a b"), "tenant"),
        (line(prompt="p", tenant="a" * 65), "tenant"),
    ],
)
def test_bad_line_is_an_error_that_names_the_field(text: str, field: str) -> None:
    error = parse_line(text).request
    assert isinstance(error, InvalidRequestError)
    assert error.field == field


def test_error_names_the_token_id_that_is_none() -> None:
    error = parse_line(line(prompt="p", logit_bias={"5": 1, "x": 2})).request
    assert isinstance(error, InvalidRequestError)
    assert "'x'" in str(error)


def test_bad_line_keeps_its_id() -> None:
    assert parse_line(line(id="b7", prompt=3)).id == "b7"
    answer = error_line(RequestLine("b7", (TextPrompt("p"), GenerationParams()), number=4), ChairliftError("x"))
    assert json.loads(answer) == {"id": "b7", "line": 4, "error": "x"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense\n", "line 3 is not JSON: Expecting value at column 1"),
        ('{"id": 1\n', "line 3 is not JSON: Expecting ',' delimiter at column 9"),
        ("[1]\n", "line 3 is not a JSON object"),
        ("[" * 100_000, "line 3 is nested too deep"),
    ],
)
def test_line_that_is_no_object_is_told_by_its_place(text: str, message: str) -> None:
    parsed = parse_line(text, 3)
    assert (parsed.number, str(parsed.request)) == (3, message)


def test_unknown_field_is_told_with_all_that_are_known() -> None:
    limit = str(parse_line(line(id=1, prompt="p", x=1)).request).partition("one of ")[2]
    known = {"id", "prompt", "prompt_token_ids", "messages", "tenant", "max_tokens", "temperature", "stop", "timeout_s"}
    assert known <= set(limit.split(", "))


def test_longest_requests_start_first_and_equals_keep_their_order() -> None:
    lines = [parse_line(line(id=i, prompt="p", max_tokens=m)) for i, m in enumerate([3, 9, None, 3, 40])]
    assert [each.id for each in longest_first(iter(lines))] == [2, 4, 1, 0, 3]
