"""Steps as rules of the scheduler's state machine: planned, planned ahead, run when the device likes, and ended."""

from dataclasses import dataclass, replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from service.core.invariants import progress, restored
from service.core.plan import StepPlan
from service.core.scheduler import Scheduler, SchedulerConfig
from service.core.snapshot import SchedulerSnapshot
from service.core.types import FinishReason, Request, StepDelta
from tests.property.toy_model import StagedStep, ToyExecutor
from tests.property.twin import twin


@dataclass
class Flight:
    """A step that was planned. `shadow` is a copy from before that: what an abort must lead back to."""

    plan: StepPlan
    staged: StagedStep
    shadow: Scheduler | None
    shadow_plan: StepPlan | None = None  # what is in flight in the shadow, if anything
    num_free_blocks: int = 0  # before that
    is_undisturbed: bool = True  # nobody has come or gone since


class FlightRules(RuleBasedStateMachine):
    """At most two steps are in flight. The machine that mixes this in has the attributes below."""

    config: SchedulerConfig
    scheduler: Scheduler
    executor: ToyExecutor
    before: SchedulerSnapshot  # the last plan
    requests: dict[int, Request]
    outputs: dict[int, list[int]]
    reasons: dict[int, FinishReason]
    cancelled: set[int]

    def __init__(self) -> None:
        super().__init__()
        self.flights: list[Flight] = []
        self.step_ns = 0
        self.ns_per_finish = 1_000_000  # by which time passes
        self.num_ahead = 0  # steps that were planned ahead
        self.num_over_ended = 0  # of them, while a row that had ended kept its place
        self.num_ahead_of_chunks = 0  # of them, while a step with chunks was in flight
        self.num_chunks_ahead = 0  # of them, with chunks themselves

    def shadows(self) -> list[Scheduler]:
        """The copies that must see what happens to the scheduler."""
        return [flight.shadow for flight in self.flights if flight.shadow is not None]

    def forget_shadow(self, shadow: Scheduler | None = None) -> None:
        """Compare nothing with this copy any more; None: with those of a step whose step before has landed.

        What ends there when the step ahead lands has ended in the copy already, and what comes first shows.
        """
        for flight in self.flights:
            flight.is_undisturbed = False
            has_landed = flight.plan.is_ahead and flight.shadow_plan is None
            if flight.shadow is shadow or (shadow is None and has_landed):
                flight.shadow = None

    @precondition(lambda self: not self.flights)
    @rule()
    def plan(self) -> None:
        self._plan(has_shadow=True)

    def _plan(self, *, has_shadow: bool = False) -> None:
        shadow = twin(self.scheduler)[0] if has_shadow else None
        self.before = self.scheduler.snapshot()
        self.step_ns = max(self.step_ns, self.before.counters.totals.num_finished * self.ns_per_finish)
        not_before_ns = self.scheduler.not_before_ns
        if not_before_ns > self.step_ns:
            self._check_window(not_before_ns)
            self.step_ns = not_before_ns
        plan = self.scheduler.plan(now_ns=self.step_ns)
        assert progress(self.before, self.scheduler.snapshot()) == []
        if plan is not None:
            assert not plan.is_ahead
            self.flights.append(Flight(plan, self.executor.stage(plan, self.scheduler.batch), shadow))

    def _check_window(self, not_before_ns: int) -> None:
        """A batch that is not full waits until its first request has waited for the window."""
        config, before = self.config, self.before
        oldest_ns = min(self.requests[queued.seq_id].arrival_ns for queued in before.queue)
        assert config.batching == "dynamic" and not before.rows and len(before.queue) < config.max_num_seqs
        assert not_before_ns == oldest_ns + config.batch_window_ns
        assert self.scheduler.plan(not_before_ns - 1) is None
        assert restored(before, self.scheduler.snapshot()) == []

    @precondition(lambda self: len(self.flights) == 1)
    @rule()
    def plan_ahead(self) -> None:
        self._plan_ahead(has_shadow=True)

    def _plan_ahead(self, *, has_shadow: bool = False) -> None:
        landing = self.flights[0]
        shadow, shadow_plan = twin(self.scheduler, landing.plan) if has_shadow else (None, None)
        before = self.scheduler.snapshot()
        plan = self.scheduler.plan_ahead(now_ns=self.step_ns)
        if plan is None:
            assert restored(nameless(before), nameless(self.scheduler.snapshot())) == []
            return
        self.num_ahead += 1
        self._check_ahead(before, plan)
        staged = self.executor.stage(plan, self.scheduler.batch, landing.staged)
        self.flights.append(Flight(plan, staged, shadow, shadow_plan, before.counters.num_free_blocks))

    def _check_ahead(self, before: SchedulerSnapshot, plan: StepPlan) -> None:
        """Nobody who waits could have been admitted instead, and nobody is computed who has reached an end."""
        config = self.config
        assert plan.is_ahead and config.batching == "continuous" and not before.cancelled_in_flight
        self.num_ahead_of_chunks += before.plan is not None and before.plan.num_decode_rows < len(before.plan.rows)
        self.num_chunks_ahead += not plan.is_decode_only
        for row in plan.rows[: len(plan.continues)].tolist():
            sequence = before.rows[row]
            sampling = self.requests[sequence.seq_id].sampling
            num_output = len(sequence.token_ids) + 1 - sequence.num_prompt_tokens
            assert num_output < sampling.max_tokens and len(sequence.token_ids) + 1 < config.max_model_len
        seq_ids = {before.rows[row].seq_id for row in plan.rows.tolist()}
        assert seq_ids.isdisjoint(self.reasons) and seq_ids.isdisjoint(self.cancelled)
        num_ended = sum(row.has_ended for row in before.rows)
        self.num_over_ended += num_ended > 0
        assert num_ended * 8 <= len(before.rows) and not (num_ended and before.queue)

    @precondition(lambda self: self.flights)
    @rule(runs_all=st.booleans())
    def commit(self, runs_all: bool) -> None:
        """With `runs_all` the device is done with the step ahead before the first one is looked at."""
        if runs_all:
            self._run_flights()
        flight = self.flights.pop(0)
        result = self.executor.run(flight.staged)
        delta = self.scheduler.commit(flight.plan, result)
        for later in self.flights:
            if later.shadow is not None and later.shadow_plan is not None:
                later.shadow.commit(later.shadow_plan, result)
                later.shadow_plan = None
        self._check_delta(flight.plan, delta)
        for later in self.flights:
            self._check_choice(later, delta)

    def _check_choice(self, ahead: Flight, delta: StepDelta) -> None:
        """With the step before it landed, `plan` would have chosen the same, unless that has ended somebody.

        Under the fair policy, what it has charged may let another sequence go first; and prompts that turn out to be
        alike leave blocks to others.
        """
        seq_ids = set(self.scheduler.batch.seq_ids[ahead.plan.rows].tolist())
        ended = delta.seq_ids[delta.finish_reasons != FinishReason.NONE].tolist()
        is_fair = self.config.ordering.policy == "fair"
        if ahead.shadow is None or not ahead.is_undisturbed or is_fair or not seq_ids.isdisjoint(ended):
            return
        other = twin(ahead.shadow)[0]
        plan = other.plan(self.step_ns)
        assert plan is not None
        assert seq_ids.issubset(other.batch.seq_ids[plan.rows].tolist())
        if ahead.shadow.counters.num_free_blocks == ahead.num_free_blocks:
            assert self._shares(other, plan) == self._shares(self.scheduler, ahead.plan)

    def _shares(self, scheduler: Scheduler, plan: StepPlan) -> dict[int, tuple[int, bool]]:
        """seq_id -> tokens of the step, and whether it samples."""
        shares = zip(plan.num_scheduled.tolist(), plan.samples.tolist(), strict=True)
        return dict(zip(scheduler.batch.seq_ids[plan.rows].tolist(), shares, strict=True))

    def _run_flights(self) -> None:
        for flight in self.flights:
            self.executor.run(flight.staged)

    def _check_delta(self, plan: StepPlan, delta: StepDelta) -> None:
        assert delta.step_id == plan.step_id
        for seq_id, num_cached in delta.cached_prompt_tokens.items():
            self._check_hit(self.requests[seq_id], num_cached)
        entries = (delta.seq_ids.tolist(), delta.token_ids.tolist(), delta.finish_reasons.tolist())
        for index, (seq_id, token_id, reason) in enumerate(zip(*entries, strict=True)):
            assert seq_id not in self.cancelled and seq_id not in self.reasons
            assert (index in delta.logprobs) == bool(token_id % 2)
            assert index not in delta.logprobs or delta.logprobs[index].chosen == token_id
            self.outputs[seq_id].append(token_id)
            if reason != FinishReason.NONE:
                self.reasons[seq_id] = FinishReason(reason)
                assert (self.outputs[seq_id], self.reasons[seq_id]) == self._alone(seq_id)

    def _alone(self, seq_id: int) -> tuple[list[int], FinishReason]:
        raise NotImplementedError

    def _check_hit(self, request: Request, num_cached: int) -> None:
        raise NotImplementedError

    @precondition(lambda self: self.flights)
    @rule(runs_first=st.booleans(), aborts_all=st.booleans())
    def abort(self, runs_first: bool, aborts_all: bool) -> None:
        """The last step is taken back, and the one before it too when that one fails."""
        if runs_first:
            self._run_flights()
        for _ in range(len(self.flights) if aborts_all else 1):
            flight = self.flights.pop()
            has_run = flight.staged.result is not None
            for earlier in self.flights if has_run else ():
                earlier.shadow = None
            self.scheduler.abort(flight.plan, has_written=has_run)
            if flight.shadow is not None and not has_run:
                assert restored(nameless(flight.shadow.snapshot()), nameless(self.scheduler.snapshot())) == []


def nameless(snapshot: SchedulerSnapshot) -> SchedulerSnapshot:
    """The same without digests: a plan that comes to nothing may have named cached blocks."""
    return replace(snapshot, cached_blocks=tuple((block, b"", parent) for block, _, parent in snapshot.cached_blocks))
