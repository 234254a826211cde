"""Whether the engine makes progress."""

import enum
from threading import Lock


class EngineState(enum.Enum):
    """The life of an engine, in order."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, takes nothing new
    STOPPED = "stopped"
    DEAD = "dead"  # stopped by an error


class Heartbeat:
    """The engine thread's sign of life; any thread may ask for it.

    An engine without work sleeps and does not beat: it says so with `rest`, and is alive however long it rests.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._last_ns: int | None = None  # None: at rest

    def beat(self, now_ns: int) -> None:
        """A step begins."""
        with self._lock:
            self._last_ns = now_ns

    def rest(self) -> None:
        """There is nothing to run, or nothing yet."""
        with self._lock:
            self._last_ns = None

    @property
    def last_ns(self) -> int | None:
        """When the step in flight began; None at rest."""
        with self._lock:
            return self._last_ns

    def silence_ns(self, now_ns: int) -> int:
        """Nanoseconds since the step in flight began; 0 at rest."""
        with self._lock:
            return 0 if self._last_ns is None else now_ns - self._last_ns
