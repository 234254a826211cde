"""The engine thread's work: plan, dispatch, wait, commit, publish."""

from typing import Protocol

from service.clock import Clock
from service.core.batch_state import BatchState
from service.core.plan import StepPlan
from service.core.types import Request, StepDelta, StepResult
from service.engine.health import Heartbeat
from service.engine.inbox import Commands, Inbox
from service.engine.observer import EngineObserver, StepTimes
from service.engine.router import OutputRouter
from service.engine.settings import EngineSettings
from service.errors import ChairliftError, ExecutorError
from service.executor.api import Executor


class StepScheduler(Protocol):
    """What the loop asks of a scheduler; `service.core.scheduler` has the real one."""

    @property
    def batch(self) -> BatchState: ...

    @property
    def has_work(self) -> bool: ...

    def add(self, request: Request) -> None: ...

    def cancel(self, seq_id: int) -> bool: ...

    def plan(self, now_ns: int) -> StepPlan | None: ...

    def commit(self, plan: StepPlan, result: StepResult) -> StepDelta: ...

    def abort(self, plan: StepPlan) -> None: ...


class EngineLoop:
    """Runs steps until the inbox is closed. Everything here belongs to the engine thread.

    An idle loop sleeps in the inbox. A transient executor error aborts the step, which is planned again after a
    pause, at most `max_step_retries` times in a row; any other error ends `run` with that error.
    """

    def __init__(
        self,
        scheduler: StepScheduler,
        executor: Executor,
        inbox: Inbox,
        router: OutputRouter,
        *,
        settings: EngineSettings,
        clock: Clock,
        heartbeat: Heartbeat,
        observer: EngineObserver,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._inbox = inbox
        self._router = router
        self._settings = settings
        self._clock = clock
        self._heartbeat = heartbeat
        self._observer = observer
        self._num_failures = 0  # in a row

    def run(self) -> None:
        """Serve until the inbox is closed; the step in flight is finished first."""
        while not self._apply(self._next_commands()):
            self._step()

    def _next_commands(self) -> Commands:
        if self._num_failures:
            return self._inbox.wait(self._settings.retry_pause_s * 2 ** (self._num_failures - 1))
        if self._scheduler.has_work:
            return self._inbox.take()
        self._heartbeat.rest()
        return self._inbox.wait()

    def _apply(self, commands: Commands) -> bool:
        """Bring the commands to the scheduler. True when the loop is to end."""
        for request in commands.requests:
            try:
                self._scheduler.add(request)
            except ChairliftError as error:
                self._router.fail(request.seq_id, error)
        for seq_id in commands.cancelled_seq_ids:
            self._scheduler.cancel(seq_id)
        return commands.is_closed

    def _step(self) -> None:
        start_ns = self._clock.now_ns()
        self._heartbeat.beat(start_ns)
        plan = self._scheduler.plan(start_ns)
        if plan is None:
            return
        planned_ns = self._clock.now_ns()
        try:
            result = self._executor.dispatch(plan, self._scheduler.batch).wait()
        except ExecutorError as error:
            self._abort(plan, error)
            return
        executed_ns = self._clock.now_ns()
        delta = self._scheduler.commit(plan, result)
        self._router.publish(delta)
        self._num_failures = 0
        committed_ns = self._clock.now_ns()
        times = StepTimes(start_ns, planned_ns - start_ns, executed_ns - planned_ns, committed_ns - executed_ns)
        self._observer.on_step(plan, delta, times)

    def _abort(self, plan: StepPlan, error: ExecutorError) -> None:
        self._scheduler.abort(plan)
        self._num_failures += 1
        will_retry = error.is_transient and self._num_failures <= self._settings.max_step_retries
        self._observer.on_step_failed(plan.step_id, error, will_retry=will_retry)
        if not will_retry:
            raise error
