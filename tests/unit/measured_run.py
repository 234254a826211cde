"""A run as a report would have it, with what a test says of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from service.report.latency_figures import Point


@dataclass(frozen=True)
class Run:
    """One rate of a sweep; what is not given was not measured."""

    rate: float
    name: str = ""
    rate_unit: str = "requests/s"
    judged_share: float | None = None
    throughput: dict[str, float] = field(default_factory=dict)
    latency_ms: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    quantiles_ms: dict[str, list[Point]] = field(default_factory=dict)
