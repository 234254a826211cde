"""The scheduler: a pure state machine that decides what each step computes."""

from collections.abc import Iterable

import numpy as np

from service.core.admission import check_deadline, check_room, check_size
from service.core.batch_state import BatchState, Rows
from service.core.batching import create_batching
from service.core.block_pool import BlockPool
from service.core.budget import ChunkBudget
from service.core.ended_rows import EndedRows
from service.core.flight import Flight
from service.core.host_tier import HostTier
from service.core.live_sequences import LiveSequences
from service.core.look_ahead import LookAhead
from service.core.ordering import create_policy
from service.core.plan import NO_ROWS, StepPlan
from service.core.planner import Planner
from service.core.reservation import Reservation
from service.core.scheduler_config import SchedulerConfig
from service.core.snapshot import SchedulerCounters, SchedulerSnapshot, take_snapshot
from service.core.step_time import load_of
from service.core.step_timer import StepTimer
from service.core.stop import finish_reasons
from service.core.types import FinishReason, Int8Array, Request, StepDelta, StepResult

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerCounters"]


class Scheduler:
    """Decides, step by step, which sequences compute how many tokens. Used by one thread, the engine's.

    A step is `plan`, then the executor's forward pass, then `commit` of its result, or `abort` when it failed. One
    plan is in flight at a time, and the one that `plan_ahead` made on top of it. There is no prefill phase: a
    sequence's computed tokens catch up with its known ones, a chunk at a time, and a sequence that has one left is a
    decode row. `add` and `cancel` are legal at any time.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._batch = BatchState(config.max_num_seqs, config.max_model_len, config.block_size)
        self._timer = StepTimer()
        host = HostTier(config, self._timer.model) if config.num_host_blocks else None
        self._pool = BlockPool(config.num_blocks, host)
        self._policy = create_policy(config.ordering)
        self._live = LiveSequences(config, self._batch, self._pool, self._policy)
        self._queue, self._prefixes, self._deadlines = self._live.queue, self._live.prefixes, self._live.deadlines
        budget = ChunkBudget(config, self._timer.model)
        self._batching = create_batching(config, self._batch, self._queue, self._prefixes, budget)
        state = (self._batch, self._pool, self._queue)
        self._planner = Planner(config, state, self._policy, budget, self._batching)
        self._ended = EndedRows(self._batch)
        self._look_ahead = LookAhead(
            config, (*state, self._live.forks), self._prefixes, self._planner, self._batching, self._ended
        )
        self._flights: list[Flight] = []  # two at most, the earlier step first
        self._cancelled_in_flight: dict[int, None] = {}  # in the order of the cancels
        self._last_plan_ns = 0

    @property
    def batch(self) -> BatchState:
        """The running sequences' columns. For an executor to read, between `plan` and `commit`."""
        return self._batch

    @property
    def has_work(self) -> bool:
        """True while a sequence is waiting, preempted or running."""
        return bool(self._live.by_id)

    @property
    def counters(self) -> SchedulerCounters:
        """Sizes and totals, for metrics. Cheap."""
        return self._live.counters()

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises InvalidRequestError when the prompt is empty or leaves no room for an output token in the context,
        UnserviceableError when the prompt is larger than the whole KV buffer, OverloadedError when the queue is full,
        DeadlineExceededError when the deadline cannot be met; then nothing has changed.
        """
        assert request.seq_id not in self._live.by_id, "seq_id is unique in the life of the process"
        check_size(request, self.config)
        idle_ns = 0 if self.has_work else request.arrival_ns - self._last_plan_ns
        check_deadline(request, self._live.num_tokens_to_answer(request), self._timer.model, self.config, idle_ns)
        check_room(request, self._queue, self._timer.rate, self.config)
        self._live.enter(request)

    def expire(self, now_ns: int) -> list[tuple[int, FinishReason]]:
        """End what has run out of time: waiting, preempted or running. For between steps, before `plan`.

        Returns (seq_id, reason): DEADLINE, or QUEUE_WAIT for a sequence that was never admitted in its time. A
        sequence whose deadline is `now_ns` has none left.
        """
        assert not self._flights, "a plan is in flight"
        ended: list[tuple[int, FinishReason]] = []
        while due := self._deadlines.due(now_ns):  # those that waited for others' prompts may be due now
            ended += [(seq_id, due[seq_id]) for seq_id in self.cancel_all(due)]
        self._deadlines.prune()
        return ended

    def cancel(self, seq_id: int) -> bool:
        """End a sequence. Returns False, and does nothing, when it is not live (any more).

        While a plan is in flight, a running sequence ends at its `commit` or `abort`: it gets no token, is not part
        of the StepDelta, and its blocks are free when no plan is in flight.
        """
        return bool(self.cancel_all([seq_id]))

    def cancel_all(self, seq_ids: Iterable[int]) -> list[int]:
        """End sequences, as `cancel` does each, and put the rest in order once. Returns those that were live."""
        cancelled, ended = self._cancelled_in_flight, self._ended
        wanted = [seq_id for seq_id in dict.fromkeys(seq_ids) if seq_id in self._live.by_id and seq_id not in cancelled]
        live = [seq_id for seq_id in wanted if not ended.holds(seq_id)]
        running = [seq_id for seq_id in live if not self._live.end_waiting(seq_id)]
        if self._flights:
            cancelled.update(dict.fromkeys(running))
        elif running:
            self._live.end_running(running)
        if not self._flights and not self.has_work:
            self._timer.rest()
        return live

    @property
    def not_before_ns(self) -> int:
        """With work to do, `plan` yields None until this time: a batch is being gathered. 0 in continuous batching."""
        return self._batching.not_before_ns() if self.has_work else 0

    @property
    def next_deadline_ns(self) -> int | None:
        """When `expire` may have something to end; None: never."""
        return self._deadlines.next_ns

    def pause(self, now_ns: int) -> None:
        """No plan is asked for for a while, and none is in flight: the last step ends now, not when the next begins."""
        self._timer.go_on(now_ns)

    def plan(self, now_ns: int) -> StepPlan | None:
        """Choose the next step and reserve its rows and blocks. None when there is nothing to run, or not yet.

        `now_ns` is monotonic. Nothing is final before `commit`; the previous plan must have been committed or aborted.
        """
        assert not self._flights, "a plan is in flight"
        self._timer.begin(now_ns)
        if not self._live.by_id or self._batching.not_before_ns() > now_ns:
            return None
        reservation = Reservation(self._batch, self._pool, self._queue, self._prefixes)
        plan = self._planner.plan(self._live.num_steps, reservation)
        self._last_plan_ns = now_ns
        self._flights.append(Flight(plan, reservation))
        return plan

    def plan_ahead(self, now_ns: int) -> StepPlan | None:
        """Choose the step after the one in flight, which alone is in flight, before its tokens are known.

        It goes on with that one's rows: see `LookAhead`. None when anything else is to happen first, or in its stead.
        The earlier step is committed first; if it is to be aborted, this one is before it.
        """
        (landing,) = self._flights
        self._timer.go_on(now_ns)
        if self._cancelled_in_flight or landing.reservation.preempted_rows:
            return None
        # What the plan in flight admits may have to wait on, and its time in the queue counts then.
        has_due = self._deadlines.may_have_due if landing.reservation.admissions else self._deadlines.has_due
        if has_due(now_ns):
            return None
        found = self._look_ahead.plan(self._live.num_steps + 1, landing.plan)
        if found is None:
            return None
        self._last_plan_ns = now_ns
        self._flights.append(Flight(*found))
        return found[0]

    def commit(self, plan: StepPlan, result: StepResult) -> StepDelta:
        """Take in a step's tokens, end what has finished or failed, and free its blocks once nothing is in flight.

        Returns what the front side must know: one entry for each sampled token of a sequence that is still wanted.
        """
        flight = self._flights.pop(0)
        assert flight.plan is plan, "only the first plan in flight can be committed"
        flight.reservation.accept()
        batch, dispatched = self._batch, plan
        computed = batch.as_slice(plan.rows)
        load = load_of(plan, batch, computed)  # of the rows that had ended, too: they took their time
        plan, result = self._ended.live_part(plan, result)
        if plan is not dispatched:
            computed = batch.as_slice(plan.rows)
        self._prefixes.note_computed(plan.rows, computed)
        batch.num_computed_tokens[computed] += plan.num_scheduled
        rows, reasons = self._append(plan, computed, result)
        seq_ids = batch.seq_ids[rows].copy()
        self._live.release_forks_of(seq_ids, reasons, self._cancelled_in_flight)
        cached = self._live.count_admissions(flight.reservation.admissions)
        delta = flight.delta(seq_ids, reasons, result, self._cancelled_in_flight, cached)
        if not self._flights:
            self._settle(flight)
        self._live.num_steps += 1
        self._timer.land(load, round(self.config.host_block_ns * (len(plan.offload) + len(plan.restore))))
        if not self.has_work:
            self._timer.rest()
        return delta

    def abort(self, plan: StepPlan, *, has_written: bool = False) -> None:
        """Take a plan back: the state equals the one before it, bit for bit, preemptions and admissions included.

        Sequences that were added or cancelled meanwhile stay added or cancelled. With `has_written` the step may have
        begun: then blocks that the plan took from the prefix cache or from preempted sequences count as lost. Of two
        steps, the earlier one has begun if the later one has.
        """
        flight = self._flights.pop()
        assert flight.plan is plan, "only the last plan in flight can be aborted"
        flight.reservation.undo()
        if self._flights:
            if has_written:
                self._flights[0].reservation.inherit(flight.reservation, plan.offload[:, 1])
            return
        self._policy.abort()
        self._timer.rest()
        if has_written:
            flight.reservation.drop_overwritten(self.config.block_size, plan.offload[:, 1])
        if plan.is_ahead:  # the step before was committed, and has not been settled
            self._settle(flight)
        for seq_id in self._cancelled_in_flight:  # one by one: as if no plan had been in flight
            if not self._live.end_waiting(seq_id):
                self._live.end_running([seq_id])
        self._cancelled_in_flight.clear()

    def snapshot(self) -> SchedulerSnapshot:
        """A deep copy of the state, comparable with ==. For tests and post-mortems: it costs time per token."""
        return take_snapshot(
            self.config,
            self.counters,
            (self._batch, self._pool, self._queue, self._live.forks, self._policy),
            [flight.plan for flight in self._flights],
            self._cancelled_in_flight,
        )

    def _append(self, plan: StepPlan, computed: Rows, result: StepResult) -> tuple[Rows, Int8Array]:
        """Give those of the plan's rows, `computed`, that sample their tokens. Returns them, and why each ends."""
        batch, sampled_rows, rows = self._batch, plan.rows, computed
        if not plan.is_decode_only and np.count_nonzero(plan.samples) < len(plan.samples):
            sampled_rows = plan.rows[plan.samples]
            rows = batch.as_slice(sampled_rows)
        assert len(result.token_ids) == len(sampled_rows), "one token for each row that samples"
        batch.append_tokens(rows, result.token_ids)
        self._policy.commit(batch, rows)
        reasons = finish_reasons(batch, rows, result, self.config.max_kv_tokens)
        self._ended.keep(sampled_rows, reasons)
        return rows, reasons

    def _settle(self, flight: Flight) -> None:
        """Publish, remove the rows that ended, requeue the preempted ones, and put the rest in order."""
        batch, preempted = self._batch, flight.reservation.preempted
        may_leave = self._ended and self._batching.may_leave()
        finished_rows, failed_rows = self._ended.rows() if may_leave else (NO_ROWS, NO_ROWS)
        self._prefixes.publish_steps(finished_rows, failed_rows)
        has_events = len(finished_rows) or self._cancelled_in_flight or preempted
        if not has_events and batch.num_decode_rows == batch.num_rows:
            return
        self._live.settle(finished_rows, self._cancelled_in_flight, preempted)
        self._cancelled_in_flight.clear()
