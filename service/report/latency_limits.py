"""The limits that a request must keep to count as good, and a run to count as within its capacity."""

import math
from dataclasses import dataclass
from typing import Final

from service.errors import ConfigError

_NAMES: Final = ("ttft", "tpot", "e2el", "itl_p99")


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """Most milliseconds of each; None is no limit.

    A request that keeps all that are of a request is good, as in `vllm bench serve`. `itl_p99_ms` is of a run: of the
    gaps between chunks of its completed requests, pooled; a simulation pools those of failed ones, too. Whether a
    request is good does not depend on it.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None
    itl_p99_ms: float | None = None

    @property
    def are_set(self) -> bool:
        """True when there is a limit."""
        return self != LatencyLimits()

    def are_met(self, ttft_ms: float, tpot_ms: float, e2el_ms: float) -> bool:
        """True for a good request. A request of one token has a TPOT of 0."""
        measured = ((self.ttft_ms, ttft_ms), (self.tpot_ms, tpot_ms), (self.e2el_ms, e2el_ms))
        return all(limit is None or value <= limit for limit, value in measured)

    def can_be_met(self, ttft_ms: float, e2el_ms: float) -> bool:
        """False for a request that has broken a limit while it still runs, with what it has taken so far."""
        return self.are_met(ttft_ms, 0.0, e2el_ms)

    def are_met_by_run(self, itl_p99_ms: float | None) -> bool:
        """True for a run whose tail is within its limit, and for one that has none, for lack of gaps."""
        return self.itl_p99_ms is None or itl_p99_ms is None or itl_p99_ms <= self.itl_p99_ms


def parse_limits(text: str) -> LatencyLimits:
    """Read `ttft:500,tpot:50,e2el:10000,itl_p99:100`, any of them, in milliseconds. Raises ConfigError."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.partition(":")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if name not in _NAMES or not 0 < value < math.inf:
            raise ConfigError(f"limit {part!r}: must be one of {', '.join(_NAMES)}, a colon, and milliseconds")
        if f"{name}_ms" in limits:
            raise ConfigError(f"limit {part!r}: {name} has a limit before")
        limits[f"{name}_ms"] = value
    return LatencyLimits(**limits)
