"""What a simulation found, as a JSON document and as one HTML file with pictures."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from service.core.scheduler import SchedulerCounters
from service.report.capacity import capacities, capacity_parts, capacity_text
from service.report.chart import Line, line_chart
from service.report.latency_figures import (
    REQUESTS_PER_S,
    Point,
    highest_rates,
    pareto_figures,
    quantile_figure,
    run_label,
)
from service.report.latency_limits import LatencyLimits
from service.report.page import figure, figures, heading, html_page, latency_table, preformatted, table
from service.sim.histogram import LogHistogram
from service.sim.metrics import Collector
from service.sim.run import Simulation
from service.sim.workload import Tenant

LATENCIES: Final = ("ttft", "tpot", "itl", "e2el", "queue_wait")
SERIES: Final = ("batch_size", "kv_occupancy", "waiting", "replicas")
_SHARES: Final = (0.01, *(number / 20 for number in range(1, 20)), 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class RunReport:
    """One simulated run. Latencies in milliseconds; series are (seconds since the first arrival, mean), 512 at most."""

    name: str  # of the setting that is compared
    rate: float  # what was offered, in `rate_unit`
    duration_s: float  # from the first arrival to the last request's end
    requests: dict[str, int]  # arrived, refused, completed, failed, good
    throughput: dict[str, float]  # requests, output tokens and all tokens per second, of completed requests
    goodput: dict[str, float]  # good requests per second, and their share of all that arrived
    latency_ms: dict[str, dict[str, float | None]]  # None for what nobody had
    quantiles_ms: dict[str, list[Point]]  # (percent of the requests, milliseconds)
    batch: dict[str, float]
    kv_occupancy: dict[str, float]
    preemptions: dict[str, int]
    prefix_cache: dict[str, float]  # prompt tokens looked up, and found; blocks copied to host memory, and back
    fairness: dict[str, float | None]  # Jain's index, None where no two tenants waited; windows in which two did
    tenant_tokens: dict[str, float]  # computed for each, prompts and outputs
    replicas: dict[str, float]
    series: dict[str, list[Point]]
    rate_unit: str = REQUESTS_PER_S

    @property
    def judged_share(self) -> float:
        """The share of good requests: a simulation runs until the last has ended."""
        return self.goodput["share"]


def run_report(name: str, rate: float, simulation: Simulation, tenants: Sequence[Tenant]) -> RunReport:
    """Summarise a simulation that has run."""
    collector, counters = simulation.collector, simulation.counters
    totals, duration_s = collector.totals, max(collector.totals.end_ns / 1e9, 1e-9)
    histograms = _histograms(collector)
    return RunReport(
        name=name,
        rate=rate,
        duration_s=duration_s,
        requests={field: getattr(totals, field) for field in ("arrived", "refused", "completed", "failed", "good")},
        throughput={
            "requests_per_s": totals.completed / duration_s,
            "output_tokens_per_s": totals.output_tokens / duration_s,
            "total_tokens_per_s": (totals.prompt_tokens + totals.output_tokens) / duration_s,
        },
        goodput={"requests_per_s": totals.good / duration_s, "share": totals.good / max(totals.arrived, 1)},
        latency_ms={key: histogram.summary() for key, histogram in histograms.items()},
        quantiles_ms={
            key: [(100 * share, histogram.quantile(share)) for share in _SHARES]
            for key, histogram in histograms.items()
            if histogram.count
        },
        batch={
            "mean": collector.batch_size.mean,
            "max": collector.batch_size.largest,
            "mean_of_steps": totals.sampled_tokens / max(totals.steps, 1),
            "steps": totals.steps,
        },
        kv_occupancy={"mean": collector.kv_occupancy.mean, "max": collector.kv_occupancy.largest},
        preemptions={
            "count": sum(counter.totals.num_preemptions for counter in counters),
            "recomputed_tokens": sum(counter.totals.num_recomputed_tokens for counter in counters),
        },
        prefix_cache=_prefix_cache(counters),
        fairness={"jain_index": collector.shares.index, "windows": collector.shares.num_windows},
        tenant_tokens=_tenant_tokens(collector, tenants),
        replicas={"mean": collector.replicas.mean, "max": collector.replicas.largest},
        series={key: getattr(collector, key).points() for key in SERIES},
    )


def _prefix_cache(counters: Sequence[SchedulerCounters]) -> dict[str, float]:
    queried_tokens = sum(counter.totals.num_queried_tokens for counter in counters)
    hit_tokens = sum(counter.totals.num_hit_tokens for counter in counters)
    return {
        "queried_tokens": queried_tokens,
        "hit_tokens": hit_tokens,
        "hit_share": hit_tokens / max(queried_tokens, 1),
        "offloaded_blocks": sum(counter.num_offloaded_blocks for counter in counters),
        "restored_blocks": sum(counter.totals.num_restored_blocks for counter in counters),
    }


def _tenant_tokens(collector: Collector, tenants: Sequence[Tenant]) -> dict[str, float]:
    """Nothing for a tenant that is alone."""
    if len(tenants) < 2:
        return {}
    return dict(zip([tenant.name for tenant in tenants], collector.shares.totals.tolist(), strict=True))


def json_report(command: str, reports: Sequence[RunReport], limits: LatencyLimits) -> str:
    """All as one document: `{"command": ..., "runs": [...], "capacity": [...]}`."""
    runs = [asdict(report) for report in reports]
    capacity = [asdict(found) for found in capacities(reports, limits)]
    return json.dumps({"command": command, "runs": runs, "capacity": capacity}) + "\n"


def text_report(reports: Sequence[RunReport], limits: LatencyLimits) -> str:
    """A table with one line per run under names and units, and one of what ended badly, where anything did; the share
    of good requests, and the capacity, only where there are limits.
    """
    names = max(len("setting"), *(len(report.name) for report in reports))
    rate_unit = "req/s" if reports[0].rate_unit == REQUESTS_PER_S else "x trace"
    lines = [
        f"{'setting':{names}}    rate    done  output   batch  TTFT p50       p99  TPOT p50     p99   E2EL p99  Jain",
        f"{'':{names}} {rate_unit:>7}   req/s   tok/s    rows        ms        ms        ms      ms         ms",
    ]
    for report in reports:
        ttft, tpot, e2el = (report.latency_ms[key] for key in ("ttft", "tpot", "e2el"))
        lines.append(
            f"{report.name:{names}} {report.rate:7.1f} {report.throughput['requests_per_s']:7.1f} "
            f"{report.throughput['output_tokens_per_s']:7.0f} {report.batch['mean_of_steps']:7.1f} "
            f"{_shown(ttft['median'], 9, 1)} {_shown(ttft['p99'], 9, 1)} {_shown(tpot['median'], 9, 2)} "
            f"{_shown(tpot['p99'], 7, 2)} {_shown(e2el['p99'], 10, 0)} {_shown(report.fairness['jain_index'], 5, 3)}"
        )
    if limits.are_set:
        good = ["  good", "     %", *(f"{100 * report.goodput['share']:6.1f}" for report in reports)]
        lines = [line.ljust(len(lines[-1])) + end for line, end in zip(lines, good, strict=True)]
    for report in reports:
        refused, failed, arrived = (report.requests[key] for key in ("refused", "failed", "arrived"))
        if refused or failed:
            lines.append(f"{run_label(report)}: of {arrived} requests {refused} were refused, {failed} failed")
    return "\n".join(lines) + "\n" + capacity_text(capacities(reports, limits))


def _shown(number: float | None, width: int, num_decimals: int) -> str:
    return f"{'-':>{width}}" if number is None else f"{number:{width}.{num_decimals}f}"


def html_report(command: str, reports: Sequence[RunReport], limits: LatencyLimits) -> str:
    """One HTML file, everything in it."""
    shown = highest_rates(reports)
    parts = [preformatted(command), heading("Runs"), _runs_table(reports, limits)]
    parts += capacity_parts(capacities(reports, limits))
    if len(reports) > len(shown):
        parts += [heading("Throughput against latency"), pareto_figures(reports)]
    parts += [heading("Over time"), figures([_series_figure(shown, *kind) for kind in _SERIES_KINDS])]
    parts += [heading("Distributions"), figures([quantile_figure(shown, *kind) for kind in _QUANTILE_KINDS])]
    for report in shown:
        parts += [heading(f"Latencies: {run_label(report)}"), latency_table(report.latency_ms)]
        if report.tenant_tokens:
            shares = [[name, tokens] for name, tokens in report.tenant_tokens.items()]
            parts += [heading(f"Tenants: {run_label(report)}"), table(["tenant", "tokens computed"], shares)]
    return html_page("Chairlift simulation", parts)


_SERIES_KINDS: Final = (
    ("batch_size", "Effective batch size", "sequences", "those that get a token in a step; 0 between steps"),
    ("kv_occupancy", "KV occupancy", "share of blocks", "share of the blocks that is taken in a step; 0 between steps"),
    ("waiting", "Queue", "requests", "requests that wait at a replica"),
    ("replicas", "Replicas", "replicas", "ready and draining ones"),
)
_QUANTILE_KINDS: Final = (
    ("queue_wait", "Queue wait", "from arrival to the first row"),
    ("ttft", "Time to first token", "from arrival"),
    ("tpot", "Time per output token", "after the first, mean of a request"),
    ("e2el", "End-to-end latency", "from arrival to the last token"),
)


def _histograms(collector: Collector) -> dict[str, LogHistogram]:
    return {key: getattr(collector, key) for key in LATENCIES}


def _runs_table(reports: Sequence[RunReport], limits: LatencyLimits) -> str:
    header = ["setting", "rate", "requests/s", "output tokens/s", "batch", "KV", "TTFT p50 (ms)", "p99"]
    header += ["TPOT p50 (ms)", "p99", "E2EL p99 (ms)", "Jain", "cache hits", "preemptions", "refused", "failed"]
    rows: list[list[object]] = []
    for report in reports:
        ttft, tpot, e2el = (report.latency_ms[key] for key in ("ttft", "tpot", "e2el"))
        rows.append(
            [
                report.name,
                report.rate,
                report.throughput["requests_per_s"],
                report.throughput["output_tokens_per_s"],
                report.batch["mean_of_steps"],
                f"{report.kv_occupancy['mean']:.0%}",
                *(ttft["median"], ttft["p99"], tpot["median"], tpot["p99"], e2el["p99"]),
                report.fairness["jain_index"],
                f"{report.prefix_cache['hit_share']:.0%}",
                report.preemptions["count"],
                report.requests["refused"],
                report.requests["failed"],
            ]
        )
        if limits.are_set:
            rows[-1].append(f"{report.goodput['share']:.1%}")
    return table([*header, "good"] if limits.are_set else header, rows)


def _series_figure(reports: Sequence[RunReport], key: str, caption: str, unit: str, note: str) -> str:
    lines = [Line(report.series[key], run_label(report)) for report in reports]
    return figure(caption, line_chart(lines, "seconds", unit), note)
