"""The load that a deployment takes within its limits: what a sweep of rates is run for.

With limits of requests it is the goodput of Zhong et al., "DistServe" (2024), though of the whole deployment and not
per GPU; with a limit of the run's ITL it is the capacity of Agrawal et al., "Sarathi-Serve" (2024).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from service.report.latency_figures import REQUESTS_PER_S, MeasuredRun
from service.report.latency_limits import LatencyLimits
from service.report.page import heading, table


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest rates of one setting's sweep that keep the limits; None where not even the lowest rate does."""

    name: str  # of the setting that is compared
    rate_90_percent_good: float | None
    rate_99_percent_good: float | None
    rate_unit: str = REQUESTS_PER_S


def capacities(runs: Sequence[MeasuredRun], limits: LatencyLimits) -> list[Capacity]:
    """One per setting; none without limits.

    A run keeps them when enough of its judged requests are good and its ITL p99 is within its limit. A rate counts
    when all runs at it and at every lower rate of the sweep do: a rate that does above one that does not is luck. All
    at once is no rate, and never counts; a run that judges no request is passed over.
    """
    if not limits.are_set:
        return []
    by_name: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        by_name.setdefault(run.name, []).append(run)
    return [
        Capacity(name, _highest_rate(of_name, limits, 0.9), _highest_rate(of_name, limits, 0.99), of_name[0].rate_unit)
        for name, of_name in by_name.items()
    ]


def capacity_text(found: Sequence[Capacity]) -> str:
    """A line per setting."""
    lines = []
    for capacity in found:
        at_90, at_99 = _shown(capacity)
        name = f"{capacity.name}, " if capacity.name else ""
        lines.append(f"{name}highest rate with 90 % good: {at_90}, with 99 % good: {at_99}\n")
    return "".join(lines)


def capacity_parts(found: Sequence[Capacity]) -> list[str]:
    """A section of a page; nothing of nothing."""
    rows = [[capacity.name, *_shown(capacity)] for capacity in found]
    header = ["setting", "highest rate with 90 % good", "with 99 % good"]
    return [heading("Capacity"), table(header, rows)] if rows else []


def _highest_rate(runs: Sequence[MeasuredRun], limits: LatencyLimits, share: float) -> float | None:
    judged = [(run, run.judged_share) for run in runs if run.judged_share is not None]
    missed = [
        run.rate for run, good in judged if good < share or not limits.are_met_by_run(run.latency_ms["itl"]["p99"])
    ]
    return max((run.rate for run, _ in judged if run.rate < min(missed, default=math.inf)), default=None)


def _shown(capacity: Capacity) -> list[str]:
    rates = (capacity.rate_90_percent_good, capacity.rate_99_percent_good)
    return ["none" if rate is None else f"{rate:g} {capacity.rate_unit}" for rate in rates]
