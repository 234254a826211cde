"""The report of a load test: a document, a table, and one HTML file with pictures."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from service.bench.timeline import LoadReport, Summary
from service.report.capacity import capacities, capacity_parts, capacity_text
from service.report.chart import Line, line_chart
from service.report.latency_figures import highest_rates, pareto_figures, quantile_figure, run_label
from service.report.latency_limits import LatencyLimits
from service.report.page import figure, figures, heading, html_page, latency_table, preformatted, table

_QUANTILE_KINDS: Final = (
    ("ttft", "Time to first token", "from just before the call to the first chunk with tokens"),
    ("tpot", "Time per output token", "after the first, mean of a request"),
    ("itl", "Inter-token latency", "gaps between a stream's chunks, completed requests pooled"),
    ("e2el", "End-to-end latency", "from just before the call to the last chunk with tokens"),
)
_SERIES_KINDS: Final = (
    ("concurrency", "Requests in flight", "requests"),
    ("output_tokens_per_s", "Output tokens", "tokens/s"),
)


def json_report(command: str, reports: Sequence[LoadReport], limits: LatencyLimits) -> str:
    """All as one document: `{"command": ..., "runs": [...], "capacity": [...]}`. An infinite rate of a run is null."""
    runs = [asdict(report) | {"rate": report.rate if math.isfinite(report.rate) else None} for report in reports]
    capacity = [asdict(found) for found in capacities(reports, limits)]
    return json.dumps({"command": command, "runs": runs, "capacity": capacity}) + "\n"


def text_report(reports: Sequence[LoadReport], limits: LatencyLimits) -> str:
    """A block of lines per run, then the capacity; good requests are counted only where there are limits."""
    found = capacities(reports, limits)
    return "\n".join([_text(report, limits) for report in reports] + ([capacity_text(found)] if found else []))


def html_report(command: str, reports: Sequence[LoadReport], limits: LatencyLimits) -> str:
    """One HTML file, everything in it."""
    shown = highest_rates(reports)
    parts = [preformatted(command), heading("Runs"), _runs_table(reports, limits)]
    parts += capacity_parts(capacities(reports, limits))
    if len(reports) > len(shown):
        parts += [heading("Throughput against latency"), pareto_figures(reports)]
    lines = [[Line(report.series[key], run_label(report)) for report in shown] for key, _, _ in _SERIES_KINDS]
    series = [
        figure(caption, line_chart(kind_lines, "seconds", unit))
        for kind_lines, (_, caption, unit) in zip(lines, _SERIES_KINDS, strict=True)
    ]
    parts += [heading("Over time"), figures(series)]
    parts += [heading("Distributions"), figures([quantile_figure(reports, *kind) for kind in _QUANTILE_KINDS])]
    for report in reports:
        parts += [heading(f"Latencies: {run_label(report)}"), latency_table(report.latency_ms)]
    return html_page("Chairlift load test", parts)


def _text(report: LoadReport, limits: LatencyLimits) -> str:
    requests, peak, throughput = report.requests, report.peak, report.throughput
    good = f"good: {requests['good']}, {report.goodput['share']:.1%}, {report.goodput['requests_per_s']:.2f}/s; "
    errors = "".join(f", {count} {name}" for name, count in report.errors.items() if name != "unfinished")
    num_unsent = requests["planned"] - requests["sent"]
    unsent = f"; {num_unsent} of {requests['planned']} planned were never sent" if num_unsent else ""
    lines = [
        f"{run_label(report)}: {requests['completed']} of {requests['sent']} completed, {requests['failed']} failed, "
        f"{requests['unfinished']} unfinished in {report.duration_s:.2f} s{errors}{unsent}",
        f"  {throughput['requests_per_s']:.2f} requests/s, {throughput['output_tokens_per_s']:.1f} output tokens/s, "
        f"{throughput['total_tokens_per_s']:.1f} tokens/s in all; "
        f"{report.tokens['cached_prompt']} of {report.tokens['prompt']} prompt tokens were cached",
        f"  {good if limits.are_set else ''}peak: {peak['concurrency']:.0f} in flight, "
        f"{peak['output_tokens_per_s']:.0f} output tokens/s; client's lag at most {report.max_start_lag_ms:.1f} ms",
        f"  {'ms':6}" + "".join(f"{name:>10}" for name in next(iter(report.latency_ms.values()))),
    ]
    lines += [f"  {key.upper():6}{_columns(values)}" for key, values in report.latency_ms.items()]
    lines += [f"  TTFT  {_columns(values)}  of {tenant}" for tenant, values in report.tenant_ttft_ms.items()]
    return "\n".join(lines) + "\n"


def _columns(values: Summary) -> str:
    return "".join(f"{'-':>10}" if value is None else f"{value:10.2f}" for value in values.values())


def _runs_table(reports: Sequence[LoadReport], limits: LatencyLimits) -> str:
    header = [
        "rate",
        "planned",
        "sent",
        "completed",
        "failed",
        "unfinished",
        "requests/s",
        "output tokens/s",
        "tokens/s",
    ]
    header += [
        "prompt tokens cached",
        "peak in flight",
        "TTFT p50 (ms)",
        "p99",
        "TPOT p50 (ms)",
        "p99",
        "ITL p99 (ms)",
        "E2EL p99 (ms)",
    ]
    rows: list[list[object]] = []
    for report in reports:
        ttft, tpot, itl, e2el = (report.latency_ms[key] for key in ("ttft", "tpot", "itl", "e2el"))
        rows.append(
            [
                f"{report.rate:g}",
                *(report.requests[key] for key in ("planned", "sent", "completed", "failed", "unfinished")),
                *report.throughput.values(),
                f"{report.tokens['cached_prompt'] / max(report.tokens['prompt'], 1):.1%}",
                report.peak["concurrency"],
                *(ttft["median"], ttft["p99"], tpot["median"], tpot["p99"], itl["p99"], e2el["p99"]),
            ]
        )
        if limits.are_set:
            rows[-1].append(f"{report.goodput['share']:.1%}")
    return table([*header, "good"] if limits.are_set else header, rows)
