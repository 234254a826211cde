"""Logs what goes wrong on the engine thread."""

import structlog

from service.core.plan import StepPlan
from service.core.types import StepDelta
from service.engine.observer import StepTimes

log = structlog.get_logger("chairlift.engine")


class EngineLog:
    """An EngineObserver that writes a line per failed step and for the engine's death, none for a good step."""

    def on_step(self, plan: StepPlan, delta: StepDelta, times: StepTimes) -> None:
        """Stay silent."""

    def on_step_failed(self, step_id: int, error: Exception, *, will_retry: bool) -> None:
        """Write one line."""
        log.error("engine.step_failed", step_id=step_id, error=str(error), will_retry=will_retry)

    def on_death(self, error: Exception) -> None:
        """Write one line, with the traceback."""
        log.error("engine.dead", error=str(error), exc_info=error)
