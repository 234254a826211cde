"""How many replicas there should be."""

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

from service.errors import ConfigError

MAX_REPLICAS: Final = 1024  # more than a router sees through
_LEAST_TARGET_LOAD: Final = 1e-6


@dataclass(frozen=True, slots=True)
class AutoscaleRule:
    """As many replicas as keep `target_load` live requests on each, between two bounds.

    Looked at every `interval_s`. Growth is ordered at once and helps after `startup_s`; replicas are given up only
    when the load has asked for fewer during all of `cooldown_s`, and end when their requests have. Those at the start
    count as asked for then, as in a Kubernetes HPA.
    """

    min_replicas: int
    max_replicas: int
    target_load: float
    interval_s: float = 15.0
    startup_s: float = 60.0
    cooldown_s: float = 300.0

    def __post_init__(self) -> None:
        """Raise ConfigError for bounds that are none."""
        if not 1 <= self.min_replicas <= self.max_replicas <= MAX_REPLICAS:
            limit = f"needs 1 <= least <= most <= {MAX_REPLICAS:,}"
            raise ConfigError(f"replicas from {self.min_replicas} to {self.max_replicas}: {limit}")
        if not _LEAST_TARGET_LOAD <= self.target_load < math.inf:
            limit = f"must be finite, and at least {_LEAST_TARGET_LOAD:g}"
            raise ConfigError(f"target_load is {self.target_load:g} live requests on a replica, but {limit}")
        if not self.interval_s > 0:
            raise ConfigError(f"interval_s is {self.interval_s:g}, but must be above 0")
        if not self.startup_s >= 0 or not self.cooldown_s >= 0:
            raise ConfigError(f"startup_s {self.startup_s}, cooldown_s {self.cooldown_s}: neither may be below 0")

    def wanted(self, num_live: int) -> int:
        """Replicas for `num_live` requests."""
        return min(max(math.ceil(num_live / self.target_load), self.min_replicas), self.max_replicas)


class Autoscaler:
    """Applies a rule over time."""

    def __init__(self, rule: AutoscaleRule) -> None:
        self.rule = rule
        self._wanted: deque[tuple[float, int]] = deque()  # (seconds, replicas) of the last `cooldown_s`

    def decide(self, now_s: float, num_live: int, num_replicas: int) -> int:
        """How many replicas there should be from now on. `num_replicas` are there or starting."""
        if not self._wanted:
            self._wanted.append((0.0, num_replicas))
        wanted = self.rule.wanted(num_live)
        self._wanted.append((now_s, wanted))
        while self._wanted[0][0] < now_s - self.rule.cooldown_s:
            self._wanted.popleft()
        if wanted >= num_replicas:
            return wanted
        return min(num_replicas, max(number for _, number in self._wanted))
