"""What the engine asks of an executor."""

from dataclasses import dataclass
from typing import Protocol

from service.core.batch_state import BatchState
from service.core.plan import StepPlan
from service.core.types import StepResult


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """What an executor was built for; the scheduler stays within it."""

    num_blocks: int  # of the KV buffer, the null block included
    block_size: int  # token positions per block, a power of two
    max_num_seqs: int  # rows of one step
    max_num_batched_tokens: int  # tokens of one step
    max_model_len: int  # tokens of one sequence, prompt and output
    num_host_blocks: int = 0  # in host memory below the KV buffer
    host_block_ns: float = 0.0  # to copy one of them there, or back


class StepHandle(Protocol):
    """A step in flight."""

    @property
    def can_continue(self) -> bool:
        """Whether a step planned ahead of this one's result may be dispatched now: its tokens are on the device."""
        ...

    def wait(self) -> StepResult:
        """Block until the step is done. Raises ExecutorError when it failed. Call it once, on the engine thread."""
        ...


class Executor(Protocol):
    """Runs steps. Owned and called by the engine thread only."""

    @property
    def limits(self) -> ExecutorLimits:
        """What it was built for."""
        ...

    def warm_up(self) -> None:
        """Run dummy steps on the null block, so that the first request meets warm buffers."""
        ...

    def dispatch(self, plan: StepPlan, batch: BatchState) -> StepHandle:
        """Start the forward pass of `plan`. Reads `batch` before it returns and never changes it.

        A plan that is ahead goes on with the step that was dispatched last, which has not been waited for and whose
        handle can continue. Any other is dispatched with no step in flight. Steps are waited for in order.
        """
        ...

    def close(self) -> None:
        """Free what is large: sessions and the KV buffer. Idempotent."""
        ...
