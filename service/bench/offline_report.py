"""What passes over a file of requests come to, of one engine or of two that took turns: as text and as JSON."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from service.bench.turns import CONFIDENCE_PERCENT, RatioOfTurns, ratio_of_turns


@dataclass(frozen=True, slots=True)
class OfflineRun:
    """One pass over the file. Loading and warming up are not part of it."""

    requests: int
    errors: int  # requests that were refused or failed
    prompt_tokens: int
    cached_prompt_tokens: int  # that the prefix cache held, also those of an earlier pass
    output_tokens: int
    elapsed_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float


def text_line(run: OfflineRun) -> str:
    """A pass in a line."""
    return (
        f"{run.requests} requests, {run.errors} bad, in {run.elapsed_s:.2f} s: {run.requests_per_s:.2f} requests/s, "
        f"{run.output_tokens_per_s:.1f} output tokens/s, {run.total_tokens_per_s:.1f} tokens/s in all, "
        f"{run.cached_prompt_tokens} of {run.prompt_tokens} prompt tokens cached\n"
    )


def ratio_line(runs: Sequence[OfflineRun], others: Sequence[OfflineRun], against: Mapping[str, str]) -> str:
    """What the passes of two engines come to in a line; `against` is what the second one's settings differ in."""
    settings = " ".join(f"{name}={value}" for name, value in against.items())
    medians = f"{_median_rate(runs):.1f}, and {_median_rate(others):.1f} with {settings}"
    ratio = output_ratio(runs, others)
    if ratio is None:
        return f"output tokens/s in the median: {medians}; no ratio, for {why_no_ratio(runs, others)}\n"
    interval = "" if ratio.low is None else f", {CONFIDENCE_PERCENT} % interval {ratio.low:.3f} to {ratio.high:.3f}"
    pairs = "1 pair" if ratio.num_pairs == 1 else f"{ratio.num_pairs} pairs"
    return f"output tokens/s in the median: {medians}; ratio {ratio.median:.3f} in the median of {pairs}{interval}\n"


def json_report(runs: Sequence[OfflineRun]) -> dict[str, object]:
    """The passes of an engine."""
    return {"median_output_tokens_per_s": _median_rate(runs), "runs": [asdict(run) for run in runs]}


def json_comparison(
    runs: Sequence[OfflineRun], others: Sequence[OfflineRun], against: Mapping[str, str]
) -> dict[str, object]:
    """The passes of the first engine, those of the second, and their ratio, or null and the reason why."""
    ratio = output_ratio(runs, others)
    return json_report(runs) | {
        "against": {"settings": dict(against)} | json_report(others),
        "output_tokens_per_s_ratio": asdict(ratio) if ratio else None,
        "why_no_ratio": why_no_ratio(runs, others),
    }


def output_ratio(runs: Sequence[OfflineRun], others: Sequence[OfflineRun]) -> RatioOfTurns | None:
    """How many times the output tokens/s of `others` the passes made, or None: see `why_no_ratio`."""
    if why_no_ratio(runs, others):
        return None
    return ratio_of_turns([run.output_tokens_per_s for run in runs], [run.output_tokens_per_s for run in others])


def why_no_ratio(runs: Sequence[OfflineRun], others: Sequence[OfflineRun]) -> str | None:
    """What keeps the passes from being compared: they are not the same work. None when they are."""
    for run, other in zip(runs, others, strict=True):
        if run.errors or other.errors:
            return "a pass had bad requests"
        if run.output_tokens != other.output_tokens:
            return f"passes of a pair differ in output tokens, {run.output_tokens} and {other.output_tokens}"
        if not run.output_tokens:
            return "a pass had no output"
    return None


def _median_rate(runs: Sequence[OfflineRun]) -> float:
    return statistics.median(run.output_tokens_per_s for run in runs)
