"""What the policies promise over many steps: nobody waits for ever, and tenants get equal shares at no cost."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core.plan import StepPlan
from service.core.scheduler import Scheduler, SchedulerConfig
from service.core.scheduler_config import OrderingConfig, Policy
from service.core.types import Request, SamplingParams, StepDelta
from service.executor.api import ExecutorLimits
from service.executor.simulated import SimulatedExecutor

LIMITS = ExecutorLimits(num_blocks=33, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=48)
STEP_NS = 10_000_000
AGING_NS = 20 * STEP_NS


def step_ns(plan: StepPlan) -> int:
    """A step of a small model: 5 ms, and 40 us a prompt token, 200 us a decode token."""
    num_prompt_tokens = plan.num_tokens - plan.num_decode_rows
    return 5_000_000 + 40_000 * num_prompt_tokens + 200_000 * plan.num_decode_rows


def config_for(limits: ExecutorLimits, ordering: OrderingConfig, watermark_fraction: float) -> SchedulerConfig:
    return SchedulerConfig(
        limits.num_blocks,
        limits.block_size,
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        limits.max_model_len,
        max_waiting_requests=10_000,
        watermark_fraction=watermark_fraction,
        ordering=ordering,
    )


def request(
    seq_id: int, num_tokens: int, max_tokens: int, tenant: str = "", arrival_ns: int = 0, priority: int = 0
) -> Request:
    prompt = np.full(num_tokens, seq_id % 1000, np.int32)
    return Request(seq_id, prompt, SamplingParams(max_tokens), (), tenant, arrival_ns, priority=priority)


class Run:
    """A scheduler on a SimulatedExecutor."""

    def __init__(self, limits: ExecutorLimits, ordering: OrderingConfig, watermark_fraction: float = 0.01) -> None:
        self.scheduler = Scheduler(config_for(limits, ordering, watermark_fraction))
        self.executor = SimulatedExecutor(limits, step_ns=step_ns)

    def step(self) -> StepDelta:
        plan = self.scheduler.plan(self.executor.elapsed_ns)
        assert plan is not None
        return self.scheduler.commit(plan, self.executor.dispatch(plan, self.scheduler.batch).wait())


@given(
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    prompt=st.integers(1, 44),
    others=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 8), st.integers(0, 3)), min_size=1, max_size=6),
    num_ahead=st.integers(0, 10),
    room=st.tuples(st.sampled_from([13, 33]), st.sampled_from([4, 12]), st.sampled_from([0.0, 0.2])),
    has_new_tenants=st.booleans(),
)
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_no_request_waits_for_ever(
    policy: Policy,
    prompt: int,
    others: list[tuple[int, int, int]],
    num_ahead: int,
    room: tuple[int, int, float],
    has_new_tenants: bool,
) -> None:
    """However the stream of other requests looks, the victim gets its first token within a bound of steps, and its last
    within the same bound again, preempted or not.
    """
    ordering = OrderingConfig(policy, AGING_NS, skip_window=4, max_skips=4, max_idle_tenants=4)
    num_blocks, max_num_seqs, watermark_fraction = room
    run = Run(replace(LIMITS, num_blocks=num_blocks, max_num_seqs=max_num_seqs), ordering, watermark_fraction)
    num_added = 0

    def add_other() -> None:
        nonlocal num_added
        num_tokens, max_tokens, priority = others[num_added % len(others)]
        tenant = f"tenant {num_added}" if has_new_tenants else f"tenant {num_added % 3}"
        run.scheduler.add(
            request(num_added + 1000, num_tokens, max_tokens, tenant, run.executor.elapsed_ns, priority=priority)
        )
        num_added += 1

    for _ in range(num_ahead):
        add_other()
    run.scheduler.add(request(1, prompt, 4, "victim", run.executor.elapsed_ns))
    # Those that may go first: older ones, what comes while the priority of 3 counts for more, what skips ahead, and
    # under "fair" 15 for each that is older. None takes more than 3 chunks and 8 tokens, preempted or not in all.
    num_first = num_ahead + 4 + (3 * AGING_NS // 5_000_000 if policy == "priority" else 0)
    bound = (16 if policy == "fair" else 1) * (num_first + 1) * (3 + 8)
    num_tokens = 0
    for number in range(2 * bound):
        while run.scheduler.counters.num_waiting < 6:
            add_other()
        num_tokens += 1 in run.step().seq_ids
        assert num_tokens or number < bound, f"no token within {bound} steps"
        if num_tokens == 4:
            return
    raise AssertionError(f"not the last token within {2 * bound} steps")


@given(
    arrivals=st.lists(
        st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3), st.sampled_from("abcde")), max_size=4), max_size=40
    ),
    num_blocks=st.sampled_from([4, 33]),
)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_the_least_served_tenant_goes_next(arrivals: list[list[tuple[int, int, str]]], num_blocks: int) -> None:
    """Of all that wait, by the counters of before the step; every sixteenth time the oldest request."""
    limits = replace(LIMITS, max_num_seqs=1, num_blocks=num_blocks)
    run = Run(limits, OrderingConfig("fair", tenant_weights=(("a", 3.0), ("b", 0.003), ("c", 0.004)), skip_window=0))
    asked: dict[int, Request] = {}
    num_admissions = num_steps = 0
    while num_steps < len(arrivals) or run.scheduler.has_work:
        for num_tokens, max_tokens, tenant in arrivals[num_steps] if num_steps < len(arrivals) else ():
            asked[len(asked)] = request(len(asked), num_tokens, max_tokens, tenant)
            run.scheduler.add(asked[len(asked) - 1])
        num_steps += 1
        before = run.scheduler.snapshot()
        if not before.rows and before.queue:
            served = dict(before.policy_counters)
            waiting = {queued.seq_id: queued.rank for queued in before.queue}
            oldest = min(waiting, key=waiting.__getitem__)
            least = min(waiting, key=lambda seq_id: (served[asked[seq_id].tenant], waiting[seq_id]))
            num_admissions += 1
            assert run.step().seq_ids.tolist() == [oldest if num_admissions % 16 == 0 else least]
            assert [queued.seq_id for queued in before.queue[:1]] == [oldest if num_admissions % 16 == 0 else least]
        elif run.scheduler.has_work:
            run.step()


def jain(values: list[float]) -> float:
    """(sum x)^2 / (n sum x^2): 1 when all are equal, 1/n when one has everything."""
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


def test_jain_index_is_known_for_two_cases():
    assert (jain([3.0, 3.0, 3.0]), jain([5.0, 0.0, 0.0, 0.0])) == (1.0, 0.25)


def serve_backlog(policy: Policy) -> tuple[float, float]:
    """Jain index of served tokens while all four tenants wait, and output tokens a second over the whole backlog.

    One tenant sends ten requests for each one of the others.
    """
    limits = ExecutorLimits(
        num_blocks=513, block_size=16, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=512
    )
    run, rng = Run(limits, OrderingConfig(policy)), np.random.default_rng(5)
    tenants, requests = {}, {}
    for number in range(520):
        tenant = "heavy" if number % 13 < 10 else f"light {number % 13}"
        asked = request(number, int(rng.integers(8, 200)), int(rng.integers(8, 120)), tenant)
        tenants[number], requests[number] = tenant, asked
        run.scheduler.add(asked)
    served: Counter[str] = Counter()
    index, num_steps, num_output_tokens, seen = 0.0, 0, 0, set()
    while run.scheduler.has_work:
        if not index and num_steps % 16 == 0:  # a snapshot takes long
            waiting = {tenants[queued.seq_id] for queued in run.scheduler.snapshot().queue}
            index = 0.0 if len(waiting) == 4 else jain([float(served[tenant]) for tenant in set(tenants.values())])
        num_steps += 1
        for seq_id in run.step().seq_ids.tolist():
            served[tenants[seq_id]] += 2 + (seq_id not in seen) * len(requests[seq_id].prompt_token_ids)
            seen.add(seq_id)
            num_output_tokens += 1
    return index, num_output_tokens * 1e9 / run.executor.elapsed_ns


def test_tenants_that_wait_are_served_alike_and_throughput_stays():
    fair_index, fair_throughput = serve_backlog("fair")
    fcfs_index, fcfs_throughput = serve_backlog("fcfs")
    print(f"Jain {fair_index:.4f} against {fcfs_index:.4f}, throughput x {fair_throughput / fcfs_throughput:.4f}")
    assert fcfs_index < 0.6
    assert fair_index >= 0.95
    assert fair_throughput >= 0.92 * fcfs_throughput


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_ten_thousand_random_cancels_leave_every_block_free(policy: Policy):
    """In the queue, running, in flight and preempted alike."""
    run, rng = Run(replace(LIMITS, num_blocks=17), OrderingConfig(policy)), np.random.default_rng(7)
    live: list[int] = []
    num_cancelled = num_added = 0
    while num_cancelled < 10_000:
        while len(live) < 40:
            run.scheduler.add(request(num_added, int(rng.integers(1, 20)), 20, f"tenant {num_added % 5}"))
            live.append(num_added)
            num_added += 1
        for is_in_flight in (False, True):
            plan = run.scheduler.plan(0) if is_in_flight else None
            for _ in range(int(rng.integers(0, 20))):
                num_cancelled += run.scheduler.cancel(live.pop(int(rng.integers(len(live)))))
            if plan is not None:
                run.scheduler.commit(plan, run.executor.dispatch(plan, run.scheduler.batch).wait())
    for seq_id in live:
        run.scheduler.cancel(seq_id)
    assert (run.scheduler.has_work, run.scheduler.counters.num_free_blocks) == (False, 16)
