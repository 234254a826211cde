"""Protobuf messages to and from the front side's own types."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from chairlift.inference.v1 import inference_pb2 as pb
from google.protobuf.duration_pb2 import Duration

from service.api.generation import Generation, TextChunk, Timings
from service.api.params import ChatPrompt, GenerationParams, Prompt, TextPrompt, TokenPrompt
from service.api.validate import validate_ranges, validate_timeout
from service.core.types import FinishReason, TokenLogprobs
from service.errors import InvalidRequestError

PROMPT_LIMIT = "one of text, token_ids and messages is required"
_OPTIONAL = tuple(field.name for field in pb.SamplingParams.DESCRIPTOR.fields if field.has_presence)
_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


def prompt_of(request: pb.GenerateRequest) -> Prompt:
    """The request's prompt. Raises InvalidRequestError when none is set."""
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return TextPrompt(request.text)
    if kind == "token_ids":
        return TokenPrompt(request.token_ids.ids)
    if kind == "messages":
        messages = [(message.role, message.content) for message in request.messages.messages]
        return ChatPrompt(messages)
    raise InvalidRequestError("prompt", None, PROMPT_LIMIT)


def params_of(request: pb.GenerateRequest) -> GenerationParams:
    """The fields that are set, but the prompt. Of them only the timeout is checked: it has another name here than in
    GenerationParams. Raises InvalidRequestError.
    """
    sampling = request.sampling
    timeout_s = request.timeout.ToNanoseconds() / 1e9 if request.HasField("timeout") else None
    validate_timeout("timeout", timeout_s)
    given = {name: getattr(sampling, name) for name in _OPTIONAL if sampling.HasField(name)}
    return GenerationParams(
        logit_bias=dict(sampling.logit_bias),
        stop_token_ids=list(sampling.stop_token_ids),
        stop_strings=list(sampling.stop_strings),
        priority=request.priority,
        timeout_s=timeout_s,
        **given,
    )


def request_message(prompt: Prompt, params: GenerationParams) -> pb.GenerateRequest:
    """The request that the two above read back. Raises InvalidRequestError for what is refused anyway."""
    validate_ranges(params)
    request = pb.GenerateRequest(sampling=sampling_message(params), priority=params.priority or 0)
    if params.timeout_s is not None:
        request.timeout.FromNanoseconds(round(params.timeout_s * 1e9))
    with _carrying("prompt", type(prompt).__name__):
        if isinstance(prompt, TextPrompt):
            request.text = prompt.text
        elif isinstance(prompt, TokenPrompt):
            request.token_ids.ids.extend(prompt.token_ids)
        else:
            request.messages.messages.extend(
                pb.ChatMessage(role=role, content=content) for role, content in prompt.messages
            )
    return request


def sampling_message(params: GenerationParams) -> pb.SamplingParams:
    """The message that `params_of` reads back. Raises InvalidRequestError for what protobuf cannot carry."""
    message = pb.SamplingParams()
    for name in _OPTIONAL:
        value = getattr(params, name)
        if value is not None:
            with _carrying(name, value):
                setattr(message, name, value)
    with _carrying("logit_bias", params.logit_bias):
        message.logit_bias.update(params.logit_bias)
    with _carrying("stop_token_ids", params.stop_token_ids):
        message.stop_token_ids.extend(params.stop_token_ids)
    with _carrying("stop_strings", params.stop_strings):
        message.stop_strings.extend(params.stop_strings)
    return message


@contextmanager
def _carrying(field: str, value: object) -> Iterator[None]:
    """Raise InvalidRequestError where protobuf refuses the field's value."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise InvalidRequestError(field, value, str(error)) from error


def chunk_message(chunk: TextChunk, index: int) -> pb.GenerateResponse:
    """One chunk of a stream, of the sample with this index."""
    logprobs = logprobs_messages(chunk.logprobs)
    return pb.GenerateResponse(
        chunk=pb.GenerateChunk(token_ids=chunk.token_ids, text=chunk.text, logprobs=logprobs, index=index)
    )


def sample_message(generation: Generation, whole: TextChunk, index: int) -> pb.Sample:
    """A whole sample."""
    return pb.Sample(
        token_ids=whole.token_ids,
        text=whole.text,
        logprobs=logprobs_messages(whole.logprobs),
        complete=complete_message(generation, index),
    )


def complete_message(generation: Generation, index: int) -> pb.GenerateComplete:
    """How a finished generation ended, and what it took."""
    return pb.GenerateComplete(
        finish_reason=_FINISH_REASONS[generation.finish_reason],
        usage=pb.Usage(
            prompt_tokens=generation.num_prompt_tokens,
            completion_tokens=generation.num_completion_tokens,
            cached_prompt_tokens=generation.num_cached_prompt_tokens,
        ),
        timings=_timings_message(generation.timings),
        stop_string=generation.stop_string,
        index=index,
    )


def logprobs_messages(logprobs: Iterable[TokenLogprobs]) -> list[pb.TokenLogprobs]:
    """One message per token."""
    return [
        pb.TokenLogprobs(
            logprob=entry.chosen,
            top=[
                pb.TokenLogprob(token_id=token_id, logprob=logprob)
                for token_id, logprob in zip(entry.top_token_ids.tolist(), entry.top_logprobs.tolist(), strict=True)
            ],
        )
        for entry in logprobs
    ]


def _timings_message(timings: Timings) -> pb.Timings:
    return pb.Timings(
        prepare_duration=_duration(timings.prepare_ns),
        first_token_duration=_duration(timings.first_token_ns),
        decode_duration=_duration(timings.decode_ns),
        total_duration=_duration(timings.total_ns),
    )


def _duration(duration_ns: int) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(duration_ns)
    return duration
