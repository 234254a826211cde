"""Which replica a request goes to."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from service.errors import ConfigError
from service.sim.workload import NO_PREFIX, SimRequest

_MULTIPLIERS: Final = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)
_MASK: Final = (1 << 64) - 1


class Target(Protocol):
    """A replica as a router sees it."""

    @property
    def number(self) -> int:
        """Unique among the replicas of a simulation."""
        ...

    @property
    def num_live(self) -> int:
        """Requests that it has taken and not finished."""
        ...


class Router(Protocol):
    """A rule of choice."""

    def choose(self, request: SimRequest, replicas: Sequence[Target]) -> int:
        """An index into `replicas`, which are ready, in the order of their numbers, and at least one."""
        ...


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._num_routed = 0

    def choose(self, request: SimRequest, replicas: Sequence[Target]) -> int:  # noqa: ARG002  blind by design
        """The next one."""
        index = self._num_routed % len(replicas)
        self._num_routed += 1
        return index


class LeastLoaded:
    """The replica with the fewest live requests, the first of several."""

    def choose(self, request: SimRequest, replicas: Sequence[Target]) -> int:  # noqa: ARG002  all are alike
        """The least loaded one."""
        return min(range(len(replicas)), key=lambda index: replicas[index].num_live)


class PrefixAffinity:
    """Requests of one shared prefix go to one replica, whose cache then holds it; others to the least loaded.

    Rendezvous hashing: when a replica comes or goes, only the prefixes move that it gains or loses. A replica with
    more than `max_imbalance` times the mean load, and more than a few requests, is passed over for the least loaded.
    """

    def __init__(self, max_imbalance: float = 1.5) -> None:
        self._max_imbalance = max_imbalance
        self._otherwise = LeastLoaded()

    def choose(self, request: SimRequest, replicas: Sequence[Target]) -> int:
        """The prefix's replica, unless it is overloaded."""
        if request.prefix == NO_PREFIX:
            return self._otherwise.choose(request, replicas)
        index = max(range(len(replicas)), key=lambda index: _score(request.prefix, replicas[index].number))
        mean_load = sum(replica.num_live for replica in replicas) / len(replicas)
        if replicas[index].num_live > self._max_imbalance * mean_load + 8:
            return self._otherwise.choose(request, replicas)
        return index


ROUTERS: Final[Mapping[str, Callable[[], Router]]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-affinity": PrefixAffinity,
}


def router_named(name: str) -> Router:
    """A new router. Raises ConfigError for an unknown name."""
    if name not in ROUTERS:
        raise ConfigError(f"router {name!r}: must be one of {', '.join(ROUTERS)}")
    return ROUTERS[name]()


def _score(prefix: int, replica: int) -> int:
    """A hash of 64 bits."""
    mixed = ((prefix + 1) * _MULTIPLIERS[0] ^ (replica + 1) * _MULTIPLIERS[1]) & _MASK
    mixed = ((mixed ^ mixed >> 31) * _MULTIPLIERS[0]) & _MASK
    return mixed ^ mixed >> 33
