"""Who is preempted, and when it comes back."""

import numpy as np
import pytest

from service.core.batch_state import NEVER_RESUMED, BatchState
from service.core.block_pool import BlockPool
from service.core.ordering import FirstComeFirstServed
from service.core.preemption import SETTLING_TOKENS, choose_victim, settling_blocks
from service.core.scheduler import Scheduler
from service.core.types import Request, SamplingParams
from tests.unit.scheduler_steps import add, make, step

BLOCK_SIZE = 4


class Rows:
    """Running rows, made by hand: the first has the lowest rank."""

    def __init__(self, *held: tuple[int, int]) -> None:
        """`held` are (computed tokens, blocks) of each."""
        self.batch, self.pool = BatchState(16, 64, BLOCK_SIZE), BlockPool(200)
        for rank, (num_computed_tokens, num_blocks) in enumerate(held):
            tokens = np.zeros(num_computed_tokens + 1, np.int32)
            row = self.batch.add_row(Request(rank, tokens, SamplingParams(9)), tokens, rank)
            self.batch.num_computed_tokens[row] = num_computed_tokens
            self.batch.num_blocks[row] = num_blocks
            self.batch.block_table[row, :num_blocks] = self.pool.take(num_blocks)

    def victim(self, num_missing: int = 1) -> int:
        may_lose = np.ones(self.batch.num_rows, np.bool_)
        return choose_victim(self.batch, self.pool, FirstComeFirstServed(), may_lose, num_missing)


def test_of_few_rows_the_last_one_is_taken_whatever_it_costs():
    assert Rows((4, 1), (4, 1), (40, 10)).victim() == 2


def test_of_the_last_quarter_the_cheapest_one_is_taken():
    rows = Rows((1, 1), *[(8, 2)] * 9, (12, 3), (6, 2), (20, 5))  # 12 behind the first: the last 3 come into question
    assert rows.victim(num_missing=1) == 11  # 6 tokens for one block
    assert rows.victim(num_missing=4) == 11  # 6 for two, 12 for three, 20 for four


def test_more_blocks_count_only_as_far_as_they_are_missing():
    rows = Rows((1, 1), *[(8, 2)] * 9, (8, 2), (7, 2), (9, 3))
    assert rows.victim(num_missing=2) == 11  # 8, 7 and 9 tokens for two blocks
    assert rows.victim(num_missing=3) == 12  # 4, 3.5 and 3 tokens a block


def test_a_block_that_others_hold_too_frees_nothing():
    rows = Rows((1, 1), *[(8, 2)] * 9, (12, 3), (6, 2), (20, 5))
    shared = rows.batch.block_table[11, :2]
    rows.batch.block_table[1, :2] = shared
    rows.pool.hold(shared)
    assert rows.victim() == 10


def test_the_first_row_is_never_taken():
    rows = Rows((4, 1), (4, 1))
    rows.batch.num_resumed_tokens[1] = 5
    assert rows.victim() == 1


@pytest.mark.parametrize(("num_generated", "victim"), [(SETTLING_TOKENS - 1, 1), (SETTLING_TOKENS, 2)])
def test_a_row_that_has_just_come_back_is_not_the_next_victim(num_generated: int, victim: int):
    rows = Rows((4, 1), (30, 8), (30, 8))
    rows.batch.num_resumed_tokens[2] = rows.batch.num_tokens[2] - num_generated
    assert rows.victim() == victim
    assert rows.batch.num_resumed_tokens[1] == NEVER_RESUMED


def test_blocks_to_settle_are_those_of_all_that_run_and_one_more():
    assert settling_blocks(2, BLOCK_SIZE) == 3 * SETTLING_TOKENS // BLOCK_SIZE


@pytest.mark.parametrize(("num_freed", "comes_back"), [(9, False), (10, True)])
def test_a_preempted_sequence_comes_back_with_room_to_grow(num_freed: int, comes_back: bool):
    """It needs 6 blocks and 8 for two sequences to settle; what ends leaves 5 + `num_freed` - 1."""
    limits = {"max_model_len": 128, "max_num_batched_tokens": 128, "prefix_cache": False}
    scheduler = make(num_blocks=1 + 1 + 5 + num_freed, **limits)
    add(scheduler, 1, num_tokens=4)
    add(scheduler, 2, num_tokens=4 * num_freed)
    add(scheduler, 3, num_tokens=20)
    step(scheduler)
    assert step(scheduler) == [(1, 1, True), (2, 1, True)]
    assert scheduler.counters.num_preempted == 1
    scheduler.cancel(2)
    assert step(scheduler) == [(1, 1, True)] + [(3, 21, True)] * comes_back


def preempted_head() -> Scheduler:
    """Of two rows that run, and a preempted sequence of 25 blocks that 23 are free for."""
    limits = {"max_num_seqs": 8, "max_model_len": 128, "max_num_batched_tokens": 256, "prefix_cache": False}
    scheduler = make(num_blocks=1 + 1 + 10 + 25, watermark_fraction=0.0, **limits)
    for seq_id, num_tokens in ((1, 4), (2, 40), (3, 100)):
        add(scheduler, seq_id, num_tokens=num_tokens)
    step(scheduler)
    assert step(scheduler) == [(1, 1, True), (2, 1, True)]
    assert (scheduler.counters.num_preempted, scheduler.counters.num_free_blocks) == (1, 23)
    return scheduler


def test_a_preempted_head_is_passed_by_those_that_leave_it_room_to_settle():
    """Of 36 blocks it needs 25, and 8 to settle with one that passes, 12 with two."""
    scheduler = preempted_head()
    for seq_id in (4, 5, 6):
        add(scheduler, seq_id, num_tokens=4, max_tokens=1)
    assert step(scheduler) == [(1, 1, True), (2, 1, True), (4, 4, True), (5, 4, True), (6, 4, True)]
    assert [(queued.seq_id, queued.num_skips) for queued in scheduler.snapshot().queue] == [(3, 2)]


@pytest.mark.parametrize(("num_tokens", "passes"), [(44, True), (45, False)])
def test_who_passes_a_preempted_one_leaves_blocks_to_settle(num_tokens: int, passes: bool):
    """Of 23 free blocks 12 are for three sequences to settle."""
    scheduler = preempted_head()
    add(scheduler, 4, num_tokens=num_tokens)
    assert step(scheduler) == [(1, 1, True), (2, 1, True)] + [(4, 44, True)] * passes


def test_sequences_that_outgrow_the_buffer_together_are_seldom_preempted():
    """8 x 17 blocks are asked of 32. Without hysteresis it is 12 preemptions and 347 tokens."""
    scheduler = make(num_blocks=33, max_model_len=128, max_num_batched_tokens=256, max_num_seqs=8, prefix_cache=False)
    for seq_id in range(8):
        add(scheduler, seq_id, num_tokens=8, max_tokens=60)
    while scheduler.has_work:
        step(scheduler)
    counters = scheduler.counters
    assert counters.totals.num_preemptions <= 8
    assert counters.totals.num_recomputed_tokens <= 250
