"""What sequences find in the prefix cache, and what they leave there, step by step."""

import numpy as np
import pytest

from service.core.scheduler import Scheduler
from service.core.types import Request, SamplingParams, StepResult
from tests.unit.scheduler_steps import commit, make, scheduled, step


def add(scheduler: Scheduler, seq_id: int, prompt: list[int], tenant: str = "", max_tokens: int = 20) -> None:
    scheduler.add(Request(seq_id, np.array(prompt, np.int32), SamplingParams(max_tokens), tenant=tenant))


def fork(scheduler: Scheduler, seq_id: int, prompt: list[int], leader: int) -> None:
    tokens = np.array(prompt, np.int32)
    scheduler.add(Request(seq_id, tokens, SamplingParams(20, seed=seq_id), fork_of=leader))


def run_to_the_end(scheduler: Scheduler, seq_id: int, prompt: list[int], tenant: str = "") -> list[int]:
    """Run a sequence of ten output tokens alone, 100, 101, ... Returns all its tokens."""
    add(scheduler, seq_id, prompt, tenant, max_tokens=10)
    output = list(range(100, 110))
    tokens = iter(output)
    while scheduler.has_work:
        plan = scheduler.plan(0)
        assert plan is not None
        sampled = [next(tokens) for _ in range(int(np.count_nonzero(plan.samples)))]
        scheduler.commit(plan, StepResult(np.array(sampled, np.int32)))
    return prompt + output


PROMPT = list(range(1, 11))  # two full blocks of 4, and two tokens


def test_the_second_turn_of_a_conversation_computes_only_what_is_new():
    scheduler = make()
    first_turn = run_to_the_end(scheduler, 1, PROMPT)
    add(scheduler, 2, [*first_turn, 31, 32])  # 22 tokens; all but the last of 20 were computed: 4 full blocks
    plan = scheduler.plan(0)
    assert scheduled(scheduler, plan) == [(2, 6, True)]
    assert commit(scheduler, plan).cached_prompt_tokens == {2: 16}
    assert (scheduler.counters.totals.num_queried_tokens, scheduler.counters.totals.num_hit_tokens) == (32, 16)


def test_another_tenant_with_the_same_prompt_has_no_hit():
    scheduler = make()
    run_to_the_end(scheduler, 1, PROMPT, tenant="a")
    add(scheduler, 2, PROMPT, tenant="b")
    plan = scheduler.plan(0)
    assert scheduled(scheduler, plan) == [(2, 10, True)]
    assert commit(scheduler, plan).cached_prompt_tokens == {}


def test_a_prompt_that_fills_the_context_is_found_again():
    scheduler = make(max_num_batched_tokens=32)
    prompt = list(range(1, 32))  # with its one token of output, all blocks that a sequence can have
    add(scheduler, 1, prompt, max_tokens=1)
    assert step(scheduler) == [(1, 31, True)]
    add(scheduler, 2, prompt, max_tokens=1)
    assert step(scheduler) == [(2, 3, True)]


def test_a_hit_leaves_the_last_token_to_compute():
    scheduler = make()
    run_to_the_end(scheduler, 1, PROMPT[:8])
    add(scheduler, 2, PROMPT[:8])
    assert step(scheduler) == [(2, 4, True)]  # the second block would leave nothing
    scheduler.cancel(2)
    add(scheduler, 3, PROMPT[:9])
    assert step(scheduler) == [(3, 1, True)]


@pytest.mark.parametrize(("is_in_flight", "rest"), [(False, (2, 5, False)), (True, (2, 4, True))])
def test_full_blocks_of_a_prompt_that_is_cancelled_halfway_are_found(is_in_flight, rest):
    """Of 12 tokens in chunks of 5, one chunk fills a block, two fill two."""
    scheduler = make(max_num_batched_tokens=5)
    prompt = list(range(1, 13))
    add(scheduler, 1, prompt)
    assert step(scheduler) == [(1, 5, False)]
    plan = scheduler.plan(0) if is_in_flight else None
    assert scheduler.cancel(1)
    if plan is not None:
        commit(scheduler, plan)
    add(scheduler, 2, prompt)
    assert step(scheduler) == [rest]


def test_a_prompt_is_shared_as_soon_as_it_is_computed():
    scheduler = make(max_num_batched_tokens=8)
    add(scheduler, 1, PROMPT)
    assert step(scheduler) == [(1, 8, False)]
    add(scheduler, 2, PROMPT)
    assert step(scheduler) == [(1, 2, True), (2, 2, True)]
    table = scheduler.batch.block_table
    assert table[0, :2].tolist() == table[1, :2].tolist()
    assert table[0, 2] != table[1, 2]


def test_a_prompt_that_two_compute_at_once_is_kept_once():
    scheduler = make(max_num_batched_tokens=32)
    add(scheduler, 1, PROMPT)
    add(scheduler, 2, PROMPT)
    assert step(scheduler) == [(1, 10, True), (2, 10, True)]
    table = scheduler.batch.block_table
    assert table[0, :2].tolist() == table[1, :2].tolist()
    assert scheduler.counters.num_free_blocks == 100 - 4


def test_a_sequence_that_lacks_blocks_is_looked_up_once_while_nothing_changes():
    scheduler = make(num_blocks=9, max_model_len=64, max_num_batched_tokens=64)
    prompt = np.arange(12, dtype=np.int32)
    scheduler.add(Request(1, prompt, SamplingParams(20)))
    step(scheduler)
    scheduler.add(Request(2, np.concatenate([prompt, np.full(20, 7, np.int32)]), SamplingParams(4)))
    step(scheduler)
    waiting = scheduler._live.by_id[2]
    first = waiting.match
    assert first.blocks.tolist() == scheduler.batch.block_table[0, :3].tolist()
    step(scheduler)
    assert waiting.match is first
    scheduler.cancel(1)
    assert step(scheduler) == [(2, 20, True)]


def test_a_preempted_sequence_resumes_with_its_cached_prefix():
    scheduler = make(num_blocks=7)
    add(scheduler, 1, PROMPT[:8], max_tokens=5)
    add(scheduler, 2, [21, 22, 23, 24, 25, 26, 27])
    step(scheduler)
    seen = [step(scheduler) for _ in range(4)]
    assert seen[-1] == [(1, 1, True), (2, 1, True)]
    assert (scheduler.counters.num_running, scheduler.counters.totals.num_preemptions) == (1, 0)
    add(scheduler, 3, list(range(41, 53)))  # takes what is left
    seen = [step(scheduler) for _ in range(3)]
    assert scheduler.counters.totals.num_preemptions == 1
    scheduler.cancel(2)
    plan = scheduler.plan(0)
    (seq_id, num_scheduled, _), *_ = scheduled(scheduler, plan)
    assert (seq_id, num_scheduled) == (3, scheduler.batch.num_tokens[plan.rows[0]] - 8)


def test_the_prompt_of_a_resumed_sequence_is_shared_as_soon_as_it_is_computed_again():
    """Both grow to 4 of 8 blocks; the first then takes all 4 of the second, which comes back with 17 known tokens."""
    scheduler = make(num_blocks=9, max_num_batched_tokens=32)
    prompt = list(range(21, 29))
    add(scheduler, 1, PROMPT[:8], max_tokens=24)
    add(scheduler, 2, prompt, max_tokens=24)
    for _ in range(24):
        step(scheduler)
    assert (scheduler.counters.num_running, scheduler.counters.num_preempted) == (0, 1)
    assert step(scheduler) == [(2, 17, True)]
    add(scheduler, 3, [*prompt, 31, 32])
    assert step(scheduler) == [(2, 1, True), (3, 2, True)]


def test_without_the_cache_nothing_is_found_and_nothing_kept():
    scheduler = make(prefix_cache=False)
    run_to_the_end(scheduler, 1, PROMPT)
    add(scheduler, 2, PROMPT)
    assert step(scheduler) == [(2, 10, True)]
    assert (scheduler.counters.num_evictable_blocks, scheduler.counters.totals.num_hit_tokens) == (0, 0)


def test_what_a_failed_sequence_decoded_is_not_kept():
    scheduler = make()
    add(scheduler, 1, PROMPT[:3])
    for _ in range(4):
        step(scheduler)
    plan = scheduler.plan(0)
    scheduler.commit(plan, StepResult(np.array([50], np.int32), failed=np.array([0])))
    assert scheduler.counters.num_evictable_blocks == 0


def test_a_prompt_whose_step_failed_is_not_kept():
    scheduler = make()
    add(scheduler, 1, PROMPT)
    plan = scheduler.plan(0)
    scheduler.commit(plan, StepResult(np.array([50], np.int32), failed=np.array([0])))
    assert scheduler.counters.num_evictable_blocks == 0


def test_samples_compute_their_prompt_once_and_share_its_full_blocks():
    scheduler = make(max_num_seqs=4)
    add(scheduler, 1, PROMPT)
    fork(scheduler, 2, PROMPT, leader=1)
    fork(scheduler, 3, PROMPT, leader=1)
    assert step(scheduler) == [(1, 10, True)]
    plan = scheduler.plan(0)
    assert sorted(scheduled(scheduler, plan)) == [(1, 1, True), (2, 1, True), (3, 1, True)]
    batch = scheduler.batch
    tables = {int(batch.seq_ids[row]): batch.block_table[row, :3].tolist() for row in range(3)}
    assert tables[1][:2] == tables[2][:2] == tables[3][:2]
    assert plan.block_copies.tolist() == [[tables[1][2], tables[2][2]], [tables[1][2], tables[3][2]]]
    assert commit(scheduler, plan).cached_prompt_tokens == {2: 9, 3: 9}
    assert scheduler.counters.num_free_blocks == 100 - 5


def test_a_prompt_that_ends_with_a_block_is_shared_but_for_that_block():
    scheduler = make()
    add(scheduler, 1, PROMPT[:8])
    fork(scheduler, 2, PROMPT[:8], leader=1)
    step(scheduler)
    plan = scheduler.plan(0)
    assert sorted(scheduled(scheduler, plan)) == [(1, 1, True), (2, 1, True)]
    batch = scheduler.batch
    tables = {int(batch.seq_ids[row]): batch.block_table[row, :2].tolist() for row in range(2)}
    assert plan.block_copies.tolist() == [[tables[1][1], tables[2][1]]]


def test_samples_share_their_prompt_without_the_cache_too():
    scheduler = make(prefix_cache=False)
    add(scheduler, 1, PROMPT)
    fork(scheduler, 2, PROMPT, leader=1)
    step(scheduler)
    assert sorted(step(scheduler)) == [(1, 1, True), (2, 1, True)]
    scheduler.cancel(1)
    scheduler.cancel(2)
    assert scheduler.counters.num_free_blocks == 100


def test_a_sample_whose_first_has_ended_computes_the_prompt_itself():
    scheduler = make(prefix_cache=False)
    add(scheduler, 1, PROMPT)
    fork(scheduler, 2, PROMPT, leader=1)
    assert scheduler.counters.num_waiting == 2
    scheduler.cancel(1)
    assert step(scheduler) == [(2, 10, True)]


def test_a_waiting_sample_can_be_cancelled():
    scheduler = make()
    add(scheduler, 1, PROMPT)
    fork(scheduler, 2, PROMPT, leader=1)
    assert [scheduler.cancel(2), scheduler.cancel(2)] == [True, False]
    step(scheduler)
    assert step(scheduler) == [(1, 1, True)]


def test_an_abort_of_a_step_that_may_have_written_gives_up_what_it_overwrote():
    scheduler = make(num_blocks=7)
    first = run_to_the_end(scheduler, 1, PROMPT)  # 4 full blocks, 2 blank
    add(scheduler, 2, [51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62])  # takes these, and evicts one
    plan = scheduler.plan(0)
    assert plan is not None
    scheduler.abort(plan, has_written=True)
    assert (scheduler.counters.num_evictable_blocks, scheduler.counters.num_free_blocks) == (3, 6)
    scheduler.cancel(2)
    add(scheduler, 3, first)
    assert step(scheduler) == [(3, 8, True)]
    for _ in range(3):
        scheduler.cancel(3)
    assert scheduler.counters.num_free_blocks == 6


def test_ten_thousand_random_cancels_leave_every_block_free_or_cached():
    rng = np.random.default_rng(3)
    scheduler = make(num_blocks=64, max_num_seqs=16, max_num_batched_tokens=64)
    live: list[int] = []
    num_cancelled = seq_id = 0
    while num_cancelled < 10_000:
        while len(live) < 24:
            seq_id += 1
            prompt = [*range(1, int(rng.integers(2, 12))), *rng.integers(1, 50, rng.integers(1, 8)).tolist()]
            leader = int(rng.choice(live)) if live and rng.random() < 0.2 else None
            tokens = np.array(prompt, np.int32)
            sampling = SamplingParams(int(rng.integers(1, 12)), seed=seq_id)
            scheduler.add(Request(seq_id, tokens, sampling, tenant="ab"[seq_id % 2]))
            live.append(seq_id)
            if leader is not None:
                seq_id += 1
                scheduler.add(Request(seq_id, tokens, sampling, tenant="ab"[(seq_id - 1) % 2], fork_of=seq_id - 1))
                live.append(seq_id)
        plan = scheduler.plan(0)
        assert plan is not None
        victims = rng.choice(live, 6, replace=False).tolist()
        for victim in victims[:3]:
            num_cancelled += scheduler.cancel(victim)
        delta = scheduler.commit(plan, StepResult(rng.integers(1, 50, np.count_nonzero(plan.samples), np.int32)))
        for victim in victims[3:]:
            num_cancelled += scheduler.cancel(victim)
        ended = {*victims, *delta.seq_ids[delta.finish_reasons != 0].tolist()}
        live = [seq_id for seq_id in live if seq_id not in ended]
    for victim in live:
        scheduler.cancel(victim)
    counters, snapshot = scheduler.counters, scheduler.snapshot()
    assert not scheduler.has_work
    assert len(snapshot.blank_blocks) + len(snapshot.cached_blocks) == counters.num_blocks - 1
    assert len(snapshot.cached_blocks) == counters.num_evictable_blocks > 0
    assert set(snapshot.ref_counts) == {0}
    assert counters.totals.num_hit_tokens > 10_000


def test_less_than_four_per_cent_of_the_allocated_tokens_are_never_used():
    """Ragged lengths: allocated KV positions that hold no token, over all steps of a loaded batch."""
    rng = np.random.default_rng(7)
    scheduler = make(num_blocks=4001, block_size=16, max_num_seqs=64, max_num_batched_tokens=256, max_model_len=2048)
    for seq_id in range(1, 257):
        prompt = rng.integers(1, 1000, int(rng.integers(100, 700))).tolist()
        scheduler.add(
            Request(seq_id, np.array(prompt, np.int32), SamplingParams(int(rng.integers(20, 500))), tenant=str(seq_id))
        )
    num_allocated = num_used = 0
    while scheduler.counters.num_waiting:
        step(scheduler)
        batch = scheduler.batch
        num_allocated += int(batch.num_blocks[: batch.num_rows].sum()) * 16
        num_used += int(batch.num_computed_tokens[: batch.num_rows].sum())
    waste = 1 - num_used / num_allocated
    print(f"KV waste {waste:.2%}")
    assert waste < 0.04


def test_a_block_that_the_prompts_last_token_fills_alone_is_shared_at_once():
    scheduler = make(max_num_batched_tokens=7)
    add(scheduler, 1, PROMPT[:8])
    assert step(scheduler) == [(1, 7, False)]
    assert step(scheduler) == [(1, 1, True)]
    add(scheduler, 2, PROMPT[:9])
    assert step(scheduler) == [(1, 1, True), (2, 1, True)]
