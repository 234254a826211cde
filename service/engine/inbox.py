"""Commands from the front side to the engine thread."""

import threading
from dataclasses import dataclass

from service.core.types import Request
from service.errors import OverloadedError

FULL_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Commands:
    """What gathered since the last take."""

    requests: tuple[Request, ...]
    cancelled_seq_ids: tuple[int, ...]
    is_closed: bool  # the engine is to stop now


class Inbox:
    """A bounded mailbox: any thread puts, the engine thread takes, and sleeps here when it has no work.

    At most `max_requests` submitted requests are held. Cancels are never refused: there is at most one per sequence.
    """

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._changed = threading.Condition()
        self._requests: dict[int, Request] = {}
        self._cancelled: dict[int, None] = {}  # an ordered set
        self._is_closed = False

    def submit(self, request: Request) -> None:
        """Put `request`. Raises OverloadedError when the inbox is full, and takes nothing then."""
        with self._changed:
            if len(self._requests) >= self._max_requests:
                raise OverloadedError(f"the inbox holds {self._max_requests} requests already", FULL_RETRY_AFTER_S)
            self._requests[request.seq_id] = request
            self._changed.notify()

    def cancel(self, seq_id: int) -> None:
        """Ask that the sequence be forgotten. Idempotent; unknown and finished sequences are fine."""
        with self._changed:
            if self._requests.pop(seq_id, None) is None:  # else the engine never hears of it
                self._cancelled[seq_id] = None
                self._changed.notify()

    def close(self) -> None:
        """Ask the engine thread to stop. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def take(self) -> Commands:
        """All commands so far; returns at once."""
        with self._changed:
            return self._take_locked()

    def wait(self, timeout_s: float | None = None) -> Commands:
        """All commands so far, after sleeping until there is one or `timeout_s` seconds have passed."""
        with self._changed:
            self._changed.wait_for(self._has_commands, timeout_s)
            return self._take_locked()

    def _has_commands(self) -> bool:
        return bool(self._requests or self._cancelled or self._is_closed)

    def _take_locked(self) -> Commands:
        commands = Commands(tuple(self._requests.values()), tuple(self._cancelled), self._is_closed)
        self._requests.clear()
        self._cancelled.clear()
        return commands
