"""The plan of one step: a pure message from the scheduler to an executor."""

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from service.core.types import BoolArray, Int32Array

NO_ROWS: Final[Int32Array] = np.empty(0, np.int32)
NO_COPIES: Final[Int32Array] = np.empty((0, 2), np.int32)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Which rows of the BatchState compute how many tokens in one forward pass.

    Row `rows[i]` computes `num_scheduled[i]` tokens, from its `num_computed_tokens` on. `samples[i]` says that the
    last of them is the row's last known token, so that its logits yield a new one. Rows that compute exactly one
    token and sample come first; there are `num_decode_rows` of them.
    """

    step_id: int
    rows: Int32Array  # [num_rows]
    num_scheduled: Int32Array  # [num_rows], each at least 1
    samples: BoolArray  # [num_rows]
    num_decode_rows: int
    num_tokens: int  # sum of num_scheduled
    # [num_copies, 2] (source, target): what the source block holds is copied to the target before the forward pass
    block_copies: Int32Array = field(default_factory=lambda: NO_COPIES)
    # [n, 2] (device block, host block) to be copied before all else: then the step writes to these device blocks
    offload: Int32Array = field(default_factory=lambda: NO_COPIES)
    # [n, 2] (host block, device block) to be copied after that, and before `block_copies`, which may read them
    restore: Int32Array = field(default_factory=lambda: NO_COPIES)
    # [num_rows] of a step planned ahead, else empty: how many tokens of each row the step before computes. Until that
    # is committed, the row's `num_computed_tokens` is so many less than this plan means.
    num_in_flight: Int32Array = field(default_factory=lambda: NO_ROWS)
    # [num_continuing] of a step planned ahead: its first rows compute a token each that the step before samples, and
    # this says which sample. Until that step is committed, their `num_tokens` is one less than this plan means.
    continues: Int32Array = field(default_factory=lambda: NO_ROWS)

    @property
    def is_ahead(self) -> bool:
        """True when the step before had not been committed as this one was planned."""
        return len(self.num_in_flight) > 0

    @property
    def is_decode_only(self) -> bool:
        """True when no row computes a chunk, so that decode.onnx can run the step."""
        return self.num_decode_rows == len(self.rows)
