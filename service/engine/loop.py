"""The engine thread's work: plan, dispatch, wait, commit, publish."""

from dataclasses import dataclass, field

from service.clock import Clock
from service.core.plan import StepPlan
from service.core.scheduler import Scheduler
from service.core.types import StepDelta
from service.engine.health import Heartbeat
from service.engine.inbox import Commands, Inbox
from service.engine.observer import EngineObserver, StepTimes
from service.engine.retries import Retries
from service.engine.router import OutputRouter
from service.engine.settings import EngineSettings
from service.errors import ChairliftError, ExecutorError
from service.executor.api import Executor, StepHandle


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was dispatched and not waited for."""

    plan: StepPlan
    handle: StepHandle
    start_ns: int  # when its planning began
    planned_ns: int


@dataclass
class EngineLoop:
    """Runs steps until the inbox is closed. Everything here belongs to the engine thread.

    Where the executor lets a step follow one that is in flight, and the scheduler finds nothing else to do, the next
    step is planned and dispatched before the present one is waited for: so the device finds work when it has done that
    one, and the host's share of a step costs no time.

    A step's tokens are published only when the steps after it are on their way and this thread is about to wait: else
    the event loop would want the interpreter while the device, or the processors, wait for this thread's next step.

    An idle loop sleeps in the inbox. A transient executor error aborts the step, which is planned again after a
    pause, at most `max_step_retries` times in a row; any other error ends `run` with that error. Commands that come
    during the pause are applied, deadlines are kept, and neither shortens it. When a step cannot be dispatched ahead,
    that is counted apart: the step is dispatched once more when the one before has landed, and during the pause none is
    planned ahead.
    """

    scheduler: Scheduler
    executor: Executor
    inbox: Inbox
    router: OutputRouter
    settings: EngineSettings
    clock: Clock
    heartbeat: Heartbeat
    observer: EngineObserver
    # Between turns of the loop: the step that was dispatched before the last one landed.
    ahead: Flight | None = field(default=None, init=False)
    landed_ns: int = field(default=0, init=False)  # when the last step was done
    unpublished: StepDelta | None = field(default=None, init=False)  # what the last step brought
    retries: Retries = field(init=False)  # of steps
    retries_ahead: Retries = field(init=False)  # of dispatching them ahead

    def __post_init__(self) -> None:
        """Begin without a failure."""
        self.retries = Retries(self.settings, self.clock)
        self.retries_ahead = Retries(self.settings, self.clock)

    def run(self) -> None:
        """Serve until the inbox is closed; what is in flight is finished first."""
        try:
            while not self._apply(self._next_commands()):
                now_ns = self.clock.now_ns()
                if self.ahead is None:
                    self._expire(now_ns)
                if now_ns >= self.retries.not_before_ns:
                    self._step(now_ns)
            if self.ahead is not None:
                self._land(self.ahead, None)
        finally:
            self._publish()

    def _next_commands(self) -> Commands:
        if self.ahead is not None:
            return self.inbox.take()
        if not self.scheduler.has_work:
            for retries in (self.retries, self.retries_ahead):
                retries.reset()  # the step that failed is gone with its sequences
            self._rest()
            return self.inbox.wait()
        begin_ns = max(self.retries.not_before_ns, self.scheduler.not_before_ns)
        if begin_ns:
            self.scheduler.pause(self.clock.now_ns())
            self._rest()
            wake_ns = min(begin_ns, self.scheduler.next_deadline_ns or begin_ns)
            return self.inbox.wait(max(0, wake_ns - self.clock.now_ns()) / 1e9)
        return self.inbox.take()

    def _rest(self) -> None:
        """Get ready to sleep."""
        self._publish()
        self.heartbeat.rest()

    def _publish(self) -> None:
        delta, self.unpublished = self.unpublished, None
        if delta is not None:
            self.router.publish(delta)

    def _apply(self, commands: Commands) -> bool:
        """Bring the commands to the scheduler. True when the loop is to end."""
        # Cancels go first: the front side has given their room in the queue away already.
        self.scheduler.cancel_all(commands.cancelled_seq_ids)
        for request in commands.requests:
            try:
                self.scheduler.add(request)
            except ChairliftError as error:
                self.router.fail(request.seq_id, error)
        return commands.is_closed

    def _expire(self, now_ns: int) -> None:
        """End what has run out of time, with nothing in flight."""
        expired = self.scheduler.expire(now_ns)
        if expired:
            self._publish()  # they get their last tokens first
            self.router.end(expired)

    def _step(self, start_ns: int) -> None:
        self.heartbeat.beat(start_ns)
        flight = self.ahead or self._begin(start_ns)
        if flight is not None:
            self._land(flight, self._follow(flight))

    def _begin(self, start_ns: int) -> Flight | None:
        """Plan and dispatch a step with none in flight; None: there is none, or it failed."""
        plan = self.scheduler.plan(start_ns)
        if plan is None:
            return None
        try:
            return self._dispatch(plan, start_ns)
        except ExecutorError as error:
            self._abort(plan, error)
            return None

    def _follow(self, flight: Flight) -> Flight | None:
        """Plan and dispatch the step after `flight`; None: that is to land first."""
        start_ns = self.clock.now_ns()
        if not flight.handle.can_continue or start_ns < self.retries_ahead.not_before_ns:
            return None
        plan = self.scheduler.plan_ahead(start_ns)
        if plan is None:
            return None
        try:
            ahead = self._dispatch(plan, start_ns)
        except ExecutorError as error:
            self.scheduler.abort(plan, has_written=True)
            will_retry = self.retries_ahead.fail(error)
            self.observer.on_step_failed(plan.step_id, error, will_retry=will_retry)
            if not will_retry:
                self._land(flight, None)  # nothing runs when the executor is closed, and its tokens are there
                raise
            return None
        self.retries_ahead.reset()
        return ahead

    def _dispatch(self, plan: StepPlan, start_ns: int) -> Flight:
        """Dispatch a plan that was begun at `start_ns`. Raises ExecutorError."""
        planned_ns = self.clock.now_ns()
        return Flight(plan, self.executor.dispatch(plan, self.scheduler.batch), start_ns, planned_ns)

    def _land(self, flight: Flight, ahead: Flight | None) -> None:
        """Wait for `flight` and commit it, while `ahead` is in flight."""
        self._publish()
        self.ahead = None
        begin_ns = max(flight.planned_ns, self.landed_ns)
        try:
            result = flight.handle.wait()
        except ExecutorError as error:
            self._abort(flight.plan, self._withdraw(ahead, error))
            return
        self.landed_ns = executed_ns = self.clock.now_ns()
        delta = self.unpublished = self.scheduler.commit(flight.plan, result)
        self.ahead = ahead
        self.retries.reset()
        committed_ns = self.clock.now_ns()
        times = StepTimes(
            flight.start_ns, flight.planned_ns - flight.start_ns, executed_ns - begin_ns, committed_ns - executed_ns
        )
        self.observer.on_step(flight.plan, delta, times)

    def _withdraw(self, ahead: Flight | None, error: ExecutorError) -> ExecutorError:
        """Take back the step that followed the one which failed with `error`. Returns the graver of their errors."""
        if ahead is None:
            return error
        try:
            ahead.handle.wait()  # the device is to be done with it before anything is planned again
        except ExecutorError as later:
            error = error if later.is_transient else later
        self.scheduler.abort(ahead.plan, has_written=True)
        return error

    def _abort(self, plan: StepPlan, error: ExecutorError) -> None:
        self.scheduler.abort(plan, has_written=True)
        will_retry = self.retries.fail(error)
        self.observer.on_step_failed(plan.step_id, error, will_retry=will_retry)
        if not will_retry:
            raise error
