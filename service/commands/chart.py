"""`chairlift chart`: one metric of measured or simulated runs as a chart for a Markdown file."""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path

from service.errors import ConfigError
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
    if not args.divide > 0:
        raise ConfigError(f"--divide is {args.divide}, but must be more than 0")
    values = [value for text in args.files for value in _read(text, args.metric, args.divide)]
    sys.stdout.write(xy_chart(args.title or args.metric, args.unit or args.metric, values))
    return 0


def _read(text: str, metric: str, divisor: float) -> list[RunValue]:
    """The metric in each run of one file."""
    name, _, path = text.rpartition("=")
    try:
        runs = json.loads(Path(path).read_text(encoding="utf-8"))["runs"]
        return [RunValue(_named(name, run), run["rate"], _divided(metric_of(run, metric), divisor)) for run in runs]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: is not a report of runs: {error!r}") from error


def _named(name: str, run: dict[str, str]) -> str:
    """`name`, then what the file calls the run: a simulation's says what of its settings differs."""
    return ", ".join(part for part in (name, run["name"]) if part)


def _divided(value: float | Mapping[str, float], divisor: float) -> float | Mapping[str, float]:
    return {name: number / divisor for name, number in value.items()} if isinstance(value, Mapping) else value / divisor
