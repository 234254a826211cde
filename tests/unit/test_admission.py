"""What the scheduler refuses at the door, and what its queue bounds."""

import numpy as np
import pytest

from service.core.admission import check_deadline
from service.core.step_time import StepLoad, StepTimeModel
from service.core.types import FinishReason, Request, SamplingParams
from service.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    UnserviceableError,
)
from tests.unit.scheduler_steps import ROOMY, add, commit, make, reasons, step


@pytest.mark.parametrize("num_tokens", [0, 8, 9])
def test_a_prompt_must_be_there_and_leave_room_for_a_token(num_tokens: int):
    scheduler = make(max_model_len=8)
    with pytest.raises(InvalidRequestError) as caught:
        add(scheduler, 1, num_tokens)
    assert caught.value.field == "prompt_token_ids"
    assert not scheduler.has_work
    add(scheduler, 2, num_tokens=7)
    assert reasons(commit(scheduler, scheduler.plan(0))) == [(2, FinishReason.LENGTH)]


def test_a_request_for_no_token_is_refused():
    with pytest.raises(InvalidRequestError):
        add(make(), 1, num_tokens=2, max_tokens=0)


def test_a_prompt_larger_than_the_buffer_is_refused_at_once():
    scheduler = make(num_blocks=3)
    with pytest.raises(UnserviceableError):
        add(scheduler, 1, num_tokens=9)
    add(scheduler, 1, num_tokens=8)
    assert scheduler.counters.totals.num_submitted == 1


def test_the_queue_is_bounded_in_requests():
    scheduler = make(max_waiting_requests=2)
    add(scheduler, 1, num_tokens=2)
    add(scheduler, 2, num_tokens=2)
    with pytest.raises(OverloadedError) as caught:
        add(scheduler, 3, num_tokens=2)
    assert caught.value.retry_after_s == 1.0  # nothing has been measured
    step(scheduler)  # admits both
    add(scheduler, 3, num_tokens=2)


def test_the_queue_is_bounded_in_tokens_but_takes_any_prompt_when_empty():
    scheduler = make(max_waiting_tokens=10)
    add(scheduler, 1, num_tokens=12)
    with pytest.raises(OverloadedError):
        add(scheduler, 2, num_tokens=1)
    scheduler.cancel(1)
    add(scheduler, 3, num_tokens=6)
    add(scheduler, 4, num_tokens=4)
    with pytest.raises(OverloadedError):
        add(scheduler, 5, num_tokens=1)


def test_retry_estimate_is_the_excess_over_the_measured_rate():
    scheduler = make(max_waiting_tokens=30, max_num_seqs=1)
    add(scheduler, 1, num_tokens=10)
    commit(scheduler, scheduler.plan(1_000_000_000))
    commit(scheduler, scheduler.plan(3_000_000_000))  # 10 tokens in 2 s: 5 tokens a second
    add(scheduler, 2, num_tokens=30)
    with pytest.raises(OverloadedError) as caught:
        add(scheduler, 3, num_tokens=15)
    assert caught.value.retry_after_s == 3.0


@pytest.mark.parametrize(("left_ms", "is_taken"), [(123, False), (125, True)])
def test_prompts_that_wait_before_are_no_context_of_the_output(left_ms: int, is_taken: bool):
    """99 decode steps of 1 ms, and 1 us for each of 250 tokens of the own prompt: 123.75 ms."""
    model = StepTimeModel()
    for num_tokens in range(100, 500):
        model.observe(StepLoad(0, 1, num_tokens), 1_000_000 + 1000 * num_tokens)
    sampling, deadline_ns = SamplingParams(200, min_tokens=100), left_ms * 1_000_000
    request = Request(1, np.arange(250, dtype=np.int32), sampling, deadline_ns=deadline_ns)
    if is_taken:
        check_deadline(request, [10_000], model, ROOMY, idle_ns=0)
    else:
        with pytest.raises(DeadlineExceededError):
            check_deadline(request, [10_000], model, ROOMY, idle_ns=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_blocks": 1},
        {"num_blocks": 1 << 29},  # of 4 tokens: one slot more than 32 bits number
        {"block_size": 12},
        {"block_size": 0},
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 3},
        {"max_model_len": 1},
        {"watermark_fraction": 1.0},
        {"max_waiting_requests": 0},
        {"max_chunk_tokens": -1},
    ],
)
def test_inconsistent_limits_are_refused(changes: dict[str, int]):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        make(**changes)


def test_ten_thousand_waiting_cancels_leave_nothing_behind():
    scheduler = make(max_waiting_requests=20_000)
    for seq_id in range(10_000):
        add(scheduler, seq_id, num_tokens=3)
    for seq_id in np.random.default_rng(3).permutation(10_000).tolist():
        assert scheduler.cancel(seq_id)
    assert (scheduler.has_work, scheduler.counters.num_waiting_tokens) == (False, 0)
    assert scheduler.plan(0) is None
