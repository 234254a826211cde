"""When sequences come on board and when they leave: what tells the generations of batching apart."""

from typing import Protocol

from service.core.batch_state import BatchState
from service.core.budget import ChunkBudget
from service.core.chunks import Chunks
from service.core.continuous_batching import ContinuousBatching
from service.core.prefixes import Prefixes
from service.core.reservation import Reservation
from service.core.scheduler_config import SchedulerConfig
from service.core.static_batching import StaticBatching
from service.core.waiting_queue import WaitingQueue


class Batching(Protocol):
    """What the Scheduler and its Planner ask. Stateless but for the columns of the BatchState."""

    def not_before_ns(self) -> int:
        """With work to do, when the next step may begin; 0: at once."""
        ...

    def admit(self, step_id: int, reservation: Reservation, chunks: Chunks, num_spare_blocks: int) -> None:
        """Admit sequences of the queue in `reservation`, and let them share the step with `chunks`.

        `num_spare_blocks` may be taken while others run.
        """
        ...

    def may_go_on(self, step_id: int, num_decode_rows: int, num_free_blocks: int) -> bool:
        """Whether step `step_id` may be planned ahead, with so many decode rows of those that run and nobody else.

        They leave `num_free_blocks`. No prompt is in progress.
        """
        ...

    def may_leave(self) -> bool:
        """Whether the rows that have ended leave the batch now."""
        ...


def create_batching(
    config: SchedulerConfig, batch: BatchState, queue: WaitingQueue, prefixes: Prefixes, budget: ChunkBudget
) -> Batching:
    """What the configuration names."""
    if config.batching == "continuous":
        return ContinuousBatching(config, batch, queue, prefixes, budget)
    return StaticBatching(config, batch, queue)
