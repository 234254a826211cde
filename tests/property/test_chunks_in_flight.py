"""Steps planned ahead while prompts are computed a few tokens at a time, which is most of what happens here."""

import numpy as np
import pytest

from service.core.scheduler import SchedulerConfig
from service.core.scheduler_config import OrderingConfig, Policy
from service.core.types import SamplingParams
from tests.property.orderings import AGING_NS
from tests.property.test_scheduler_machine import machine_for_walks, move_on
from tests.property.toy_model import VOCAB_SIZE

NUM_STEPS = 1200


@pytest.mark.parametrize(
    ("block_size", "prefix_cache", "num_host_blocks", "policy", "can_fail"),
    [
        (1, True, 0, "fcfs", True),
        (2, False, 0, "fcfs", False),
        (2, True, 30, "priority", True),
        (4, True, 0, "fair", False),
    ],
)
def test_prompts_are_computed_while_steps_are_in_flight(
    block_size: int, prefix_cache: bool, num_host_blocks: int, policy: Policy, can_fail: bool
) -> None:
    """Prompts of up to 25 tokens in chunks of 4, in turn with decoding, cancels and steps that fail."""
    rng = np.random.default_rng(5)
    config = SchedulerConfig(
        num_blocks=1 + 100 // block_size,
        block_size=block_size,
        max_num_seqs=4,
        max_num_batched_tokens=9,
        max_model_len=34,
        max_chunk_tokens=4,
        prefix_cache=prefix_cache,
        num_host_blocks=num_host_blocks,
        ordering=OrderingConfig(policy, AGING_NS, max_skips=3),
    )
    machine = machine_for_walks(config, can_fail)
    for _ in range(NUM_STEPS):
        snapshot = machine.scheduler.snapshot()
        if len(snapshot.queue) + len(snapshot.forks) < 2 and rng.random() < 0.25:
            prompt = rng.integers(0, VOCAB_SIZE, rng.integers(1, 26)).tolist()
            if machine.requests and rng.random() < 0.4:
                prompt = machine.history(int(rng.choice(list(machine.requests)[-3:])))[:20] + prompt[:4]
            stops = (int(rng.integers(1, VOCAB_SIZE)),)
            sampling = SamplingParams(int(rng.integers(1, 9)), stop_token_ids=stops)
            machine.add_samples(prompt, sampling, "a", int(rng.integers(1, 3)))
        move_on(machine, rng, ahead=0.9, cancels=0.05, aborts=0.15)
    assert machine.num_ahead_of_chunks > 100
    assert machine.num_chunks_ahead > 100
    machine.teardown()
