"""Step inputs against a slow oracle that walks every token."""

import numpy as np
import pytest

from service.core.batch_state import BatchState
from service.core.plan import StepPlan
from service.executor.api import ExecutorLimits
from service.executor.step_inputs import StepInputBuffers, StepInputs

BLOCK_SIZE = 4
LIMITS = ExecutorLimits(
    num_blocks=64, block_size=BLOCK_SIZE, max_num_seqs=6, max_num_batched_tokens=40, max_model_len=32
)


def make_batch(rng: np.random.Generator) -> BatchState:
    batch = BatchState(LIMITS.max_num_seqs, LIMITS.max_model_len, BLOCK_SIZE)
    batch.num_rows = LIMITS.max_num_seqs
    batch.token_ids[:] = rng.integers(0, 50_000, batch.token_ids.shape)
    batch.block_table[:] = rng.permutation(batch.block_table.size).reshape(batch.block_table.shape)
    return batch


def make_plan(batch: BatchState, work: list[tuple[int, int, int, bool]]) -> StepPlan:
    """`work`: (row, computed before, scheduled now, samples) in the plan's order."""
    rows, computed, scheduled, samples = (np.array(column) for column in zip(*work, strict=True))
    batch.num_computed_tokens[rows] = computed
    return StepPlan(
        step_id=1,
        rows=rows.astype(np.int32),
        num_scheduled=scheduled.astype(np.int32),
        samples=samples.astype(np.bool_),
        num_decode_rows=int((samples & (scheduled == 1)).sum()),
        num_tokens=int(scheduled.sum()),
    )


def oracle(plan: StepPlan, batch: BatchState) -> dict[str, list]:
    out: dict[str, list] = {name: [] for name in StepInputs.__slots__}
    out["cu_seqlens"].append(0)
    for row, scheduled, samples in zip(plan.rows, plan.num_scheduled, plan.samples, strict=True):
        start = int(batch.num_computed_tokens[row])
        for position in range(start, start + int(scheduled)):
            out["token_ids"].append(int(batch.token_ids[row, position]))
            out["positions"].append(position)
            block = int(batch.block_table[row, position // BLOCK_SIZE])
            out["slot_mapping"].append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        out["cu_seqlens"].append(len(out["token_ids"]))
        out["context_lens"].append(start + int(scheduled))
        if samples:
            out["logit_indices"].append(len(out["token_ids"]) - 1)
    width = -(-max(out["context_lens"]) // BLOCK_SIZE)
    out["block_table"] = [batch.block_table[row, :width].tolist() for row in plan.rows]
    return out


CASES = {
    "one decode row": [(0, 7, 1, True)],
    "decode rows at block edges": [(0, 3, 1, True), (1, 4, 1, True), (2, 31, 1, True), (3, 0, 1, True)],
    "rows out of order": [(5, 9, 1, True), (2, 1, 1, True)],
    "one whole prompt": [(1, 0, 32, True)],
    "a chunk that yields nothing": [(1, 5, 6, False)],
    "decode rows, chunks, and a chunk of one": [
        (0, 10, 1, True),
        (3, 20, 1, True),
        (4, 0, 13, False),
        (1, 8, 5, True),
        (5, 2, 1, False),
    ],
    "as many rows and tokens as the limits allow": [(row, row, 6 if row else 10, row % 2 == 0) for row in range(6)],
}


@pytest.mark.parametrize("work", CASES.values(), ids=CASES)
def test_inputs_equal_a_walk_over_every_token(work: list[tuple[int, int, int, bool]]) -> None:
    batch = make_batch(np.random.default_rng(1))
    plan = make_plan(batch, work)
    inputs = StepInputBuffers(LIMITS).fill(plan, batch)
    assert oracle(plan, batch) == {name: array.tolist() for name, array in inputs.named()}


def test_random_plans_in_reused_buffers_equal_the_oracle() -> None:
    rng = np.random.default_rng(2)
    batch, buffers = make_batch(rng), StepInputBuffers(LIMITS)
    for _ in range(300):
        num_rows = int(rng.integers(1, LIMITS.max_num_seqs + 1))
        work = []
        for row in rng.permutation(LIMITS.max_num_seqs)[:num_rows].tolist():
            scheduled = int(rng.integers(1, 7))
            work.append(
                (row, int(rng.integers(0, LIMITS.max_model_len - scheduled + 1)), scheduled, bool(rng.integers(2)))
            )
        plan = make_plan(batch, work)
        assert oracle(plan, batch) == {name: array.tolist() for name, array in buffers.fill(plan, batch).named()}


def test_inputs_are_int32_prefixes_at_fixed_addresses_and_leave_the_batch_alone() -> None:
    batch, buffers = make_batch(np.random.default_rng(3)), StepInputBuffers(LIMITS)
    plan = make_plan(batch, CASES["decode rows at block edges"])
    before = {name: value.copy() for name, value in vars(batch).items() if isinstance(value, np.ndarray)}
    first = {name: array.ctypes.data for name, array in buffers.fill(plan, batch).named()}
    again = buffers.fill(make_plan(batch, [(0, 3, 1, True), (1, 4, 1, True), (2, 31, 1, True), (3, 0, 1, True)]), batch)
    for name, array in again.named():
        assert (name, np.int32, True, first[name]) == (name, array.dtype, array.flags.c_contiguous, array.ctypes.data)
    assert all(np.array_equal(before[name], getattr(batch, name)) for name in before)


def test_a_single_token_gets_company_that_writes_nothing_where_two_rows_are_needed():
    batch = make_batch(np.random.default_rng(5))
    plan = make_plan(batch, [(2, 6, 1, True)])
    alone = StepInputBuffers(LIMITS).fill(plan, batch)
    padded = StepInputBuffers(LIMITS, min_rows=2).fill(plan, batch)
    for name in ("token_ids", "positions", "slot_mapping", "context_lens", "block_table"):
        assert getattr(padded, name)[:1].tolist() == getattr(alone, name).tolist(), name
    assert padded.slot_mapping.tolist()[1:] == [-1]
    assert padded.cu_seqlens.tolist() == [0, 1, 2]
    assert padded.context_lens.tolist()[1:] == [1]
    assert padded.block_table[1].tolist() == [0, 0]
    assert padded.logit_indices.tolist() == [0, 0]


def test_a_single_row_of_logits_is_computed_twice_where_two_rows_are_needed():
    batch = make_batch(np.random.default_rng(6))
    buffers = StepInputBuffers(LIMITS, min_rows=2)
    assert buffers.fill(make_plan(batch, [(0, 0, 3, False), (1, 2, 4, True)]), batch).logit_indices.tolist() == [6, 6]
    assert buffers.fill(make_plan(batch, [(0, 0, 3, False)]), batch).logit_indices.tolist() == []
    assert buffers.fill(make_plan(batch, [(0, 3, 1, True), (1, 6, 1, True)]), batch).logit_indices.tolist() == [0, 1]
