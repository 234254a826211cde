"""`chairlift bench offline`: what the engine makes of a file of requests, in this process and without a server.

With --against it is two engines that take turns, and the ratio of what they make.
"""

import asyncio
import hashlib
import io
import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

from service import config
from service.api.frontend import Frontend
from service.bench.number_flags import MAX_COUNT, whole_number
from service.bench.offline_report import OfflineRun, json_comparison, json_report, ratio_line, text_line
from service.commands import bench_sides
from service.commands.request_lines import RequestLine
from service.commands.run import BatchRun, Tally, load_offline, longest_first, request_lines
from service.commands.weights import add_weights_argument
from service.executor.machine import available_memory_bytes
from service.obs.logging import configure_logging


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """An engine that runs."""

    label: str  # what its passes' lines begin with
    frontend: Frontend
    max_in_flight: int  # requests that it is given at the same time


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument(
        "--model", required=True, type=Path, metavar="DIR|SOURCE", help="a model folder, or what --weights exports"
    )
    parser.add_argument(
        "--requests", required=True, type=Path, metavar="FILE", help="requests as `chairlift run` reads"
    )
    parser.add_argument(
        "--runs",
        type=whole_number(1, MAX_COUNT),
        default=1,
        metavar="N",
        help="passes over the file, of each engine (default 1)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")
    parser.add_argument(
        "--order",
        choices=("longest-first", "file"),
        default="longest-first",
        help="how requests start: longest-first, as `chairlift run` does; file: in the file's order, as a server's "
        "queue gets them (default longest-first)",
    )
    parser.add_argument(
        "--max-concurrency",
        type=whole_number(1, MAX_COUNT),
        metavar="N",
        help="requests at the engine at the same time; unset: twice max_num_seqs",
    )
    parser.add_argument(
        "--warm-ups",
        type=whole_number(0, MAX_COUNT),
        default=0,
        metavar="N",
        help="passes before those that count (default 0)",
    )
    parser.add_argument(
        "--cold",
        action="store_true",
        help="no pass finds what earlier ones left in the prefix cache: each has tenants of its own; not with "
        "tenant_weights or shared_prefix_scope",
    )
    add_weights_argument(parser, None)
    bench_sides.add_arguments(parser)


def run(args: Namespace) -> int:
    """Answer the file as often as asked for, and report each time."""
    config.check_environment()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(args))
    return 0


def offline_run(tally: Tally, elapsed_s: float) -> OfflineRun:
    """The figures of one pass."""
    return OfflineRun(
        requests=tally.num_requests,
        errors=tally.num_errors,
        prompt_tokens=tally.prompt_tokens,
        cached_prompt_tokens=tally.cached_prompt_tokens,
        output_tokens=tally.completion_tokens,
        elapsed_s=elapsed_s,
        requests_per_s=(tally.num_requests - tally.num_errors) / elapsed_s,
        output_tokens_per_s=tally.completion_tokens / elapsed_s,
        total_tokens_per_s=(tally.prompt_tokens + tally.completion_tokens) / elapsed_s,
    )


async def _run(args: Namespace) -> None:
    configure_logging("warning")
    sides = bench_sides.sides(args, available_memory_bytes())
    requests = args.requests.read_text(encoding="utf-8", errors="replace").split("\n")
    runs: list[list[OfflineRun]] = [[] for _ in sides]
    try:
        async with AsyncExitStack() as stack:
            engines = [await _started(args, side, stack) for side in sides]
            turn = list(zip(engines, runs, strict=True))
            for number in range(args.warm_ups + args.runs):
                for engine, measured in reversed(turn) if number % 2 else turn:  # nobody always goes first
                    await _one_pass(args, engine, _lines(args, requests, number), number, measured)
    finally:  # interrupted perhaps
        num_whole = min(map(len, runs))
        if num_whole:
            _report(args, [passes[:num_whole] for passes in runs], sides[-1].against)


def _report(args: Namespace, runs: list[list[OfflineRun]], against: Mapping[str, str]) -> None:
    """Say what the passes come to; the lines that are no JSON have been printed."""
    if args.json:
        report = json_comparison(runs[0], runs[1], against) if against else json_report(runs[0])
        sys.stdout.write(json.dumps(report) + "\n")
    elif against:
        sys.stdout.write(ratio_line(runs[0], runs[1], against))


async def _started(args: Namespace, side: bench_sides.Side, stack: AsyncExitStack) -> MeasuredEngine:
    """Load and start an engine, which `stack` closes."""
    with bench_sides.naming_errors(side.against):
        model = load_offline(args, side.executor, side.scheduling)
        await stack.enter_async_context(model.running())
    label = "against: " if side.against else ""
    return MeasuredEngine(label, model.frontend, args.max_concurrency or 2 * side.executor.max_num_seqs)


async def _one_pass(
    args: Namespace, engine: MeasuredEngine, lines: Iterable[RequestLine], number: int, measured: list[OfflineRun]
) -> None:
    """Answer `lines`. The pass is added to `measured` and printed when its number is one that counts."""
    start_s = time.monotonic()
    tally = await BatchRun(engine.frontend, io.StringIO(), engine.max_in_flight).answer(lines)
    run = offline_run(tally, max(time.monotonic() - start_s, 1e-9))
    if tally.first_error and not number:
        print(f"bad requests: {run.errors}; the first one: {tally.first_error}", file=sys.stderr)
    if number < args.warm_ups:
        print(f"warm-up {number + 1} of {args.warm_ups}: {engine.label}{run.elapsed_s:.2f} s", file=sys.stderr)
        return
    measured.append(run)
    if not args.json:
        sys.stdout.write(engine.label + text_line(run))
        sys.stdout.flush()


def _lines(args: Namespace, requests: list[str], number: int) -> Iterator[RequestLine]:
    """What the pass of this number is to answer, in the order of starting."""
    lines = request_lines(requests)
    if args.cold:
        lines = (_of_new_tenant(line, number) for line in lines)
    return longest_first(lines) if args.order == "longest-first" else lines


def _of_new_tenant(line: RequestLine, number: int) -> RequestLine:
    """`line`, of a tenant whom no pass of another number has."""
    # Hashed, for a tenant's name has at most 64 characters, and the line's may have all of them.
    name = hashlib.blake2b(f"{number} {line.tenant}".encode(), digest_size=16).hexdigest()
    return replace(line, tenant=name)
