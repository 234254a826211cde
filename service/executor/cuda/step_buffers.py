"""One kind of step's inputs on the device, at addresses that never change, and the pinned memory they are staged in.

Everything but the block table lies in one buffer, plan and sampling parameters included, and goes over in one copy; the
rows of the block table follow in a second, as wide as the longest sequence needs.
"""

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from service.executor.api import ExecutorLimits
from service.executor.cuda.attention_plan import AttentionPlanner, PlanCounts, PlanLayout, PlanLimits, PlanSections
from service.executor.cuda.device import Device
from service.executor.cuda.memory import DeviceBuffer, PinnedBuffer
from service.executor.sampler import RowParams
from service.executor.step_inputs import StepInputs

_ALIGNMENT_BYTES: Final = 64
_PER_TOKEN: Final = ("token_ids", "positions", "slot_mapping")
_GRAPH_INPUTS: Final = (*_PER_TOKEN, "cu_seqlens", "context_lens", "logit_indices")
_PARAMS: Final[Mapping[str, npt.DTypeLike]] = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "seed": np.int64,
    "position": np.int32,
}


@dataclass(frozen=True, slots=True)
class StepSize:
    """The extents of a step's tensors."""

    num_tokens: int
    num_seqs: int
    num_logits: int


class StepBuffers:
    """The inputs of decode steps, or of mixed ones. Owned by the engine thread.

    `stage` waits for nothing: the step before must be done, since its inputs are overwritten.
    """

    def __init__(self, device: Device, limits: ExecutorLimits, plan_limits: PlanLimits, *, has_prefill: bool) -> None:
        """Allocate both sides. Raises ConfigError when memory is lacking."""
        self._device = device
        max_tokens, max_rows = plan_limits.max_tokens, limits.max_num_seqs
        self._max_blocks = -(-limits.max_model_len // limits.block_size)
        layout = PlanLayout.of(plan_limits, has_prefill=has_prefill)
        sizes: dict[str, tuple[int, npt.DTypeLike]] = dict.fromkeys(_PER_TOKEN, (max_tokens, np.int32))
        sizes |= {"cu_seqlens": (max_rows + 1, np.int32)}
        sizes |= dict.fromkeys(("context_lens", "logit_indices"), (max_rows, np.int32))
        sizes |= {name: (max_rows, dtype) for name, dtype in _PARAMS.items()}
        sizes |= {"plan": (layout.size, np.int32)}
        self._offsets, num_bytes = _place(sizes)
        table_bytes = 4 * max_rows * self._max_blocks
        with ExitStack() as undo:
            # The device's last, to be freed first: that waits for what is in flight, which may still read the others.
            self._staged = undo.enter_context(closing(PinnedBuffer(device, num_bytes)))
            self._staged_table = undo.enter_context(closing(PinnedBuffer(device, table_bytes)))
            self._memory = undo.enter_context(closing(DeviceBuffer(device, num_bytes)))
            self._table = undo.enter_context(closing(DeviceBuffer(device, table_bytes)))
            self._owned = undo.pop_all()
        self._all: npt.NDArray[Any] = self._staged.view((num_bytes,), np.uint8)
        self._arrays = {
            name: self._staged.view((length,), dtype, self._offsets[name]) for name, (length, dtype) in sizes.items()
        }
        self._planner = AttentionPlanner(plan_limits, layout, self._arrays["plan"])
        self.plan: PlanSections = self._planner.sections  # of the step that was staged last
        plan_address = self.address("plan")
        self.plan_addresses = {
            name: plan_address + 4 * offset for name, offset in zip(self.plan._fields, layout.offsets, strict=True)
        }

    @property
    def table_stride(self) -> int:
        """Columns of the block table on the device."""
        return self._max_blocks

    @property
    def table_address(self) -> int:
        """The block table on the device, int32[max_num_seqs, table_stride]."""
        return self._table.address

    def address(self, name: str) -> int:
        """Where an input lies on the device."""
        return self._memory.address + self._offsets[name]

    def stage(self, inputs: StepInputs, params: RowParams, num_seqs: int) -> PlanCounts:
        """Plan the step, pad it to `num_seqs` sequences and enqueue its copies to the device.

        Only decode steps are padded. Padding computes a token at position 0 that sees nothing and writes no KV.
        """
        arrays, num_rows = self._arrays, len(inputs.context_lens)
        for name in _GRAPH_INPUTS:
            values = getattr(inputs, name)
            arrays[name][: len(values)] = values
        for field in fields(params):
            values = getattr(params, field.name)
            arrays[field.name][: len(values)] = values
        if num_rows < num_seqs:
            pad = slice(num_rows, num_seqs)
            arrays["token_ids"][pad] = arrays["positions"][pad] = arrays["context_lens"][pad] = 0
            arrays["slot_mapping"][pad] = -1
            arrays["logit_indices"][pad] = np.arange(num_rows, num_seqs, dtype=np.int32)
            arrays["cu_seqlens"][num_rows + 1 : num_seqs + 1] = np.arange(num_rows, num_seqs, dtype=np.int32) + 1
        counts = self._planner.fill(arrays["cu_seqlens"][: num_seqs + 1], arrays["context_lens"][:num_seqs])
        table = self._staged_table.view(inputs.block_table.shape, np.int32)
        table[:] = inputs.block_table
        self._device.copy_in(self._memory.address, self._all)
        self._device.copy_in_rows(self._table.address, 4 * self._max_blocks, table)
        return counts

    def close(self) -> None:
        """Free both sides. Idempotent."""
        self._owned.close()


def _place(sizes: Mapping[str, tuple[int, npt.DTypeLike]]) -> tuple[dict[str, int], int]:
    """Byte offsets of arrays that lie one behind the other, and the bytes of all."""
    offsets, num_bytes = {}, 0
    for name, (length, dtype) in sizes.items():
        offsets[name] = num_bytes
        num_bytes += -(-length * np.dtype(dtype).itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return offsets, num_bytes
