"""The planner on batches that the present policy seldom makes."""

import numpy as np

from service.core.batch_state import BatchState
from service.core.block_pool import BlockPool
from service.core.budget import ChunkBudget
from service.core.continuous_batching import ContinuousBatching
from service.core.ordering import FirstComeFirstServed
from service.core.planner import Planner
from service.core.prefixes import Prefixes
from service.core.reservation import Reservation
from service.core.scheduler_config import SchedulerConfig
from service.core.step_time import StepTimeModel
from service.core.types import Request, SamplingParams
from service.core.waiting_queue import WaitingQueue


def test_prompts_in_progress_share_tokens_and_blocks_lowest_rank_first():
    config = SchedulerConfig(num_blocks=6, block_size=4, max_num_seqs=4, max_num_batched_tokens=30, max_model_len=32)
    policy = FirstComeFirstServed()
    batch, pool, queue = BatchState(4, 32, 4), BlockPool(6), WaitingQueue(policy)
    prefixes = Prefixes(config, batch, pool, {})
    budget = ChunkBudget(config, StepTimeModel())
    batching = ContinuousBatching(config, batch, queue, prefixes, budget)
    planner = Planner(config, (batch, pool, queue), policy, budget, batching)
    for seq_id, rank in [(1, 2), (2, 0), (3, 1)]:
        tokens = np.arange(10, dtype=np.int32)
        batch.add_row(Request(seq_id, tokens, SamplingParams(5)), tokens, rank)
    reservation = Reservation(batch, pool, queue, prefixes)
    plan = planner.plan(0, reservation)
    # 5 blocks of 4: all of rank 0 (3 blocks), 8 tokens of rank 1 (2 blocks), nothing of rank 2.
    assert batch.seq_ids[plan.rows].tolist() == [2, 3]
    assert plan.num_scheduled.tolist() == [10, 8]
    assert plan.samples.tolist() == [True, False]
    assert batch.num_blocks[:3].tolist() == [0, 3, 2]
    assert batch.block_table[1, :4].tolist() == [1, 2, 3, 0]
    assert batch.block_table[2, :3].tolist() == [4, 5, 0]
    reservation.undo()
    assert (pool.num_free, batch.num_blocks[:3].tolist(), batch.block_table.any()) == (5, [0, 0, 0], False)
