"""`chairlift bench serve`: open-loop load against a running server."""

import asyncio
import itertools
import json
import math
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import uvloop
from chairlift.inference.v1 import inference_pb2 as pb

from graphs.progress import OpenProgress, ProgressBar
from service.api.call import TENANT_KEY
from service.api.convert import request_message
from service.api.params import GenerationParams, TokenPrompt
from service.bench.load import Metadata, due_times_s, is_reachable, run_load
from service.bench.load_report import html_report, json_report, text_report
from service.bench.number_flags import (
    ARRIVAL_FLAGS,
    MAX_COUNT,
    MAX_SECONDS,
    NumberFlag,
    add_numbers,
    rates,
    real_number,
    whole_number,
)
from service.bench.timeline import LoadReport, load_report
from service.commands.generate import RemoteError
from service.commands.report_output import add_output_arguments, check_output, good_limits, write_output
from service.commands.request_lines import parse_line
from service.commands.target import host_port
from service.errors import ChairliftError, ConfigError
from service.report.latency_figures import REQUESTS_PER_S, TIMES_THE_TRACE
from service.report.latency_limits import LatencyLimits
from service.sim.arrivals import arrivals_named
from service.sim.lengths import parse_lengths

EPILOG = """A file of requests has lines as `chairlift run` reads them; with --arrivals trace each also has arrival_s,
and --rates are speeds. Without a file prompts are random token ids, with lengths fixed:N, uniform:LEAST:MOST or
lognormal:MEDIAN:SIGMA; each rate has its own, of the same lengths. A file's are the same at every rate: a server with a
prefix cache has those of the first run. Requests go out when they are due, however many are in flight; a rate of inf
sends all at once."""
ARRIVALS = ("poisson", "gamma", "on-off", "trace")
NUMBER_FLAGS = (
    NumberFlag("--num-requests", whole_number(1, 10_000_000), None, "of each run (default: the file's, else 100)"),
    NumberFlag("--vocab-size", whole_number(1, 1 << 31), 1000, "ids of random prompts"),
    NumberFlag("--warm-up", whole_number(0, MAX_COUNT), 1, "requests before the first run"),
    NumberFlag("--max-seconds", real_number(1e-3, MAX_SECONDS), 600.0, "of each run"),
)


@dataclass(frozen=True, slots=True)
class Feed:
    """The requests of a run, whose they are, and when the trace has them, if it is one.

    Those of a file are of every run, and of the warm-up; drawn ones are of the warm-up alone.
    """

    requests: list[pb.GenerateRequest]
    tenants: list[str] = field(default_factory=list)  # of each request, or of none
    arrival_s: list[float] = field(default_factory=list)

    @property
    def metadata(self) -> list[Metadata]:
        """What goes with each request, or with none."""
        return [((TENANT_KEY, tenant),) if tenant else () for tenant in self.tenants]


class _Line(NamedTuple):
    """A line of the file of requests."""

    request: pb.GenerateRequest
    tenant: str
    arrival_s: float | None


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of the command."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--target", type=host_port, default="127.0.0.1:50051", metavar="HOST:PORT", help="the server (%(default)s)"
    )
    parser.add_argument(
        "--rates", type=rates, default="1", metavar="R,..", help="requests per second, one run each (1)"
    )
    parser.add_argument("--arrivals", default="poisson", choices=ARRIVALS, help="default poisson")
    parser.add_argument("--requests", type=Path, metavar="FILE", help="requests, a JSON object a line, used in turn")
    parser.add_argument("--prompts", default="lognormal:128:0.7", metavar="LENGTHS", help="default %(default)s")
    parser.add_argument("--outputs", default="lognormal:64:0.7", metavar="LENGTHS", help="default %(default)s")
    add_numbers(parser, (*ARRIVAL_FLAGS, *NUMBER_FLAGS))
    add_output_arguments(parser)


def run(args: Namespace) -> int:
    """Send the load of every rate and report. Raises ConfigError, RemoteError when no answer comes at all."""
    check_output(args)
    limits = good_limits(args)
    feed = _feed(args)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        reports = runner.run(measure(args, feed, limits))
    write_output(
        args,
        lambda command: html_report(command, reports, limits),
        lambda command: json_report(command, reports, limits),
        lambda: text_report(reports, limits),
    )
    return 0


async def measure(args: Namespace, feed: Feed, limits: LatencyLimits) -> list[LoadReport]:
    """One report per rate."""
    await _warm_up(args, feed)
    bar = ProgressBar()
    rate_unit = TIMES_THE_TRACE if feed.arrival_s else REQUESTS_PER_S
    reports = []
    for number, rate in enumerate(args.rates, 1):
        requests = feed.requests if args.requests else _random_requests(args, len(feed.requests), number)
        with bar.open(f"{rate:g} {rate_unit}", len(requests)) as progress:
            result = await run_load(
                args.target,
                requests,
                [time_s / rate for time_s in feed.arrival_s] or _times_s(args, rate, len(requests)),
                metadata=feed.metadata,
                max_seconds=args.max_seconds,
                on_progress=partial(_show, progress),
            )
        for timeline, tenant in zip(result.timelines, feed.tenants, strict=False):  # less when the time was up
            timeline.tenant = tenant
        report = load_report("", rate, len(requests), result.timelines, limits, result.max_start_lag_s)
        reports.append(replace(report, rate_unit=rate_unit))
    return reports


def _show(progress: OpenProgress, num_ended: int, num_running: int) -> None:
    progress(num_ended, f", {num_running} in flight")


async def _warm_up(args: Namespace, feed: Feed) -> None:
    """Requests one after the other, so that a server that is not there is told at once. Raises RemoteError."""
    if not args.warm_up and not await is_reachable(args.target):
        raise RemoteError(f"{args.target}: UNAVAILABLE: no connection")
    for number, request in enumerate(feed.requests[: args.warm_up]):
        metadata = feed.metadata[number : number + 1]
        load = run_load(args.target, [request], [0.0], metadata=metadata, max_seconds=args.max_seconds)
        (timeline,) = (await load).timelines
        if timeline.error:
            raise RemoteError(f"{args.target}: {timeline.error}: {timeline.details}".rstrip(": "))


def _times_s(args: Namespace, rate: float, num_requests: int) -> list[float]:
    if math.isinf(rate):
        return due_times_s(None, rate, num_requests, args.seed)
    arrivals = arrivals_named(args.arrivals, rate, burstiness=args.burstiness, on_s=args.on_s, off_s=args.off_s)
    return due_times_s(arrivals, rate, num_requests, args.seed)


def _feed(args: Namespace) -> Feed:
    if args.requests is None:
        if args.arrivals == "trace":
            raise ConfigError("--arrivals trace: needs --requests, whose lines have arrival_s")
        return Feed(_random_requests(args, args.num_requests or 100, run_number=0))
    with args.requests.open(encoding="utf-8", errors="replace") as lines:
        read = [_read_line(line, args.requests, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not read:
        raise ConfigError(f"{args.requests}: holds no request")
    if args.arrivals == "trace":
        if any(line.arrival_s is None for line in read):
            raise ConfigError(f"{args.requests}: --arrivals trace needs arrival_s in every line")
        chosen = sorted(read, key=lambda line: line.arrival_s or 0.0)[: args.num_requests]
        arrival_s = [line.arrival_s or 0.0 for line in chosen]
    else:
        chosen, arrival_s = list(itertools.islice(itertools.cycle(read), args.num_requests or len(read))), []
    return Feed([line.request for line in chosen], [line.tenant for line in chosen], arrival_s)


def _read_line(line: str, path: Path, number: int) -> _Line:
    """Raises ConfigError."""
    where = f"{path}:{number}"
    arrival_s = None
    try:
        document = json.loads(line)
        if isinstance(document, dict) and "arrival_s" in document:
            arrival_s = float(document.pop("arrival_s"))
            line = json.dumps(document)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{where}: {error}") from error
    if arrival_s is not None and not 0 <= arrival_s < 1e9:
        raise ConfigError(f"{where}: arrival_s is {arrival_s}, but must be seconds from the trace's start")
    parsed = parse_line(line, number)
    request = parsed.request
    if isinstance(request, ChairliftError):
        raise ConfigError(f"{where}: {request}") from request
    if (request[1].n or 1) > 1:
        raise ConfigError(f"{where}: n is {request[1].n}, but the metrics are those of one answer to each request")
    try:
        return _Line(request_message(*request), parsed.tenant, arrival_s)
    except ChairliftError as error:
        raise ConfigError(f"{where}: {error}") from error


def _random_requests(args: Namespace, count: int, run_number: int) -> list[pb.GenerateRequest]:
    """Each run has tokens of its own, so that no prefix cache holds them, but the same lengths, to be compared."""
    rng = np.random.default_rng(args.seed)
    prompts, outputs = (parse_lengths(text).draw(rng, count).tolist() for text in (args.prompts, args.outputs))
    rng = np.random.default_rng((args.seed, 2, run_number))
    greedy = GenerationParams(temperature=0.0, ignore_eos=True)
    return [
        request_message(
            TokenPrompt(rng.integers(0, args.vocab_size, num_prompt).tolist()), replace(greedy, max_tokens=num_output)
        )
        for num_prompt, num_output in zip(prompts, outputs, strict=True)
    ]
