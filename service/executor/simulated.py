"""An executor without a model, for tests and simulation: tokens are a hash that a reader can compute by hand."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from service.core.batch_state import BatchState
from service.core.plan import StepPlan
from service.core.types import Int32Array, StepResult
from service.errors import ExecutorError
from service.executor.api import ExecutorLimits

_MULTIPLIERS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9))
_EMPTY_SLOT = -1


def toy_tokens(last_tokens: npt.ArrayLike, positions: npt.ArrayLike, vocab_size: int) -> Int32Array:
    """The token that follows `last_tokens` when it stands at `positions`: a hash of both, below `vocab_size`."""
    # At least one dimension: numpy warns of wrap-around, which is meant here, for scalars only.
    last = np.atleast_1d(last_tokens).astype(np.uint64)
    position = np.atleast_1d(positions).astype(np.uint64)
    mixed = (last * _MULTIPLIERS[0]) ^ ((position + np.uint64(1)) * _MULTIPLIERS[1])
    mixed ^= mixed >> np.uint64(31)
    mixed *= _MULTIPLIERS[0]
    return np.asarray((mixed >> np.uint64(33)) % np.uint64(vocab_size)).astype(np.int32)


class SimulatedExecutor:
    """Chooses `toy_tokens` and keeps the ids of computed tokens where a model keeps their keys and values.

    Before a row gets its token, every slot of its context is compared with the row's known tokens: a wrong block
    table, a block given to two sequences or a skipped token is an ExecutorError. `step_ns` gives the virtual duration
    of a step without copies to and from host memory; `elapsed_ns` sums up both. With `can_continue`, steps may be
    dispatched ahead. Owned by one thread.
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        vocab_size: int = 1000,
        step_ns: Callable[[StepPlan], int] | None = None,
        *,
        can_continue: bool = False,
    ) -> None:
        self.limits = limits
        self.elapsed_ns = 0
        self._can_continue = can_continue
        self._sampled: Int32Array = np.empty(0, np.int32)  # by the last step
        self._vocab_size = vocab_size
        self._step_ns = step_ns
        self._slots = np.full((limits.num_blocks, limits.block_size), _EMPTY_SLOT, np.int32)
        self._host_slots = np.full((limits.num_host_blocks, limits.block_size), _EMPTY_SLOT, np.int32)

    def warm_up(self) -> None:
        """Nothing is cold here."""

    def dispatch(self, plan: StepPlan, batch: BatchState) -> "SimulatedStep":
        """Write the step's tokens into their slots and choose the next ones."""
        self._copy_blocks(plan)
        continued = self._sampled[plan.continues]
        starts = batch.num_computed_tokens[plan.rows]
        if plan.is_ahead:
            starts += plan.num_in_flight
        work = zip(plan.rows.tolist(), starts.tolist(), plan.num_scheduled.tolist(), strict=True)
        for index, (row, start, count) in enumerate(work):
            tokens = batch.token_ids[row, : start + count].copy()
            if index < len(continued):
                tokens[-1] = continued[index]
            self._compute(batch, row, start, tokens)
        if self._step_ns is not None:
            num_copies = len(plan.offload) + len(plan.restore)
            self.elapsed_ns += self._step_ns(plan) + round(num_copies * self.limits.host_block_ns)
        sampled = plan.rows[plan.samples]
        positions = batch.num_tokens[sampled]
        last_tokens = batch.token_ids[sampled, positions - 1]
        positions[: len(continued)] += 1
        last_tokens[: len(continued)] = continued
        self._sampled = toy_tokens(last_tokens, positions, self._vocab_size)
        return SimulatedStep(StepResult(token_ids=self._sampled), can_continue=self._can_continue)

    def close(self) -> None:
        """Nothing is held."""

    def _copy_blocks(self, plan: StepPlan) -> None:
        """To host memory, from there, and between blocks, in this order."""
        for (sources, targets), held, taken in (
            (plan.offload.T, self._slots, self._host_slots),
            (plan.restore.T, self._host_slots, self._slots),
            (plan.block_copies.T, self._slots, self._slots),
        ):
            taken[targets] = held[sources]

    def _compute(self, batch: BatchState, row: int, start: int, tokens: Int32Array) -> None:
        positions = np.arange(len(tokens))
        blocks = batch.block_table[row, positions // self.limits.block_size]
        offsets = positions % self.limits.block_size
        self._slots[blocks[start:], offsets[start:]] = tokens[start:]
        wrong: npt.NDArray[Any] = np.flatnonzero(self._slots[blocks, offsets] != tokens)
        if len(wrong):
            raise ExecutorError(
                f"sequence {batch.seq_ids[row]}: the slot of position {wrong[0]} (block {blocks[wrong[0]]}) holds "
                "another sequence's token"
            )


class SimulatedStep:
    """A step that is already done."""

    def __init__(self, result: StepResult, *, can_continue: bool = False) -> None:
        self.can_continue = can_continue
        self._result = result

    def wait(self) -> StepResult:
        """The tokens that `dispatch` chose."""
        return self._result
