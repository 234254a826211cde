"""A deployment on a virtual clock: replicas behind a router, under an autoscaling rule."""

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from service.core.scheduler import SchedulerConfig, SchedulerCounters
from service.errors import ConfigError
from service.report.latency_limits import LatencyLimits
from service.sim.autoscaler import MAX_REPLICAS, Autoscaler, AutoscaleRule
from service.sim.latency import StepLatency
from service.sim.metrics import Collector
from service.sim.replica import Replica
from service.sim.router import router_named
from service.sim.workload import SimRequest, Tenant

_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is simulated. With a rule, `num_replicas` are there at the start."""

    scheduler: SchedulerConfig  # of each replica
    latency: StepLatency
    num_replicas: int = 1
    router: str = "least-loaded"
    autoscale: AutoscaleRule | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for no replica, for too many, and for more than the rule allows."""
        if not 1 <= self.num_replicas <= MAX_REPLICAS:
            raise ConfigError(f"num_replicas is {self.num_replicas}, but must be between 1 and {MAX_REPLICAS:,}")
        if self.autoscale is not None and self.num_replicas > self.autoscale.max_replicas:
            limit = f"the most that the autoscaler may have is {self.autoscale.max_replicas}"
            raise ConfigError(f"num_replicas is {self.num_replicas} at the start, but {limit}")


def _since_the_first(requests: Iterable[SimRequest]) -> Iterator[SimRequest]:
    """The requests, as if the first one had come at 0."""
    start_ns = None
    for request in requests:
        if start_ns is None:
            start_ns = request.arrival_ns
        yield replace(request, arrival_ns=request.arrival_ns - start_ns)


class Simulation:
    """Runs a workload through a deployment, event by event: arrivals, ends of steps, looks at the load.

    Time begins with the first arrival. An arrival comes before whatever else happens at the same nanosecond. The time
    between events costs nothing, so a simulation is as fast as its schedulers are.
    """

    def __init__(self, deployment: Deployment, tenants: tuple[Tenant, ...], limits: LatencyLimits) -> None:
        self.collector = Collector(tenants, limits)
        self._num_made = 0  # replicas that ever were
        self._past: list[SchedulerCounters] = []  # of those that are gone
        self._deployment = deployment
        self._tenants = tenants
        self._router = router_named(deployment.router)
        self._autoscaler = Autoscaler(deployment.autoscale) if deployment.autoscale else None
        self._ready: list[Replica] = []
        self._starting: list[Replica] = []
        self._draining: list[Replica] = []
        self._events: list[tuple[int, int, Callable[[int], None]]] = []  # (when, serial, what), a heap
        self._serials = count()
        self._has_arrivals = True
        self._scaled_ns = 0

    def run(self, requests: Iterable[SimRequest], on_progress: Callable[[int], None] | None = None) -> Collector:
        """Serve `requests`, which arrive in order, to their ends. `on_progress` gets the number that have arrived."""
        self._ready = [self._new_replica() for _ in range(self._deployment.num_replicas)]
        for replica in self._ready:
            replica.join(0)
        if self._autoscaler is not None:
            self._at(round(self._autoscaler.rule.interval_s * 1e9), self._scale)
        events, totals = self._events, self.collector.totals
        arrivals = _since_the_first(requests)
        request = next(arrivals, None)
        self._has_arrivals = request is not None
        now_ns = 0
        while request is not None or events:
            if request is not None and request.arrival_ns <= (events[0][0] if events else _NEVER):
                now_ns = request.arrival_ns
                self._arrive(request)
                request = next(arrivals, None)
                self._has_arrivals = request is not None
                if on_progress is not None and totals.arrived % 1024 == 0:
                    on_progress(totals.arrived)
                continue
            now_ns, _, happen = heapq.heappop(events)
            happen(now_ns)
        self._count_replicas(totals.end_ns)
        for replica in self._ready:
            replica.leave(totals.end_ns)
        return self.collector

    @property
    def num_live(self) -> int:
        """Requests in the system."""
        return sum(replica.num_live for replica in (*self._ready, *self._draining))

    @property
    def _is_over(self) -> bool:
        """True when nobody is served, or will be."""
        return not self._has_arrivals and not self.num_live

    @property
    def counters(self) -> list[SchedulerCounters]:
        """Of every replica that ever was."""
        return [*self._past, *(replica.scheduler.counters for replica in (*self._ready, *self._draining))]

    def _at(self, when_ns: int, happen: Callable[[int], None]) -> None:
        heapq.heappush(self._events, (when_ns, next(self._serials), happen))

    def _arrive(self, request: SimRequest) -> None:
        replica = self._ready[self._router.choose(request, self._ready)]
        seq_id = self.collector.on_arrival(request)
        if not replica.add(seq_id, request, self._tenants[request.tenant]):
            self.collector.on_refused(seq_id)
        elif replica.is_idle and replica.wake_ns != request.arrival_ns:
            replica.wake_ns = request.arrival_ns
            self._at(request.arrival_ns, partial(self._wake, replica))

    def _wake(self, replica: Replica, now_ns: int) -> None:
        if replica.wake_ns != now_ns:
            return  # a request has woken it earlier
        next_ns = replica.wake(now_ns)
        if next_ns is not None:
            self._at(next_ns, partial(self._wake, replica))
        elif replica in self._draining:
            self._count_replicas(now_ns)
            self._draining.remove(replica)
            self._part_with(replica, now_ns)

    def _scale(self, now_ns: int) -> None:
        """Look at the load, order or give up replicas, and look again later; nothing after the last request's end."""
        assert self._autoscaler is not None, "only a deployment with a rule is scaled"
        if self._is_over:
            return
        rule, num_replicas = self._autoscaler.rule, len(self._ready) + len(self._starting)
        wanted = self._autoscaler.decide(now_ns / 1e9, self.num_live, num_replicas)
        for _ in range(num_replicas, wanted):
            replica = self._new_replica()
            self._starting.append(replica)
            self._at(now_ns + round(rule.startup_s * 1e9), partial(self._join, replica))
        if wanted < num_replicas:
            self._give_up(num_replicas - wanted, now_ns)
        self._at(now_ns + round(rule.interval_s * 1e9), self._scale)

    def _join(self, replica: Replica, now_ns: int) -> None:
        if replica in self._starting and not self._is_over:  # not given up meanwhile
            self._count_replicas(now_ns)
            self._starting.remove(replica)
            self._ready.append(replica)
            replica.join(now_ns)

    def _give_up(self, num_replicas: int, now_ns: int) -> None:
        """Starting replicas go first, then the newest; what they have begun they finish."""
        self._count_replicas(now_ns)
        for _ in range(num_replicas):
            if self._starting:
                self._starting.pop()
                continue
            replica = self._ready.pop()
            if replica.num_live:
                self._draining.append(replica)
            else:
                self._part_with(replica, now_ns)

    def _part_with(self, replica: Replica, now_ns: int) -> None:
        replica.leave(now_ns)
        self._past.append(replica.scheduler.counters)

    def _count_replicas(self, now_ns: int) -> None:
        """Tell the series how many there were until now."""
        self.collector.replicas.add(self._scaled_ns, now_ns, len(self._ready) + len(self._draining))
        self._scaled_ns = max(self._scaled_ns, now_ns)

    def _new_replica(self) -> Replica:
        replica = Replica(self._num_made, self._deployment.scheduler, self._deployment.latency, self.collector)
        self._num_made += 1
        return replica
