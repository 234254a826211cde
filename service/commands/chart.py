"""`chairlift chart`: one metric of measured or simulated runs as a chart for a Markdown file."""

import json
import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from service.errors import ConfigError
from service.report.latency_figures import REQUESTS_PER_S
from service.report.mermaid import RunValue, metric_of, xy_chart

EPILOG = """FILE is what `simulate --json` or `bench serve --json` printed; NAME= says what its runs are called, when
the file does not. METRIC says where a number is in a run of such a file, as latency_ms.ttft.p99,
throughput.output_tokens_per_s or fairness.jain_index; or where several are, as latency_ms.itl or tenant_tokens."""


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `chart`."""
    parser.epilog = EPILOG
    parser.add_argument("metric", metavar="METRIC", help="what is drawn")
    parser.add_argument("files", nargs="+", metavar="[NAME=]FILE", help="JSON reports of runs")
    parser.add_argument("--title", metavar="TEXT", help="of the chart (default: the metric)")
    parser.add_argument("--unit", default="", metavar="TEXT", help="of the metric; its values are divided by --divide")
    parser.add_argument("--divide", type=float, default=1.0, metavar="N", help="1000 makes seconds of milliseconds")


def run(args: Namespace) -> int:
    """Print the chart. Raises ConfigError."""
    if not 0 < args.divide < math.inf:
        raise ConfigError(f"--divide is {args.divide}, but must be more than 0, and finite")
    values = [value for text in args.files for value in _read(text, args.metric, args.divide)]
    sys.stdout.write(xy_chart(args.title or args.metric, args.unit or args.metric, values))
    return 0


def _read(text: str, metric: str, divisor: float) -> list[RunValue]:
    """The metric in each run of one file."""
    name, path = _name_and_path(text)
    try:
        runs = _runs(json.loads(Path(path).read_text(encoding="utf-8")))
        return [_run_value(name, run, metric, divisor) for run in runs]
    except (ValueError, RecursionError, OverflowError) as error:
        raise ConfigError(f"{path}: is not a report of runs: {error}") from error


def _run_value(name: str, run: dict[str, Any], metric: str, divisor: float) -> RunValue:
    """Raises ConfigError for what no chart can show, ValueError for what is no rate."""
    of_run = RunValue(_named(name, run), _rate(run["rate"]), 0.0, str(run.get("rate_unit", REQUESTS_PER_S)))
    found = metric_of(run, metric)
    numbers = found if isinstance(found, Mapping) else {"": found}
    drawn = {}
    for key, number in numbers.items():
        path = f"{metric}.{key}" if key else metric
        if number is None:
            raise ConfigError(f"{path} was not measured in the run {of_run.run_label}")
        drawn[key] = _quotient(path, number, divisor)
    return replace(of_run, value=drawn if isinstance(found, Mapping) else drawn[""])


def _runs(document: object) -> list[dict[str, Any]]:
    """The runs of a report. Raises ValueError."""
    runs = document.get("runs") if isinstance(document, dict) else None
    if not isinstance(runs, list):
        raise ValueError('it has no list "runs"')
    if not all(isinstance(run, dict) and isinstance(run.get("name"), str) and "rate" in run for run in runs):
        raise ValueError("one of them lacks its name or its rate")
    return runs


def _name_and_path(text: str) -> tuple[str, str]:
    """Both may hold "=": the longest path that exists is the file."""
    parts = text.split("=")
    for number in range(len(parts)):
        path = "=".join(parts[number:])
        if path and Path(path).exists():
            return "=".join(parts[:number]), path
    return "=".join(parts[:-1]), parts[-1]


def _rate(rate: object) -> float | None:
    """What was offered, or None for all at once."""
    if rate is None or (isinstance(rate, int | float) and math.isfinite(rate)):
        return rate
    raise ValueError(f"its rate is {rate!r}")


def _named(name: str, run: dict[str, str]) -> str:
    """`name`, then what the file calls the run: a simulation's says what of its settings differs."""
    return ", ".join(part for part in (name, run["name"]) if part)


def _quotient(metric: str, number: float, divisor: float) -> float:
    quotient = number / divisor
    if not math.isfinite(quotient):
        raise ConfigError(f"{metric} is {number:g}: divided by {divisor:g} it is not finite")
    return quotient
