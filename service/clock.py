"""The one clock of the process, as a parameter: tests and the simulator pass their own."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary start; never goes back."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_ns(self) -> int:
        """Nanoseconds of `time.monotonic_ns`."""
        return time.monotonic_ns()
