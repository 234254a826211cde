"""When sequences come on board and when they leave: what tells the generations of batching apart."""

from typing import Protocol

from service.core.batch_state import BatchState
from service.core.budget import ChunkBudget
from service.core.chunks import Chunks
from service.core.continuous_batching import ContinuousBatching
from service.core.prefixes import Prefixes
from service.core.reservation import Reservation
from service.core.roster import Roster
from service.core.scheduler_config import SchedulerConfig
from service.core.static_batching import StaticBatching
from service.core.waiting_queue import WaitingQueue


class Batching(Protocol):
    """What the Scheduler and its Planner ask. Stateless but for the columns of the BatchState."""

    def not_before_ns(self) -> int:
        """With work to do, when the next step may begin; 0: at once."""
        ...

    def admit(
        self, step_id: int, reservation: Reservation, roster: Roster, chunks: Chunks, num_spare_blocks: int
    ) -> None:
        """Admit sequences of the queue in `reservation` beside `roster`, and let them share the step with `chunks`.

        `num_spare_blocks` may be taken while others run.
        """
        ...

    def may_go_on(self, step_id: int, chunks: Chunks | None, num_spare_blocks: int, *, is_published: bool) -> bool:
        """Whether step `step_id` may be planned ahead, with `chunks` of those that run and nobody else.

        None: no prompt is in progress, and nobody waits who could have a row. With `is_published` the prefix cache
        holds all that it will when the step before has landed.
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
