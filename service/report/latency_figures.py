"""The pictures that every report of latencies has."""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol, TypeVar

from service.report.chart import Line, line_chart
from service.report.page import figure, figures

Point = tuple[float, float]

REQUESTS_PER_S: Final = "requests/s"
"""What rates are, unless a trace is replayed."""

TIMES_THE_TRACE: Final = "times the trace's rate"
"""What they are then."""

_PARETO_KINDS: Final = (("ttft", "p99"), ("tpot", "p99"), ("e2el", "p99"), ("e2el", "median"))


class MeasuredRun(Protocol):
    """What a report must say of a run."""

    @property
    def name(self) -> str:
        """Of the setting that is compared."""
        ...

    @property
    def rate(self) -> float:
        """What was offered, in `rate_unit`."""
        ...

    @property
    def rate_unit(self) -> str:
        """REQUESTS_PER_S or TIMES_THE_TRACE."""
        ...

    @property
    def throughput(self) -> Mapping[str, float]:
        """`output_tokens_per_s` among others."""
        ...

    @property
    def judged_share(self) -> float | None:
        """Share of good requests among those that were, or had broken a limit, when time was up; None without any."""
        ...

    @property
    def latency_ms(self) -> Mapping[str, Mapping[str, float | None]]:
        """Summaries in milliseconds, by metric; None for what was not measured."""
        ...

    @property
    def quantiles_ms(self) -> Mapping[str, Sequence[Point]]:
        """(percent of the requests, of ITL percent of the gaps; milliseconds), by metric."""
        ...


Run = TypeVar("Run", bound=MeasuredRun)


def run_label(run: MeasuredRun) -> str:
    """Names a run among others."""
    return ", ".join(part for part in (run.name, f"{run.rate:g} {run.rate_unit}") if part)


def highest_rates(runs: Sequence[Run]) -> list[Run]:
    """Of every setting the run with the highest rate."""
    last: dict[str, Run] = {}
    for run in runs:
        if run.name not in last or run.rate >= last[run.name].rate:
            last[run.name] = run
    return list(last.values())


def pareto_figures(runs: Sequence[MeasuredRun]) -> str:
    """Throughput against latency: a line per setting through its rates, in their order."""
    names = list(dict.fromkeys(run.name for run in runs))
    runs = sorted(runs, key=lambda run: run.rate)
    parts = []
    for key, percentile in _PARETO_KINDS:
        measured = [
            (run.name, (run.throughput["output_tokens_per_s"], latency_ms))
            for run in runs
            if (latency_ms := run.latency_ms[key][percentile]) is not None
        ]
        lines = [Line([point for of, point in measured if of == name], name) for name in names]
        chart = line_chart(lines, "output tokens/s", "ms", has_log_y=True)
        parts.append(figure(f"{key.upper()} {percentile}", chart, "one point per offered rate"))
    return figures(parts)


def quantile_figure(runs: Sequence[MeasuredRun], key: str, caption: str, note: str) -> str:
    """The distribution of one latency, a line per run."""
    lines = [Line(run.quantiles_ms.get(key, []), run_label(run)) for run in runs]
    x_label = "percent of gaps" if key == "itl" else "percent of requests"
    return figure(caption, line_chart(lines, x_label, "ms", has_log_y=True), note)
