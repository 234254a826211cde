"""Batches that start and end together."""

import numpy as np
import pytest

from service.core.scheduler import Scheduler
from service.core.scheduler_config import OrderingConfig
from service.core.types import FinishReason, Request, SamplingParams, StepResult
from service.errors import ConfigError
from tests.unit.scheduler_steps import add, commit, make, reasons, scheduled, step

MS = 1_000_000


def make_batches(batching: str = "static", **changes: object) -> Scheduler:
    return make(batching=batching, prefix_cache=False, **changes)


def test_who_comes_while_a_batch_runs_waits_for_its_end():
    scheduler = make_batches(max_num_seqs=2)
    add(scheduler, 1, num_tokens=3, max_tokens=3)
    assert step(scheduler) == [(1, 3, True)]
    add(scheduler, 2, num_tokens=2, max_tokens=2)
    assert step(scheduler) == [(1, 1, True)]
    assert step(scheduler) == [(1, 1, True)]
    assert step(scheduler) == [(2, 2, True)]


def test_a_finished_row_computes_on_and_says_nothing_until_the_last_one_ends():
    scheduler = make_batches()
    add(scheduler, 1, num_tokens=3, max_tokens=1)
    add(scheduler, 2, num_tokens=4, max_tokens=4)
    assert reasons(commit(scheduler, scheduler.plan(0))) == [(1, FinishReason.LENGTH), (2, FinishReason.NONE)]
    for last in (FinishReason.NONE, FinishReason.NONE, FinishReason.LENGTH):
        plan = scheduler.plan(0)
        assert scheduled(scheduler, plan) == [(1, 1, True), (2, 1, True)]
        assert scheduler.counters.num_running == 2
        delta = scheduler.commit(plan, StepResult(np.array([8, 9], np.int32)))
        assert (delta.token_ids.tolist(), reasons(delta)) == ([9], [(2, last)])
    counters = scheduler.counters
    assert (scheduler.has_work, counters.totals.num_finished, counters.num_free_blocks) == (
        False,
        2,
        counters.num_blocks - 1,
    )


@pytest.mark.parametrize("batching", ["static", "dynamic"])
@pytest.mark.parametrize(("max_tokens", "num_steps"), [((2, 3, 3), 3), ((2, 3, 9), 9)])
def test_a_cancel_in_the_step_that_ends_a_row_neither_holds_up_the_batch_nor_shortens_it(
    max_tokens: tuple[int, ...], num_steps: int, batching: str
):
    scheduler = make_batches(batching)
    for seq_id, num_tokens in enumerate(max_tokens, start=1):
        add(scheduler, seq_id, 3, num_tokens)
    step(scheduler)
    plan = scheduler.plan(0)
    assert scheduler.cancel(1)
    assert [2, 3] == commit(scheduler, plan).seq_ids.tolist()
    add(scheduler, 4, 3, max_tokens=1)
    batches = [sorted(seq_id for seq_id, _, _ in step(scheduler)) for _ in range(num_steps - 1)]
    assert [[2, 3]] * (num_steps - 2) + [[4]] == batches
    assert not scheduler.has_work


def test_a_row_that_filled_the_context_writes_nowhere_else():
    scheduler = make_batches(max_model_len=8)
    add(scheduler, 1, num_tokens=7)
    add(scheduler, 2, num_tokens=2, max_tokens=6)
    first_tokens = set()
    for _ in range(5):
        step(scheduler)
        first_tokens |= {row.token_ids[:2] for row in scheduler.snapshot().rows if row.seq_id == 2}
    assert len(first_tokens) == 1
    step(scheduler)
    assert not scheduler.has_work


def test_memory_is_set_aside_for_the_longest_answers():
    scheduler = make_batches(num_blocks=11, max_num_seqs=4)  # 10 blocks of 4
    for seq_id in (1, 2, 3):
        add(scheduler, seq_id, num_tokens=4, max_tokens=12)  # 4 blocks each
    assert [seq_id for seq_id, _, _ in step(scheduler)] == [1, 2]


def test_a_batch_is_formed_when_full_or_when_its_first_request_has_waited_for_the_window():
    scheduler = make_batches("dynamic", batch_window_ns=10 * MS, max_num_seqs=2)
    ask = SamplingParams(1)
    scheduler.add(Request(1, np.arange(3, dtype=np.int32), ask, arrival_ns=5 * MS))
    assert (scheduler.plan(15 * MS - 1), scheduler.not_before_ns) == (None, 15 * MS)
    plan = scheduler.plan(15 * MS)
    assert scheduled(scheduler, plan) == [(1, 3, True)]
    commit(scheduler, plan)
    assert scheduler.not_before_ns == 0
    for seq_id in (2, 3):
        scheduler.add(Request(seq_id, np.arange(3, dtype=np.int32), ask, arrival_ns=20 * MS))
    assert scheduled(scheduler, scheduler.plan(20 * MS)) == [(2, 3, True), (3, 3, True)]


def test_a_window_runs_from_the_oldest_arrival_whoever_goes_first():
    scheduler = make_batches("dynamic", batch_window_ns=10 * MS, ordering=OrderingConfig("priority"))
    for seq_id, arrival_ms in ((1, 5), (2, 9), (3, 13)):  # each goes before the one that came earlier
        prompt = np.arange(3, dtype=np.int32)
        scheduler.add(Request(seq_id, prompt, SamplingParams(1), arrival_ns=arrival_ms * MS, priority=seq_id))
        assert scheduler.not_before_ns == 15 * MS


def test_a_window_ends_before_the_longest_wait():
    make_batches("dynamic", batch_window_ns=10 * MS, max_queue_wait_ns=10 * MS + 1)
    with pytest.raises(ConfigError, match="must be above batch_window_ns, 10000000"):
        make_batches("dynamic", batch_window_ns=10 * MS, max_queue_wait_ns=10 * MS)


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_a_cancelled_row_leaves_at_once_and_the_batch_ends_without_it(batching: str):
    scheduler = make_batches(batching)
    add(scheduler, 1, num_tokens=3, max_tokens=1)
    add(scheduler, 2, num_tokens=3, max_tokens=9)
    step(scheduler)
    scheduler.cancel(2)
    assert step(scheduler) == [(1, 1, True)]
    assert not scheduler.has_work


def test_abort_takes_a_whole_batch_back():
    scheduler = make_batches()
    add(scheduler, 1, num_tokens=3, max_tokens=1)
    add(scheduler, 2, num_tokens=4, max_tokens=4)
    for _ in range(3):
        before = scheduler.snapshot()
        scheduler.abort(scheduler.plan(0))
        assert scheduler.snapshot() == before
        step(scheduler)


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_a_prefix_cache_is_refused(batching: str):
    with pytest.raises(ConfigError, match=f"prefix_cache is on, but must be off with {batching} batching"):
        make(batching=batching)
