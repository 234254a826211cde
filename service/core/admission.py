"""What is refused at the door."""

from collections.abc import Iterable
from typing import Final

from service.core.budget import TokenRate
from service.core.scheduler_config import SchedulerConfig
from service.core.step_time import StepTimeModel
from service.core.types import Request
from service.core.waiting_queue import WaitingQueue
from service.errors import DeadlineExceededError, InvalidRequestError, OverloadedError, UnserviceableError

_REST_NS: Final = 1_000_000_000


def check_size(request: Request, config: SchedulerConfig) -> None:
    """Refuse what can never run.

    Raises InvalidRequestError when the prompt is empty or leaves no room for an output token in the context, or when
    no output is asked for; UnserviceableError when the prompt is larger than the whole KV buffer.
    """
    num_tokens = len(request.prompt_token_ids)
    longest = config.max_model_len - 1
    if num_tokens == 0:
        raise InvalidRequestError("prompt_token_ids", [], "at least one token")
    if num_tokens > longest:
        limit = f"at most {longest}, so that one output token fits"
        raise InvalidRequestError("prompt_token_ids", f"{num_tokens} tokens", limit)
    if request.sampling.max_tokens < 1:
        raise InvalidRequestError("max_tokens", request.sampling.max_tokens, "at least 1")
    if num_tokens > config.max_kv_tokens:
        raise UnserviceableError(
            f"a prompt of {num_tokens} tokens can never fit the KV buffer of {config.max_kv_tokens} tokens"
        )


def check_room(request: Request, queue: WaitingQueue, rate: TokenRate, config: SchedulerConfig) -> None:
    """Refuse what overflows the queue: OverloadedError, with an estimate of when it has room again.

    An empty queue takes any prompt, or one longer than `max_waiting_tokens` could never enter.
    """
    if len(queue) >= config.max_waiting_requests:
        message = f"{len(queue)} requests are waiting, of at most {config.max_waiting_requests}"
        raise OverloadedError(message, rate.seconds_for(queue.num_tokens / len(queue)))
    excess = queue.num_tokens + len(request.prompt_token_ids) - config.max_waiting_tokens
    if len(queue) and excess > 0:
        message = f"{queue.num_tokens} tokens are waiting, of at most {config.max_waiting_tokens}"
        raise OverloadedError(message, rate.seconds_for(excess))


def check_deadline(
    request: Request, counts: Iterable[int], step_time: StepTimeModel, config: SchedulerConfig, idle_ns: int
) -> None:
    """Refuse what is not expected to be done in time even if all goes well: DeadlineExceededError.

    `counts` are the prompt tokens to compute before its first one, estimated better and better; the next one is asked
    for while it cannot be done by the one before. The least time is that of these, in the largest steps, and of the
    output tokens that must come, alone on the machine; 0 while the model has measured too little. An engine that has
    had nothing to do for a second, as `idle_ns` says, tries: its prices may be of a time when the machine was paused,
    and while it only refuses it learns no others.
    """
    if request.deadline_ns is None:
        return
    left_ns = request.deadline_ns - request.arrival_ns
    if left_ns <= 0:
        raise DeadlineExceededError("the deadline passed before the request reached the queue")
    if idle_ns >= _REST_NS:
        return
    num_prompt_tokens, min_tokens = len(request.prompt_token_ids), request.sampling.min_tokens
    for num_tokens in counts:
        least_ns = step_time.least_answer_ns(num_tokens, num_prompt_tokens, min_tokens, config.max_num_batched_tokens)
        if left_ns > least_ns:
            return
    raise DeadlineExceededError(
        f"the deadline is in {left_ns / 1e9:.3f} s, but {num_tokens} prompt tokens, those that wait before "
        f"included, and the output take {least_ns / 1e9:.3f} s at least"
    )
