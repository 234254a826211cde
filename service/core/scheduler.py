"""The scheduler: a pure state machine that decides what each step computes."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from service.core.admission import check_deadline, check_room, check_size
from service.core.batch_state import BatchState
from service.core.batching import create_batching
from service.core.block_pool import BlockPool
from service.core.budget import ChunkBudget, TokenRate
from service.core.deadlines import Deadlines
from service.core.live_sequences import LiveSequences
from service.core.ordering import create_policy
from service.core.plan import StepPlan
from service.core.planner import Planner
from service.core.reservation import Reservation
from service.core.scheduler_config import SchedulerConfig
from service.core.sequence import SequenceStatus
from service.core.snapshot import SchedulerCounters, SchedulerSnapshot, take_snapshot
from service.core.step_time import StepLoad, StepTimeModel, load_of
from service.core.stop import finish_reasons
from service.core.types import FinishReason, Int8Array, Int32Array, Int64Array, Request, StepDelta, StepResult

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerCounters"]

_REST_NS: Final = 1_000_000_000
_NO_ROWS: Final[Int32Array] = np.empty(0, np.int32)
# Looking a member up in an enum takes longer than comparing a thousand rows.
_NONE, _ERROR = np.int8(FinishReason.NONE), np.int8(FinishReason.ERROR)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A plan between `plan` and `commit` or `abort`."""

    plan: StepPlan
    reservation: Reservation
    started_ns: int


class Scheduler:
    """Decides, step by step, which sequences compute how many tokens. Used by one thread, the engine's.

    A step is `plan`, then the executor's forward pass, then `commit` of its result, or `abort` when it failed. One
    plan is in flight at a time. There is no prefill phase: a sequence's computed tokens catch up with its known ones,
    a chunk at a time, and a sequence that has one left is a decode row. `add` and `cancel` are legal at any time.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._batch = BatchState(config.max_num_seqs, config.max_model_len, config.block_size)
        self._pool = BlockPool(config.num_blocks)
        self._policy = create_policy(config.ordering)
        self._live = LiveSequences(config, self._batch, self._pool, self._policy)
        self._queue, self._prefixes = self._live.queue, self._live.prefixes
        self._step_time = StepTimeModel()
        if config.num_host_blocks:
            self._pool.add_host_tier(config, self._step_time)
        budget = ChunkBudget(config, self._step_time)
        self._batching = create_batching(config, self._batch, self._queue, self._prefixes)
        state = (self._batch, self._pool, self._queue)
        self._planner = Planner(config, state, self._policy, budget, self._batching)
        self._flight: _Flight | None = None
        self._cancelled_in_flight: dict[int, None] = {}  # in the order of the cancels
        self._last_plan_ns = 0
        self._num_steps = 0
        self._deadlines = Deadlines()
        self._rate = TokenRate()
        self._last_step: tuple[StepLoad, int] | None = None  # with its start: a step whose time is not known yet

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
        num_tokens = self._policy.num_tokens_before(request) + len(request.prompt_token_ids)
        num_tokens = round(num_tokens * self._live.totals.uncached_share)
        # An engine that has idled tries: its prices may be of a time when the machine was paused, and while it only
        # refuses it learns no others.
        is_rested = not self.has_work and request.arrival_ns - self._last_plan_ns >= _REST_NS
        check_deadline(request, num_tokens, None if is_rested else self._step_time, self.config)
        check_room(request, self._queue, self._rate, self.config)
        self._live.enter(request)
        self._deadlines.enter(request, self.config.max_queue_wait_ns)

    def expire(self, now_ns: int) -> list[tuple[int, FinishReason]]:
        """End what has run out of time: waiting, preempted or running. For between steps, before `plan`.

        Returns (seq_id, reason): DEADLINE, or QUEUE_WAIT for a sequence that was never admitted in its time. A
        sequence whose deadline is `now_ns` has none left.
        """
        assert self._flight is None, "a plan is in flight"
        ended = []
        for seq_id, reason in self._deadlines.due(now_ns):
            sequence = self._live.by_id.get(seq_id)
            if sequence is None:
                continue
            if reason is FinishReason.DEADLINE or sequence.status is SequenceStatus.WAITING:
                self.cancel(seq_id)
                ended.append((seq_id, reason))
        self._deadlines.prune(self._live.by_id)
        return ended

    def cancel(self, seq_id: int) -> bool:
        """End a sequence. Returns False, and does nothing, when it is not live (any more).

        While a plan is in flight, a running sequence ends at its `commit` or `abort`: it gets no token, is not part
        of the StepDelta, and its blocks are free afterwards.
        """
        if seq_id not in self._live.by_id or seq_id in self._cancelled_in_flight:
            return False
        if not self._live.end_waiting(seq_id):
            if self._flight is not None:
                self._cancelled_in_flight[seq_id] = None
            else:
                self._live.end_running(seq_id)
        return True

    @property
    def not_before_ns(self) -> int:
        """With work to do, `plan` yields None until this time: a batch is being gathered. 0 in continuous batching."""
        return self._batching.not_before_ns() if self.has_work else 0

    @property
    def next_deadline_ns(self) -> int | None:
        """When `expire` may have something to end; None: never."""
        return self._deadlines.next_ns

    def plan(self, now_ns: int) -> StepPlan | None:
        """Choose the next step and reserve its rows and blocks. None when there is nothing to run, or not yet.

        `now_ns` is monotonic. Nothing is final before `commit`; the previous plan must have been committed or aborted.
        """
        assert self._flight is None, "a plan is in flight"
        if self._last_step is not None:
            load, started_ns = self._last_step
            self._rate.observe(load.prefill_tokens, now_ns - started_ns)
            self._step_time.observe(load, now_ns - started_ns)
            self._last_step = None
        if not self._live.by_id or self._batching.not_before_ns() > now_ns:
            return None
        reservation = Reservation(self._batch, self._pool, self._queue, self._prefixes)
        plan = self._planner.plan(self._num_steps, reservation)
        self._last_plan_ns = now_ns
        self._flight = _Flight(plan, reservation, now_ns)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> StepDelta:
        """Take in a step's tokens, end what has finished or failed, and free its blocks.

        Returns what the front side must know: one entry for each sampled token of a sequence that is still wanted.
        """
        flight = self._landed(plan)
        flight.reservation.accept()
        batch = self._batch
        plan, result = self._batching.landed_part(plan, result)
        computed = batch.as_slice(plan.rows)
        load = load_of(plan, batch, computed)
        prompt_rows = self._prefixes.prompts_among(plan.rows, computed)
        batch.num_computed_tokens[computed] += plan.num_scheduled
        sampled_rows, rows = plan.rows, computed
        if not plan.is_decode_only and np.count_nonzero(plan.samples) < len(plan.samples):
            sampled_rows = plan.rows[plan.samples]
            rows = batch.as_slice(sampled_rows)
        assert len(result.token_ids) == len(sampled_rows), "one token for each row that samples"
        batch.append_tokens(rows, result.token_ids)
        self._policy.commit(batch, rows)
        reasons = finish_reasons(batch, rows, result.token_ids, self.config.max_kv_tokens)
        if len(result.failed):
            reasons[result.failed] = _ERROR
        seq_ids = batch.seq_ids[rows].copy()
        self._live.release_forks_of(seq_ids)
        delta = self._delta(flight, seq_ids, reasons, result)
        finished_rows = sampled_rows[reasons != _NONE] if np.count_nonzero(reasons) else _NO_ROWS
        failed_rows = sampled_rows[result.failed] if len(result.failed) else _NO_ROWS
        self._prefixes.publish_step(prompt_rows, finished_rows, failed_rows)
        self._settle(flight, self._batching.leaving_rows(finished_rows))
        self._num_steps += 1
        started_ns = flight.started_ns
        if self._pool.host is not None:  # copies are no part of what a load costs
            started_ns += round(self.config.host_block_ns * (len(plan.offload) + len(plan.restore)))
        self._last_step = (load, started_ns) if self.has_work else None
        return delta

    def abort(self, plan: StepPlan, *, has_written: bool = False) -> None:
        """Take a plan back: the state equals the one before it, bit for bit, preemptions and admissions included.

        Sequences that were added or cancelled meanwhile stay added or cancelled. With `has_written` the step may have
        begun: then blocks that the plan took from the prefix cache or from preempted sequences count as lost.
        """
        reservation = self._landed(plan).reservation
        reservation.undo()
        self._policy.abort()
        if has_written:
            reservation.drop_overwritten(self.config.block_size, plan.offload[:, 1])
        for seq_id in self._cancelled_in_flight:
            if not self._live.end_waiting(seq_id):
                self._live.end_running(seq_id)
        self._cancelled_in_flight.clear()

    def snapshot(self) -> SchedulerSnapshot:
        """A deep copy of the state, comparable with ==. For tests and post-mortems: it costs time per token."""
        return take_snapshot(
            self.config,
            self.counters,
            (self._batch, self._pool, self._queue, self._live.forks, self._policy),
            self._flight.plan if self._flight is not None else None,
            self._cancelled_in_flight,
        )

    def _landed(self, plan: StepPlan) -> _Flight:
        """The flight of `plan`, which is over now."""
        flight = self._flight
        assert flight is not None and flight.plan is plan, "only the plan in flight can be committed or aborted"
        self._flight = None
        return flight

    def _delta(self, flight: _Flight, seq_ids: Int64Array, reasons: Int8Array, result: StepResult) -> StepDelta:
        """The StepDelta of the sequences that sampled, without the cancelled ones."""
        token_ids, logprobs = result.token_ids, result.logprobs
        if self._cancelled_in_flight:
            wanted = np.flatnonzero(~np.isin(seq_ids, list(self._cancelled_in_flight)))
            seq_ids, token_ids, reasons = seq_ids[wanted], token_ids[wanted], reasons[wanted]
            logprobs = {new: logprobs[old] for new, old in enumerate(wanted.tolist()) if old in logprobs}
        cached = self._live.count_admissions(flight.reservation.admissions)
        return StepDelta(flight.plan.step_id, seq_ids, token_ids, reasons, logprobs, cached)

    def _settle(self, flight: _Flight, finished_rows: Int32Array) -> None:
        """Remove the rows that ended in this step, requeue the preempted ones, and put the rest in order."""
        batch, preempted = self._batch, flight.reservation.preempted
        has_events = len(finished_rows) or self._cancelled_in_flight or preempted
        if not has_events and batch.num_decode_rows == batch.num_rows:
            return
        self._live.settle(finished_rows, self._cancelled_in_flight, preempted)
        self._cancelled_in_flight.clear()
