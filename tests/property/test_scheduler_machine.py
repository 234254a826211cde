"""The scheduler against a toy language model, in any order of events.

A token written to a wrong slot, a block shared by mistake or filled by a row that failed, or a position computed twice
or never changes what the toy model generates; and that must equal what each sequence yields when it runs alone.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from service.core.invariants import restored, violations
from service.core.scheduler import Scheduler, SchedulerConfig
from service.core.scheduler_config import OrderingConfig, Policy
from service.core.types import FinishReason, Request, SamplingParams
from tests.property.arrival_rules import ArrivalRules
from tests.property.deadline_rules import DeadlineRules
from tests.property.orderings import AGING_NS
from tests.property.scheduler_draws import configs, prompts, sampling_params, tenants
from tests.property.toy_model import VOCAB_SIZE, ToyExecutor, tokens_alone


class SchedulerMachine(ArrivalRules, DeadlineRules):
    def __init__(self) -> None:
        super().__init__()
        self.reasons: dict[int, FinishReason] = {}
        self.cancelled: set[int] = set()

    @initialize(
        config=configs(),
        requests=st.lists(st.tuples(prompts(), sampling_params(), tenants), min_size=3, max_size=6),
        can_fail=st.booleans(),
    )
    def start(
        self, config: SchedulerConfig, requests: list[tuple[list[int], SamplingParams, str]], can_fail: bool
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.executor = ToyExecutor(config, can_fail=can_fail)
        self.before = self.scheduler.snapshot()
        self.add_several(requests)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self._cancel(*data.draw(st.lists(st.sampled_from(sorted(self.requests)), min_size=1, max_size=4)))

    def _cancel(self, *seq_ids: int) -> None:
        live = [seq_id for seq_id in dict.fromkeys(seq_ids) if seq_id not in self.reasons.keys() | self.cancelled]
        assert self.scheduler.cancel_all(seq_ids) == live
        assert not any(self.scheduler.cancel(seq_id) for seq_id in seq_ids)
        self.forget_shadow()
        for shadow in self.shadows():
            for seq_id in seq_ids:
                shadow.cancel(seq_id)
        self.cancelled |= set(live)

    def _alone(self, seq_id: int) -> tuple[list[int], FinishReason]:
        return tokens_alone(self.requests[seq_id], self.config, can_fail=self.executor.can_fail)

    def _check_hit(self, request: Request, num_cached: int) -> None:
        """A hit is whole blocks of what another sequence of the same tenant has had, or a prompt but for one token."""
        prompt = request.prompt_token_ids.tolist()
        if request.fork_of is not None and num_cached == len(prompt) - 1:
            return
        assert self.config.prefix_cache
        assert num_cached % self.config.block_size == 0 and 0 < num_cached < len(prompt)
        others = [other for other in self.requests.values() if other is not request and other.tenant == request.tenant]
        assert any(self.history(other.seq_id)[:num_cached] == prompt[:num_cached] for other in others)

    @rule(num_steps=st.integers(1, 12), aborts_each=st.booleans(), cancels_preempted=st.booleans(), looks=st.booleans())
    def run_steps(self, num_steps: int, aborts_each: bool, cancels_preempted: bool, looks: bool) -> None:
        """With `looks`, each step is planned ahead if it can be."""
        while self.flights:
            self.commit(runs_all=False)
        for number in range(num_steps):
            if not self.flights:
                self._plan()
            if not self.flights:
                return
            if aborts_each and not self.flights[0].plan.is_ahead:
                self.scheduler.abort(self.flights.pop().plan)
                assert restored(self.before, self.scheduler.snapshot()) == []
                self._plan()
            for row in self.scheduler.snapshot().rows:
                if cancels_preempted and not row.blocks:
                    self._cancel(row.seq_id)
            self.state_is_sound()
            if looks and number < num_steps - 1:
                self._plan_ahead()
                self.state_is_sound()
            self.commit(runs_all=bool(number % 2))
            self.state_is_sound()

    @invariant()
    def state_is_sound(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        snapshot = self.scheduler.snapshot()
        assert violations(snapshot) == []
        restored = {block for _, block in snapshot.plan.restore} if snapshot.plan is not None else set()
        cached = {block for block, _, _ in snapshot.cached_blocks} - restored
        assert not [block for block in cached if self.executor.holds_garbage(block)]
        assert max((queued.num_skips for queued in snapshot.queue), default=0) <= self.config.ordering.max_skips
        ordering = self.config.ordering
        is_strict = ordering.policy == "fcfs" and ordering.skip_window == 0
        # A sample comes to the queue only when its prompt is there, and finds others before it then.
        never_run = [
            queued.rank
            for queued in snapshot.queue
            if not queued.is_preempted and self.requests[queued.seq_id].fork_of is None
        ]
        if is_strict and snapshot.plan is None and snapshot.rows and never_run:
            assert max(row.rank for row in snapshot.rows) < min(never_run)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(1000):
            if not self.scheduler.has_work:
                break
            self.run_steps(1, aborts_each=False, cancels_preempted=False, looks=False)
        assert not self.scheduler.has_work
        assert self.requests.keys() == self.reasons.keys() | self.cancelled
        for seq_id in self.cancelled:
            expected, _ = self._alone(seq_id)
            assert self.outputs[seq_id] == expected[: len(self.outputs[seq_id])]
        assert self.scheduler.counters.num_free_blocks == self.config.num_blocks - 1
        snapshot = self.scheduler.snapshot()
        assert snapshot.ref_counts == (0,) * self.config.num_blocks
        assert len(snapshot.cached_blocks) == len(snapshot.evictable_blocks)


SchedulerMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestSchedulerMachine = SchedulerMachine.TestCase


@pytest.mark.parametrize("can_fail", [False, True])
@pytest.mark.parametrize(
    ("max_chunk_tokens", "policy", "num_host_blocks"),
    [(0, "fcfs", 0), (3, "fcfs", 0), (0, "priority", 0), (0, "fair", 0), (0, "fcfs", 5), (3, "fair", 60)],
)
def test_thousands_of_random_steps_under_memory_pressure(
    max_chunk_tokens: int, policy: Policy, num_host_blocks: int, can_fail: bool
) -> None:
    """The machine's own moves at random, with far more preemptions than hypothesis finds worth trying."""
    rng = np.random.default_rng(11)
    config = SchedulerConfig(
        num_blocks=19,
        block_size=2,
        max_num_seqs=5,
        max_num_batched_tokens=13,
        max_model_len=30,
        max_chunk_tokens=max_chunk_tokens,
        num_host_blocks=num_host_blocks,
        ordering=OrderingConfig(policy, AGING_NS, max_idle_tenants=1, max_skips=3),
    )
    machine = machine_for_walks(config, can_fail)
    for number in range(2400):
        # For a while nobody comes, so that nobody waits and steps can be planned ahead.
        if number % 100 < 60 and len(machine.scheduler.snapshot().queue) < 4:
            prompt = rng.integers(0, VOCAB_SIZE, rng.integers(1, 12)).tolist()
            tenant = "abc"[rng.integers(3)]
            if machine.requests and rng.random() < 0.7:
                before = machine.requests[int(rng.choice(list(machine.requests)[-4:]))]
                prompt, tenant = machine.history(before.seq_id)[:14] + prompt[:2], before.tenant
            sampling = SamplingParams(int(rng.integers(1, 25)), stop_token_ids=(int(rng.integers(1, 31)),))
            machine.add_samples(prompt, sampling, tenant, int(rng.integers(1, 4)))
        move_on(machine, rng, ahead=0.7, cancels=0.05, aborts=0.2)
    assert machine.scheduler.counters.totals.num_preemptions > 50
    assert machine.scheduler.counters.totals.num_hit_tokens > 200
    assert (machine.scheduler.counters.totals.num_restored_blocks > 9) == (num_host_blocks > 0)
    assert machine.num_ahead > 200
    assert (FinishReason.ERROR in machine.reasons.values()) == can_fail
    machine.teardown()


def machine_for_walks(config: SchedulerConfig, can_fail: bool) -> SchedulerMachine:
    """A machine that makes its moves without hypothesis."""
    machine = SchedulerMachine()
    machine.ns_per_finish = 100_000  # else steps come to cost so much that no deadline can be met
    machine.start(config, [], can_fail)
    return machine


def move_on(
    machine: SchedulerMachine, rng: np.random.Generator, *, ahead: float, cancels: float, aborts: float
) -> None:
    """Plan if nothing is in flight, plan ahead perhaps, and end a step; with these probabilities."""
    if not machine.flights:
        machine.plan()
    if not machine.flights:
        return
    if len(machine.flights) == 1 and rng.random() < ahead:
        machine.plan_ahead()
        machine.state_is_sound()
    if rng.random() < cancels:
        machine._cancel(int(rng.choice(list(machine.requests))))
    machine.state_is_sound()
    if rng.random() < aborts:
        machine.abort(runs_first=bool(rng.random() < 0.5), aborts_all=bool(rng.random() < 0.5))
    else:
        machine.commit(runs_all=bool(rng.random() < 0.5))
    machine.state_is_sound()
