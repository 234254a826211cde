"""Runs requests on an executor under the real scheduler, without the engine's thread."""

from collections.abc import Sequence
from dataclasses import replace

from service.core.plan import StepPlan
from service.core.scheduler import Scheduler
from service.core.types import Request, TokenLogprobs
from service.engine.scheduling import scheduler_config
from service.engine.settings import EngineSettings
from service.executor.api import Executor, StepHandle

Flight = tuple[StepPlan, StepHandle]


class Outcome:
    """What became of the requests: tokens and logprobs by seq_id, and what it took to get there."""

    def __init__(self) -> None:
        self.num_ahead = 0  # steps that were dispatched before the one before was waited for
        self.num_chunk_steps_ahead = 0  # of them, with chunks
        self.num_ahead_of_chunks = 0  # of them, while chunks were computed
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.num_preemptions = 0
        self.num_restored_blocks = 0
        self.num_hit_tokens = 0  # of prompts, found in the prefix cache


def run_requests(
    executor: Executor, requests: Sequence[Request], *, looks_ahead: bool = False, **limits: int
) -> Outcome:
    """Run `requests` to their ends under the real scheduler, within the executor's limits or the tighter `limits`.

    With `looks_ahead`, steps are dispatched ahead where scheduler and executor let them.
    """
    scheduler, outcome = scheduler_for(executor, **limits), Outcome()
    for request in requests:
        scheduler.add(request)
        outcome.tokens[request.seq_id] = []
        outcome.logprobs[request.seq_id] = []
    flight: Flight | None = None
    while (flight := flight or dispatched(executor, scheduler, scheduler.plan(0))) is not None:
        plan, handle = flight
        can_follow = looks_ahead and handle.can_continue
        flight = dispatched(executor, scheduler, scheduler.plan_ahead(0)) if can_follow else None
        if flight is not None:
            outcome.num_ahead += 1
            outcome.num_chunk_steps_ahead += not flight[0].is_decode_only
            outcome.num_ahead_of_chunks += not plan.is_decode_only
        delta = scheduler.commit(plan, handle.wait())
        for index, (seq_id, token_id) in enumerate(zip(delta.seq_ids.tolist(), delta.token_ids.tolist(), strict=True)):
            outcome.tokens[seq_id].append(token_id)
            if index in delta.logprobs:
                outcome.logprobs[seq_id].append(delta.logprobs[index])
    totals = scheduler.counters.totals
    outcome.num_preemptions, outcome.num_restored_blocks = totals.num_preemptions, totals.num_restored_blocks
    outcome.num_hit_tokens = totals.num_hit_tokens
    return outcome


def scheduler_for(executor: Executor, **limits: int) -> Scheduler:
    """A scheduler as in a server, but within the tighter `limits`; it keeps no blocks free, and copies cost nothing."""
    config = scheduler_config(executor.limits, EngineSettings())
    return Scheduler(replace(config, watermark_fraction=0.0, host_block_ns=0.0, **limits))


def dispatched(executor: Executor, scheduler: Scheduler, plan: StepPlan | None) -> Flight | None:
    """`plan` and its handle, if there is one."""
    return None if plan is None else (plan, executor.dispatch(plan, scheduler.batch))
