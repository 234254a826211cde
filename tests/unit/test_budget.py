"""How many prompt tokens a step takes, and whose."""

import numpy as np
import pytest

from service.core.chunks import Chunks
from service.core.plan import StepPlan
from service.core.scheduler import Scheduler
from service.core.scheduler_config import OrderingConfig
from service.core.step_time import load_of
from service.core.types import Request, SamplingParams
from tests.unit.scheduler_steps import add, commit, make, scheduled, step

MS = 1_000_000
PRICES_MS = np.array([4.0, 0.05, 0.1, 0.0001, 0.00002])  # step, prefill token, decode row, context token, pair


class Timed:
    """A scheduler whose steps take what the prices say."""

    def __init__(self, **changes: object) -> None:
        limits = {"num_blocks": 4001, "max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 8192}
        self.scheduler: Scheduler = make(**limits | changes)
        self.now_ns = 0
        self.step_ms = 0.0

    def step(self) -> StepPlan:
        plan = self.scheduler.plan(self.now_ns)
        assert plan is not None
        copying_ms = (len(plan.offload) + len(plan.restore)) * self.scheduler.config.host_block_ns / MS
        self.step_ms = float(load_of(plan, self.scheduler.batch).terms() @ PRICES_MS) + copying_ms
        commit(self.scheduler, plan)
        self.now_ns += round(self.step_ms * MS)
        return plan

    def chunk(self) -> int:
        plan = self.step()
        return plan.num_tokens - plan.num_decode_rows


def decoding(**changes: object) -> Timed:
    """Four streams that have decoded for a while."""
    timed = Timed(**changes)
    for seq_id in range(4):
        add(timed.scheduler, seq_id, num_tokens=20 + seq_id, max_tokens=5000)
    for _ in range(50):
        timed.step()
    return timed


def test_a_long_prompt_stays_within_the_target_and_uses_it():
    timed = decoding(target_itl_ns=12 * MS)
    add(timed.scheduler, 9, num_tokens=4000)
    steps_ms = []
    while timed.scheduler.batch.num_decode_rows < 5:
        chunk = timed.chunk()
        steps_ms.append(timed.step_ms)
    assert chunk > 0
    assert max(steps_ms) <= 1.02 * 12.0
    assert max(steps_ms[3:]) <= 12.0
    assert np.mean(steps_ms[20:-1]) >= 11.0


def test_restored_blocks_take_of_the_time_that_the_target_leaves():
    """Twelve blocks of a prefix are in host memory, which take 1.2 ms; the prompt's other tokens fill what is left."""
    timed = decoding(target_itl_ns=12 * MS, num_blocks=301, num_host_blocks=500, host_block_ns=0.1 * MS)
    first, second = (np.arange(start, start + count, dtype=np.int32) for start, count in ((10_000, 84), (20_000, 840)))
    for seq_id, prompt in ((8, first), (9, second)):
        timed.scheduler.add(Request(seq_id, prompt, SamplingParams(1)))
        while len(timed.scheduler.snapshot().rows) > 4 or timed.scheduler.snapshot().queue:
            timed.step()
    prompt = np.concatenate([first, np.arange(30_000, 30_300, dtype=np.int32)])
    timed.scheduler.add(Request(10, prompt, SamplingParams(1)))
    plan = timed.step()
    assert len(plan.restore) == 12
    assert plan.num_tokens > 20
    assert timed.step_ms - 0.1 * len(plan.offload) <= 12.0, "copies out aside, which have a budget of their own"


def test_tokens_are_lowered_to_no_less_than_one_for_who_joins():
    chunks = Chunks(4, num_tokens=30, num_blocks_left=100)
    chunks.join(0, turn=1, num_wanted=10, num_slots=0, is_new=False)
    chunks.lower(5, turn=2)
    chunks.join(1, turn=2, num_wanted=8, num_slots=0, is_new=True)
    chunks.share()
    assert (chunks.rows, chunks.num_tokens) == ([0, 1], [10, 1])


def test_chunks_shrink_as_the_prompt_they_attend_to_grows():
    timed = decoding(target_itl_ns=12 * MS)
    add(timed.scheduler, 9, num_tokens=4000)
    chunks = [timed.chunk() for _ in range(25)]
    # Half of a chunk's cost is attention once it attends to 2,500 tokens: 50 us a token, and 0.02 us a pair.
    assert chunks[-1] < 0.7 * max(chunks)


def test_a_chunk_is_at_most_twice_as_large_as_any_that_was_measured():
    timed = Timed(target_itl_ns=1000 * MS)
    add(timed.scheduler, 1, num_tokens=5, max_tokens=5000)
    for _ in range(20):
        timed.step()
    add(timed.scheduler, 9, num_tokens=4000)
    assert [timed.chunk() for _ in range(6)] == [10, 20, 40, 80, 160, 320]


def test_without_a_target_a_step_is_filled():
    timed = decoding()
    add(timed.scheduler, 9, num_tokens=4000)
    assert timed.chunk() == 508


def test_prompts_get_their_share_when_decoding_alone_takes_longer_than_the_target():
    timed = decoding(target_itl_ns=4 * MS, prefill_share=0.5)
    add(timed.scheduler, 9, num_tokens=4000)
    chunks = [timed.chunk() for _ in range(10)]
    assert chunks[-1] == pytest.approx(2.0 / 0.05, rel=0.15)  # half of 4 ms
    least = decoding(target_itl_ns=1, prefill_share=0.0)
    add(least.scheduler, 9, num_tokens=400)
    assert [least.chunk() for _ in range(20)][-1] == 1


def test_the_target_binds_only_while_somebody_decodes():
    timed = Timed(target_itl_ns=5 * MS)
    add(timed.scheduler, 1, num_tokens=600)
    assert timed.chunk() == 512


def test_a_short_prompt_passes_a_long_one_in_progress():
    scheduler = make(max_num_batched_tokens=10, max_model_len=200)
    add(scheduler, 1, num_tokens=100)
    step(scheduler)
    add(scheduler, 2, num_tokens=6)
    assert step(scheduler) == [(2, 6, True), (1, 4, False)]
    assert step(scheduler) == [(2, 1, True), (1, 9, False)]


def test_a_long_prompt_in_progress_is_passed_for_as_many_steps_as_it_needs_alone():
    scheduler = make(max_num_batched_tokens=10, max_model_len=200)
    add(scheduler, 1, num_tokens=100)
    step(scheduler)  # step 0, of the 10 that it takes alone: its turn is step 10
    first = []
    for seq_id in range(2, 12):  # each wants all of a step, so that its turn is the step after
        add(scheduler, seq_id, num_tokens=10, max_tokens=1)
        first.append(step(scheduler)[0][0])
    assert first == [2, 3, 4, 5, 6, 7, 8, 9, 1, 1]


def test_short_prompts_pass_a_long_one_to_its_end_whatever_its_progress():
    scheduler = make(max_num_batched_tokens=10, max_model_len=200)
    add(scheduler, 1, num_tokens=100, max_tokens=1)
    step(scheduler)
    seen = []
    for seq_id in range(2, 13):  # one comes in each of the steps 1 to 11
        add(scheduler, seq_id, num_tokens=2, max_tokens=1)
        seen.append([each_id for each_id, _, _ in step(scheduler)])
    # Its turn is step 10, as that of a prompt which comes in step 9. By then it has 26 tokens left.
    assert seen == [*([seq_id, 1] for seq_id in range(2, 10)), [1], [1], [1, 10, 11]]


def test_a_head_that_gets_no_token_is_passed_by_any_number_that_leave_it_a_row():
    """None of them takes what it waits for: the end of the prompt in progress."""
    ordering = OrderingConfig(max_skips=0)
    scheduler = make(max_num_batched_tokens=10, max_num_seqs=6, max_model_len=200, ordering=ordering)
    add(scheduler, 1, num_tokens=100, max_tokens=1)
    step(scheduler)
    add(scheduler, 2, num_tokens=150)
    for seq_id in (3, 4, 5):
        add(scheduler, seq_id, num_tokens=3, max_tokens=1)
    assert step(scheduler) == [(3, 3, True), (4, 3, True), (5, 3, True), (1, 1, False)]
    assert [(queued.seq_id, queued.num_skips) for queued in scheduler.snapshot().queue] == [(2, 0)]
    assert [step(scheduler) for _ in range(8)] == [[(1, 10, False)]] * 8
    assert step(scheduler) == [(1, 9, True), (2, 1, False)]


def test_a_head_that_gets_no_token_keeps_a_row():
    scheduler = make(max_num_batched_tokens=10, max_model_len=300, ordering=OrderingConfig(max_skips=0))
    add(scheduler, 1, num_tokens=60)
    step(scheduler)
    add(scheduler, 2, num_tokens=150)
    for seq_id in (3, 4, 5):  # these stay, in a batch of four
        add(scheduler, seq_id, num_tokens=3, max_tokens=200)
    assert step(scheduler) == [(3, 3, True), (4, 3, True), (1, 4, False)]
    while 2 not in scheduler.batch.seq_ids:
        assert 5 not in {seq_id for seq_id, _, _ in step(scheduler)}


def test_a_head_that_got_no_token_goes_first_once_nothing_in_progress_has_an_earlier_turn():
    scheduler = make(max_num_batched_tokens=10, max_model_len=200)
    add(scheduler, 1, num_tokens=40, max_tokens=1)
    step(scheduler)  # its turn is step 4
    add(scheduler, 2, num_tokens=60, max_tokens=1)
    firsts = []
    for seq_id in range(3, 15):  # one comes in each of the steps 1 to 12, and has the step after for its turn
        add(scheduler, seq_id, num_tokens=10, max_tokens=1)
        firsts.append(step(scheduler)[0][0])
    # Admitted in step 6, when nothing else is in progress, 2 has step 12 for its turn.
    assert firsts == [3, 4, 1, 1, 1, 2, 5, 6, 7, 8, 2, 2]


def test_abort_forgets_who_passed_a_prompt_in_progress():
    scheduler = make(max_num_batched_tokens=10, max_model_len=200)
    add(scheduler, 1, num_tokens=100)
    step(scheduler)
    add(scheduler, 2, num_tokens=6)
    before = scheduler.snapshot()
    for _ in range(2):
        plan = scheduler.plan(0)
        assert scheduled(scheduler, plan) == [(2, 6, True), (1, 4, False)]
        scheduler.abort(plan)
        assert scheduler.snapshot() == before
