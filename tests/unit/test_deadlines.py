"""Sequences that run out of time, in the queue, before their prompt and between steps."""

import numpy as np
import pytest

from service.core.scheduler import Scheduler
from service.core.scheduler_config import OrderingConfig
from service.core.types import FinishReason, Request, SamplingParams, StepResult
from service.errors import DeadlineExceededError
from tests.unit.scheduler_steps import commit, make, scheduled, step

MS = 1_000_000


def ask(scheduler: Scheduler, seq_id: int, num_tokens: int = 4, max_tokens: int = 20, **fields: object) -> None:
    sampling = SamplingParams(max_tokens, min_tokens=int(fields.pop("min_tokens", 0)))  # type: ignore[call-overload]
    prompt = np.arange(1000 * seq_id, 1000 * seq_id + num_tokens, dtype=np.int32)  # shares no block with others
    scheduler.add(Request(seq_id, prompt, sampling, (), **fields))  # type: ignore[arg-type]


def measured(ordering: OrderingConfig | None = None) -> Scheduler:
    """A scheduler that has learnt 10 ms a step and 1 ms a token, of a prompt or of a decode row, and is idle."""
    scheduler = make(
        ordering=ordering or OrderingConfig(), num_blocks=1001, max_num_batched_tokens=64, max_model_len=512
    )
    now_ns = 0
    for number in range(40):
        num_tokens = 8 + number % 50
        ask(scheduler, 1000 + number, num_tokens)
        commit(scheduler, scheduler.plan(now_ns))
        now_ns += (10 + num_tokens) * MS
        for _ in range(2):
            commit(scheduler, scheduler.plan(now_ns))
            now_ns += 11 * MS
        scheduler.cancel(1000 + number)
    return scheduler


def test_a_running_sequence_ends_at_its_deadline_and_not_before():
    scheduler = make()
    ask(scheduler, 1, deadline_ns=100)
    ask(scheduler, 2)
    step(scheduler)
    assert scheduler.expire(99) == []
    assert scheduler.expire(100) == [(1, FinishReason.DEADLINE)]
    assert scheduler.expire(1000) == []
    assert step(scheduler) == [(2, 1, True)]
    counters = scheduler.counters
    assert (counters.totals.num_finished, counters.num_free_blocks) == (1, 98)


@pytest.mark.parametrize(("deadline_ns", "reason"), [(500, FinishReason.DEADLINE), (2000, FinishReason.QUEUE_WAIT)])
def test_of_two_reasons_that_have_come_the_earlier_one_is_told(deadline_ns: int, reason: FinishReason):
    scheduler = make(max_queue_wait_ns=1000)
    ask(scheduler, 1, deadline_ns=deadline_ns)
    assert scheduler.expire(3000) == [(1, reason)]


def test_a_deadline_stops_steps_ahead_only_while_it_matters():
    scheduler = make(max_queue_wait_ns=1000)
    ask(scheduler, 1, deadline_ns=500)
    ask(scheduler, 2, deadline_ns=2000)
    step(scheduler)
    scheduler.cancel(1)
    plan = scheduler.plan(100)
    ahead = scheduler.plan_ahead(1000)
    assert ahead is not None, "1 has ended, and 2 waits no more"
    commit(scheduler, plan)
    last = scheduler.plan_ahead(1999)
    assert last is not None
    commit(scheduler, ahead)
    assert scheduler.plan_ahead(2000) is None
    commit(scheduler, last)
    assert scheduler.expire(2000) == [(2, FinishReason.DEADLINE)]


def test_a_sequence_whose_admission_is_taken_back_still_has_waited():
    scheduler = make(max_queue_wait_ns=1000)
    ask(scheduler, 1, num_tokens=1)
    plan = scheduler.plan(0)
    assert plan is not None and plan.is_decode_only
    assert scheduler.plan_ahead(1000) is None
    scheduler.abort(plan)
    assert scheduler.expire(1000) == [(1, FinishReason.QUEUE_WAIT)]


def test_a_waiting_sequence_ends_before_its_prompt_is_computed():
    scheduler = make(max_num_seqs=1)
    ask(scheduler, 1)
    ask(scheduler, 2, deadline_ns=7)
    step(scheduler)
    assert scheduler.expire(7) == [(2, FinishReason.DEADLINE)]
    assert (scheduler.counters.num_waiting, scheduler.counters.num_waiting_tokens) == (0, 0)


def test_a_preempted_sequence_ends_at_its_deadline():
    scheduler = make(num_blocks=5)
    ask(scheduler, 1, num_tokens=8)
    ask(scheduler, 2, num_tokens=8, deadline_ns=50)
    step(scheduler)
    step(scheduler)
    assert scheduler.counters.num_preempted == 1
    assert scheduler.expire(50) == [(2, FinishReason.DEADLINE)]
    assert scheduler.counters.num_preempted == 0


def test_the_longest_wait_counts_until_admission_only():
    scheduler = make(max_num_seqs=1, max_queue_wait_ns=100)
    ask(scheduler, 1, arrival_ns=5)
    ask(scheduler, 2, arrival_ns=6)
    step(scheduler)
    assert scheduler.expire(105) == []
    assert scheduler.expire(106) == [(2, FinishReason.QUEUE_WAIT)]
    assert scheduler.has_work


def test_samples_do_not_run_out_of_their_wait_while_the_first_one_runs():
    scheduler = make(max_num_seqs=1, max_num_batched_tokens=2, max_queue_wait_ns=100)
    ask(scheduler, 1, num_tokens=6, max_tokens=2)
    for seq_id in (2, 3):
        ask(scheduler, seq_id, num_tokens=6, fork_of=1)
    ask(scheduler, 4, arrival_ns=1)
    for _ in range(2):  # of the three that the prompt takes
        step(scheduler)
    assert scheduler.expire(100) == []
    assert scheduler.counters.num_waiting == 3
    step(scheduler)
    assert scheduler.expire(1000) == [(4, FinishReason.QUEUE_WAIT)]
    assert step(scheduler) == [(1, 1, True)]  # its last token
    assert scheduler.expire(2000) == []
    assert scheduler.counters.num_waiting == 2


def test_samples_run_out_of_their_wait_with_the_first_one():
    scheduler = make(max_num_seqs=1, max_queue_wait_ns=100)
    ask(scheduler, 1)
    step(scheduler)
    ask(scheduler, 2, arrival_ns=5)
    for seq_id in (3, 4):
        ask(scheduler, seq_id, arrival_ns=5, fork_of=2)
    assert scheduler.expire(104) == []
    assert scheduler.expire(105) == [(seq_id, FinishReason.QUEUE_WAIT) for seq_id in (2, 3, 4)]
    assert scheduler.counters.num_running == 1


def test_samples_whose_first_one_ends_without_a_token_have_waited_since_they_came():
    scheduler = make(max_num_batched_tokens=4, max_queue_wait_ns=100)
    ask(scheduler, 1, num_tokens=8, arrival_ns=5)
    ask(scheduler, 2, num_tokens=8, arrival_ns=5, fork_of=1)
    step(scheduler)
    assert scheduler.expire(104) == []
    scheduler.cancel(1)
    assert scheduler.expire(104) == []
    assert scheduler.expire(105) == [(2, FinishReason.QUEUE_WAIT)]


def test_samples_whose_first_one_fails_have_waited_since_they_came():
    scheduler = make(max_num_seqs=2, max_queue_wait_ns=100)
    ask(scheduler, 1)
    step(scheduler)
    ask(scheduler, 2, arrival_ns=5)
    ask(scheduler, 4, arrival_ns=5)  # takes the row that the failure leaves, as it came before the sample
    ask(scheduler, 3, arrival_ns=5, fork_of=2)
    plan = scheduler.plan(0)
    assert scheduled(scheduler, plan) == [(1, 1, True), (2, 4, True)]
    assert plan is not None
    scheduler.commit(plan, StepResult(np.full(2, 50, np.int32), failed=np.array([1])))
    assert step(scheduler) == [(1, 1, True), (4, 4, True)]
    assert scheduler.expire(104) == []
    assert scheduler.expire(105) == [(3, FinishReason.QUEUE_WAIT)]


def test_samples_whose_first_one_is_cancelled_in_flight_have_waited_since_they_came():
    scheduler = make(max_num_seqs=1, max_queue_wait_ns=100)
    ask(scheduler, 1)
    ask(scheduler, 2, arrival_ns=5)  # takes the row
    ask(scheduler, 3, arrival_ns=5, fork_of=1)
    plan = scheduler.plan(0)
    scheduler.cancel(1)
    assert commit(scheduler, plan).seq_ids.tolist() == []
    step(scheduler)
    assert scheduler.expire(105) == [(3, FinishReason.QUEUE_WAIT)]


def test_a_sample_of_one_that_has_failed_is_on_its_own():
    """The failed one keeps its row while a step ahead is in flight."""
    scheduler = make(max_num_seqs=1, max_queue_wait_ns=100)
    ask(scheduler, 1)
    plan = scheduler.plan(0)
    ahead = scheduler.plan_ahead(0)
    assert plan is not None and ahead is not None
    scheduler.commit(plan, StepResult(np.full(1, 50, np.int32), failed=np.array([0])))
    ask(scheduler, 2, arrival_ns=5)  # takes the row
    ask(scheduler, 3, arrival_ns=5, fork_of=1)
    commit(scheduler, ahead)
    step(scheduler)
    assert scheduler.expire(105) == [(3, FinishReason.QUEUE_WAIT)]


def test_deadlines_of_ended_sequences_are_forgotten():
    scheduler = make(max_waiting_requests=10_000)
    for seq_id in range(1000):
        ask(scheduler, seq_id, deadline_ns=10**15)
        scheduler.cancel(seq_id)
        scheduler.expire(0)
    assert len(scheduler._deadlines._heap) <= 65


def test_a_deadline_that_has_passed_is_refused_before_anything_is_measured():
    scheduler = make()
    with pytest.raises(DeadlineExceededError):
        ask(scheduler, 1, arrival_ns=10, deadline_ns=10)
    ask(scheduler, 1, arrival_ns=10, deadline_ns=11)


@pytest.mark.parametrize(("left_ms", "is_taken"), [(109, False), (111, True)])
def test_what_cannot_be_done_in_time_is_refused_at_the_door(left_ms: int, is_taken: bool):
    """A prompt of 90 tokens takes two steps of at most 64: 2 x 10 + 90 x 1 ms."""
    scheduler = measured()
    if is_taken:
        ask(scheduler, 1, num_tokens=90, deadline_ns=left_ms * MS)
    else:
        with pytest.raises(DeadlineExceededError, match="90 prompt tokens"):
            ask(scheduler, 1, num_tokens=90, deadline_ns=left_ms * MS)
        assert not scheduler.has_work


def test_a_sample_is_taken_when_its_first_one_is_for_it_computes_one_token_of_the_prompt():
    scheduler = measured()
    ask(scheduler, 1, num_tokens=90, deadline_ns=115 * MS)
    ask(scheduler, 2, num_tokens=90, deadline_ns=115 * MS, fork_of=1)
    with pytest.raises(DeadlineExceededError, match="180 prompt tokens"):
        ask(scheduler, 3, num_tokens=90, deadline_ns=115 * MS)


@pytest.mark.parametrize("deadline_ns", [6, 7])
def test_a_deadline_that_has_passed_is_called_so(deadline_ns: int):
    with pytest.raises(DeadlineExceededError, match=r"^the deadline passed before the request reached the queue$"):
        ask(make(), 1, arrival_ns=7, deadline_ns=deadline_ns)


def test_an_engine_that_has_rested_for_a_second_tries_what_its_prices_say_cannot_be_done():
    scheduler = measured()
    last_plan_ms = sum(10 + 8 + number + 2 * 11 for number in range(40)) - 11
    for rest_ms, is_taken in ((999, False), (1000, True)):
        arrival_ns = (last_plan_ms + rest_ms) * MS
        if is_taken:
            ask(scheduler, 2, num_tokens=90, arrival_ns=arrival_ns, deadline_ns=arrival_ns + 50 * MS)
        else:
            with pytest.raises(DeadlineExceededError, match="90 prompt tokens"):
                ask(scheduler, 1, num_tokens=90, arrival_ns=arrival_ns, deadline_ns=arrival_ns + 50 * MS)
    with pytest.raises(DeadlineExceededError):  # with something to do it knows better again
        ask(scheduler, 3, num_tokens=90, arrival_ns=arrival_ns, deadline_ns=arrival_ns + 50 * MS)


@pytest.mark.parametrize(("left_ms", "is_taken"), [(114, False), (116, True)])
def test_the_output_tokens_that_must_come_take_their_time_too(left_ms: int, is_taken: bool):
    """10 + 6 ms for the prompt, and 9 steps of 11 ms after the first token."""
    scheduler = measured()
    if is_taken:
        ask(scheduler, 1, num_tokens=6, min_tokens=10, deadline_ns=left_ms * MS)
    else:
        with pytest.raises(DeadlineExceededError):
            ask(scheduler, 1, num_tokens=6, min_tokens=10, deadline_ns=left_ms * MS)


@pytest.mark.parametrize(
    ("policy", "tenant", "num_before"),
    [("fcfs", "a", 300), ("priority", "a", 0), ("fair", "a", 200), ("fair", "b", 100), ("fair", "c", 0)],
)
def test_prompts_that_are_certainly_admitted_before_count(policy: str, tenant: str, num_before: int):
    scheduler = measured(OrderingConfig(policy))  # type: ignore[arg-type]
    ask(scheduler, 1, num_tokens=200, tenant="a")
    ask(scheduler, 2, num_tokens=100, tenant="b")
    ask(scheduler, 3, num_tokens=201, tenant=tenant)  # computed after the new one, which is shorter
    with pytest.raises(DeadlineExceededError, match=f" {num_before + 200} prompt tokens"):
        ask(scheduler, 4, tenant=tenant, num_tokens=200, deadline_ns=1)


@pytest.mark.parametrize(("left_ms", "is_taken"), [(89, False), (91, True)])
def test_a_short_prompt_may_pass_a_long_one_in_time(left_ms: int, is_taken: bool):
    """70 tokens take two steps of 10 ms, and 1 ms each; the 200 tokens before them wait meanwhile."""
    scheduler = measured()
    ask(scheduler, 1, num_tokens=200)
    if is_taken:
        ask(scheduler, 2, num_tokens=70, deadline_ns=left_ms * MS)
    else:
        with pytest.raises(DeadlineExceededError, match=" 70 prompt tokens"):
            ask(scheduler, 2, num_tokens=70, deadline_ns=left_ms * MS)


@pytest.mark.parametrize(("left_ms", "is_taken"), [(11, False), (13, True)])
def test_what_is_cached_of_the_prompt_takes_no_time(left_ms: int, is_taken: bool):
    """Of 90 tokens 88 are in full blocks of 4: two are left, 10 + 2 ms."""
    scheduler = measured()
    prompt = np.arange(90, dtype=np.int32)
    scheduler.add(Request(1, prompt, SamplingParams(1)))
    while scheduler.has_work:
        commit(scheduler, scheduler.plan(10**10))
    repeated = Request(2, prompt, SamplingParams(1), deadline_ns=left_ms * MS)
    if is_taken:
        scheduler.add(repeated)
    else:
        with pytest.raises(DeadlineExceededError, match=" 2 prompt tokens"):
            scheduler.add(repeated)
