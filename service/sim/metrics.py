"""What a simulation measures, in memory that does not grow with the number of requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from service.core.types import FinishReason, Int64Array
from service.report.latency_limits import LatencyLimits
from service.sim.fairness import ServiceShares
from service.sim.histogram import LogHistogram
from service.sim.series import TimeSeries
from service.sim.workload import SimRequest, Tenant

_MAX_LIVE: Final = 1 << 32
_FIRST_SLOTS: Final = 1024
_GOOD_REASONS: Final = (FinishReason.STOP, FinishReason.LENGTH)


class LiveRequests:
    """Columns over the requests that are in the system. A request's id is `serial << 32 | slot`; slots are used again.

    A slot without a token yet has a `last_token_ns` of 0, one that was never admitted a `admitted_ns` of -1.
    """

    def __init__(self) -> None:
        self._free = list(range(_FIRST_SLOTS - 1, -1, -1))
        self._num_opened = 0
        self.arrival_ns: Int64Array = np.zeros(_FIRST_SLOTS, np.int64)
        self.admitted_ns: Int64Array = np.zeros(_FIRST_SLOTS, np.int64)
        self.first_token_ns: Int64Array = np.zeros(_FIRST_SLOTS, np.int64)
        self.last_token_ns: Int64Array = np.zeros(_FIRST_SLOTS, np.int64)
        self.output_tokens: Int64Array = np.zeros(_FIRST_SLOTS, np.int64)
        self.prompt_tokens: Int64Array = np.zeros(_FIRST_SLOTS, np.int64)
        self.tenant: Int64Array = np.zeros(_FIRST_SLOTS, np.int64)

    def open(self, request: SimRequest) -> int:
        """Take in a request. Returns its id, which is never given twice."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self.arrival_ns[slot] = request.arrival_ns
        self.admitted_ns[slot] = -1
        self.first_token_ns[slot] = self.last_token_ns[slot] = self.output_tokens[slot] = 0
        self.prompt_tokens[slot] = request.prompt_tokens
        self.tenant[slot] = request.tenant
        self._num_opened += 1
        return self._num_opened << 32 | slot

    def slots(self, seq_ids: Int64Array) -> Int64Array:
        """The slots of requests that are in the system."""
        slots: Int64Array = seq_ids & (_MAX_LIVE - 1)
        return slots

    def close(self, slot: int) -> None:
        """Forget a request."""
        self._free.append(slot)

    def _grow(self) -> None:
        num_slots = len(self.tenant)
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                setattr(self, name, np.concatenate([column, np.zeros(num_slots, np.int64)]))
        self._free.extend(range(2 * num_slots - 1, num_slots - 1, -1))


@dataclass(slots=True)
class Totals:
    """Counts over the whole run."""

    arrived: int = 0
    refused: int = 0  # the queue was full, or the request could never fit
    completed: int = 0
    failed: int = 0  # ended without its whole output
    good: int = 0  # completed within the limits
    prompt_tokens: int = 0  # of completed requests
    output_tokens: int = 0  # of completed requests
    steps: int = 0
    sampled_tokens: int = 0  # tokens that live sequences got, over all steps
    end_ns: int = 0  # when the last request ended


class Collector:
    """Takes in what happens, in the order of virtual time. Milliseconds in the histograms.

    TTFT, TPOT and E2EL are of completed requests. The queue wait is of all that were admitted, and ITL of every token:
    keeping a request's gaps until it ends would take memory for each of its tokens.
    """

    def __init__(self, tenants: Sequence[Tenant], limits: LatencyLimits) -> None:
        self.live = LiveRequests()
        self.totals = Totals()
        self.shares = ServiceShares(tenants)
        self.ttft, self.tpot, self.itl, self.e2el, self.queue_wait = (LogHistogram() for _ in range(5))
        self.batch_size, self.kv_occupancy, self.waiting = TimeSeries(), TimeSeries(), TimeSeries()
        self.replicas = TimeSeries()
        self._limits = limits
        self._has_tenants = len(tenants) > 1

    def on_arrival(self, request: SimRequest) -> int:
        """A request came. Returns its id."""
        self.totals.arrived += 1
        self.shares.on_waiting(request.tenant, 1)
        return self.live.open(request)

    def on_refused(self, seq_id: int) -> None:
        """A request was turned away."""
        slot = seq_id & (_MAX_LIVE - 1)
        self.totals.refused += 1
        self.totals.end_ns = max(self.totals.end_ns, int(self.live.arrival_ns[slot]))
        self.shares.on_waiting(int(self.live.tenant[slot]), -1)
        self.live.close(slot)

    def on_admitted(self, now_ns: int, seq_ids: Int64Array) -> None:
        """Requests were given rows, for the first time or again after a preemption."""
        live = self.live
        for slot in live.slots(seq_ids).tolist():
            if live.admitted_ns[slot] < 0:
                live.admitted_ns[slot] = now_ns
                self.queue_wait.add((now_ns - int(live.arrival_ns[slot])) / 1e6)
                self.shares.on_waiting(int(live.tenant[slot]), -1)

    def on_served(self, end_ns: int, seq_ids: Int64Array, num_tokens: npt.NDArray[np.int32]) -> None:
        """A step computed `num_tokens[i]` tokens of sequence `seq_ids[i]`."""
        if self._has_tenants:
            self.shares.on_step(end_ns, self.live.tenant[self.live.slots(seq_ids)], num_tokens)

    def on_tokens(self, now_ns: int, seq_ids: Int64Array) -> None:
        """Each of these live requests got one token."""
        live, slots = self.live, self.live.slots(seq_ids)
        last_ns = live.last_token_ns[slots]
        gaps_ms = (now_ns - last_ns) / 1e6
        is_first = last_ns == 0
        if is_first.any():
            live.first_token_ns[slots[is_first]] = now_ns
            gaps_ms = gaps_ms[~is_first]
        self.itl.add_all(gaps_ms)
        live.last_token_ns[slots] = now_ns
        live.output_tokens[slots] += 1
        self.totals.steps += 1
        self.totals.sampled_tokens += len(slots)

    def on_finished(self, now_ns: int, seq_id: int, reason: int) -> None:
        """A live request ended."""
        live, totals, slot = self.live, self.totals, seq_id & (_MAX_LIVE - 1)
        totals.end_ns = max(totals.end_ns, now_ns)
        if live.admitted_ns[slot] < 0:
            self.shares.on_waiting(int(live.tenant[slot]), -1)
        if reason in _GOOD_REASONS:
            self._complete(now_ns, slot)
        else:
            totals.failed += 1
        live.close(slot)

    def _complete(self, now_ns: int, slot: int) -> None:
        live, totals = self.live, self.totals
        arrival_ns, output_tokens = int(live.arrival_ns[slot]), int(live.output_tokens[slot])
        ttft_ms, e2el_ms = (int(live.first_token_ns[slot]) - arrival_ns) / 1e6, (now_ns - arrival_ns) / 1e6
        self.ttft.add(ttft_ms)
        tpot_ms = 0.0
        if output_tokens > 1:
            tpot_ms = (e2el_ms - ttft_ms) / (output_tokens - 1)
            self.tpot.add(tpot_ms)
        self.e2el.add(e2el_ms)
        totals.completed += 1
        totals.good += self._limits.are_met(ttft_ms, tpot_ms, e2el_ms)
        totals.prompt_tokens += int(live.prompt_tokens[slot])
        totals.output_tokens += output_tokens
