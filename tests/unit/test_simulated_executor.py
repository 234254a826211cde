"""The simulated executor: hand-checkable tokens, and slots that betray a wrong block table."""

from dataclasses import replace

import numpy as np
import pytest

from service.core.batch_state import BatchState
from service.core.plan import StepPlan
from service.core.types import Request, SamplingParams
from service.errors import ExecutorError
from service.executor.api import ExecutorLimits
from service.executor.simulated import SimulatedExecutor, toy_tokens
from tests.stepping import run_requests

LIMITS = ExecutorLimits(num_blocks=8, block_size=4, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=16)


def plan_of(*work: tuple[int, int, bool]) -> StepPlan:
    rows, scheduled, samples = zip(*work, strict=True)
    return StepPlan(
        step_id=1,
        rows=np.array(rows, np.int32),
        num_scheduled=np.array(scheduled, np.int32),
        samples=np.array(samples),
        num_decode_rows=0,
        num_tokens=sum(scheduled),
    )


def batch_with_prompt() -> BatchState:
    batch = BatchState(2, 16, 4)
    batch.token_ids[0, :6] = [5, 6, 7, 8, 9, 10]
    batch.num_tokens[0] = batch.num_prompt_tokens[0] = 6
    batch.block_table[0, :2] = [3, 1]
    return batch


def test_tokens_are_a_function_of_last_token_and_position() -> None:
    multiplier, other = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
    mixed = (10 * multiplier % 2**64) ^ (7 * other % 2**64)
    mixed ^= mixed >> 31
    expected = (mixed * multiplier % 2**64 >> 33) % 1000
    assert [expected] == toy_tokens(10, 6, 1000).tolist()
    result = SimulatedExecutor(LIMITS).dispatch(plan_of((0, 6, True)), batch_with_prompt()).wait()
    assert [expected] == result.token_ids.tolist()


def test_a_chunked_prompt_yields_the_token_of_the_whole_one() -> None:
    batch, executor = batch_with_prompt(), SimulatedExecutor(LIMITS)
    whole = SimulatedExecutor(LIMITS).dispatch(plan_of((0, 6, True)), batch).wait()
    assert executor.dispatch(plan_of((0, 5, False)), batch).wait().token_ids.tolist() == []
    batch.num_computed_tokens[0] = 5
    assert whole.token_ids.tolist() == executor.dispatch(plan_of((0, 1, True)), batch).wait().token_ids.tolist()


def test_a_skipped_token_and_a_stolen_block_are_errors() -> None:
    batch, executor = batch_with_prompt(), SimulatedExecutor(LIMITS)
    batch.num_computed_tokens[0] = 5
    with pytest.raises(ExecutorError, match="the slot of position 0 "):
        executor.dispatch(plan_of((0, 1, True)), batch)
    batch.num_computed_tokens[0] = 0
    executor.dispatch(plan_of((0, 5, False)), batch)
    batch.token_ids[1, :2], batch.num_tokens[1], batch.block_table[1, 0] = [90, 91], 2, 3
    executor.dispatch(plan_of((1, 2, True)), batch)
    batch.num_computed_tokens[0] = 5
    with pytest.raises(ExecutorError, match=r"position 0 \(block 3\)"):
        executor.dispatch(plan_of((0, 1, True)), batch)


def test_virtual_time_sums_the_steps() -> None:
    batch, executor = batch_with_prompt(), SimulatedExecutor(LIMITS, step_ns=lambda plan: 100 * plan.num_tokens)
    executor.dispatch(plan_of((0, 5, False)), batch)
    batch.num_computed_tokens[0] = 5
    executor.dispatch(plan_of((0, 1, True)), batch)
    assert executor.elapsed_ns == 600


def test_blocks_come_back_from_host_memory_whole_and_their_copies_take_time() -> None:
    """Two prompts of two full blocks take turns; the KV buffer holds one of them, which pushes the other out."""
    limits = replace(LIMITS, num_blocks=4, num_host_blocks=8, max_num_seqs=1, host_block_ns=5.0)
    executor = SimulatedExecutor(limits, step_ns=lambda plan: 1000)
    prompts = (np.arange(5 + 10 * (number % 2), 14 + 10 * (number % 2), dtype=np.int32) for number in range(6))
    asked = [Request(number, prompt, SamplingParams(3)) for number, prompt in enumerate(prompts)]
    outcome = run_requests(executor, asked)
    alone = run_requests(SimulatedExecutor(limits), asked[:2]).tokens
    assert [outcome.tokens[number] for number in range(6)] == [alone[number % 2] for number in range(6)]
    assert outcome.num_restored_blocks == 8
    # Three steps for each; two blocks go out once for either prompt, and come back four times.
    assert executor.elapsed_ns == 6 * 3 * 1000 + (2 + 2 + 8) * 5
