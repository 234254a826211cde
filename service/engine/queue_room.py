"""Whether sequences may join the engine's queue: its bounds in requests and tokens, and the size of the KV buffer."""

from collections.abc import Sequence

from service.core.types import SamplingParams
from service.engine.router import OutputRouter
from service.engine.settings import EngineSettings
from service.errors import InvalidRequestError, OverloadedError, UnserviceableError
from service.executor.api import ExecutorLimits


class QueueRoom:
    """What the queue has room for, beside what waits in it by the router's count. Lives on the event loop's thread."""

    def __init__(self, settings: EngineSettings, limits: ExecutorLimits, router: OutputRouter) -> None:
        self._settings = settings
        self._limits = limits
        self._router = router

    def check(self, num_samples: int, num_ahead: int = 0) -> None:
        """Raise InvalidRequestError when the queue could never hold so many sequences, OverloadedError when it cannot
        now, with `num_ahead` others on their way.
        """
        max_requests = self._settings.max_waiting_requests
        if num_samples > max_requests:
            limit = f"at most {max_requests} on this server, whose queue has no room for more"
            raise InvalidRequestError("n", num_samples, limit)
        num_waiting = self._router.waiting_requests + num_ahead
        if num_waiting + num_samples > max_requests:
            message = f"{num_waiting} requests wait already, of {max_requests} that may"
            raise OverloadedError(message, self._router.retry_after_s)

    def check_prompt(self, num_tokens: int, samplings: Sequence[SamplingParams]) -> None:
        """Raise what `check` does, and that for the prompt's length; UnserviceableError when the KV buffer could never
        hold one of the sequences.
        """
        # The last token is never fed back, so that its keys and values need no slot.
        num_slots = num_tokens + max(sampling.max_tokens for sampling in samplings) - 1
        num_blocks = -(-num_slots // self._limits.block_size)
        if num_blocks > self._limits.num_blocks - 1:
            message = f"the request may need {num_blocks} KV blocks; this server has {self._limits.num_blocks - 1}"
            raise UnserviceableError(message)
        self.check(len(samplings))
        num_waiting, max_tokens = self._router.waiting_tokens, self._settings.max_waiting_tokens
        # An empty queue takes any prompt, and all its samples, or they could never enter.
        if self._router.waiting_requests and num_waiting + len(samplings) * num_tokens > max_tokens:
            message = f"{num_waiting} prompt tokens wait already, of {max_tokens} that may"
            raise OverloadedError(message, self._router.retry_after_s)
