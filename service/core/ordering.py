"""In which order sequences are admitted, and who keeps blocks when they run out."""

from service.core.types import Request


class FirstComeFirstServed:
    """Ranks are the order of arrival at the scheduler."""

    def __init__(self) -> None:
        self._num_ranked = 0

    def rank(self, request: Request) -> int:  # noqa: ARG002  other policies look at the request
        """The place of a new request. Lower is admitted first and preempted last; never given twice."""
        rank = self._num_ranked
        self._num_ranked += 1
        return rank
