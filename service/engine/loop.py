"""The engine thread's work: plan, dispatch, wait, commit, publish."""

from dataclasses import dataclass

from service.clock import Clock
from service.core.plan import StepPlan
from service.core.scheduler import Scheduler
from service.engine.health import Heartbeat
from service.engine.inbox import Commands, Inbox
from service.engine.observer import EngineObserver, StepTimes
from service.engine.router import OutputRouter
from service.engine.settings import EngineSettings
from service.errors import ChairliftError, ExecutorError
from service.executor.api import Executor


@dataclass
class EngineLoop:
    """Runs steps until the inbox is closed. Everything here belongs to the engine thread.

    An idle loop sleeps in the inbox. A transient executor error aborts the step, which is planned again after a
    pause, at most `max_step_retries` times in a row; any other error ends `run` with that error. Commands that come
    during the pause are applied, and do not shorten it.
    """

    scheduler: Scheduler
    executor: Executor
    inbox: Inbox
    router: OutputRouter
    settings: EngineSettings
    clock: Clock
    heartbeat: Heartbeat
    observer: EngineObserver
    num_failures: int = 0  # in a row
    retry_ns: int = 0  # no step begins before this time of the clock

    def run(self) -> None:
        """Serve until the inbox is closed; the step in flight is finished first."""
        while not self._apply(self._next_commands()):
            if self.clock.now_ns() >= self.retry_ns:
                self._step()

    def _next_commands(self) -> Commands:
        if not self.scheduler.has_work:
            self.num_failures = self.retry_ns = 0  # the step that failed is gone with its sequences
            self.heartbeat.rest()
            return self.inbox.wait()
        begin_ns = max(self.retry_ns if self.num_failures else 0, self.scheduler.not_before_ns)
        if begin_ns:
            self.heartbeat.rest()
            wake_ns = min(begin_ns, self.scheduler.next_deadline_ns or begin_ns)
            return self.inbox.wait(max(0, wake_ns - self.clock.now_ns()) / 1e9)
        return self.inbox.take()

    def _apply(self, commands: Commands) -> bool:
        """Bring the commands to the scheduler. True when the loop is to end."""
        # Cancels go first: the front side has given their room in the queue away already.
        for seq_id in commands.cancelled_seq_ids:
            self.scheduler.cancel(seq_id)
        cancelled = frozenset(commands.cancelled_seq_ids)
        for request in commands.requests:
            if request.seq_id in cancelled:
                continue
            try:
                self.scheduler.add(request)
            except ChairliftError as error:
                self.router.fail(request.seq_id, error)
        return commands.is_closed

    def _step(self) -> None:
        start_ns = self.clock.now_ns()
        self.heartbeat.beat(start_ns)
        expired = self.scheduler.expire(start_ns)
        if expired:
            self.router.end(expired)
        plan = self.scheduler.plan(start_ns)
        if plan is None:
            return
        planned_ns = self.clock.now_ns()
        try:
            result = self.executor.dispatch(plan, self.scheduler.batch).wait()
        except ExecutorError as error:
            self._abort(plan, error)
            return
        executed_ns = self.clock.now_ns()
        delta = self.scheduler.commit(plan, result)
        self.router.publish(delta)
        self.num_failures = 0
        committed_ns = self.clock.now_ns()
        times = StepTimes(start_ns, planned_ns - start_ns, executed_ns - planned_ns, committed_ns - executed_ns)
        self.observer.on_step(plan, delta, times)

    def _abort(self, plan: StepPlan, error: ExecutorError) -> None:
        self.scheduler.abort(plan, has_written=True)
        self.num_failures += 1
        will_retry = error.is_transient and self.num_failures <= self.settings.max_step_retries
        self.observer.on_step_failed(plan.step_id, error, will_retry=will_retry)
        if not will_retry:
            raise error
        pause_s = self.settings.retry_pause_s * 2 ** (self.num_failures - 1)
        self.retry_ns = self.clock.now_ns() + round(pause_s * 1e9)
