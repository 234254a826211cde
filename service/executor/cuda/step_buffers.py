"""One kind of step's inputs on the device, at addresses that never change, and the pinned memory they are staged in.

Everything but the block table lies in one buffer, plan and sampling parameters included, and goes over in one copy; the
rows of the block table follow in a second, as wide as the longest sequence needs. Steps that edit logits copy a third
time: what to change where. There are two sets of pinned memory, used in turn, so that a step can be staged while the
one before is in flight; on the device their inputs follow each other in one place, as the steps do.
"""

from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from service.core.types import Int32Array
from service.executor.api import ExecutorLimits
from service.executor.cuda.attention_plan import AttentionPlanner
from service.executor.cuda.device import Device
from service.executor.cuda.memory import DeviceBuffer, PinnedBuffer, placed
from service.executor.cuda.plan_layout import PlanCounts, PlanLayout, PlanLimits, PlanSections
from service.executor.cuda.row_edits import NO_LOGPROBS, RowEdits, SamplingBounds
from service.executor.sampler import RowParams
from service.executor.step_inputs import StepInputs

Sizes = dict[str, tuple[int, npt.DTypeLike]]
"""Arrays' lengths and types."""

_PER_TOKEN: Final = ("token_ids", "positions", "slot_mapping")
_GRAPH_INPUTS: Final = (*_PER_TOKEN, "cu_seqlens", "context_lens", "logit_indices")
PARAM_DTYPES: Final[Mapping[str, npt.DTypeLike]] = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "seed": np.int64,
    "position": np.int32,
}
"""Graph inputs too, of SampleRows: one entry per row of logits."""
EDIT_COLUMNS: Final = ("edit_tokens", "edit_counts", "edit_biases", "edit_logits")
"""Of every edit, all of 4 bytes. The last one is the kernel's to write."""


class _Staging:
    """Pinned memory of one step: all arrays but the block table, that, and edits."""

    def __init__(self, device: Device, num_bytes: tuple[int, int, int], sizes: Sizes, offsets: dict[str, int]) -> None:
        with ExitStack() as undo:
            buffers = [undo.enter_context(closing(PinnedBuffer(device, each))) for each in num_bytes]
            self._owned = undo.pop_all()
        staged, self.table, self.edits = buffers
        self.all: npt.NDArray[Any] = staged.view((num_bytes[0],), np.uint8)
        self.arrays = {name: staged.view((length,), dtype, offsets[name]) for name, (length, dtype) in sizes.items()}

    def close(self) -> None:
        self._owned.close()


class StepBuffers:
    """The inputs of decode steps, or of mixed ones. Owned by the engine thread.

    `stage` waits for nothing: the step before the last one must be done, since its staged inputs are overwritten.
    """

    def __init__(
        self,
        device: Device,
        limits: ExecutorLimits,
        plan_limits: PlanLimits,
        bounds: SamplingBounds,
        *,
        has_prefill: bool,
    ) -> None:
        """Allocate both sides. Raises ConfigError when memory is lacking."""
        self._device = device
        self._max_edits = bounds.max_edits
        max_tokens, max_rows = plan_limits.max_tokens, limits.max_num_seqs
        self._max_rows = max_rows
        self._max_blocks = -(-limits.max_model_len // limits.block_size)
        layout = PlanLayout.of(plan_limits, has_prefill=has_prefill)
        sizes: Sizes = dict.fromkeys(_PER_TOKEN, (max_tokens, np.int32))
        sizes |= {"cu_seqlens": (max_rows + 1, np.int32)}
        sizes |= dict.fromkeys(("context_lens", "logit_indices"), (max_rows, np.int32))
        sizes |= {name: (max_rows, dtype) for name, dtype in PARAM_DTYPES.items()}
        sizes |= {"penalties": (3 * max_rows, np.float32), "edit_indptr": (max_rows + 1, np.int32)}
        sizes |= {"num_logprobs": (max_rows, np.int32)}
        sizes |= {"plan": (layout.size, np.int32)}
        offsets, num_bytes = placed(sizes)
        table_bytes = 4 * max_rows * self._max_blocks
        with ExitStack() as undo:
            # The device's last, to be freed first: that waits for what is in flight, which may still read the others.
            staged_bytes = (num_bytes, table_bytes, self._edit_bytes(3))
            stagings = [undo.enter_context(closing(_Staging(device, staged_bytes, sizes, offsets))) for _ in range(2)]
            self._memory = undo.enter_context(closing(DeviceBuffer(device, num_bytes)))
            self._table = undo.enter_context(closing(DeviceBuffer(device, table_bytes)))
            self._edits = undo.enter_context(closing(DeviceBuffer(device, self._edit_bytes(len(EDIT_COLUMNS)))))
            self._owned = undo.pop_all()
        self._stagings = deque((each, AttentionPlanner(plan_limits, layout, each.arrays["plan"])) for each in stagings)
        self._addresses = {name: self._memory.address + offset for name, offset in offsets.items()}
        self._addresses |= {name: self._edits.address + self._edit_bytes(i) for i, name in enumerate(EDIT_COLUMNS)}
        plan_address = self.address("plan")
        self.plan_addresses = {
            name: plan_address + 4 * offset for name, offset in zip(PlanSections._fields, layout.offsets, strict=True)
        }

    @property
    def next_table(self) -> Int32Array:
        """Flat pinned memory for the next step's block table: one that lies there already is not copied there."""
        return self._stagings[0][0].table.view((self._max_rows * self._max_blocks,), np.int32)

    @property
    def table_stride(self) -> int:
        """Columns of the block table on the device."""
        return self._max_blocks

    @property
    def table_address(self) -> int:
        """The block table on the device, int32[max_num_seqs, table_stride]."""
        return self._table.address

    def address(self, name: str) -> int:
        """Where an array lies on the device."""
        return self._addresses[name]

    def stage(self, inputs: StepInputs, params: RowParams, edits: RowEdits | None, num_seqs: int) -> PlanCounts:
        """Plan the step, pad it to `num_seqs` sequences and enqueue its copies to the device.

        Only decode steps are padded. Padding computes a token at position 0 that sees nothing and writes no KV. Rows of
        logits without parameters, those of padding, take the likeliest token.
        """
        staging, planner = self._stagings[0]
        self._stagings.rotate(-1)
        arrays, num_rows = staging.arrays, len(inputs.context_lens)
        for name in _GRAPH_INPUTS:
            values = getattr(inputs, name)
            arrays[name][: len(values)] = values
        if num_rows < num_seqs:
            pad = slice(num_rows, num_seqs)
            arrays["token_ids"][pad] = arrays["positions"][pad] = arrays["context_lens"][pad] = 0
            arrays["slot_mapping"][pad] = -1
            arrays["logit_indices"][pad] = np.arange(num_rows, num_seqs, dtype=np.int32)
            arrays["cu_seqlens"][num_rows + 1 : num_seqs + 1] = np.arange(num_rows, num_seqs, dtype=np.int32) + 1
        _stage_rows(arrays, params, edits, num_seqs)
        counts = planner.fill(arrays["cu_seqlens"][: num_seqs + 1], arrays["context_lens"][:num_seqs])
        table = staging.table.view(inputs.block_table.shape, np.int32)
        if not np.may_share_memory(table, inputs.block_table):
            table[:] = inputs.block_table
        self._device.copy_in(self._memory.address, staging.all)
        self._device.copy_in_rows(self._table.address, 4 * self._max_blocks, table)
        if edits is not None and edits.columns.size:
            columns = staging.edits.view(edits.columns.shape, np.int32)
            columns[:] = edits.columns
            self._device.copy_in_rows(self._edits.address, self._edit_bytes(1), columns)
        return counts

    def _edit_bytes(self, num_columns: int) -> int:
        return 4 * self._max_edits * num_columns

    def close(self) -> None:
        """Free both sides. Idempotent."""
        self._owned.close()


def _stage_rows(
    arrays: Mapping[str, npt.NDArray[Any]], params: RowParams, edits: RowEdits | None, num_rows: int
) -> None:
    """Stage what sampling takes of at most `num_rows` rows of logits."""
    for name in PARAM_DTYPES:
        values = getattr(params, name)
        arrays[name][: len(values)] = values
        arrays[name][len(values) : num_rows] = 0
    indptr, num_logprobs = arrays["edit_indptr"], arrays["num_logprobs"]
    if edits is None:
        indptr[: num_rows + 1] = 0
        num_logprobs[:num_rows] = NO_LOGPROBS
        return
    num_sampled = len(edits.num_logprobs)
    arrays["penalties"][: 3 * num_sampled] = edits.penalties.reshape(-1)
    indptr[: num_sampled + 1] = edits.indptr
    indptr[num_sampled + 1 : num_rows + 1] = edits.indptr[-1]
    num_logprobs[:num_sampled] = edits.num_logprobs
    num_logprobs[num_sampled:num_rows] = NO_LOGPROBS
