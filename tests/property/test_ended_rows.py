"""Steps planned ahead over rows that have ended: one of eight may stay, and other tests have fewer rows."""

import numpy as np
import pytest

from service.core.scheduler import SchedulerConfig
from service.core.scheduler_config import OrderingConfig
from service.core.types import SamplingParams
from tests.property.orderings import AGING_NS
from tests.property.test_scheduler_machine import SchedulerMachine, machine_for_walks, move_on
from tests.property.toy_model import VOCAB_SIZE

NUM_STEPS = 300


def burst(machine: SchedulerMachine, rng: np.random.Generator) -> None:
    """Nine prompts, some of which begin like others, and samples of them; most end where nobody could know."""
    for _ in range(9):
        prompt = rng.integers(0, VOCAB_SIZE, rng.integers(1, 12)).tolist()
        if machine.requests and rng.random() < 0.5:
            prompt = machine.history(int(rng.choice(list(machine.requests)[-9:])))[:30] + prompt[:2]
        stops = (int(rng.integers(1, VOCAB_SIZE)),)
        sampling = SamplingParams(int(rng.integers(10, 50)), ignore_eos=True, stop_token_ids=stops)
        machine.add_samples(prompt, sampling, "a", int(rng.integers(1, 4)))


@pytest.mark.parametrize(
    ("block_size", "num_host_blocks", "can_fail"), [(1, 0, False), (2, 60, True), (4, 0, True), (4, 300, False)]
)
def test_steps_are_planned_ahead_over_rows_that_have_ended(
    block_size: int, num_host_blocks: int, can_fail: bool
) -> None:
    """Bursts, each of which drains for long: so nobody waits, and rows end one by one."""
    rng = np.random.default_rng(3)
    config = SchedulerConfig(
        num_blocks=1 + 24 * 40 // block_size,
        block_size=block_size,
        max_num_seqs=24,
        max_num_batched_tokens=200,
        max_model_len=60,
        max_waiting_requests=99,
        num_host_blocks=num_host_blocks,
        ordering=OrderingConfig("fcfs", AGING_NS, max_skips=3),
    )
    machine = machine_for_walks(config, can_fail)
    for _ in range(NUM_STEPS):
        snapshot = machine.scheduler.snapshot()
        if not machine.flights and not snapshot.queue and len(snapshot.rows) < 10:
            burst(machine, rng)
        move_on(machine, rng, ahead=0.95, cancels=0.02, aborts=0.1)
    assert machine.num_over_ended > 50
    machine.teardown()
