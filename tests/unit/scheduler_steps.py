"""Drives a scheduler step by step with made-up tokens."""

import dataclasses

import numpy as np

from service.core.plan import StepPlan
from service.core.scheduler import Scheduler, SchedulerConfig
from service.core.types import FinishReason, Request, SamplingParams, StepDelta, StepResult

ROOMY = SchedulerConfig(num_blocks=101, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32)


def make(**changes: object) -> Scheduler:
    return Scheduler(dataclasses.replace(ROOMY, **changes))  # type: ignore[arg-type]


def add(scheduler: Scheduler, seq_id: int, num_tokens: int, max_tokens: int = 20, **sampling: object) -> None:
    """The prompt is 1, 2, 3, ...; each sequence has a tenant of its own, so that none shares another's blocks."""
    prompt = np.arange(1, num_tokens + 1, dtype=np.int32)
    params = SamplingParams(max_tokens, **sampling)  # type: ignore[arg-type]
    scheduler.add(Request(seq_id, prompt, params, (0,), tenant=str(seq_id)))


def scheduled(scheduler: Scheduler, plan: StepPlan | None) -> list[tuple[int, int, bool]]:
    """(seq_id, tokens, samples) in the plan's order."""
    assert plan is not None
    seq_ids = scheduler.batch.seq_ids[plan.rows].tolist()
    return list(zip(seq_ids, plan.num_scheduled.tolist(), plan.samples.tolist(), strict=True))


def commit(scheduler: Scheduler, plan: StepPlan | None, token_id: int = 50) -> StepDelta:
    """Every sampling row gets the same token."""
    assert plan is not None
    return scheduler.commit(plan, StepResult(np.full(np.count_nonzero(plan.samples), token_id, np.int32)))


def step(scheduler: Scheduler, token_id: int = 50) -> list[tuple[int, int, bool]]:
    """Plan and commit. Returns what was scheduled."""
    plan = scheduler.plan(0)
    seen = scheduled(scheduler, plan)
    commit(scheduler, plan, token_id)
    return seen


def reasons(delta: StepDelta) -> list[tuple[int, FinishReason]]:
    return [(seq_id, FinishReason(reason)) for seq_id, reason in zip(delta.seq_ids, delta.finish_reasons, strict=True)]
