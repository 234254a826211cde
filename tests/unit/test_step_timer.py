"""Which time is taken for which step's."""

import numpy as np
import pytest

from service.core.scheduler import Scheduler
from service.core.step_time import StepLoad
from service.core.step_timer import StepTimer
from service.core.types import StepResult
from tests.unit.scheduler_steps import add, commit, make, step

LOAD = StepLoad(decode_rows=1, context_tokens=5)
STOP = 0  # of the sequences of `add`


def mean_ns(timer: StepTimer) -> float:
    """Of steps that are all `LOAD`: what the last step took counts 1, the one before it 0.99, and so on."""
    return timer.model.predict_ns(LOAD)


def test_steps_that_overlap_end_where_the_next_one_is_asked_for():
    timer = StepTimer()
    timer.begin(0)
    timer.go_on(4)
    timer.land(LOAD, 0)
    timer.go_on(10)
    assert mean_ns(timer) == pytest.approx(10, rel=1e-4)
    timer.land(LOAD, 0)
    timer.go_on(25)
    assert mean_ns(timer) == pytest.approx((0.99 * 10 + 15) / 1.99, rel=1e-4)


def test_copies_are_part_of_the_rate_and_not_of_what_a_load_costs():
    timer = StepTimer()
    timer.begin(0)
    timer.land(StepLoad(prefill_tokens=100), 2)
    timer.go_on(10)
    assert timer.rate.tokens_per_s == pytest.approx(100 / 10e-9)
    assert timer.model.predict_ns(StepLoad(prefill_tokens=100)) == pytest.approx(8, rel=1e-4)


def test_of_two_steps_that_landed_together_nothing_is_learned():
    timer = StepTimer()
    timer.begin(0)
    timer.land(LOAD, 0)
    timer.land(LOAD, 0)
    timer.go_on(30)
    assert mean_ns(timer) == 0
    timer.land(LOAD, 0)
    timer.begin(37)
    assert mean_ns(timer) == pytest.approx(7, rel=1e-4)


def test_what_lands_before_a_rest_took_no_time_that_is_known():
    timer = StepTimer()
    timer.begin(0)
    timer.land(LOAD, 0)
    timer.rest()
    timer.go_on(30)
    assert mean_ns(timer) == 0


def test_idle_time_after_a_cancel_is_no_steps():
    scheduler = make()
    add(scheduler, 1, 3)
    step(scheduler)
    scheduler.cancel(1)
    add(scheduler, 2, 3)
    scheduler.plan(1_000_000_000)
    assert scheduler._timer.model.predict_ns(StepLoad(3, 0, 0, 6.0)) == 0


def test_a_step_ahead_begins_where_the_one_before_was_found_landed():
    """Asked for at 20, 29 and 41, behind a prompt's step of 20 ns: decode steps of 9 and 12 ns."""
    scheduler = make()
    add(scheduler, 1, 3)
    step(scheduler)
    first = scheduler.plan(20)
    second = scheduler.plan_ahead(21)
    commit(scheduler, first)
    third = scheduler.plan_ahead(29)
    commit(scheduler, second)
    assert scheduler.plan_ahead(41) is not None
    commit(scheduler, third)
    same = StepTimer()
    for load, now_ns in ((StepLoad(3, 0, 0, 6.0), 20), (StepLoad(0, 1, 4), 29), (StepLoad(0, 1, 5), 41)):
        same.land(load, 0)
        same.go_on(now_ns)
    assert scheduler._timer.model.prices.tolist() == same.model.prices.tolist()


def ran(scheduler: Scheduler, last_tokens: list[int]) -> Scheduler:
    """Two prompts of three tokens, and two decode steps that overlap; the earlier one samples `last_tokens`."""
    for seq_id in (1, 2):
        add(scheduler, seq_id, 3)
    step(scheduler)
    first, second = scheduler.plan(20), scheduler.plan_ahead(21)
    assert first is not None
    scheduler.commit(first, StepResult(np.array(last_tokens, np.int32)))
    add(scheduler, 3, 3)
    assert scheduler.plan_ahead(30) is None  # who waits is to be admitted first
    commit(scheduler, second)
    assert scheduler.plan(45) is not None
    return scheduler


@pytest.mark.parametrize("last_tokens", [[50, STOP], [STOP, STOP]])
def test_a_row_that_has_ended_costs_its_step_what_it_cost_before(last_tokens: list[int]):
    going, ended = (ran(make(), tokens)._timer.model.prices.tolist() for tokens in ([50, 50], last_tokens))
    assert going == ended
