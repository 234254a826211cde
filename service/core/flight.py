"""A step between its plan and its commit or abort."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from service.core.plan import StepPlan
from service.core.reservation import Reservation
from service.core.types import Int8Array, Int64Array, StepDelta, StepResult


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan and what it has changed."""

    plan: StepPlan
    reservation: Reservation

    def delta(
        self,
        seq_ids: Int64Array,
        reasons: Int8Array,
        result: StepResult,
        cancelled: Collection[int],
        cached_prompt_tokens: dict[int, int],
    ) -> StepDelta:
        """The StepDelta of the sequences that sampled, `seq_ids`, without the `cancelled` ones."""
        if cancelled:
            wanted = np.flatnonzero(~np.isin(seq_ids, list(cancelled)))
            seq_ids, reasons, result = seq_ids[wanted], reasons[wanted], result.of(wanted)
        return StepDelta(self.plan.step_id, seq_ids, result.token_ids, reasons, result.logprobs, cached_prompt_tokens)
