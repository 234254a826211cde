"""What the front side sees of an engine, be it a thread of this process or a process of its own."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from service.clock import Clock
from service.core.types import Int32Array, SamplingParams
from service.engine.health import EngineState
from service.engine.prefix_keys import PromptKeys
from service.engine.stream import TokenStream

TENANT_NAME = re.compile(r"[!-~]{1,64}")
"""What a tenant may be called: visible ASCII, since the name comes in metadata."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Whose a sequence is, and how urgent."""

    tenant: str = ""
    priority: int = 0  # higher goes first, under the priority policy
    deadline_ns: int | None = None  # of the whole answer, by the engine's clock


class EngineClient(Protocol):
    """Everything here but `prompt_keys` is for the event loop's thread."""

    @property
    def clock(self) -> Clock:
        """The clock of every time that a stream tells."""
        ...

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        ...

    def check_room(self, num_samples: int, num_ahead: int = 0) -> None:
        """Raise what `submit_samples` would raise now for so many of any prompt: the prompt need not be made then.

        `num_ahead` other sequences are about to be submitted.
        """
        ...

    def submit(self, prompt_token_ids: Int32Array, sampling: SamplingParams, terms: Terms | None = None) -> TokenStream:
        """Start a sequence. The stream raises DeadlineExceededError when its deadline passes, and also when it turns
        out that the deadline cannot be met; OverloadedError when it has waited for too long.

        Raises OverloadedError when the queue is full, UnserviceableError when the KV buffer could never hold the
        request, DrainingError or EngineDeadError when nothing is taken any more; nothing is left behind then.
        """
        ...

    def prompt_keys(self, prompt_token_ids: Int32Array, tenant: str) -> PromptKeys:
        """What the prefix cache calls the tenant's prompt: a long one takes milliseconds. Any thread."""
        ...

    def submit_samples(
        self,
        prompt_token_ids: Int32Array,
        samplings: Sequence[SamplingParams],
        terms: Terms | None = None,
        keys: PromptKeys | None = None,
    ) -> list[TokenStream]:
        """Start a sequence for each of `samplings`, which share the prompt's computation and its KV blocks.

        `keys` are the prompt's, of the tenant in `terms`; without them they are made here.

        All of them are started or none: raises what `submit` raises, and InvalidRequestError when the queue, even an
        empty one, has no room for so many.
        """
        ...

    def cancel(self, seq_id: int) -> None:
        """Forget the sequence; its blocks are free at the next step boundary. Idempotent, O(1), never raises."""
        ...
