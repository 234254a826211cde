"""Prompts that come one after the other while all earlier ones stream: nobody's first token is late."""

import pytest

from service.core.scheduler_config import OrderingConfig, Policy, SchedulerConfig
from service.report.latency_limits import LatencyLimits
from service.sim.histogram import LogHistogram
from service.sim.latency import StepLatency
from service.sim.run import Deployment, Simulation
from service.sim.workload import SimRequest, Tenant

MS = 1_000_000
NUM_PROMPTS = 29
STEP_TOKENS = 528
LATENCY = StepLatency(5 * MS, prefill_token_ns=0.02 * MS, decode_row_ns=0.02 * MS, context_token_ns=0)


def ttft_of(num_prompts: int, prompt_tokens: int, gap_ms: int, policy: Policy) -> LogHistogram:
    """First tokens of prompts `gap_ms` apart, whose answers are long enough for all of them to run at once."""
    config = SchedulerConfig(
        num_blocks=6_001,
        block_size=16,
        max_num_seqs=64,
        max_num_batched_tokens=STEP_TOKENS,
        max_model_len=3_000,
        ordering=OrderingConfig(policy=policy),
        prefix_cache=False,
    )
    simulation = Simulation(Deployment(config, LATENCY), (Tenant("a"), Tenant("b")), LatencyLimits())
    measured = simulation.run(
        SimRequest(number * gap_ms * MS, number % 2, prompt_tokens, output_tokens=600) for number in range(num_prompts)
    )
    assert measured.totals.completed == num_prompts
    assert measured.batch_size.largest == num_prompts
    return measured.ttft


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize(("prompt_tokens", "num_chunks", "gap_ms"), [(500, 1, 20), (2000, 4, 80)])
def test_29_staggered_prompts_do_not_multiply_the_ttft_tail(
    prompt_tokens: int, num_chunks: int, gap_ms: int, policy: Policy
) -> None:
    """Alone a prompt takes `num_chunks` steps, of 5 ms and 0.02 for each of its tokens: 15 and 60 ms.

    Beside 28 streams a step has room for 500 of its tokens, so that it takes as many steps, none of which is longer
    than 5 + 528 * 0.02 = 15.56 ms: together less than the gap, so the next one comes in its last step at the earliest:
    none waits for more than the step that runs when it comes. The tail, of 29 the largest, is one step longer than
    that: 31.12 and 77.8 ms at most, 2.08 and 1.3 times what a prompt takes alone.
    """
    alone = ttft_of(1, prompt_tokens, gap_ms, policy)
    staggered = ttft_of(NUM_PROMPTS, prompt_tokens, gap_ms, policy)
    assert alone.largest == num_chunks * 5 + prompt_tokens * 0.02
    assert staggered.count == NUM_PROMPTS
    assert staggered.largest <= (num_chunks + 1) * (5 + STEP_TOKENS * 0.02)
