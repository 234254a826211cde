"""New requests as rules of the scheduler's state machine."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from service.core.snapshot import QueuedSnapshot
from service.core.types import Request, SamplingParams
from service.errors import DeadlineExceededError, InvalidRequestError, OverloadedError, UnserviceableError
from tests.property.deadline_rules import deadline_of
from tests.property.flight_rules import FlightRules
from tests.property.orderings import AGING_NS
from tests.property.scheduler_draws import prompts, sampling_params, tenants
from tests.property.toy_model import EOS_TOKEN_ID, VOCAB_SIZE


class ArrivalRules(FlightRules):
    """Requests come, alike or not, and are refused for a reason only. The machine that mixes this in has the others."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[int, Request] = {}  # accepted
        self.outputs: dict[int, list[int]] = {}

    @rule(requests=st.lists(st.tuples(prompts(), sampling_params(), tenants), min_size=2, max_size=6))
    def add_several(self, requests: list[tuple[list[int], SamplingParams, str]]) -> None:
        for prompt, sampling, tenant in requests:
            self.add(prompt, sampling, tenant)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), ending=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3), sampling=sampling_params())
    def add_next_turn(self, data: st.DataObject, ending: list[int], sampling: SamplingParams) -> None:
        """A prompt that begins with another sequence's tokens, as far as they are known."""
        before = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        self.add(self.history(before.seq_id) + ending, sampling, before.tenant)

    def history(self, seq_id: int) -> list[int]:
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
        arrival_ns = seq_id * AGING_NS // 2
        request = Request(
            seq_id,
            np.array(prompt, np.int32),
            sampling,
            (EOS_TOKEN_ID,),
            tenant,
            arrival_ns,
            priority=seq_id * 7 % 5,
            deadline_ns=deadline_of(seq_id, arrival_ns),
            fork_of=fork_of,
        )
        if not self._is_accepted(request, self.scheduler.snapshot().queue):
            return
        self.requests[seq_id], self.outputs[seq_id] = request, []
        self.forget_shadow()
        for shadow in self.shadows():
            try:
                shadow.add(request)
            # What the plan has admitted is in the shadow's queue still.
            except (OverloadedError, DeadlineExceededError):
                self.forget_shadow(shadow)

    def _is_accepted(self, request: Request, queue: tuple[QueuedSnapshot, ...]) -> bool:
        """Submit a request, with such a queue before it. It is refused for a reason, and never without one."""
        config, num_tokens = self.config, len(request.prompt_token_ids)
        waiting_tokens = num_tokens + sum(len(queued.token_ids) for queued in queue)
        try:
            self.scheduler.add(request)
        except InvalidRequestError:
            assert not 1 <= num_tokens < config.max_model_len
            return False
        except UnserviceableError:
            assert num_tokens > (config.num_blocks - 1) * config.block_size
            return False
        except DeadlineExceededError:
            assert request.deadline_ns is not None
            return False
        except OverloadedError as error:
            assert len(queue) >= config.max_waiting_requests or waiting_tokens > config.max_waiting_tokens
            assert 0.0 < error.retry_after_s <= 60.0
            return False
        assert 1 <= num_tokens < config.max_model_len
        assert len(queue) < config.max_waiting_requests
        assert not queue or waiting_tokens <= config.max_waiting_tokens
        return True
