"""The limits of every request field. Each complaint is an InvalidRequestError with field, value and limit."""

import secrets
import unicodedata
from collections.abc import Sequence

import numpy as np

from service.api.params import GenerationParams, ModelLimits
from service.core.types import Int32Array, SamplingParams
from service.errors import InvalidRequestError
from service.text.token_span import TokenSpan

MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY = float(np.float32(0.01))  # as protobuf's float carries it: slightly less
MAX_REPETITION_PENALTY = 100.0
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
MAX_STOP_TOKENS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_ROLE_CHARS = 64
MAX_PRIORITY = 10
MAX_SAMPLES = 16
MAX_TIMEOUT_S = 86_400.0
MAX_COUNT = 2**32 - 1  # what protobuf's uint32 carries


def validate_params(params: GenerationParams, limits: ModelLimits) -> None:
    """Check all that can be checked before the prompt is tokenised."""
    validate_ranges(params)
    _check_logit_bias(params, limits)
    _check_stops(params, limits)


def validate_ranges(params: GenerationParams) -> None:
    """Check the numbers whose limits are the same for every model."""
    _check_range("temperature", params.temperature, 0.0, MAX_TEMPERATURE)
    _check_range("top_p", params.top_p, 0.0, 1.0)
    if params.top_p == 0.0:
        raise InvalidRequestError("top_p", 0.0, "above 0 to 1")
    _check_range("min_p", params.min_p, 0.0, 1.0)
    _check_range("repetition_penalty", params.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    _check_range("frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_range("presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_range("num_logprobs", params.num_logprobs, 0, MAX_LOGPROBS)
    _check_range("seed", params.seed, -(2**63), 2**63 - 1)
    _check_range("n", params.n, 1, MAX_SAMPLES)
    _check_range("priority", params.priority, -MAX_PRIORITY, MAX_PRIORITY)
    validate_timeout("timeout_s", params.timeout_s)
    _check_range("top_k", params.top_k, 0, MAX_COUNT)
    _check_range("min_tokens", params.min_tokens, 0, MAX_COUNT)
    _check_range("max_tokens", params.max_tokens, 1, MAX_COUNT)


def validate_timeout(name: str, timeout_s: float | None) -> None:
    """Check the time for the whole answer, which `name` is called where the request came from."""
    _check_range(name, timeout_s, 0.0, MAX_TIMEOUT_S)


def validate_roles(messages: Sequence[tuple[str, str]]) -> None:
    """Check who speaks in each of `messages`, (role, content) each; what a role means is the template's to know."""
    limit = f"1 to {MAX_ROLE_CHARS} characters, none of them a control character"
    for role, _ in messages:
        if not 1 <= len(role) <= MAX_ROLE_CHARS:
            raise InvalidRequestError("role", f"{len(role)} characters" if role else "", limit)
        if any(unicodedata.category(character) == "Cc" for character in role):
            raise InvalidRequestError("role", role, limit)


def validate_text(text: str, span: TokenSpan | None, limits: ModelLimits) -> None:
    """Refuse a text that has too many tokens whatever they are: tokenising it would take much time and memory."""
    if span is None or span.min_tokens(text) < limits.max_model_len:
        return
    max_tokens = limits.max_model_len - 1
    limit = f"at most {max_tokens * span.max_bytes} bytes: {max_tokens} tokens of up to {span.max_bytes} bytes"
    raise InvalidRequestError("prompt", f"{len(text.encode('utf-8', 'surrogatepass'))} bytes", limit)


def validate_length(num_prompt_tokens: int, limits: ModelLimits) -> None:
    """Check that there is at least one token, and room for one more."""
    if num_prompt_tokens == 0:
        raise InvalidRequestError("prompt", "", "at least one token")
    if num_prompt_tokens >= limits.max_model_len:
        limit = f"at most {limits.max_model_len - 1} tokens, one less than the context of {limits.max_model_len}"
        raise InvalidRequestError("prompt", f"{num_prompt_tokens} tokens", limit)


def validate_prompt(token_ids: Sequence[int] | Int32Array, limits: ModelLimits) -> Int32Array:
    """The prompt as int32[num_prompt_tokens]; of a valid length, all in the vocabulary."""
    validate_length(len(token_ids), limits)
    try:
        prompt = np.asarray(token_ids, np.int64)
    except OverflowError:  # beyond 64 bits
        raise InvalidRequestError("prompt", max(token_ids, key=abs), _vocabulary(limits)) from None
    outside = (prompt < 0) | (prompt >= limits.vocab_size)
    if outside.any():
        raise InvalidRequestError("prompt", int(prompt[outside.argmax()]), _vocabulary(limits))
    return prompt.astype(np.int32)


def resolve_sampling(params: GenerationParams, num_prompt_tokens: int, limits: ModelLimits) -> SamplingParams:
    """The checked `params` with every default filled in. Checks what depends on the prompt's length."""
    room = limits.max_model_len - num_prompt_tokens
    max_tokens = params.max_tokens
    if max_tokens is None:
        # The last token is never fed back, so that it needs no slot in the KV buffer.
        max_tokens = max(1, min(room, limits.max_kv_tokens - num_prompt_tokens + 1))
    elif max_tokens > room:
        limit = f"at most {room}: the context holds {limits.max_model_len} tokens, the prompt has {num_prompt_tokens}"
        raise InvalidRequestError("max_tokens", max_tokens, limit)
    min_tokens = params.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequestError("min_tokens", min_tokens, f"at most max_tokens, {max_tokens}")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_or(params.temperature, 1.0),
        top_k=min(params.top_k or 0, limits.vocab_size),
        top_p=_or(params.top_p, 1.0),
        min_p=_or(params.min_p, 0.0),
        repetition_penalty=_or(params.repetition_penalty, 1.0),
        frequency_penalty=_or(params.frequency_penalty, 0.0),
        presence_penalty=_or(params.presence_penalty, 0.0),
        logit_bias=tuple((token_id, float(bias)) for token_id, bias in sorted(params.logit_bias.items())),
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        num_logprobs=-1 if params.num_logprobs is None else params.num_logprobs,
        min_tokens=min_tokens,
        ignore_eos=bool(params.ignore_eos),
        stop_token_ids=tuple(params.stop_token_ids),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    """Refuse what is outside [low, high], NaN included."""
    if value is not None and not low <= value <= high:
        raise InvalidRequestError(name, value, f"{_number(low)} to {_number(high)}")


def _number(limit: float) -> str:
    """Integers with all their digits."""
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def _vocabulary(limits: ModelLimits) -> str:
    return f"a token id of the vocabulary, 0 to {limits.vocab_size - 1}"


def _check_logit_bias(params: GenerationParams, limits: ModelLimits) -> None:
    if len(params.logit_bias) > MAX_LOGIT_BIASES:
        raise InvalidRequestError("logit_bias", f"{len(params.logit_bias)} entries", f"at most {MAX_LOGIT_BIASES}")
    for token_id, bias in params.logit_bias.items():
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequestError("logit_bias", token_id, _vocabulary(limits))
        _check_range("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)


def _check_stops(params: GenerationParams, limits: ModelLimits) -> None:
    if len(params.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequestError("stop_token_ids", f"{len(params.stop_token_ids)} ids", f"at most {MAX_STOP_TOKENS}")
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequestError("stop_token_ids", token_id, _vocabulary(limits))
    if len(params.stop_strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError("stop_strings", f"{len(params.stop_strings)} strings", f"at most {MAX_STOP_STRINGS}")
    for stop in params.stop_strings:
        if not 1 <= len(stop) <= MAX_STOP_STRING_CHARS:
            limit = f"1 to {MAX_STOP_STRING_CHARS} characters each"
            raise InvalidRequestError("stop_strings", f"{len(stop)} characters", limit)
