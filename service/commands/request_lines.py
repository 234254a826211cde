"""The lines of `chairlift run`: requests as JSON objects in, results as JSON objects out."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from service.api.generation import Generation, TextChunk
from service.api.params import ChatPrompt, GenerationParams, Prompt, TextPrompt, TokenPrompt
from service.engine.client import TENANT_NAME
from service.errors import ChairliftError, InvalidRequestError

INTEGERS = ("max_tokens", "top_k", "seed", "num_logprobs", "min_tokens", "n", "priority")
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "timeout_s")
OTHERS = ("logit_bias", "ignore_eos", "stop_token_ids", "stop_strings", "stop")
PROMPTS = ("prompt", "prompt_token_ids", "messages")
FIELDS = ("id", *PROMPTS, "tenant", *INTEGERS, *NUMBERS, *OTHERS)


class BadLineError(InvalidRequestError):
    """A line that holds no object at all, and so no id either."""

    def __init__(self, number: int, why: str) -> None:
        ChairliftError.__init__(self, f"line {number} {why}")
        self.field, self.value, self.limit = "line", number, why


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One line: a request, or the error that keeps it from being one."""

    id: object  # whatever JSON value the line has; None when it has none
    request: tuple[Prompt, GenerationParams] | ChairliftError
    tenant: str = ""  # whose it is
    number: int = 1  # its place in the file


def parse_line(line: str, number: int = 1) -> RequestLine:
    """Read the line of that `number`; never raises. Fields that are null count as unset, unknown ones are an error."""
    line_id: object = None
    try:
        document = json.loads(line.rstrip())
        if not isinstance(document, dict):
            raise BadLineError(number, "is not a JSON object")
        given = {name: value for name, value in document.items() if value is not None}
        line_id = given.pop("id", None)
        tenant = _take_tenant(given)
        return RequestLine(line_id, (_take_prompt(given), _params(given)), tenant, number)
    except json.JSONDecodeError as error:
        bad = BadLineError(number, f"is not JSON: {error.msg} at column {error.colno}")
        return RequestLine(line_id, bad, number=number)
    except ValueError as error:  # an integer of thousands of digits
        return RequestLine(line_id, BadLineError(number, f"cannot be read: {error}"), number=number)
    except RecursionError:
        return RequestLine(line_id, BadLineError(number, "is nested too deep"), number=number)
    except ChairliftError as error:
        return RequestLine(line_id, error, number=number)


def result_line(line_id: object, generation: Generation, whole: TextChunk, index: int | None = None) -> str:
    """The result of a sample that ended well, with its index when the request had `n`. Times are milliseconds."""
    timings = generation.timings
    result: dict[str, object] = {
        "id": line_id,
        "token_ids": whole.token_ids,
        "text": whole.text,
        "finish_reason": generation.finish_reason.name.lower(),
        "usage": {
            "prompt_tokens": generation.num_prompt_tokens,
            "cached_prompt_tokens": generation.num_cached_prompt_tokens,
            "completion_tokens": generation.num_completion_tokens,
        },
        "timings": {
            "prepare_ms": round(timings.prepare_ns / 1e6, 3),
            "first_token_ms": round(timings.first_token_ns / 1e6, 3),
            "decode_ms": round(timings.decode_ns / 1e6, 3),
            "total_ms": round(timings.total_ns / 1e6, 3),
        },
    }
    if index is not None:
        result["index"] = index
    if whole.logprobs:
        result["logprobs"] = [
            {
                "logprob": entry.chosen,
                "top": [
                    {"token_id": token_id, "logprob": logprob}
                    for token_id, logprob in zip(entry.top_token_ids.tolist(), entry.top_logprobs.tolist(), strict=True)
                ],
            }
            for entry in whole.logprobs
        ]
    return json.dumps(result, ensure_ascii=False) + "\n"


def error_line(line: RequestLine, error: Exception) -> str:
    """The result of a request that did not end well, and its place in the file, for those without an id."""
    return json.dumps({"id": line.id, "line": line.number, "error": str(error)}, ensure_ascii=False) + "\n"


def _take_tenant(given: dict[str, object]) -> str:
    """Remove the tenant from `given`, if there is one."""
    tenant = given.pop("tenant", "")
    if not isinstance(tenant, str) or (tenant and not TENANT_NAME.fullmatch(tenant)):
        raise InvalidRequestError("tenant", tenant, "a string of 1 to 64 visible ASCII characters")
    return tenant


def _take_prompt(given: dict[str, object]) -> Prompt:
    """Remove the prompt from `given`."""
    names = [name for name in PROMPTS if name in given]
    if len(names) != 1:
        raise InvalidRequestError("prompt", names, f"exactly one of {', '.join(PROMPTS)}")
    name = names[0]
    value = given.pop(name)
    if name == "prompt":
        if not isinstance(value, str):
            raise InvalidRequestError(name, type(value).__name__, "a string")
        return TextPrompt(value)
    if name == "prompt_token_ids":
        return TokenPrompt(_integers(name, value))
    if not isinstance(value, list):
        raise InvalidRequestError(name, type(value).__name__, "a list of messages")
    return ChatPrompt([_message(message) for message in value])


def _message(message: object) -> tuple[str, str]:
    if isinstance(message, dict) and set(message) == {"role", "content"}:
        role, content = message["role"], message["content"]
        if isinstance(role, str) and isinstance(content, str):
            return role, content
    raise InvalidRequestError("messages", type(message).__name__, 'objects like {"role": "user", "content": "..."}')


def _params(given: Mapping[str, object]) -> GenerationParams:
    if "stop" in given and "stop_strings" in given:
        raise InvalidRequestError("stop", given["stop"], "one of stop and stop_strings, which mean the same")
    values: dict[str, object] = {}
    for name, value in given.items():
        if name in INTEGERS:
            values[name] = _integer(name, value)
        elif name in NUMBERS:
            values[name] = _number(name, value)
        elif name == "ignore_eos":
            if not isinstance(value, bool):
                raise InvalidRequestError(name, value, "true or false")
            values[name] = value
        elif name == "stop_token_ids":
            values[name] = _integers(name, value)
        elif name in {"stop", "stop_strings"}:
            values["stop_strings"] = _strings(name, value)
        elif name == "logit_bias":
            values[name] = _logit_bias(value)
        else:
            raise InvalidRequestError(name, value, f"unknown field; one of {', '.join(FIELDS)}")
    return GenerationParams(**values)  # type: ignore[arg-type]  # each was checked against its field


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(name, value, "an integer")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(name, value, "a number")
    return value


def _integers(name: str, value: object) -> list[int]:
    if not isinstance(value, list):
        raise InvalidRequestError(name, type(value).__name__, "a list of integers")
    return [_integer(name, item) for item in value]


def _strings(name: str, value: object) -> list[str]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise InvalidRequestError(name, type(value).__name__, "a string or a list of strings")
    return items


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise InvalidRequestError("logit_bias", type(value).__name__, "an object from token id to number")
    for token_id in value:
        if not token_id.isdecimal():
            raise InvalidRequestError("logit_bias", token_id, "token ids as keys")
    return {int(token_id): _number("logit_bias", bias) for token_id, bias in value.items()}
