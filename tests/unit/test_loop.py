"""The engine's loop while nothing is in flight."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from service.core.plan import StepPlan
from service.core.scheduler import Scheduler
from service.core.types import FinishReason, Request, SamplingParams, StepDelta
from service.engine.health import Heartbeat
from service.engine.inbox import Commands, Inbox
from service.engine.loop import EngineLoop
from service.engine.observer import StepTimes
from service.engine.router import OutputRouter
from service.engine.scheduling import SchedulingSettings, scheduler_config
from service.engine.settings import EngineSettings
from service.errors import ExecutorError
from tests.doubles import LIMITS, PROMPT, GatedExecutor, ManualClock, NullObserver, run_async


class SleepingInbox(Inbox):
    """Nothing comes: a sleep takes no time but the clock's, and one that has no end closes it."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(max_requests=8)
        self.sleeps_s: list[float] = []
        self._clock = clock

    def wait(self, timeout_s: float | None = None) -> Commands:
        if self._has_commands():
            return self.take()
        if timeout_s is None:
            self.close()
        else:
            self.sleeps_s.append(timeout_s)
            self._clock.time_ns += round(timeout_s * 1e9)
        return self.take()


def test_a_deadline_that_passes_in_the_pause_before_a_retry_is_kept_and_slept_until() -> None:
    async def main() -> None:
        clock, executor, settings = ManualClock(), GatedExecutor(), EngineSettings(retry_pause_s=2.0)
        scheduler, inbox = Scheduler(scheduler_config(LIMITS, settings)), SleepingInbox(clock)
        router = OutputRouter(asyncio.get_running_loop(), clock, inbox.cancel)
        loop = EngineLoop(scheduler, executor, inbox, router, settings, clock, Heartbeat(), NullObserver())
        executor.errors.append(ExecutorError("passing", is_transient=True))
        start_ns = clock.time_ns
        for seq_id, deadline_ns in ((1, start_ns + 100_000_000), (2, None)):
            inbox.submit(Request(seq_id, np.array(PROMPT), SamplingParams(3), deadline_ns=deadline_ns))
        loop.run()
        assert inbox.sleeps_s == [0.1, 1.9]
        assert clock.time_ns == start_ns + 2_000_000_000
        assert scheduler.counters.totals.num_finished == 2
        assert executor.num_steps == 1 + 3

    run_async(main())


class TellingRouter(OutputRouter):
    """Keeps what it is told, in order."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(asyncio.get_running_loop(), clock, lambda _: None)
        self.told: list[str] = []

    def publish(self, delta: StepDelta) -> None:
        self.told.append(f"tokens of step {delta.step_id}")

    def end(self, ended: list[tuple[int, FinishReason]]) -> None:
        self.told += [f"{seq_id}: {reason.name}" for seq_id, reason in ended]


class SlowSteps(NullObserver):
    """Each step takes 60 ms."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def on_step(self, plan: StepPlan, delta: StepDelta, times: StepTimes) -> None:
        self._clock.time_ns += 60_000_000


def test_tokens_come_before_the_deadline_that_ends_their_sequence() -> None:
    async def main() -> None:
        clock, settings = ManualClock(), EngineSettings()
        scheduler, inbox, router = (
            Scheduler(scheduler_config(LIMITS, settings)),
            SleepingInbox(clock),
            TellingRouter(clock),
        )
        loop = EngineLoop(scheduler, GatedExecutor(), inbox, router, settings, clock, Heartbeat(), SlowSteps(clock))
        deadline_ns = clock.time_ns + 100_000_000
        inbox.submit(Request(1, np.array(PROMPT), SamplingParams(50), deadline_ns=deadline_ns))
        loop.run()
        assert router.told == ["tokens of step 0", "tokens of step 1", "1: DEADLINE"]

    run_async(main())


def test_the_time_in_which_a_batch_is_gathered_is_no_part_of_the_step_before() -> None:
    """Two of three requests fill a batch and end with its one step; the third would wait for a second for others."""

    async def main() -> None:
        clock, settings, limits = ManualClock(), EngineSettings(), replace(LIMITS, max_num_seqs=2)
        gathering = SchedulingSettings(batching="dynamic", batch_window_ms=1000.0)
        scheduler, inbox = Scheduler(scheduler_config(limits, settings, gathering)), SleepingInbox(clock)
        router = OutputRouter(asyncio.get_running_loop(), clock, inbox.cancel)
        executor, observer = GatedExecutor(limits), SlowSteps(clock)
        loop = EngineLoop(scheduler, executor, inbox, router, settings, clock, Heartbeat(), observer)
        for seq_id in (1, 2, 3):
            inbox.submit(Request(seq_id, np.array(PROMPT), SamplingParams(1), arrival_ns=clock.time_ns))
        loop.run()
        assert inbox.sleeps_s == [0.94]
        assert executor.num_steps == 2
        assert scheduler._timer.rate.tokens_per_s == pytest.approx(2 * len(PROMPT) / 0.06)

    run_async(main())
