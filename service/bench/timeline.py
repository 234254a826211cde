"""What a client saw of requests, and the metrics of it as `vllm bench serve` defines them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from service.report.latency_figures import REQUESTS_PER_S
from service.report.latency_limits import LatencyLimits

Float64Array = npt.NDArray[np.float64]
Point = tuple[float, float]
Summary = dict[str, float | None]

_SHARES: Final = (0.01, *(number / 20 for number in range(1, 20)), 0.99, 0.999)
_MAX_SERIES_POINTS: Final = 512
UNFINISHED: Final = "unfinished"
"""The error of a request that was still running when the time was up."""


@dataclass(slots=True)
class RequestTimeline:
    """One request as its client saw it; times in seconds of one monotonic clock. Written by the request's own task."""

    start_s: float  # just before the call
    chunk_times_s: list[float] = field(default_factory=list)  # of every chunk that brought tokens
    chunk_tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0  # of them, found in the server's prefix cache
    output_tokens: int = 0  # from the server's usage; until it has come, those of the chunks
    end_s: float = 0.0  # when the call ended, however it did
    error: str = ""  # status code of a request that failed, UNFINISHED, or nothing
    details: str = ""  # what the server said of the error
    tenant: str = ""  # whose it was

    @property
    def is_completed(self) -> bool:
        """True when the call ended well and brought a token."""
        return not self.error and bool(self.chunk_times_s)

    @property
    def ttft_s(self) -> float:
        """From just before the call to the first chunk with tokens."""
        return self.chunk_times_s[0] - self.start_s

    @property
    def e2el_s(self) -> float:
        """From just before the call to the last chunk with tokens."""
        return self.chunk_times_s[-1] - self.start_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 for one token."""
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The metrics of one run. Latencies in milliseconds; each is of completed requests."""

    name: str
    rate: float  # what was offered, in `rate_unit`; infinite: all at once
    duration_s: float  # from the first call to the last one's end
    requests: dict[str, int]  # planned, sent before the time was up, and of these completed, failed, unfinished, good
    errors: dict[str, int]  # status code -> requests
    tokens: dict[str, int]  # prompt, cached_prompt (of them) and output, of completed requests
    throughput: dict[str, float]  # requests, output tokens and all tokens per second
    goodput: dict[str, float]  # good requests per second, and their share of those that were sent
    judged_share: float | None  # of good ones among those sent that were not cut off before they had broken a limit
    peak: dict[str, float]  # concurrency; output tokens, and chunks, in the best whole second
    latency_ms: dict[str, Summary]
    tenant_ttft_ms: dict[str, Summary]  # of each tenant that was named
    quantiles_ms: dict[str, list[Point]]  # (percent of the requests, of ITL percent of the gaps; milliseconds)
    max_start_lag_ms: float  # how far the client fell behind its own schedule
    series: dict[str, list[Point]]  # concurrency, and output tokens per second: (seconds, value)
    rate_unit: str = REQUESTS_PER_S


def load_report(
    name: str,
    rate: float,
    num_planned: int,
    timelines: Sequence[RequestTimeline],
    limits: LatencyLimits,
    max_start_lag_s: float = 0.0,
) -> LoadReport:
    """The metrics of a run that was to send `num_planned` requests, and sent those of `timelines`."""
    completed = [timeline for timeline in timelines if timeline.is_completed]
    begin_s = min((timeline.start_s for timeline in timelines), default=0.0)
    duration_s = max(max((timeline.end_s for timeline in timelines), default=0.0) - begin_s, 1e-9)
    prompt_tokens = sum(timeline.prompt_tokens for timeline in completed)
    cached_prompt_tokens = sum(timeline.cached_prompt_tokens for timeline in completed)
    output_tokens = sum(timeline.output_tokens for timeline in completed)
    num_good = sum(
        limits.are_met(timeline.ttft_s * 1e3, timeline.tpot_s * 1e3, timeline.e2el_s * 1e3) for timeline in completed
    )
    num_judged = len(timelines) - sum(_is_open(timeline, limits) for timeline in timelines)
    errors = Counter(timeline.error or "no token" for timeline in timelines if not timeline.is_completed)
    num_unfinished = errors[UNFINISHED]
    latencies = _latencies_ms(completed)
    tokens_per_s, chunks_per_s = _per_second(timelines, begin_s)
    concurrency = _concurrency(timelines, begin_s)
    return LoadReport(
        name=name,
        rate=rate,
        duration_s=duration_s,
        requests={
            "planned": num_planned,
            "sent": len(timelines),
            "completed": len(completed),
            "failed": len(timelines) - len(completed) - num_unfinished,
            "unfinished": num_unfinished,
            "good": num_good,
        },
        errors=dict(errors),
        tokens={"prompt": prompt_tokens, "cached_prompt": cached_prompt_tokens, "output": output_tokens},
        throughput={
            "requests_per_s": len(completed) / duration_s,
            "output_tokens_per_s": output_tokens / duration_s,
            "total_tokens_per_s": (prompt_tokens + output_tokens) / duration_s,
        },
        goodput={"requests_per_s": num_good / duration_s, "share": num_good / max(len(timelines), 1)},
        judged_share=num_good / num_judged if num_judged else None,
        peak={
            "concurrency": max((value for _, value in concurrency), default=0),
            "output_tokens_per_s": float(tokens_per_s.max(initial=0)),
            "output_chunks_per_s": float(chunks_per_s.max(initial=0)),
        },
        latency_ms={key: summary(values) for key, values in latencies.items()},
        tenant_ttft_ms={
            tenant: summary(np.array([timeline.ttft_s for timeline in completed if timeline.tenant == tenant]) * 1e3)
            for tenant in sorted({timeline.tenant for timeline in timelines} - {""})
        },
        quantiles_ms={
            key: list(zip((100 * share for share in _SHARES), np.quantile(values, _SHARES).tolist(), strict=True))
            for key, values in latencies.items()
            if len(values)
        },
        max_start_lag_ms=max_start_lag_s * 1e3,
        series={
            "concurrency": _thinned(concurrency),
            "output_tokens_per_s": _thinned([(second + 0.5, float(n)) for second, n in enumerate(tokens_per_s)]),
        },
    )


def _is_open(timeline: RequestTimeline, limits: LatencyLimits) -> bool:
    """True for a request that was cut off and could still have kept all limits."""
    elapsed_ms = (timeline.end_s - timeline.start_s) * 1e3
    ttft_ms = timeline.ttft_s * 1e3 if timeline.chunk_times_s else elapsed_ms
    return timeline.error == UNFINISHED and limits.can_be_met(ttft_ms, elapsed_ms)


def summary(values: Float64Array) -> Summary:
    """Mean, median, std, p90, p95, p99 and max; None without values. Percentiles are interpolated."""
    if not len(values):
        return dict.fromkeys(("mean", "median", "std", "p90", "p95", "p99", "max"))
    median, p90, p95, p99 = np.percentile(values, (50, 90, 95, 99)).tolist()
    return {
        "mean": float(values.mean()),
        "median": median,
        "std": float(values.std()),
        "p90": p90,
        "p95": p95,
        "p99": p99,
        "max": float(values.max()),
    }


def _latencies_ms(completed: Sequence[RequestTimeline]) -> dict[str, Float64Array]:
    gaps = [np.diff(timeline.chunk_times_s) for timeline in completed]
    return {
        "ttft": np.array([timeline.ttft_s for timeline in completed]) * 1e3,
        "tpot": np.array([timeline.tpot_s for timeline in completed if timeline.output_tokens > 1]) * 1e3,
        "itl": np.concatenate([*gaps, np.empty(0)]) * 1e3,
        "e2el": np.array([timeline.e2el_s for timeline in completed]) * 1e3,
    }


def _per_second(timelines: Sequence[RequestTimeline], begin_s: float) -> tuple[Float64Array, Float64Array]:
    """Tokens and chunks that came in each whole second since the beginning."""
    times_s = [time_s - begin_s for timeline in timelines for time_s in timeline.chunk_times_s]
    tokens = [count for timeline in timelines for count in timeline.chunk_tokens]
    seconds = np.array(times_s).astype(np.int64)
    return np.bincount(seconds, tokens).astype(np.float64), np.bincount(seconds).astype(np.float64)


def _concurrency(timelines: Sequence[RequestTimeline], begin_s: float) -> list[Point]:
    """(seconds, requests in flight from then on). A call that ends when another begins is not in flight with it."""
    changes = [(timeline.start_s - begin_s, 1) for timeline in timelines]
    changes += [(timeline.end_s - begin_s, -1) for timeline in timelines]
    points, num_running = [], 0
    for time_s, change in sorted(changes):
        num_running += change
        points.append((time_s, float(num_running)))
    return points


def _thinned(points: list[Point]) -> list[Point]:
    """At most 512 of `points`: evenly chosen, with the first of the highest and the last one."""
    if len(points) <= _MAX_SERIES_POINTS:
        return points
    step = -(-len(points) // (_MAX_SERIES_POINTS - 2))
    highest = max(range(len(points)), key=lambda number: points[number][1])
    return [points[number] for number in sorted({*range(0, len(points), step), highest, len(points) - 1})]
