"""Steps planned ahead while a step with chunks is in flight: they go on as if that had landed."""

import numpy as np
import pytest

from service.core.plan import StepPlan
from service.core.scheduler import Scheduler
from service.core.step_time import load_of
from service.core.types import FinishReason, Request, SamplingParams, StepResult
from tests.property.twin import twin
from tests.unit.scheduler_steps import add, commit, make, scheduled, step


def ahead_of(scheduler: Scheduler) -> tuple[StepPlan, StepPlan]:
    """A step, and the one planned ahead of its result."""
    first, ahead = scheduler.plan(0), scheduler.plan_ahead(0)
    assert first is not None and ahead is not None
    return first, ahead


def test_a_prompt_that_the_step_in_flight_completes_goes_on_with_the_token_that_it_yields() -> None:
    scheduler = make()
    add(scheduler, 1, 8)
    first, ahead = ahead_of(scheduler)
    assert ([0], [8], [0], True) == (
        ahead.rows.tolist(),
        ahead.num_in_flight.tolist(),
        ahead.continues.tolist(),
        ahead.is_decode_only,
    )
    batch = scheduler.batch
    assert (8, 0, 3) == (batch.num_tokens[0], batch.num_computed_tokens[0], batch.num_blocks[0]), "8 is in the third"
    commit(scheduler, first, 51)
    commit(scheduler, ahead, 52)
    assert [51, 52] == batch.token_ids[0, 8:10].tolist()
    assert (10, 9) == (batch.num_tokens[0], batch.num_computed_tokens[0])


def test_rows_come_in_the_order_in_which_they_decode() -> None:
    """One token of 2 tokens, of 1 and of 20: the second decodes, and the first is done in the same step."""
    scheduler = make(max_num_batched_tokens=8)
    for seq_id, num_tokens in ((1, 2), (2, 1), (3, 20)):
        add(scheduler, seq_id, num_tokens)
    first, ahead = ahead_of(scheduler)
    assert first.rows.tolist() == [1, 0, 2]
    assert scheduled(scheduler, first) == [(2, 1, True), (1, 2, True), (3, 5, False)]
    assert ahead.rows.tolist() == [1, 0, 2]
    assert scheduled(scheduler, ahead) == [(2, 1, True), (1, 1, True), (3, 6, False)]


def test_prompts_go_on_with_their_next_chunks_behind_the_rows_that_decode() -> None:
    """Sequence 1 is in the row before, and is not done when the short prompt is, which passes it."""
    scheduler = make(max_num_batched_tokens=6)
    add(scheduler, 1, 20)
    step(scheduler)
    add(scheduler, 2, 4)
    first, ahead = ahead_of(scheduler)
    assert [(2, 4, True), (1, 2, False)] == scheduled(scheduler, first)
    assert [(2, 1, True), (1, 5, False)] == scheduled(scheduler, ahead)
    assert ([1, 0], [4, 2], [0], 1) == (
        ahead.rows.tolist(),
        ahead.num_in_flight.tolist(),
        ahead.continues.tolist(),
        ahead.num_decode_rows,
    )
    commit(scheduler, first)
    third = scheduler.plan_ahead(0)
    assert [(2, 1, True), (1, 5, False)] == scheduled(scheduler, third)
    commit(scheduler, ahead)
    commit(scheduler, third)
    assert 18 == scheduler.batch.num_computed_tokens[1], "rows are in order again"
    assert [(2, 1, True), (1, 2, True)] == scheduled(scheduler, scheduler.plan(0))


def test_a_prompt_s_last_token_is_known_and_goes_before_chunks() -> None:
    scheduler = make(max_num_batched_tokens=5)
    add(scheduler, 1, 6)
    first, ahead = ahead_of(scheduler)
    assert [(1, 5, False)] == scheduled(scheduler, first)
    assert [(1, 1, True)] == scheduled(scheduler, ahead)
    assert (0, 1, True) == (len(ahead.continues), ahead.num_decode_rows, ahead.is_ahead)


@pytest.mark.parametrize("limits", [{}, {"max_chunk_tokens": 3}, {"max_num_batched_tokens": 5}])
def test_steps_are_those_of_a_scheduler_that_waits_for_each(limits: dict[str, int]) -> None:
    """Ends by length included, as long as nobody waits."""
    found: list[list[list[tuple[int, int, bool]]]] = []
    for looks_ahead in (False, True):
        scheduler, steps, num_ahead = make(**limits), [], 0
        for seq_id, num_tokens in enumerate((1, 14, 3, 9)):
            add(scheduler, seq_id, num_tokens, max_tokens=3 + seq_id)
        while scheduler.counters.num_waiting:
            steps.append(step(scheduler))
        flight = None
        while (flight := flight or scheduler.plan(0)) is not None:
            steps.append(sorted(scheduled(scheduler, flight)))
            ahead = scheduler.plan_ahead(0) if looks_ahead else None
            commit(scheduler, flight)
            flight, num_ahead = ahead, num_ahead + (ahead is not None)
        found.append(steps)
    assert found[0] == found[1]
    assert num_ahead > 2


def test_what_steps_compute_of_prompts_is_published_when_nothing_is_in_flight() -> None:
    for ends in (commit, Scheduler.abort):
        scheduler = make()
        add(scheduler, 1, 8)
        first, ahead = ahead_of(scheduler)
        commit(scheduler, first)
        assert 0 == scheduler.batch.num_published_blocks[0]
        ends(scheduler, ahead)
        assert 2 == scheduler.batch.num_published_blocks[0]


def test_who_may_find_a_prefix_when_it_is_published_holds_the_next_step_up() -> None:
    """Nine blocks, of which sequence 1 takes five; the one that waits needs seven, or three if it can share."""
    for prefix_cache, num_landed in ((False, 0), (False, 1), (True, 0), (True, 1)):
        scheduler = make(num_blocks=10, watermark_fraction=0.0, prefix_cache=prefix_cache)
        prompts = [np.arange(length, dtype=np.int32) for length in (16, 28)]
        scheduler.add(Request(1, prompts[0], SamplingParams(9)))
        flight = scheduler.plan(0)
        for _ in range(num_landed):
            ahead = scheduler.plan_ahead(0)
            commit(scheduler, flight)
            flight = ahead
        scheduler.add(Request(2, prompts[1], SamplingParams(1)))
        assert prefix_cache == (scheduler.plan_ahead(0) is None)
        if prefix_cache:
            commit(scheduler, flight)
            assert [(1, 1, True), (2, 12, True)] == scheduled(scheduler, scheduler.plan(0))


def test_samples_that_wait_for_a_prompt_are_admitted_when_it_has_landed() -> None:
    for fork_of in (None, 1):
        scheduler = make()
        add(scheduler, 1, 6)
        first = scheduler.plan(0)
        if fork_of is not None:
            scheduler.add(Request(2, np.arange(1, 7, dtype=np.int32), SamplingParams(9), tenant="1", fork_of=fork_of))
        assert (fork_of is None) == (scheduler.plan_ahead(0) is not None)
        commit(scheduler, first)
        assert (fork_of is None) == (scheduler.counters.num_waiting == 0)


def test_a_sequence_that_waits_again_has_waited_since_it_came() -> None:
    """Its step is taken back, though another had been asked for when its time in the queue was over."""
    scheduler = make(max_queue_wait_ns=1000)
    add(scheduler, 1, 6)
    plan = scheduler.plan(0)
    assert plan is not None and scheduler.plan_ahead(1000) is None
    scheduler.abort(plan)
    assert [(1, FinishReason.QUEUE_WAIT)] == scheduler.expire(1000)


def test_a_step_taken_back_leaves_rows_where_they_are_until_their_prompts_are_published() -> None:
    """Sequence 2's row goes before that of sequence 1 then."""
    scheduler = make(max_num_batched_tokens=8)
    add(scheduler, 1, 28)
    step(scheduler)
    add(scheduler, 2, 8)
    first, ahead = ahead_of(scheduler)
    assert [(2, 8, True)] == scheduled(scheduler, first)
    commit(scheduler, first)
    scheduler.abort(ahead, has_written=True)
    batch = scheduler.batch
    assert [(2, 2), (1, 2)] == list(
        zip(batch.seq_ids[:2].tolist(), batch.num_published_blocks[:2].tolist(), strict=True)
    )


def test_a_chunk_ahead_keeps_to_the_time_that_decoding_leaves_when_the_step_before_has_landed() -> None:
    """Tokens cost the more, the further the prompt is; and the short prompt's row decodes by then."""
    prices = np.array([1000.0, 10.0, 50.0, 40.0, 2.0])
    scheduler = make(
        max_num_seqs=8, max_num_batched_tokens=300, max_model_len=400, num_blocks=900, target_itl_ns=16_000
    )
    now_ns = 0

    def run() -> None:
        nonlocal now_ns
        plan = scheduler.plan(now_ns)
        assert plan is not None
        now_ns += round(float(load_of(plan, scheduler.batch).terms() @ prices))
        commit(scheduler, plan)

    add(scheduler, 0, 20, max_tokens=300)
    for seq_id in range(1, 60):
        if seq_id % 2:
            add(scheduler, seq_id, 40 + 7 * seq_id % 90, max_tokens=3)
        run()
    add(scheduler, 100, 300)
    run()
    add(scheduler, 101, 30)
    first = scheduler.plan(now_ns)
    other, other_first = twin(scheduler, first)
    ahead = scheduler.plan_ahead(now_ns)
    assert first is not None and other_first is not None and ahead is not None
    assert (101, 30, True) in scheduled(scheduler, first)
    other.commit(other_first, StepResult(np.full(np.count_nonzero(first.samples), 50, np.int32)))
    expected = sorted(scheduled(other, other.plan(now_ns)))
    assert expected == sorted(scheduled(scheduler, ahead))
    (chunk,) = (count for _, count, samples in expected if not samples)
    assert 1 < chunk < 60, "of the 300 that a step holds"
