"""What the engine thread tells an observer, once per step and never per token."""

from dataclasses import dataclass
from typing import Protocol

from service.core.plan import StepPlan
from service.core.types import StepDelta


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where one committed step spent its time, in nanoseconds of the engine's clock.

    One that was planned ahead began while the step before it was executed.
    """

    start_ns: int  # when planning began
    plan_ns: int
    execute_ns: int  # dispatch and wait, from the end of the step before on
    commit_ns: int


class EngineObserver(Protocol):
    """Called on the engine thread; must return quickly and never raise."""

    def on_step(self, plan: StepPlan, delta: StepDelta, times: StepTimes) -> None:
        """A step was committed."""
        ...

    def on_step_failed(self, step_id: int, error: Exception, *, will_retry: bool) -> None:
        """A step was aborted; with `will_retry` it is planned again, else the engine dies."""
        ...

    def on_death(self, error: Exception) -> None:
        """The engine stopped because of `error`. Called once, last."""
        ...
