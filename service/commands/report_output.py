"""What the commands that report on loads share: where the report goes, and which requests count as good."""

import shlex
import sys
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Callable
from pathlib import Path

from service.errors import ConfigError
from service.report.latency_limits import LatencyLimits, parse_limits


def add_output_arguments(parser: ArgumentParser | _ArgumentGroup) -> None:
    """The flags --goodput, --json and --html."""
    parser.add_argument("--goodput", metavar="LIMITS", help="limits of a good request in ms: ttft:500,tpot:50,e2el:1e4")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report with pictures")


def check_output(args: Namespace) -> None:
    """Raise ConfigError when the page could not be written in the end."""
    if args.html is not None and not args.html.parent.is_dir():
        raise ConfigError(f"{args.html}: its folder does not exist")


def good_limits(args: Namespace) -> LatencyLimits:
    """What --goodput says. Raises ConfigError."""
    return parse_limits(args.goodput) if args.goodput else LatencyLimits()


def write_output(
    args: Namespace, html: Callable[[str], str], json: Callable[[str], str], text: Callable[[], str]
) -> None:
    """Write the page where one is asked for, print the rest. `html` and `json` are given the command that was run."""
    command = shlex.join(["chairlift", *sys.argv[1:]])
    if args.html is not None:
        args.html.write_text(html(command), encoding="utf-8")
    sys.stdout.write(json(command) if args.json else text())
