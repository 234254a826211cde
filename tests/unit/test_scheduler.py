"""Small scenarios of the scheduler, worked out by hand. The 'executor' is a list of tokens."""

import numpy as np
import pytest

from service.core.types import FinishReason, StepResult, TokenLogprobs
from tests.unit.scheduler_steps import add, commit, make, reasons, scheduled, step


def test_nothing_to_do_is_no_plan():
    scheduler = make()
    assert not scheduler.has_work
    assert scheduler.plan(0) is None


def test_a_prompt_is_one_chunk_and_then_one_token_a_step():
    scheduler = make()
    add(scheduler, 7, num_tokens=5, max_tokens=3)
    assert step(scheduler) == [(7, 5, True)]
    assert scheduler.batch.token_ids[0, :6].tolist() == [1, 2, 3, 4, 5, 50]
    plan = scheduler.plan(0)
    assert scheduled(scheduler, plan) == [(7, 1, True)]
    assert (plan.is_decode_only, plan.num_decode_rows, plan.num_tokens, plan.step_id) == (True, 1, 1, 1)
    assert reasons(commit(scheduler, plan)) == [(7, FinishReason.NONE)]
    assert reasons(commit(scheduler, scheduler.plan(0))) == [(7, FinishReason.LENGTH)]
    assert not scheduler.has_work
    assert scheduler.counters.num_free_blocks == 100


def test_decode_tokens_come_before_chunks_and_chunks_share_the_rest():
    scheduler = make(max_num_batched_tokens=8)
    add(scheduler, 1, num_tokens=3)
    step(scheduler)
    add(scheduler, 2, num_tokens=4)
    add(scheduler, 3, num_tokens=9)
    plan = scheduler.plan(0)
    assert scheduled(scheduler, plan) == [(1, 1, True), (2, 4, True), (3, 3, False)]
    assert (plan.num_decode_rows, plan.num_tokens, plan.is_decode_only) == (1, 8, False)
    delta = commit(scheduler, plan)
    assert delta.seq_ids.tolist() == [1, 2]
    assert step(scheduler) == [(1, 1, True), (2, 1, True), (3, 6, True)]


def test_a_row_that_finishes_its_prompt_moves_before_the_rows_that_have_not():
    scheduler = make(max_num_batched_tokens=8, max_chunk_tokens=2)
    add(scheduler, 1, num_tokens=9)
    step(scheduler)  # 2 of 9
    scheduler.cancel(1)
    add(scheduler, 2, num_tokens=5)
    assert step(scheduler) == [(2, 2, False)]
    assert step(scheduler) == [(2, 2, False)]
    add(scheduler, 3, num_tokens=1)
    assert step(scheduler) == [(2, 1, True), (3, 1, True)]
    assert scheduler.batch.num_decode_rows == 2


def test_chunk_setting_bounds_the_prompt_tokens_of_a_step():
    scheduler = make(max_chunk_tokens=5)
    add(scheduler, 1, num_tokens=7)
    add(scheduler, 2, num_tokens=6)
    assert step(scheduler) == [(1, 5, False)]
    assert step(scheduler) == [(1, 2, True), (2, 3, False)]
    assert step(scheduler) == [(1, 1, True), (2, 3, True)]


def test_a_prompt_of_one_token_is_a_decode_row_to_the_executor():
    scheduler = make()
    add(scheduler, 1, num_tokens=2)
    add(scheduler, 2, num_tokens=1)
    plan = scheduler.plan(0)
    assert scheduled(scheduler, plan) == [(2, 1, True), (1, 2, True)]
    assert plan.num_decode_rows == 1
    commit(scheduler, plan)
    assert step(scheduler) == [(1, 1, True), (2, 1, True)]


def test_tokens_go_to_their_sequences_when_the_plan_is_not_in_row_order():
    scheduler = make()
    for seq_id, num_tokens in [(1, 2), (2, 1), (3, 4)]:
        add(scheduler, seq_id, num_tokens)
    plan = scheduler.plan(0)
    assert plan.rows.tolist() == [1, 0, 2]
    delta = scheduler.commit(plan, StepResult(np.array([52, 51, 53], np.int32)))
    assert delta.seq_ids.tolist() == [2, 1, 3]
    batch = scheduler.batch
    known = {int(batch.seq_ids[row]): batch.token_ids[row, : batch.num_tokens[row]].tolist() for row in range(3)}
    assert known == {1: [1, 2, 51], 2: [1, 52], 3: [1, 2, 3, 4, 53]}


def test_failed_row_ends_with_its_blocks_and_the_others_go_on():
    scheduler = make()
    add(scheduler, 1, num_tokens=2)
    add(scheduler, 2, num_tokens=2)
    plan = scheduler.plan(0)
    delta = scheduler.commit(plan, StepResult(np.array([50, 51], np.int32), failed=np.array([0])))
    assert delta.finish_reasons.tolist() == [FinishReason.ERROR, FinishReason.NONE]
    assert step(scheduler) == [(2, 1, True)]
    assert scheduler.counters.num_free_blocks == scheduler.config.num_blocks - 2


def test_rows_and_not_only_tokens_bound_admission():
    scheduler = make(max_num_seqs=2)
    for seq_id in (1, 2, 3):
        add(scheduler, seq_id, num_tokens=2, max_tokens=2)
    assert step(scheduler) == [(1, 2, True), (2, 2, True)]
    assert step(scheduler) == [(1, 1, True), (2, 1, True)]  # both end here
    assert step(scheduler) == [(3, 2, True)]


@pytest.mark.parametrize(("num_blocks", "is_admitted"), [(6, True), (5, False)])
def test_a_prompt_is_admitted_when_all_its_blocks_are_there(num_blocks: int, is_admitted: bool):
    scheduler = make(num_blocks=num_blocks)  # of 4 tokens; one is the null block
    add(scheduler, 1, num_tokens=8)
    add(scheduler, 2, num_tokens=9)
    assert step(scheduler) == [(1, 8, True)] + [(2, 8, False)] * is_admitted


@pytest.mark.parametrize(("num_blocks", "is_admitted"), [(7, True), (6, False)])
def test_admission_counts_the_blocks_promised_to_prompts_in_progress(num_blocks: int, is_admitted: bool):
    scheduler = make(num_blocks=num_blocks, max_num_batched_tokens=12)
    add(scheduler, 1, num_tokens=16)  # 3 blocks now, and one promised
    assert step(scheduler) == [(1, 12, False)]
    add(scheduler, 2, num_tokens=8)
    assert step(scheduler) == [(1, 4, True)] + [(2, 8, True)] * is_admitted


@pytest.mark.parametrize(("watermark_fraction", "is_admitted"), [(0.2, True), (0.3, False)])
def test_admission_leaves_the_watermark_free(watermark_fraction: float, is_admitted: bool):
    scheduler = make(num_blocks=11, watermark_fraction=watermark_fraction)  # 2 or 3 of 10 blocks
    add(scheduler, 1, num_tokens=13)
    add(scheduler, 2, num_tokens=16)
    assert len(step(scheduler)) == 1 + is_admitted
    # Alone, a sequence may go below the watermark.
    alone = make(num_blocks=5, watermark_fraction=0.9)
    add(alone, 1, num_tokens=16)
    assert step(alone) == [(1, 16, True)]


def test_blocks_of_a_step_cover_its_tokens_and_no_more():
    scheduler = make(max_num_batched_tokens=6)
    add(scheduler, 1, num_tokens=13)
    held = []
    for _ in range(5):
        step(scheduler)
        held.append(int(scheduler.batch.num_blocks[0]))
    assert held == [2, 3, 4, 4, 4]  # 6, 12, 13, 14, 15 tokens of 4 a block


def test_the_latest_arrival_gives_its_blocks_to_the_earliest_and_computes_those_again_that_are_gone():
    scheduler = make(num_blocks=5)
    add(scheduler, 1, num_tokens=7)
    add(scheduler, 2, num_tokens=7)
    assert step(scheduler, 51) == [(1, 7, True), (2, 7, True)]  # 4 of 4 blocks
    assert step(scheduler, 52) == [(1, 1, True), (2, 1, True)]  # both blocks full
    assert scheduler.counters.num_free_blocks == 0
    assert step(scheduler, 53) == [(1, 1, True)]
    counters = scheduler.counters
    assert (counters.num_running, counters.num_preempted, counters.num_waiting) == (1, 1, 0)
    assert (counters.totals.num_preemptions, counters.totals.num_recomputed_tokens) == (1, 0)
    assert (counters.num_free_blocks, counters.num_waiting_tokens) == (1, 9)
    assert counters.num_evictable_blocks == 1  # the other of its two has been given to 1

    scheduler.cancel(1)
    plan = scheduler.plan(0)
    assert scheduled(scheduler, plan) == [(2, 5, True)]  # the second block, and one token more, in one chunk
    row = plan.rows[0]
    assert scheduler.batch.token_ids[row, :9].tolist() == [1, 2, 3, 4, 5, 6, 7, 51, 52]
    assert scheduler.batch.num_prompt_tokens[row] == 7
    commit(scheduler, plan, 53)
    assert scheduler.batch.token_ids[0, 9] == 53
    assert scheduler.counters.totals.num_recomputed_tokens == 4


def test_a_preempted_sequence_keeps_its_tokens_when_its_row_is_taken():
    scheduler = make(num_blocks=6, max_num_batched_tokens=32)
    add(scheduler, 1, num_tokens=4, max_tokens=1)
    add(scheduler, 2, num_tokens=8)
    add(scheduler, 3, num_tokens=7)
    step(scheduler, 51)  # 1 ends, and 3 moves to its row
    step(scheduler, 52)  # 2 takes the last block
    assert scheduler.batch.seq_ids[:2].tolist() == [3, 2]
    assert step(scheduler, 53) == [(2, 1, True)]  # 3 is preempted, and 2 moves to its row
    assert scheduler.snapshot().queue[0].token_ids == (1, 2, 3, 4, 5, 6, 7, 51, 52)


def test_a_preempted_sequence_keeps_its_place_before_later_arrivals():
    scheduler = make(num_blocks=5)
    add(scheduler, 1, num_tokens=8)
    add(scheduler, 2, num_tokens=8)
    step(scheduler)
    add(scheduler, 3, num_tokens=2)
    assert step(scheduler) == [(1, 1, True)]  # 2 gave way and 3 would fit, but nobody is admitted in the same step
    assert [queued.seq_id for queued in scheduler.snapshot().queue] == [2, 3]
    assert step(scheduler) == [(1, 1, True)]  # 2 does not fit, and 3 does not pass it


def test_max_tokens_counts_output_over_preemptions():
    scheduler = make(num_blocks=5)
    add(scheduler, 1, num_tokens=7, max_tokens=3)
    add(scheduler, 2, num_tokens=7, max_tokens=4)
    output: dict[int, list[FinishReason]] = {1: [], 2: []}
    while scheduler.has_work:
        for seq_id, reason in reasons(commit(scheduler, scheduler.plan(0))):
            output[seq_id].append(reason)
    assert output[1] == [FinishReason.NONE] * 2 + [FinishReason.LENGTH]
    assert output[2] == [FinishReason.NONE] * 3 + [FinishReason.LENGTH]
    assert scheduler.counters.totals.num_preemptions == 1


def test_a_sequence_that_fills_the_whole_buffer_alone_ends_as_unserviceable():
    scheduler = make(num_blocks=3)  # 8 tokens
    add(scheduler, 1, num_tokens=6)
    seen = [reasons(commit(scheduler, scheduler.plan(0))) for _ in range(3)]
    assert seen == [[(1, FinishReason.NONE)], [(1, FinishReason.NONE)], [(1, FinishReason.UNSERVICEABLE)]]
    assert (scheduler.has_work, scheduler.plan(0), scheduler.counters.num_free_blocks) == (False, None, 2)


def test_the_last_token_of_a_sequence_needs_no_slot():
    scheduler = make(num_blocks=3)
    add(scheduler, 1, num_tokens=8, max_tokens=1)
    assert reasons(commit(scheduler, scheduler.plan(0))) == [(1, FinishReason.LENGTH)]


def test_context_length_ends_a_sequence():
    scheduler = make(max_model_len=8)
    add(scheduler, 1, num_tokens=6)
    assert reasons(commit(scheduler, scheduler.plan(0))) == [(1, FinishReason.NONE)]
    assert reasons(commit(scheduler, scheduler.plan(0))) == [(1, FinishReason.LENGTH)]


@pytest.mark.parametrize(
    ("token_id", "sampling", "reason"),
    [
        (0, {}, FinishReason.STOP),
        (0, {"ignore_eos": True}, FinishReason.NONE),
        (0, {"ignore_eos": True, "stop_token_ids": (0,)}, FinishReason.STOP),
        (9, {"stop_token_ids": (8, 9)}, FinishReason.STOP),
        (7, {"stop_token_ids": (8, 9)}, FinishReason.NONE),
        (0, {"min_tokens": 1}, FinishReason.NONE),
        (9, {"min_tokens": 1, "stop_token_ids": (9,)}, FinishReason.NONE),
        (0, {"max_tokens": 1}, FinishReason.STOP),
        (1, {"max_tokens": 1}, FinishReason.LENGTH),
    ],
)
def test_why_the_first_token_ends_a_sequence(token_id: int, sampling: dict[str, int], reason: FinishReason):
    scheduler = make()
    add(scheduler, 1, num_tokens=2, **sampling)
    add(scheduler, 2, num_tokens=2, stop_token_ids=(60, 61, 62))  # a wider stop column changes nothing for the other
    assert reasons(commit(scheduler, scheduler.plan(0), token_id))[0] == (1, reason)


def test_a_stop_token_ends_a_sequence_once_min_tokens_came_before_it():
    scheduler = make()
    add(scheduler, 1, num_tokens=2, min_tokens=2)
    seen = [reasons(commit(scheduler, scheduler.plan(0), 0))[0][1] for _ in range(3)]
    assert seen == [FinishReason.NONE, FinishReason.NONE, FinishReason.STOP]


def test_delta_passes_tokens_and_logprobs_on_in_the_order_of_the_plan():
    scheduler = make()
    for seq_id in (1, 2, 3):
        add(scheduler, seq_id, num_tokens=2)
    step(scheduler)
    plan = scheduler.plan(0)
    logprobs = {index: TokenLogprobs(-float(index), np.zeros(0, np.int32), np.zeros(0, np.float32)) for index in (0, 2)}
    scheduler.cancel(1)
    delta = scheduler.commit(plan, StepResult(np.array([11, 12, 13], np.int32), logprobs))
    assert delta.seq_ids.tolist() == [2, 3]
    assert delta.token_ids.tolist() == [12, 13]
    assert {index: entry.chosen for index, entry in delta.logprobs.items()} == {1: -2.0}


def test_part_of_a_result_keeps_what_belongs_to_its_tokens():
    entries = {
        index: TokenLogprobs(-float(index), np.empty(0, np.int32), np.empty(0, np.float32)) for index in (0, 2, 3)
    }
    result = StepResult(np.array([10, 11, 12, 13], np.int32), entries, np.array([1, 2], np.int64))
    part = result.of(np.array([0, 2, 3]))
    assert ([10, 12, 13], [1]) == (part.token_ids.tolist(), part.failed.tolist())
    assert {0: 0.0, 1: -2.0, 2: -3.0} == {index: entry.chosen for index, entry in part.logprobs.items()}


def test_cancel_in_flight_frees_the_blocks_at_the_commit():
    scheduler = make()
    add(scheduler, 1, num_tokens=5)
    add(scheduler, 2, num_tokens=5)
    plan = scheduler.plan(0)
    assert scheduler.cancel(2)
    assert not scheduler.cancel(2)
    assert scheduler.counters.num_free_blocks == 96
    assert commit(scheduler, plan).seq_ids.tolist() == [1]
    assert scheduler.counters.num_free_blocks == 98
    assert step(scheduler) == [(1, 1, True)]


def test_cancel_of_a_waiting_or_running_sequence_is_immediate_and_idempotent():
    scheduler = make(max_num_seqs=1)
    add(scheduler, 1, num_tokens=5)
    add(scheduler, 2, num_tokens=5)
    step(scheduler)
    assert [scheduler.cancel(seq_id) for seq_id in (2, 2, 1, 1, 99)] == [True, False, True, False, False]
    counters = scheduler.counters
    assert (counters.num_free_blocks, counters.totals.num_finished, counters.num_waiting_tokens) == (100, 2, 0)
    assert not scheduler.has_work


def test_counters_stay_what_they_were_and_cannot_be_written():
    scheduler = make()
    before = scheduler.counters
    with pytest.raises(AttributeError):
        before.totals.num_submitted = 7  # type: ignore[misc]
    add(scheduler, 1, num_tokens=5)
    assert (before.totals.num_submitted, scheduler.counters.totals.num_submitted) == (0, 1)


def test_a_finish_and_a_cancel_of_the_same_sequence_count_once():
    scheduler = make()
    add(scheduler, 1, num_tokens=5, max_tokens=1)
    plan = scheduler.plan(0)
    scheduler.cancel(1)
    assert commit(scheduler, plan).seq_ids.tolist() == []
    assert (scheduler.counters.totals.num_finished, scheduler.counters.num_free_blocks) == (1, 100)


def test_abort_takes_back_admissions_growth_and_preemptions_bit_for_bit():
    scheduler = make(num_blocks=5)
    add(scheduler, 1, num_tokens=8)
    before = scheduler.snapshot()
    scheduler.abort(scheduler.plan(0))
    assert scheduler.snapshot() == before

    add(scheduler, 2, num_tokens=8)
    step(scheduler)
    before = scheduler.snapshot()
    columns = {
        name: np.copy(column) for name, column in vars(scheduler.batch).items() if isinstance(column, np.ndarray)
    }
    plan = scheduler.plan(0)
    assert scheduled(scheduler, plan) == [(1, 1, True)]  # 2 is preempted for it
    scheduler.abort(plan)
    assert scheduler.snapshot() == before
    for name, column in columns.items():
        assert np.array_equal(getattr(scheduler.batch, name), column), name
    assert scheduler.plan(0).step_id == plan.step_id


def test_cancel_in_flight_of_a_preempted_sequence_holds_over_an_abort():
    scheduler = make(num_blocks=5)
    add(scheduler, 1, num_tokens=8)
    add(scheduler, 2, num_tokens=8)
    step(scheduler)
    plan = scheduler.plan(0)
    assert scheduler.cancel(2)
    scheduler.abort(plan)
    assert scheduler.counters.num_free_blocks == 2
    assert step(scheduler) == [(1, 1, True)]
    assert scheduler.counters.totals.num_preemptions == 0


def test_cancels_in_flight_leave_an_aborted_step_as_if_there_had_been_none():
    cancelled_in_flight, cancelled_alone = make(max_num_seqs=5), make(max_num_seqs=5)
    for scheduler in (cancelled_in_flight, cancelled_alone):
        for seq_id in range(1, 6):
            add(scheduler, seq_id, num_tokens=3)
        step(scheduler)
    plan = cancelled_in_flight.plan(0)
    for scheduler in (cancelled_in_flight, cancelled_alone):
        for seq_id in (1, 2):
            scheduler.cancel(seq_id)
    assert plan is not None
    cancelled_in_flight.abort(plan)
    assert cancelled_in_flight.snapshot() == cancelled_alone.snapshot()
