"""What the commands that report on loads share: where the report goes, and which requests count as good."""

import os
import shlex
import sys
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Callable
from pathlib import Path

from service.errors import ConfigError
from service.report.latency_limits import LatencyLimits, parse_limits


def add_output_arguments(parser: ArgumentParser | _ArgumentGroup) -> None:
    """The flags --goodput, --json and --html."""
    parser.add_argument(
        "--goodput",
        metavar="LIMITS",
        help="limits of a good request in ms: ttft:500,tpot:50,e2el:1e4; and of a run: itl_p99:100. The highest rate "
        "that keeps them with 90 and with 99 %% good requests, as all lower ones do, is reported",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report with pictures")


def check_output(args: Namespace) -> None:
    """Raise ConfigError when the page could not be written in the end."""
    if args.html is None:
        return
    if not args.html.parent.is_dir():
        raise ConfigError(f"{args.html}: its folder does not exist")
    if args.html.is_dir():
        raise ConfigError(f"{args.html}: is a folder")
    if not os.access(args.html if args.html.exists() else args.html.parent, os.W_OK):
        raise ConfigError(f"{args.html}: may not be written")


def good_limits(args: Namespace) -> LatencyLimits:
    """What --goodput says. Raises ConfigError."""
    return parse_limits(args.goodput) if args.goodput else LatencyLimits()


def write_output(
    args: Namespace, html: Callable[[str], str], json: Callable[[str], str], text: Callable[[], str]
) -> None:
    """Print the report, then write the page where one is asked for: should that fail, the figures are not lost.

    `html` and `json` are given the command that was run.
    """
    command = shlex.join(["chairlift", *sys.argv[1:]])
    sys.stdout.write(json(command) if args.json else text())
    if args.html is not None:
        sys.stdout.flush()
        # The command may name files whose names are no text; the page shows them escaped.
        args.html.write_text(html(command), encoding="utf-8", errors="backslashreplace")
