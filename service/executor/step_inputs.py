"""The graph inputs of one step, computed from its plan into arrays at fixed addresses.

Every step binds prefixes of arrays that are as large as the largest step; nothing is padded but steps of a single row,
where a model needs it. No Python loop runs over rows or tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from service.core.batch_state import BatchState
from service.core.plan import StepPlan
from service.core.types import NULL_BLOCK, Int32Array
from service.executor.api import ExecutorLimits
from service.executor.buffers import aligned_zeros


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's views of a StepInputBuffers; valid until its next `fill`."""

    token_ids: Int32Array  # [num_tokens]
    positions: Int32Array  # [num_tokens]
    slot_mapping: Int32Array  # [num_tokens] slot = block * block_size + offset
    cu_seqlens: Int32Array  # [num_rows + 1] cumulative number of tokens
    context_lens: Int32Array  # [num_rows] tokens of the sequence after this step
    block_table: Int32Array  # [num_rows, max_blocks] as wide as the longest row needs
    logit_indices: Int32Array  # [num_sampled] tokens that get logits

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """What all shapes follow from: tokens, rows, width of the block table, sampled rows."""
        return (len(self.token_ids), *self.block_table.shape, len(self.logit_indices))

    def named(self) -> Iterator[tuple[str, Int32Array]]:
        """Every graph input's name and array."""
        for name in self.__slots__:
            yield name, getattr(self, name)


class StepInputBuffers:
    """The memory behind every step's inputs. Owned by the engine thread; addresses never change."""

    def __init__(self, limits: ExecutorLimits, min_rows: int = 1) -> None:
        """`min_rows`, 1 or 2, is the least number of tokens and of logits that a step is to have."""
        self._min_rows = min_rows
        max_tokens, max_rows = max(limits.max_num_batched_tokens, min_rows), max(limits.max_num_seqs, min_rows)
        max_blocks = -(-limits.max_model_len // limits.block_size)
        self._block_bits = limits.block_size.bit_length() - 1
        self._token_ids = _int32(max_tokens)
        self._positions = _int32(max_tokens)
        self._slot_mapping = _int32(max_tokens)
        self._cu_seqlens = _int32(max_rows + 1)
        self._context_lens = _int32(max_rows)
        self._block_table = _int32(max_rows * max_blocks)
        self._logit_indices = _int32(max_rows)
        self._counting: Int32Array = np.arange(max_rows + 1, dtype=np.int32)

    def fill(self, plan: StepPlan, batch: BatchState, table: Int32Array | None = None) -> StepInputs:
        """Compute the inputs of `plan`. The plan must keep the limits that the buffers were made for.

        The block table, which may have megabytes, goes to the flat memory `table` if there is one. Tokens with which a
        step planned ahead continues are not known: whatever is in their places. Rows of `min_rows` that the plan does
        not have follow its own: their tokens write no KV, their logits are twins.
        """
        fill = self._fill_decode if plan.is_decode_only else self._fill_mixed
        inputs = fill(plan, batch, self._block_table if table is None else table)
        if len(inputs.token_ids) < self._min_rows:
            inputs = self._add_token(inputs)
        if 0 < len(inputs.logit_indices) < self._min_rows:
            logit_indices = self._logit_indices[:2]
            logit_indices[1] = logit_indices[0]
            inputs = replace(inputs, logit_indices=logit_indices)
        return inputs

    def _add_token(self, inputs: StepInputs) -> StepInputs:
        """One more sequence, of one token that sees the null block."""
        width = inputs.block_table.shape[1]
        table = self._block_table[: 2 * width].reshape(2, width)
        table[1] = NULL_BLOCK
        self._token_ids[1] = self._positions[1] = 0
        self._slot_mapping[1] = -1
        self._cu_seqlens[2] = 2
        self._context_lens[1] = 1
        return StepInputs(
            token_ids=self._token_ids[:2],
            positions=self._positions[:2],
            slot_mapping=self._slot_mapping[:2],
            cu_seqlens=self._cu_seqlens[:3],
            context_lens=self._context_lens[:2],
            block_table=table,
            logit_indices=inputs.logit_indices,
        )

    def _fill_mixed(self, plan: StepPlan, batch: BatchState, table: Int32Array) -> StepInputs:
        num_rows, num_tokens = len(plan.rows), plan.num_tokens
        num_computed = batch.num_computed_tokens[plan.rows]
        if plan.is_ahead:
            num_computed += plan.num_in_flight
        context_lens = np.add(num_computed, plan.num_scheduled, out=self._context_lens[:num_rows])
        cu_seqlens = self._cu_seqlens[: num_rows + 1]
        cu_seqlens[0] = 0
        np.cumsum(plan.num_scheduled, out=cu_seqlens[1:])
        token_rows = np.repeat(plan.rows, plan.num_scheduled)
        # A token's position is its index in the step plus what its row had computed, less where its row starts.
        positions = np.add(
            np.arange(num_tokens, dtype=np.int32),
            np.repeat(num_computed - cu_seqlens[:-1], plan.num_scheduled),
            out=self._positions[:num_tokens],
        )
        sampled = cu_seqlens[1:][plan.samples]
        return StepInputs(
            token_ids=_gather(batch.token_ids, token_rows, positions, self._token_ids[:num_tokens]),
            positions=positions,
            slot_mapping=self._fill_slots(batch, token_rows, positions),
            cu_seqlens=cu_seqlens,
            context_lens=context_lens,
            block_table=self._fill_block_table(batch, plan.rows, int(context_lens.max()), table),
            logit_indices=np.subtract(sampled, 1, out=self._logit_indices[: len(sampled)]),
        )

    def _fill_decode(self, plan: StepPlan, batch: BatchState, table: Int32Array) -> StepInputs:
        """The same for one token per row, all sampled. Most steps are this: every call into numpy counts, cold."""
        rows, num_rows = plan.rows, len(plan.rows)
        positions = batch.num_computed_tokens.take(rows, out=self._positions[:num_rows], mode="clip")
        if plan.is_ahead:
            positions += plan.num_in_flight
        context_lens = np.add(positions, 1, out=self._context_lens[:num_rows])
        cu_seqlens, logit_indices = self._cu_seqlens[: num_rows + 1], self._logit_indices[:num_rows]
        cu_seqlens[:] = self._counting[: num_rows + 1]
        logit_indices[:] = self._counting[:num_rows]
        return StepInputs(
            token_ids=_gather(batch.token_ids, rows, positions, self._token_ids[:num_rows]),
            positions=positions,
            slot_mapping=self._fill_slots(batch, rows, positions),
            cu_seqlens=cu_seqlens,
            context_lens=context_lens,
            block_table=self._fill_block_table(batch, rows, int(context_lens.max()), table),
            logit_indices=logit_indices,
        )

    def _fill_slots(self, batch: BatchState, token_rows: Int32Array, positions: Int32Array) -> Int32Array:
        slots = self._slot_mapping[: len(positions)]
        _gather(batch.block_table, token_rows, positions >> self._block_bits, slots)
        slots <<= self._block_bits
        slots |= positions & ((1 << self._block_bits) - 1)
        return slots

    def _fill_block_table(
        self, batch: BatchState, rows: Int32Array, max_context: int, memory: Int32Array
    ) -> Int32Array:
        width = -(-max_context // (1 << self._block_bits))
        table = memory[: len(rows) * width].reshape(len(rows), width)
        # Bounds are the plan's promise; "clip" lets numpy write straight into `table`.
        return batch.block_table[:, :width].take(rows, axis=0, out=table, mode="clip")


def _int32(length: int) -> Int32Array:
    return aligned_zeros((length,), np.int32)


def _gather(table: Int32Array, rows: Int32Array, columns: Int32Array, out: Int32Array) -> Int32Array:
    """`table[rows, columns]` into `out`."""
    out[:] = table[rows, columns]
    return out
