"""One replica: the real scheduler, and steps that only take time."""

from dataclasses import dataclass
from struct import Struct
from typing import Final

import numpy as np

from service.core.plan import StepPlan
from service.core.scheduler import Scheduler, SchedulerConfig
from service.core.types import Int32Array, Request, SamplingParams, StepResult
from service.errors import ChairliftError
from service.sim.latency import StepLatency
from service.sim.metrics import Collector
from service.sim.workload import SimRequest, Tenant

_PAIR: Final = Struct("<qq")


@dataclass(frozen=True, slots=True)
class _Step:
    """A step in flight."""

    plan: StepPlan
    start_ns: int
    kv_occupancy: float  # share of the blocks that are taken


class Replica:
    """A scheduler on virtual time. Its tokens have no values, and nothing is checked slot by slot.

    `wake` lets it go on: it commits the step that is over and begins the next one. The series know it from `join` to
    `leave`.
    """

    def __init__(self, number: int, config: SchedulerConfig, latency: StepLatency, collector: Collector) -> None:
        self.number = number
        self.num_live = 0
        self.wake_ns: int | None = None  # when it is to go on; None: at a request
        self.scheduler = Scheduler(config)
        self._is_continuous = config.batching == "continuous"
        self._latency = latency
        self._collector = collector
        self._step: _Step | None = None
        self._measured_ns = 0  # until when the series of steps know about it
        self._num_waiting = 0
        self._waiting_since_ns = 0  # when that number was first so
        self._tokens: Int32Array = np.zeros(max(config.max_num_seqs, config.max_model_len), np.int32)
        self._tokens.flags.writeable = False

    def join(self, now_ns: int) -> None:
        """Be ready for requests."""
        self._measured_ns = self._waiting_since_ns = now_ns

    def leave(self, now_ns: int) -> None:
        """Be ready no longer, with no request left."""
        self._note_idle(now_ns)
        self._collector.waiting.add(self._waiting_since_ns, now_ns, self._num_waiting)

    def add(self, seq_id: int, request: SimRequest, tenant: Tenant) -> bool:
        """Take a request. False when a server would refuse it: it exceeds the context, or the scheduler says no."""
        config = self.scheduler.config
        if request.prompt_tokens + request.output_tokens > config.max_model_len:
            return False
        prompt = self._tokens[: request.prompt_tokens]
        sampling = SamplingParams(request.output_tokens, ignore_eos=True)
        root = digests = b""
        if config.prefix_cache:
            root, digests = _digest(seq_id, 0), _block_names(seq_id, request, len(prompt), config.block_size)
        try:
            self.scheduler.add(
                Request(
                    seq_id,
                    prompt,
                    sampling,
                    tenant=tenant.name,
                    arrival_ns=request.arrival_ns,
                    cache_root=root,
                    block_digests=digests,
                )
            )
        except ChairliftError:
            return False
        self.num_live += 1
        self._note_queue(request.arrival_ns)
        return True

    @property
    def is_idle(self) -> bool:
        """True while no step is in flight, so that a request may begin one."""
        return self._step is None

    def wake(self, now_ns: int) -> int | None:
        """Commit the step that ends at `now_ns`, begin the next. Returns the new `wake_ns`."""
        if self._step is not None:
            self._finish(self._step, now_ns)
            self._step = None
        self.wake_ns = self._begin(now_ns)
        return self.wake_ns

    def _begin(self, now_ns: int) -> int | None:
        scheduler, batch, collector = self.scheduler, self.scheduler.batch, self._collector
        num_rows = batch.num_rows
        plan = scheduler.plan(now_ns)
        if plan is None:
            return max(scheduler.not_before_ns, now_ns + 1) if scheduler.has_work else None
        if batch.num_rows > num_rows:
            collector.on_admitted(now_ns, batch.seq_ids[num_rows : batch.num_rows])
        num_decode_rows = plan.num_decode_rows
        context_tokens = int(batch.num_computed_tokens[plan.rows].sum())
        duration_ns = self._latency.step_ns(plan.num_tokens - num_decode_rows, num_decode_rows, context_tokens)
        duration_ns += round((len(plan.offload) + len(plan.restore)) * scheduler.config.host_block_ns)
        counters = scheduler.counters  # as the step runs: its end frees the blocks of whom it finishes
        self._step = _Step(plan, now_ns, 1.0 - counters.num_free_blocks / (counters.num_blocks - 1))
        self._note_queue(now_ns)
        return now_ns + max(duration_ns, 1)

    def _finish(self, step: _Step, now_ns: int) -> None:
        plan, collector, batch = step.plan, self._collector, self.scheduler.batch
        rows, counts = plan.rows, plan.num_scheduled
        if not self._is_continuous:  # rows that have ended compute on, for nobody
            is_live = ~batch.has_ended[rows]
            rows, counts = rows[is_live], counts[is_live]
        collector.on_served(now_ns, batch.seq_ids[rows], counts)
        delta = self.scheduler.commit(plan, StepResult(self._tokens[: int(np.count_nonzero(plan.samples))]))
        collector.on_tokens(now_ns, delta.seq_ids)
        for index in np.flatnonzero(delta.finish_reasons).tolist():
            self.num_live -= 1
            collector.on_finished(now_ns, int(delta.seq_ids[index]), int(delta.finish_reasons[index]))
        self._note_idle(step.start_ns)
        self._measured_ns = now_ns
        collector.batch_size.add(step.start_ns, now_ns, len(delta.seq_ids))
        collector.kv_occupancy.add(step.start_ns, now_ns, step.kv_occupancy)
        self._note_queue(now_ns)

    def _note_idle(self, now_ns: int) -> None:
        """Tell the series that no step ran until now."""
        for series in (self._collector.batch_size, self._collector.kv_occupancy):
            series.add(self._measured_ns, now_ns, 0.0)
        self._measured_ns = now_ns

    def _note_queue(self, now_ns: int) -> None:
        """Tell the series how many waited until now, if others do from now on."""
        counters = self.scheduler.counters
        num_waiting = counters.num_waiting + counters.num_preempted
        if num_waiting != self._num_waiting:
            self._collector.waiting.add(self._waiting_since_ns, now_ns, self._num_waiting)
            self._num_waiting, self._waiting_since_ns = num_waiting, now_ns


def _block_names(seq_id: int, request: SimRequest, prompt_tokens: int, block_size: int) -> bytes:
    """Digests of the prompt's full blocks: equal in requests of one prefix as far as it reaches, else nobody else's."""
    num_blocks = prompt_tokens // block_size
    num_shared = min(request.prefix_tokens // block_size, num_blocks)
    shared = [_digest(-1 - request.prefix, number) for number in range(num_shared)]
    return b"".join(shared + [_digest(seq_id, 1 + number) for number in range(num_shared, num_blocks)])


def _digest(name: int, number: int) -> bytes:
    """Stands for a hash: 16 bytes that no other pair has."""
    return _PAIR.pack(name, number)
