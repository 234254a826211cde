"""How often something is tried again, and when."""

from dataclasses import dataclass, field

from service.clock import Clock
from service.engine.settings import EngineSettings
from service.errors import ExecutorError


@dataclass
class Retries:
    """Failures in a row of one kind of work: after a pause that doubles with each it is tried again, some times."""

    settings: EngineSettings
    clock: Clock
    num_failures: int = field(default=0, init=False)
    not_before_ns: int = field(default=0, init=False)  # when it may be tried again, by the clock

    def fail(self, error: ExecutorError) -> bool:
        """It failed with `error`. True when it may be tried again."""
        self.num_failures += 1
        pause_s = self.settings.retry_pause_s * 2 ** (self.num_failures - 1)
        self.not_before_ns = self.clock.now_ns() + round(pause_s * 1e9)
        return error.is_transient and self.num_failures <= self.settings.max_step_retries

    def reset(self) -> None:
        """It succeeded, or is not wanted any more."""
        self.num_failures = self.not_before_ns = 0
