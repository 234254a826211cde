"""Who is admitted next under each policy, worked out by hand."""

import numpy as np
import pytest

from service.core.scheduler import Scheduler
from service.core.scheduler_config import OrderingConfig
from service.core.types import Request, SamplingParams
from service.errors import ConfigError
from tests.unit.scheduler_steps import add, commit, make, scheduled, step

SECOND = 1_000_000_000


def ask(
    scheduler: Scheduler, seq_id: int, tenant: str = "", *, num_tokens: int = 4, max_tokens: int = 1, **fields: int
) -> None:
    prompt = np.arange(1000 * seq_id, 1000 * seq_id + num_tokens, dtype=np.int32)  # shares no block with others
    scheduler.add(Request(seq_id, prompt, SamplingParams(max_tokens), (), tenant, **fields))  # type: ignore[arg-type]


def admissions(scheduler: Scheduler, num_steps: int) -> list[int]:
    """Who computes something in each of the next steps, in order; for steps of one sequence."""
    return [seq_id for _ in range(num_steps) for seq_id, _, _ in step(scheduler)]


def counter(scheduler: Scheduler, name: str) -> float:
    return dict(scheduler.snapshot().policy_counters)[name]


def test_a_higher_priority_passes_those_that_have_waited_less_than_it_is_worth():
    scheduler = make(max_num_seqs=1, ordering=OrderingConfig("priority", aging_ns=10 * SECOND))
    ask(scheduler, 1, arrival_ns=0)
    ask(scheduler, 2, arrival_ns=1)
    ask(scheduler, 3, arrival_ns=20 * SECOND, priority=2)  # ties with 1, which has the lower id
    ask(scheduler, 4, arrival_ns=20 * SECOND, priority=3)
    ask(scheduler, 5, arrival_ns=20 * SECOND + 2, priority=2)
    assert admissions(scheduler, 5) == [4, 1, 3, 2, 5]


def test_the_lower_priority_gives_its_blocks_up():
    scheduler = make(num_blocks=5, ordering=OrderingConfig("priority"))
    ask(scheduler, 1, num_tokens=7, max_tokens=9)
    ask(scheduler, 2, num_tokens=7, max_tokens=9, priority=1)
    step(scheduler)
    step(scheduler)
    assert step(scheduler) == [(2, 1, True)]


def test_tenants_take_turns_by_tokens_and_not_by_requests():
    scheduler = make(max_num_seqs=1, ordering=OrderingConfig("fair"))
    for seq_id in range(1, 4):
        ask(scheduler, seq_id, "long", num_tokens=10)  # 10, and 2 for the one token generated
    for seq_id in range(11, 17):
        ask(scheduler, seq_id, "short", num_tokens=4)  # 4 and 2
    # Counters of long and short before each choice, ties to the earlier arrival: 0-0, 12-0, 12-6, 12-12, 24-12, ...
    assert admissions(scheduler, 9) == [1, 11, 12, 2, 13, 14, 3, 15, 16]


def test_the_prompts_of_one_step_are_charged_before_the_next_is_chosen():
    scheduler = make(ordering=OrderingConfig("fair"))
    for seq_id, tenant in ((1, "a"), (2, "a"), (3, "a"), (4, "b"), (5, "c")):
        ask(scheduler, seq_id, tenant)
    assert [seq_id for seq_id, _, _ in step(scheduler)] == [1, 4, 5, 2]


def test_a_tenant_of_weight_three_gets_three_times_the_tokens():
    scheduler = make(max_num_seqs=1, ordering=OrderingConfig("fair", tenant_weights=(("a", 3.0),)))
    for seq_id in range(12):
        ask(scheduler, seq_id, "a")
        ask(scheduler, 100 + seq_id, "b")
    assert sum(seq_id < 100 for seq_id in admissions(scheduler, 12)) == 9


def test_the_cheapest_tokens_count_after_millions_of_the_dearest():
    """Three prompts of "light" cost 1.8e11, where floats are 3e-5 apart; each of the others costs 6e-6."""
    weights = (("light", 1e-6), ("a", 1e6), ("b", 1e6))
    config = {"num_blocks": 15101, "max_num_batched_tokens": 60_001, "max_model_len": 60_001}
    scheduler = make(max_num_seqs=1, ordering=OrderingConfig("fair", tenant_weights=weights), **config)
    for seq_id in range(1, 5):
        ask(scheduler, seq_id, "light", num_tokens=60_000)
    assert admissions(scheduler, 4) == [1, 2, 3, 4]
    for seq_id, tenant in ((11, "a"), (12, "a"), (13, "a"), (21, "b"), (22, "b"), (23, "b")):
        ask(scheduler, seq_id, tenant)
    assert admissions(scheduler, 6) == [11, 21, 12, 22, 13, 23]


def test_an_arrival_after_the_virtual_time_was_taken_off_the_counters_goes_by_the_same_measure():
    scheduler = make(max_num_seqs=1, ordering=OrderingConfig("fair", tenant_weights=(("a", 1e-3), ("b", 1e-3))))
    for seq_id, tenant in ((1, "a"), (2, "b"), (3, "a"), (4, "b")):
        ask(scheduler, seq_id, tenant)
    assert admissions(scheduler, 2) == [1, 2]  # 6,000 each
    assert (counter(scheduler, "a"), counter(scheduler, "b"), counter(scheduler, "virtual time")) == (0, 0, 0)
    ask(scheduler, 5, "b")
    assert admissions(scheduler, 3) == [3, 4, 5]


def test_an_idle_tenant_that_comes_back_is_lifted_to_the_least_that_waits():
    scheduler = make(max_num_seqs=1, ordering=OrderingConfig("fair"))
    ask(scheduler, 1, "idle")
    step(scheduler)
    for seq_id in range(2, 12):
        ask(scheduler, seq_id, "busy")
    admissions(scheduler, 8)
    assert (counter(scheduler, "idle"), counter(scheduler, "busy")) == (6.0, 48.0)
    for seq_id in range(21, 25):
        ask(scheduler, seq_id, "idle")
    assert counter(scheduler, "idle") == 48.0
    assert admissions(scheduler, 4) == [10, 21, 11, 22]  # not 21, 22, 23, 24


def test_a_tenant_that_waits_is_not_lifted_by_what_it_asks_for_more():
    """Its fork came to the queue without a lift: it was never away."""
    ordering = OrderingConfig("fair", tenant_weights=(("b", 0.02),))
    scheduler = make(max_num_seqs=2, max_num_batched_tokens=8, ordering=ordering)
    ask(scheduler, 1, "a", num_tokens=28)
    ask(scheduler, 2, "a", num_tokens=28, fork_of=1)
    for seq_id in (3, 4, 5):
        ask(scheduler, seq_id, "b")
    while 2 not in {queued.seq_id for queued in scheduler.snapshot().queue}:  # it waits for its leader's prompt
        step(scheduler)
    waiting, virtual_time = counter(scheduler, "a"), counter(scheduler, "virtual time")
    assert waiting == 30.0 < virtual_time == 600.0  # what two of b's had cost when the third was admitted
    ask(scheduler, 6, "a")
    assert counter(scheduler, "a") == waiting
    before = scheduler.snapshot()
    scheduler.abort(scheduler.plan(0))
    assert scheduler.snapshot() == before
    plan = scheduler.plan(0)  # admits the fork: nobody of "a" but 6 waits
    ask(scheduler, 7, "a")
    scheduler.abort(plan)
    assert counter(scheduler, "a") == waiting


def test_when_nobody_waits_a_tenant_is_lifted_to_the_last_one_admitted():
    scheduler = make(max_num_seqs=1, ordering=OrderingConfig("fair"))
    ask(scheduler, 1, "idle")
    for seq_id in range(2, 5):
        ask(scheduler, seq_id, "busy")
        step(scheduler)
    step(scheduler)
    ask(scheduler, 9, "idle")
    assert counter(scheduler, "idle") == 12.0  # what busy had when its last request was admitted


def test_tenants_that_are_gone_are_forgotten_beyond_the_limit():
    scheduler = make(max_num_seqs=1, ordering=OrderingConfig("fair", max_idle_tenants=2))
    for seq_id in range(50):
        ask(scheduler, seq_id, f"tenant {seq_id}")
        step(scheduler)
    names = [name for name, _ in scheduler.snapshot().policy_counters]
    assert names == ["tenant 48", "tenant 49", "virtual time", "admissions"]
    ask(scheduler, 99, "tenant 0")
    assert counter(scheduler, "tenant 0") == counter(scheduler, "virtual time")


def test_every_sixteenth_admission_goes_to_the_oldest_request():
    scheduler = make(max_num_seqs=1, ordering=OrderingConfig("fair"))
    ask(scheduler, 1, "old", num_tokens=30)
    step(scheduler)
    step(scheduler)
    ask(scheduler, 2, "old")
    for seq_id in range(100, 130):  # each of a tenant of its own, served less than "old"
        ask(scheduler, seq_id, f"tenant {seq_id}")
    assert admissions(scheduler, 16).index(2) == 14  # the sixteenth, 1 included


def test_abort_takes_back_what_a_plan_has_charged():
    scheduler = make(ordering=OrderingConfig("fair"))
    ask(scheduler, 1, "a", max_tokens=5)
    ask(scheduler, 2, "b", max_tokens=5)
    before = scheduler.snapshot()
    plan = scheduler.plan(0)
    scheduler.abort(plan)
    assert scheduler.snapshot() == before
    step(scheduler)
    assert (counter(scheduler, "a"), counter(scheduler, "b")) == (6.0, 6.0)
    step(scheduler)
    assert (counter(scheduler, "a"), counter(scheduler, "b")) == (8.0, 8.0)


def test_a_head_is_passed_by_any_number_that_leave_it_room():
    scheduler = make(num_blocks=9, max_num_seqs=8, ordering=OrderingConfig(skip_window=2, max_skips=0))  # 8 blocks of 4
    add(scheduler, 1, num_tokens=17)  # takes 5
    step(scheduler)
    add(scheduler, 2, num_tokens=16)  # needs 4: it waits for 1, whoever has the other 3 blocks
    for seq_id in (3, 4, 5, 6):
        add(scheduler, seq_id, num_tokens=4, max_tokens=1)
    assert step(scheduler) == [(1, 1, True), (3, 4, True), (4, 4, True), (5, 4, True)]
    assert step(scheduler) == [(1, 1, True), (6, 4, True)]
    assert [(queued.seq_id, queued.num_skips) for queued in scheduler.snapshot().queue] == [(2, 0)]
    scheduler.cancel(1)
    assert [seq_id for seq_id, _, _ in step(scheduler)] == [2]


def test_a_head_is_passed_a_bounded_number_of_times_by_those_that_take_its_room():
    scheduler = make(num_blocks=9, ordering=OrderingConfig(skip_window=2, max_skips=2))
    add(scheduler, 1, num_tokens=17)
    step(scheduler)
    add(scheduler, 2, num_tokens=31)  # needs all
    for seq_id in (3, 4, 5):
        add(scheduler, seq_id, num_tokens=4, max_tokens=1)
    assert step(scheduler) == [(1, 1, True), (3, 4, True), (4, 4, True)]
    assert [(queued.seq_id, queued.num_skips) for queued in scheduler.snapshot().queue] == [(2, 2), (5, 0)]
    assert step(scheduler) == [(1, 1, True)]  # 5 would fit
    scheduler.cancel(1)
    assert [seq_id for seq_id, _, _ in step(scheduler)] == [2]


def test_room_is_counted_beside_all_that_came_while_the_head_waits():
    scheduler = make(num_blocks=9, max_num_seqs=8)
    add(scheduler, 1, num_tokens=17)
    step(scheduler)
    add(scheduler, 2, num_tokens=24)  # needs 6, so that two of the three that are free leave it room
    for seq_id in (3, 4, 5):
        add(scheduler, seq_id, num_tokens=4)
    assert [seq_id for seq_id, _, _ in step(scheduler)] == [1, 3, 4, 5]
    assert [(queued.seq_id, queued.num_skips) for queued in scheduler.snapshot().queue] == [(2, 1)]


def test_a_head_that_would_fit_but_for_those_that_came_since_is_delayed_by_more():
    scheduler = make(
        num_blocks=21,
        max_num_seqs=16,
        max_model_len=64,
        max_num_batched_tokens=64,
        ordering=OrderingConfig(max_skips=1),
    )
    add(scheduler, 1, num_tokens=17)  # takes 5 of 20
    add(scheduler, 2, num_tokens=23)  # takes 6
    step(scheduler)
    add(scheduler, 3, num_tokens=40)  # needs 10 of 9
    for seq_id in range(4, 10):
        add(scheduler, seq_id, num_tokens=3)
    step(scheduler)
    assert [(queued.seq_id, queued.num_skips) for queued in scheduler.snapshot().queue] == [(3, 0)]
    scheduler.cancel(2)  # it needs 10 of 9 again, and 6 are taken by those that have passed
    for seq_id in (10, 11):
        add(scheduler, seq_id, num_tokens=3)
    step(scheduler)
    assert [(queued.seq_id, queued.num_skips) for queued in scheduler.snapshot().queue] == [(3, 1), (11, 0)]


@pytest.mark.parametrize(("max_num_seqs", "num_skips"), [(3, 0), (2, 1)])
def test_who_takes_the_last_row_delays_the_head(max_num_seqs: int, num_skips: int):
    scheduler = make(num_blocks=9, max_num_seqs=max_num_seqs)
    add(scheduler, 1, num_tokens=17)
    step(scheduler)
    add(scheduler, 2, num_tokens=16)
    add(scheduler, 3, num_tokens=4)
    assert [seq_id for seq_id, _, _ in step(scheduler)] == [1, 3]
    assert [(queued.seq_id, queued.num_skips) for queued in scheduler.snapshot().queue] == [(2, num_skips)]


def test_only_the_window_behind_a_head_is_looked_at():
    scheduler = make(num_blocks=9, ordering=OrderingConfig(skip_window=2))
    add(scheduler, 1, num_tokens=17)
    step(scheduler)
    for seq_id, num_tokens in ((2, 16), (3, 16), (4, 16), (5, 4)):
        add(scheduler, seq_id, num_tokens)
    assert step(scheduler) == [(1, 1, True)]
    scheduler.cancel(2)
    assert step(scheduler) == [(1, 1, True), (5, 4, True)]


def test_abort_takes_back_the_skips():
    scheduler = make(num_blocks=9)
    add(scheduler, 1, num_tokens=17)
    step(scheduler)
    add(scheduler, 2, num_tokens=31)
    add(scheduler, 3, num_tokens=4)
    before = scheduler.snapshot()
    for _ in range(3):
        plan = scheduler.plan(0)
        assert [seq_id for seq_id, _, _ in scheduled(scheduler, plan)] == [1, 3]
        scheduler.abort(plan)
        assert scheduler.snapshot() == before
    commit(scheduler, scheduler.plan(0))
    assert scheduler.snapshot().queue[0].num_skips == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"aging_ns": 0},
        {"output_token_cost": 0.0},
        {"tenant_weights": (("a", 9e-7),)},
        {"tenant_weights": (("a", 1000001.0),)},
        {"tenant_weights": (("a", float("nan")),)},
        {"max_idle_tenants": -1},
        {"skip_window": -1},
        {"max_skips": -1},
    ],
)
def test_orderings_that_make_no_sense_are_refused(changes: dict[str, int]):
    with pytest.raises(ConfigError):
        OrderingConfig(**changes)  # type: ignore[arg-type]
