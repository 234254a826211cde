"""How long each step took, by the times at which the scheduler is asked for plans."""

from service.core.budget import TokenRate
from service.core.step_time import StepLoad, StepTimeModel


class StepTimer:
    """Teaches the step-time model and the token rate. Owned by the Scheduler.

    A step lasts from the call that planned it to the first call for a plan after its commit, or to a pause. One that
    was planned ahead is taken to begin where the step before it ends: so the times of steps that overlap add up to the
    time that passed.
    """

    def __init__(self) -> None:
        self.model = StepTimeModel()
        self.rate = TokenRate()
        self._landed: list[tuple[StepLoad, int]] = []  # steps whose time is not known yet, and what is no part of it
        self._started_ns = 0

    def begin(self, now_ns: int) -> None:
        """A step is planned now, with none in flight."""
        self.go_on(now_ns)
        self._started_ns = now_ns

    def go_on(self, now_ns: int) -> None:
        """A plan is asked for while a step is in flight, or none for a while: a step that has landed ends now."""
        if not self._landed:
            return
        if len(self._landed) == 1:  # of several, none can be told from the others
            load, copying_ns = self._landed[0]
            elapsed_ns = now_ns - self._started_ns
            self.rate.observe(load.prefill_tokens, elapsed_ns)  # who waits waits for copies, too
            self.model.observe(load, elapsed_ns - copying_ns)
        self._landed.clear()
        self._started_ns = now_ns

    def land(self, load: StepLoad, copying_ns: int) -> None:
        """A step of this load was committed. Its copies, which are no part of what a load costs, took `copying_ns`."""
        self._landed.append((load, copying_ns))

    def rest(self) -> None:
        """What comes now belongs to no step."""
        self._landed.clear()
