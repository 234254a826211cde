"""The scheduler against a toy language model, in any order of events.

The toy model's next token is a hash of the whole token history, which it reads back from a paged buffer through the
block tables. So a token written to a wrong slot, a block shared by mistake, or a position computed twice or never
changes what is generated; and what is generated must equal what each sequence yields when it runs alone.
"""

import copy
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from service.core.batch_state import BatchState
from service.core.invariants import progress, restored, violations
from service.core.plan import StepPlan
from service.core.scheduler import Scheduler, SchedulerConfig
from service.core.scheduler_config import OrderingConfig, Policy
from service.core.types import FinishReason, Request, SamplingParams, StepResult, TokenLogprobs
from service.errors import DeadlineExceededError, InvalidRequestError, OverloadedError, UnserviceableError
from tests.property.deadline_rules import DeadlineRules, deadline_of
from tests.property.orderings import AGING_NS, orderings

VOCAB_SIZE = 31
EOS_TOKEN_ID = 0


def next_token(history: list[int], seed: int) -> int:
    return zlib.crc32(np.asarray([*history, seed], np.int32).tobytes()) % VOCAB_SIZE


def tokens_alone(request: Request, config: SchedulerConfig) -> tuple[list[int], FinishReason]:
    """What the sequence generates when nothing else runs, and why it ends."""
    sampling = request.sampling
    history = request.prompt_token_ids.tolist()
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(request.eos_token_ids))
    output: list[int] = []
    while True:
        output.append(next_token(history, sampling.seed))
        history.append(output[-1])
        if output[-1] in stops and len(output) > sampling.min_tokens:
            return output, FinishReason.STOP
        if len(output) == sampling.max_tokens or len(history) == config.max_model_len:
            return output, FinishReason.LENGTH
        if len(history) > (config.num_blocks - 1) * config.block_size:
            return output, FinishReason.UNSERVICEABLE


class ToyExecutor:
    """A paged buffer that holds (token, position) instead of K and V."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.slots = np.full((config.num_blocks * config.block_size, 2), -1, np.int64)
        self._blocks = self.slots.reshape(config.num_blocks, config.block_size, 2)

    def run(self, plan: StepPlan, batch: BatchState) -> StepResult:
        token_ids = []
        for source, target in plan.block_copies.tolist():
            self._blocks[target] = self._blocks[source]
        for row, count, samples in zip(plan.rows, plan.num_scheduled, plan.samples, strict=True):
            start = batch.num_computed_tokens[row]
            positions = np.arange(start + count)
            slots = batch.block_table[row, positions // self.block_size] * self.block_size
            slots += positions % self.block_size
            assert slots.min() >= self.block_size, "the null block is never written by a live sequence"
            self.slots[slots[start:], 0] = batch.token_ids[row, start : start + count]
            self.slots[slots[start:], 1] = positions[start:]
            assert self.slots[slots, 1].tolist() == positions.tolist()
            if samples:
                token_ids.append(next_token(self.slots[slots, 0].tolist(), int(batch.seed[row])))
        logprobs = {
            index: TokenLogprobs(float(token_id), np.zeros(0, np.int32), np.zeros(0, np.float32))
            for index, token_id in enumerate(token_ids)
            if token_id % 2
        }
        return StepResult(np.array(token_ids, np.int32), logprobs)


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    max_num_seqs = draw(st.integers(1, 5))
    max_model_len = draw(st.integers(6, 20))
    block_size = draw(st.sampled_from([1, 2, 4]))
    # From too small for the longest sequence to room for a few, so that most schedules preempt.
    num_kv_tokens = max_model_len * draw(st.sampled_from([3, 4, 5, 6, 8])) // 4
    batching = draw(st.sampled_from(["continuous", "continuous", "continuous", "static", "dynamic"]))
    return SchedulerConfig(
        num_blocks=1 + max(2, -(-num_kv_tokens // block_size)),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 10)),
        max_model_len=max_model_len,
        max_waiting_requests=draw(st.sampled_from([9, 3])),
        max_waiting_tokens=draw(st.sampled_from([1000, 20])),
        max_chunk_tokens=draw(st.sampled_from([0, 0, 1, 5])),
        watermark_fraction=draw(st.sampled_from([0.0, 0.0, 0.3])),
        ordering=draw(orderings()),
        batching=batching,
        batch_window_ns=draw(st.sampled_from([20_000, 3_000_000, 50_000_000])) if batching == "dynamic" else 0,
        prefix_cache=batching == "continuous",
    )


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Anything, or one of a few beginnings and a little more, so that sequences share prefixes."""
    ending = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8))
    beginning = draw(st.sampled_from([[], [1, 2, 3, 4, 5], [1, 2, 3, 9, 9, 9, 9]]))
    return (beginning + ending[:2]) if beginning else ending


tenants = st.sampled_from(["a", "a", "b", "c"])


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        max_tokens=draw(st.integers(1, 16)),
        min_tokens=draw(st.sampled_from([0, 0, 3])),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=tuple(draw(st.lists(st.integers(1, VOCAB_SIZE - 1), max_size=2))),
    )


class SchedulerMachine(DeadlineRules):
    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[int, Request] = {}  # accepted
        self.outputs: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.cancelled: set[int] = set()
        self.plan_in_flight: StepPlan | None = None
        self.step_ns = 0
        self.shadow: Scheduler | None = None  # a copy from before the plan: what an abort must lead back to

    @initialize(
        config=configs(), requests=st.lists(st.tuples(prompts(), sampling_params(), tenants), min_size=3, max_size=6)
    )
    def start(self, config: SchedulerConfig, requests: list[tuple[list[int], SamplingParams, str]]) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.executor = ToyExecutor(config)
        self.before = self.scheduler.snapshot()
        self.add_several(requests)

    @rule(requests=st.lists(st.tuples(prompts(), sampling_params(), tenants), min_size=2, max_size=6))
    def add_several(self, requests: list[tuple[list[int], SamplingParams, str]]) -> None:
        for prompt, sampling, tenant in requests:
            self.add(prompt, sampling, tenant)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), ending=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3), sampling=sampling_params())
    def add_next_turn(self, data: st.DataObject, ending: list[int], sampling: SamplingParams) -> None:
        """A prompt that begins with another sequence's tokens, as far as they are known."""
        before = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        self.add(self._history(before.seq_id) + ending, sampling, before.tenant)

    def _history(self, seq_id: int) -> list[int]:
        return self.requests[seq_id].prompt_token_ids.tolist() + self.outputs[seq_id]

    @rule(prompt=prompts(), sampling=sampling_params(), tenant=tenants, num_samples=st.integers(2, 4))
    def add_samples(self, prompt: list[int], sampling: SamplingParams, tenant: str, num_samples: int) -> None:
        """Parallel samples of one prompt, each with a seed of its own."""
        leader = len(self.outputs) + 100
        self.add(prompt, sampling, tenant)
        if leader in self.outputs:
            for seed in range(1, num_samples):
                self.add(prompt, replace(sampling, seed=seed), tenant, fork_of=leader)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), sampling=sampling_params())
    def add_late_sample(self, data: st.DataObject, sampling: SamplingParams) -> None:
        leader = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        prompt = leader.prompt_token_ids.tolist()
        self.add(prompt, replace(sampling, seed=9), leader.tenant, fork_of=leader.seq_id)

    @rule(prompt=prompts(), sampling=sampling_params(), tenant=tenants)
    def add(self, prompt: list[int], sampling: SamplingParams, tenant: str, fork_of: int | None = None) -> None:
        seq_id = len(self.outputs) + 100
        arrival_ns, priority = seq_id * AGING_NS // 2, seq_id * 7 % 5
        deadline_ns = deadline_of(seq_id, arrival_ns)
        request = Request(
            seq_id,
            np.array(prompt, np.int32),
            sampling,
            (EOS_TOKEN_ID,),
            tenant,
            arrival_ns,
            priority=priority,
            deadline_ns=deadline_ns,
            fork_of=fork_of,
        )
        config, queue = self.config, self.scheduler.snapshot().queue
        waiting_tokens = sum(len(queued.token_ids) for queued in queue)
        try:
            self.scheduler.add(request)
        except InvalidRequestError:
            assert not 1 <= len(prompt) < config.max_model_len
            return
        except UnserviceableError:
            assert len(prompt) > (config.num_blocks - 1) * config.block_size
            return
        except DeadlineExceededError:
            assert deadline_ns is not None
            return
        except OverloadedError as error:
            assert len(queue) >= config.max_waiting_requests or waiting_tokens + len(prompt) > config.max_waiting_tokens
            assert 0.0 < error.retry_after_s <= 60.0
            return
        assert 1 <= len(prompt) < config.max_model_len
        assert len(queue) < config.max_waiting_requests
        assert not queue or waiting_tokens + len(prompt) <= config.max_waiting_tokens
        self.requests[seq_id], self.outputs[seq_id] = request, []
        if self.shadow is not None:
            try:
                self.shadow.add(request)
            except (
                OverloadedError,
                DeadlineExceededError,
            ):  # what the plan has admitted is in the shadow's queue still
                self.shadow = None

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self._cancel(data.draw(st.sampled_from(sorted(self.requests))))

    def _cancel(self, seq_id: int) -> None:
        is_live = seq_id not in self.reasons and seq_id not in self.cancelled
        assert self.scheduler.cancel(seq_id) == is_live
        assert not self.scheduler.cancel(seq_id)
        if self.shadow is not None:
            self.shadow.cancel(seq_id)
        if is_live:
            self.cancelled.add(seq_id)

    @precondition(lambda self: self.plan_in_flight is None)
    @rule()
    def plan(self) -> None:
        self.shadow = copy.deepcopy(self.scheduler)
        self._plan()

    def _plan(self) -> None:
        self.before = self.scheduler.snapshot()
        self.step_ns = max(self.step_ns, self.before.counters.totals.num_finished * 1_000_000)
        not_before_ns = self.scheduler.not_before_ns
        if not_before_ns > self.step_ns:
            self._check_window(not_before_ns)
            self.step_ns = not_before_ns
        self.plan_in_flight = self.scheduler.plan(now_ns=self.step_ns)
        assert progress(self.before, self.scheduler.snapshot()) == []

    def _check_window(self, not_before_ns: int) -> None:
        """A batch that is not full waits until its first request has waited for the window."""
        config, before = self.config, self.before
        head = self.requests[before.queue[0].seq_id]
        assert config.batching == "dynamic" and not before.rows and len(before.queue) < config.max_num_seqs
        assert not_before_ns == head.arrival_ns + config.batch_window_ns
        assert self.scheduler.plan(not_before_ns - 1) is None
        assert restored(before, self.scheduler.snapshot()) == []

    @precondition(lambda self: self.plan_in_flight is not None)
    @rule()
    def commit(self) -> None:
        plan = self.plan_in_flight
        assert plan is not None
        result = self.executor.run(plan, self.scheduler.batch)
        delta = self.scheduler.commit(plan, result)
        self.plan_in_flight = self.shadow = None
        assert delta.step_id == plan.step_id
        for seq_id, num_cached in delta.cached_prompt_tokens.items():
            self._check_hit(self.requests[seq_id], num_cached)
        for index, (seq_id, token_id, reason) in enumerate(
            zip(delta.seq_ids.tolist(), delta.token_ids.tolist(), delta.finish_reasons.tolist(), strict=True)
        ):
            assert seq_id not in self.cancelled and seq_id not in self.reasons
            assert (index in delta.logprobs) == bool(token_id % 2)
            assert index not in delta.logprobs or delta.logprobs[index].chosen == token_id
            self.outputs[seq_id].append(token_id)
            if reason != FinishReason.NONE:
                self.reasons[seq_id] = FinishReason(reason)
                expected = tokens_alone(self.requests[seq_id], self.config)
                assert (self.outputs[seq_id], self.reasons[seq_id]) == expected

    def _check_hit(self, request: Request, num_cached: int) -> None:
        """A hit is whole blocks of what another sequence of the same tenant has had, or a prompt but for one token."""
        prompt = request.prompt_token_ids.tolist()
        if request.fork_of is not None and num_cached == len(prompt) - 1:
            return
        assert num_cached % self.config.block_size == 0 and 0 < num_cached < len(prompt)
        others = [other for other in self.requests.values() if other is not request and other.tenant == request.tenant]
        assert any(self._history(other.seq_id)[:num_cached] == prompt[:num_cached] for other in others)

    @precondition(lambda self: self.plan_in_flight is not None)
    @rule(runs_first=st.booleans())
    def abort(self, runs_first: bool) -> None:
        plan = self.plan_in_flight
        assert plan is not None
        if runs_first:
            self.executor.run(plan, self.scheduler.batch)
        self.scheduler.abort(plan, has_written=runs_first)
        if self.shadow is not None and not runs_first:
            assert restored(self.shadow.snapshot(), self.scheduler.snapshot()) == []
        self.plan_in_flight = self.shadow = None

    @rule(num_steps=st.integers(1, 12), aborts_each=st.booleans(), cancels_preempted=st.booleans())
    def run_steps(self, num_steps: int, aborts_each: bool, cancels_preempted: bool) -> None:
        if self.plan_in_flight is not None:
            self.commit()
        for _ in range(num_steps):
            self._plan()
            if self.plan_in_flight is None:
                return
            if aborts_each:
                self.scheduler.abort(self.plan_in_flight)
                assert restored(self.before, self.scheduler.snapshot()) == []
                self._plan()
            for row in self.scheduler.snapshot().rows:
                if cancels_preempted and not row.blocks:
                    self._cancel(row.seq_id)
            self.state_is_sound()
            self.commit()
            self.state_is_sound()

    @invariant()
    def state_is_sound(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        snapshot = self.scheduler.snapshot()
        assert violations(snapshot) == []
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
            self.run_steps(1, aborts_each=False, cancels_preempted=False)
        assert not self.scheduler.has_work
        assert self.requests.keys() == self.reasons.keys() | self.cancelled
        for seq_id in self.cancelled:
            expected, _ = tokens_alone(self.requests[seq_id], self.config)
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


@pytest.mark.parametrize(("max_chunk_tokens", "policy"), [(0, "fcfs"), (3, "fcfs"), (0, "priority"), (0, "fair")])
def test_thousands_of_random_steps_under_memory_pressure(max_chunk_tokens: int, policy: Policy) -> None:
    """The machine's own moves at random, with far more preemptions than hypothesis finds worth trying."""
    rng = np.random.default_rng(11)
    machine = SchedulerMachine()
    config = SchedulerConfig(
        num_blocks=19,
        block_size=2,
        max_num_seqs=5,
        max_num_batched_tokens=13,
        max_model_len=30,
        max_chunk_tokens=max_chunk_tokens,
        ordering=OrderingConfig(policy, AGING_NS, max_idle_tenants=1, max_skips=3),
    )
    machine.start(config, [])
    for _ in range(1200):
        if len(machine.scheduler.snapshot().queue) < 4:
            prompt = rng.integers(0, VOCAB_SIZE, rng.integers(1, 12)).tolist()
            tenant = "abc"[rng.integers(3)]
            if machine.requests and rng.random() < 0.7:
                before = machine.requests[int(rng.choice(list(machine.requests)[-4:]))]
                prompt, tenant = machine._history(before.seq_id)[:14] + prompt[:2], before.tenant
            sampling = SamplingParams(int(rng.integers(1, 25)), stop_token_ids=(int(rng.integers(1, 31)),))
            machine.add_samples(prompt, sampling, tenant, int(rng.integers(1, 4)))
        machine.plan()
        if rng.random() < 0.05:
            machine._cancel(int(rng.choice(list(machine.requests))))
        if rng.random() < 0.2:
            machine.state_is_sound()
            machine.abort(runs_first=bool(rng.random() < 0.5))
        else:
            machine.state_is_sound()
            machine.commit()
        machine.state_is_sound()
    assert machine.scheduler.counters.totals.num_preemptions > 50
    assert machine.scheduler.counters.totals.num_hit_tokens > 200
    machine.teardown()
