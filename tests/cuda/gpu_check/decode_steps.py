"""Times of decode steps on an executor under the real scheduler: one by one, and following each other in flight."""

import time
from dataclasses import dataclass
from statistics import median

import numpy as np

from service.core.scheduler import Scheduler
from service.core.types import Request, SamplingParams
from service.executor.api import Executor
from tests.stepping import scheduler_for

PROMPT_TOKENS = 64
SPARE_TOKENS = 60  # that sequences have besides those of the timed steps, while others' prompts are computed, say


@dataclass(frozen=True)
class StepTimes:
    """Medians."""

    host_us: float  # planned, dispatched and committed, one step at a time
    wait_us: float
    ahead_us: float | None = None  # from one step's end to the next's, each dispatched before; None: it cannot

    @property
    def step_us(self) -> float:
        return self.host_us + self.wait_us


def time_steps(executor: Executor, batch: int, num_steps: int) -> StepTimes:
    """Of steps in which `batch` sequences decode."""
    host_ns, wait_ns = _one_by_one(executor, batch, num_steps)
    ahead_ns = _ahead(executor, batch, num_steps)
    return StepTimes(median(host_ns) / 1e3, median(wait_ns) / 1e3, median(ahead_ns) / 1e3 if ahead_ns else None)


def _one_by_one(executor: Executor, batch: int, num_steps: int) -> tuple[list[int], list[int]]:
    scheduler = _scheduler(executor, batch, num_steps)
    host_ns: list[int] = []
    wait_ns: list[int] = []
    while len(host_ns) < num_steps:
        started = time.perf_counter_ns()
        plan = scheduler.plan(0)
        assert plan is not None, "sequences end only after the last step that is timed"
        handle = executor.dispatch(plan, scheduler.batch)
        dispatched = time.perf_counter_ns()
        result = handle.wait()
        waited = time.perf_counter_ns()
        is_full = plan.is_decode_only and len(plan.rows) == batch
        scheduler.commit(plan, result)
        if is_full:
            host_ns.append(dispatched - started + time.perf_counter_ns() - waited)
            wait_ns.append(waited - dispatched)
    return host_ns, wait_ns


def _ahead(executor: Executor, batch: int, num_steps: int) -> list[int]:
    """Nanoseconds between the ends of steps; none if steps of this executor do not follow each other in flight."""
    scheduler = _scheduler(executor, batch, num_steps)
    periods_ns: list[int] = []
    flight, landed = None, 0
    while len(periods_ns) < num_steps:
        if flight is None:
            plan = scheduler.plan(0)
            assert plan is not None, "sequences end only after the last step that is timed"
            flight = plan, executor.dispatch(plan, scheduler.batch)
        plan, handle = flight
        follower = scheduler.plan_ahead(0) if handle.can_continue else None
        flight = None if follower is None else (follower, executor.dispatch(follower, scheduler.batch))
        is_full = plan.is_decode_only and len(plan.rows) == batch
        scheduler.commit(plan, handle.wait())
        now = time.perf_counter_ns()
        if plan.is_ahead and is_full:
            periods_ns.append(now - landed)
        elif is_full and not handle.can_continue:
            return []
        landed = now
    if flight is not None:
        flight[1].wait()
    return periods_ns


def _scheduler(executor: Executor, batch: int, num_steps: int) -> Scheduler:
    """With `batch` requests for more tokens than are timed."""
    scheduler = scheduler_for(executor)
    rng = np.random.default_rng(batch)
    sampling = SamplingParams(max_tokens=2 * num_steps + SPARE_TOKENS, temperature=0.0, ignore_eos=True)
    for seq_id in range(batch):
        scheduler.add(Request(seq_id, rng.integers(3, 256, PROMPT_TOKENS).astype(np.int32), sampling))
    return scheduler
