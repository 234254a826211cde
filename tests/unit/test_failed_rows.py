"""What is left in the prefix cache of a sequence that failed, and of those that share blocks with it."""

import numpy as np
import pytest

from service.core.batch_state import NEVER_RESUMED, BatchState
from service.core.block_pool import BlockPool
from service.core.invariants import violations
from service.core.plan import StepPlan
from service.core.prefixes import Prefixes
from service.core.scheduler import Scheduler
from service.core.types import Request, SamplingParams, StepDelta, StepResult
from tests.unit.scheduler_steps import ROOMY, commit, make, scheduled, step

PROMPT = list(range(1, 13))  # three full blocks of 4


def add(scheduler: Scheduler, seq_id: int, prompt: list[int], max_tokens: int = 20) -> None:
    scheduler.add(Request(seq_id, np.array(prompt, np.int32), SamplingParams(max_tokens)))


def fail(scheduler: Scheduler, *seq_ids: int, plan: StepPlan | None = None) -> StepDelta:
    """A step in which these sequences have nothing to sample from."""
    plan = plan or scheduler.plan(0)
    assert plan is not None
    sampling = scheduler.batch.seq_ids[plan.rows[plan.samples]]
    assert set(seq_ids) <= set(sampling.tolist())
    failed = np.flatnonzero(np.isin(sampling, seq_ids))
    delta = scheduler.commit(plan, StepResult(np.full(len(sampling), 50, np.int32), failed=failed))
    assert violations(scheduler.snapshot()) == []
    return delta


def num_cached_blocks(scheduler: Scheduler) -> int:
    return len(scheduler.snapshot().cached_blocks)


def test_what_a_failed_sequence_computed_in_earlier_steps_is_not_kept():
    scheduler = make(max_num_batched_tokens=8)
    add(scheduler, 1, PROMPT)
    assert step(scheduler) == [(1, 8, False)]
    assert num_cached_blocks(scheduler) == 2
    fail(scheduler, 1)
    assert num_cached_blocks(scheduler) == 0
    assert scheduler.counters.num_free_blocks == 100
    add(scheduler, 2, PROMPT)
    assert step(scheduler) == [(2, 8, False)]


def test_what_a_failed_sequence_decoded_over_goes_with_it():
    scheduler = make()
    add(scheduler, 1, PROMPT)
    for _ in range(6):
        step(scheduler)
    fail(scheduler, 1)
    assert num_cached_blocks(scheduler) == 0


def test_what_a_failed_sequence_found_goes_with_all_that_was_computed_behind_it():
    scheduler = make(max_num_batched_tokens=32)
    for seq_id, ending in ((1, list(range(21, 38))), (2, [41, 42, 43, 44, 45])):
        add(scheduler, seq_id, PROMPT[:8] + ending, max_tokens=1)
        step(scheduler)
    add(scheduler, 3, [51, 52, 53, 54, 55], max_tokens=1)
    step(scheduler)
    assert num_cached_blocks(scheduler) == 2 + 4 + 1 + 1
    add(scheduler, 4, PROMPT)
    assert fail(scheduler, 4).cached_prompt_tokens == {4: 8}
    assert num_cached_blocks(scheduler) == 1
    assert scheduler.counters.num_evictable_blocks == 1


def test_blocks_that_another_sequence_has_sampled_with_are_kept():
    scheduler = make(max_num_batched_tokens=9)
    add(scheduler, 1, PROMPT[:8])
    step(scheduler)
    add(scheduler, 2, [*PROMPT, 21])  # two blocks of the first one, one of its own, and the last token
    add(scheduler, 3, PROMPT[:8] + list(range(31, 47)))  # begins with blocks that are right, and goes on
    assert step(scheduler) == [(1, 1, True), (2, 5, True), (3, 3, False)]
    fail(scheduler, 2)
    assert scheduler.batch.num_computed_tokens[:2].tolist() == [8 + 2, 8 + 3 + 7]
    assert num_cached_blocks(scheduler) == 2 + 2


def test_who_has_begun_with_blocks_of_a_failed_sequence_begins_anew():
    scheduler = make(max_num_batched_tokens=8)
    add(scheduler, 1, PROMPT)
    assert step(scheduler) == [(1, 8, False)]
    add(scheduler, 2, [*PROMPT, 21, 22, 23, 24])
    plan = scheduler.plan(0)
    assert scheduled(scheduler, plan) == [(1, 4, True), (2, 4, False)]
    fail(scheduler, 1, plan=plan)
    assert num_cached_blocks(scheduler) == 0
    counters = scheduler.counters
    assert (counters.num_running, counters.num_preempted, counters.num_free_blocks) == (0, 1, 100)
    assert [step(scheduler) for _ in range(2)] == [[(2, 8, False)], [(2, 8, True)]]
    assert num_cached_blocks(scheduler) == 4


@pytest.mark.parametrize(
    ("num_tokens", "num_resumed_tokens", "doubtful"),
    [(6, NEVER_RESUMED, ([5], [1])), (7, NEVER_RESUMED, ([], [])), (6, 6, ([], [])), (10, 9, ([], []))],
)
def test_only_a_sequence_that_neither_has_sampled_nor_come_back_begins_anew(num_tokens, num_resumed_tokens, doubtful):
    batch = BatchState(ROOMY.max_num_seqs, ROOMY.max_model_len, ROOMY.block_size)
    for seq_id in (1, 2):
        request = Request(seq_id, np.array(PROMPT[:6], np.int32), SamplingParams(20))
        row = batch.add_row(request, np.array(PROMPT[:num_tokens], np.int32))
        batch.block_table[row, 0] = 5
        batch.num_blocks[row] = batch.num_published_blocks[row] = 1
    batch.num_resumed_tokens[1] = num_resumed_tokens
    prefixes = Prefixes(ROOMY, batch, BlockPool(ROOMY.num_blocks), {})
    blocks, rows = prefixes.doubtful(np.array([0], np.int32), np.array([1], np.int32))
    assert (blocks.tolist(), rows.tolist()) == doubtful


def test_a_failure_waits_for_the_step_ahead_and_its_samples():
    """The second one samples in the step that was planned ahead, before anything is dropped: its blocks are right."""
    scheduler = make(max_num_batched_tokens=8)
    add(scheduler, 1, PROMPT)
    step(scheduler)
    add(scheduler, 2, [*PROMPT[:8], 21, 22, 23, 24, 25])
    landing = scheduler.plan(0)
    assert scheduled(scheduler, landing) == [(1, 4, True), (2, 4, False)]
    ahead = scheduler.plan_ahead(0)
    assert scheduled(scheduler, ahead) == [(1, 1, True), (2, 1, True)]
    fail(scheduler, 1, plan=landing)
    assert commit(scheduler, ahead).seq_ids.tolist() == [2]
    assert scheduler.counters.num_running == 1
    assert num_cached_blocks(scheduler) == 3


def test_host_memory_gives_up_its_copies_too():
    scheduler = make(num_blocks=5, num_host_blocks=8)
    add(scheduler, 1, PROMPT, max_tokens=1)
    step(scheduler)
    add(scheduler, 2, list(range(21, 37)), max_tokens=1)  # takes all blocks
    step(scheduler)
    assert scheduler.counters.num_host_blocks == 3
    add(scheduler, 3, [*PROMPT, 41])
    assert fail(scheduler, 3).cached_prompt_tokens == {3: 12}
    assert scheduler.counters.num_host_blocks == 4  # of the second one's
    add(scheduler, 4, [*PROMPT, 41])
    assert step(scheduler) == [(4, 13, True)]
