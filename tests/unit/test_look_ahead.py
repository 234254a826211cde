"""Steps planned before the one before has landed: which rows go on, when none is planned, and what stays until when."""

import numpy as np
import pytest

from service.core.scheduler import Scheduler
from service.core.step_time import StepLoad
from service.core.step_timer import StepTimer
from service.core.types import FinishReason, StepResult
from tests.unit.scheduler_steps import add, commit, make, reasons, scheduled, step

STOP = 0  # of the sequences of `add`


def decoding(num_rows: int, **changes: object) -> Scheduler:
    """Rows 0 to num_rows - 1 have prompts of 6 tokens and one of output, in two blocks of 4."""
    scheduler = make(**({"max_num_seqs": num_rows, "max_num_batched_tokens": 6 * num_rows} | changes))
    for row in range(num_rows):
        add(scheduler, 100 + row, 6)
    step(scheduler)
    return scheduler


def tokens(scheduler: Scheduler, row: int) -> tuple[int, int, int]:
    """(known, computed, blocks)"""
    batch = scheduler.batch
    return tuple(int(column[row]) for column in (batch.num_tokens, batch.num_computed_tokens, batch.num_blocks))


def test_the_step_ahead_computes_what_the_one_before_samples() -> None:
    scheduler = decoding(3)
    first = scheduler.plan(0)
    ahead = scheduler.plan_ahead(0)
    assert first is not None and ahead is not None
    assert (first.step_id + 1, True, True) == (ahead.step_id, ahead.is_ahead, ahead.is_decode_only)
    assert [0, 1, 2] == ahead.rows.tolist() == ahead.continues.tolist()
    assert (7, 6, 2) == tokens(scheduler, 0), "nothing has landed"
    commit(scheduler, first, 51)
    assert (8, 7, 2) == tokens(scheduler, 0)
    third = scheduler.plan_ahead(0)
    assert third is not None and (8, 7, 3) == tokens(scheduler, 0), "position 8 is in the third block"
    assert [(100, FinishReason.NONE), (101, FinishReason.NONE), (102, FinishReason.NONE)] == reasons(
        commit(scheduler, ahead, 52)
    )
    assert [50, 51, 52] == scheduler.batch.token_ids[0, 6:9].tolist()


def test_rows_that_the_step_in_flight_ends_by_length_are_left_out() -> None:
    scheduler = make()
    for seq_id, max_tokens in ((1, 9), (2, 2), (3, 9), (4, 2)):
        add(scheduler, seq_id, 3, max_tokens)
    step(scheduler)
    first, ahead = scheduler.plan(0), scheduler.plan_ahead(0)
    assert ahead is not None
    assert ([0, 2], [0, 2]) == (ahead.rows.tolist(), ahead.continues.tolist())
    delta = commit(scheduler, first)
    assert [FinishReason.NONE, FinishReason.LENGTH] * 2 == [reason for _, reason in reasons(delta)]
    assert 4 == scheduler.counters.num_running, "rows stay where they are"
    commit(scheduler, ahead)
    assert (2, 2) == (scheduler.counters.num_running, scheduler.counters.totals.num_finished)


def test_a_stop_token_is_told_at_once_and_its_row_leaves_with_the_step_ahead() -> None:
    scheduler = decoding(8)
    first, ahead = scheduler.plan(0), scheduler.plan_ahead(0)
    assert first is not None and ahead is not None
    num_free = scheduler.counters.num_free_blocks
    sampled = np.full(8, 50, np.int32)
    sampled[3] = STOP
    delta = scheduler.commit(first, StepResult(sampled))
    assert (103, FinishReason.STOP) == reasons(delta)[3]
    assert not scheduler.cancel(103)
    third = scheduler.plan_ahead(0)
    assert third is not None and [0, 1, 2, 4, 5, 6, 7] == third.continues.tolist(), "one of eight may stay"
    assert num_free - 7 == scheduler.counters.num_free_blocks, "its blocks are not given to others"
    delta = commit(scheduler, ahead)
    assert 103 not in delta.seq_ids
    delta = commit(scheduler, third)
    assert (7, 7) == (scheduler.counters.num_running, len(delta.seq_ids))
    assert num_free - 7 + 2 == scheduler.counters.num_free_blocks


def test_no_step_is_planned_ahead_when_more_than_an_eighth_of_the_rows_have_ended() -> None:
    scheduler = decoding(15)
    first, ahead = scheduler.plan(0), scheduler.plan_ahead(0)
    assert first is not None and ahead is not None
    sampled = np.full(15, 50, np.int32)
    sampled[[2, 9]] = STOP
    scheduler.commit(first, StepResult(sampled))
    assert scheduler.plan_ahead(0) is None
    commit(scheduler, ahead)
    assert 13 == len(scheduled(scheduler, scheduler.plan(0)))


def test_an_ended_row_makes_room_for_who_waits_before_another_step_is_planned_ahead() -> None:
    scheduler = decoding(8)
    first, ahead = scheduler.plan(0), scheduler.plan_ahead(0)
    assert first is not None and ahead is not None
    add(scheduler, 1, 3)
    sampled = np.full(8, 50, np.int32)
    sampled[0] = STOP
    scheduler.commit(first, StepResult(sampled))
    assert scheduler.plan_ahead(0) is None
    commit(scheduler, ahead)
    assert (1, 3, True) == scheduled(scheduler, scheduler.plan(0))[-1]


def test_a_row_that_ended_two_steps_ago_makes_room_for_who_comes_then() -> None:
    scheduler = decoding(8)
    first, ahead = scheduler.plan(0), scheduler.plan_ahead(0)
    assert first is not None and ahead is not None
    sampled = np.full(8, 50, np.int32)
    sampled[0] = STOP
    scheduler.commit(first, StepResult(sampled))
    third = scheduler.plan_ahead(0)
    assert third is not None
    commit(scheduler, ahead)
    add(scheduler, 1, 3)
    assert scheduler.plan_ahead(0) is None
    commit(scheduler, third)
    assert (1, 3, True) == scheduled(scheduler, scheduler.plan(0))[-1]


def test_a_sequence_that_finds_no_seat_holds_nothing_up_and_one_that_fits_does() -> None:
    full, roomy = decoding(4), decoding(4, max_num_seqs=5, max_num_batched_tokens=30)
    for scheduler in (full, roomy):
        scheduler.plan(0)
        add(scheduler, 1, 3)
    assert full.plan_ahead(0) is not None
    assert roomy.plan_ahead(0) is None


def test_a_row_that_the_step_in_flight_ends_by_length_goes_to_who_waits() -> None:
    scheduler = make(max_num_seqs=2)
    for seq_id, max_tokens in ((1, 9), (2, 2)):
        add(scheduler, seq_id, 3, max_tokens)
    step(scheduler)
    first = scheduler.plan(0)
    add(scheduler, 3, 3)
    assert scheduler.plan_ahead(0) is None
    commit(scheduler, first)
    assert [(1, 1, True), (3, 3, True)] == scheduled(scheduler, scheduler.plan(0))


def test_a_sequence_whose_blocks_are_not_there_holds_nothing_up() -> None:
    """Eleven blocks: four rows hold two each, and the one that waits needs seven."""
    scheduler = decoding(4, max_num_seqs=5, max_num_batched_tokens=30, num_blocks=12, watermark_fraction=0.0)
    scheduler.plan(0)
    add(scheduler, 1, 28)
    assert scheduler.plan_ahead(0) is not None


def test_a_step_that_would_have_to_preempt_is_not_planned_ahead() -> None:
    """Each row's second block is full when it has 8 tokens, and one block is free."""
    scheduler = decoding(2, num_blocks=6, watermark_fraction=0.0)
    step(scheduler)
    assert (8, 7, 2) == tokens(scheduler, 0)
    scheduler.plan(0)
    assert 1 == scheduler.counters.num_free_blocks
    assert scheduler.plan_ahead(0) is None


def test_cancels_and_deadlines_are_looked_after_first() -> None:
    cancelled = decoding(2)
    cancelled.plan(0)
    cancelled.cancel(100)
    assert cancelled.plan_ahead(0) is None
    for now_ns in (999, 1000):
        full = decoding(2, max_queue_wait_ns=1000)
        add(full, 1, 3)
        full.plan(0)
        assert (full.plan_ahead(now_ns) is None) == (now_ns == 1000), "the one that waits has waited for 1000 ns"


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_batches_that_end_together_are_not_planned_ahead(batching: str) -> None:
    scheduler = decoding(2, batching=batching, prefix_cache=False)
    scheduler.plan(0)
    assert scheduler.plan_ahead(0) is None


def test_a_step_ends_when_the_next_one_is_asked_for_after_its_commit() -> None:
    """A is planned at 0 and B ahead at 5; A lands before 20, which begins B, and B before 30."""
    timer = StepTimer()
    timer.begin(0)
    timer.go_on(5)
    timer.land(StepLoad(prefill_tokens=100), 0)
    timer.go_on(20)
    assert 100 / 20e-9 == pytest.approx(timer.rate.tokens_per_s)
    timer = StepTimer()
    timer.begin(0)
    timer.go_on(5)
    timer.land(StepLoad(), 0)
    timer.go_on(20)
    timer.land(StepLoad(prefill_tokens=100), 2)
    timer.begin(30)
    assert 100 / 10e-9 == pytest.approx(timer.rate.tokens_per_s)


def test_of_steps_that_cannot_be_told_apart_no_time_is_learned() -> None:
    timer = StepTimer()
    timer.begin(0)
    timer.land(StepLoad(prefill_tokens=100), 0)
    timer.land(StepLoad(prefill_tokens=100), 0)
    timer.begin(30)
    assert 0.0 == timer.rate.tokens_per_s
