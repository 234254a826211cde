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
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import uvloop

from service import config
from service.api.frontend import Frontend
from service.bench.number_flags import MAX_COUNT, whole_number
from service.bench.turns import RatioOfTurns, ratio_of_turns
from service.commands import bench_sides
from service.commands.request_lines import RequestLine
from service.commands.run import BatchRun, Tally, load_offline, longest_first, request_lines
from service.commands.weights import add_weights_argument
from service.obs.logging import configure_logging


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


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument(
        "--model", required=True, type=Path, metavar="DIR|SOURCE", help="a model folder, or what --weights exports"
    )
    parser.add_argument(
        "--requests", required=True, type=Path, metavar="FILE", help="requests as `chairlift run` reads"
    )
    parser.add_argument(
        "--runs", type=whole_number(1, MAX_COUNT), default=1, metavar="N", help="passes over the file (default 1)"
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
        help="passes before those that are reported (default 0)",
    )
    parser.add_argument(
        "--cold",
        action="store_true",
        help="no pass finds what earlier ones left in the prefix cache: each has tenants of its own, without weights",
    )
    add_weights_argument(parser, None)
    bench_sides.add_arguments(parser)


def run(args: Namespace) -> int:
    """Answer the file as often as asked for, and report each time."""
    config.check_environment()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(args))
    return 0


def text_line(run: OfflineRun) -> str:
    """A pass in a line."""
    return (
        f"{run.requests} requests, {run.errors} bad, in {run.elapsed_s:.2f} s: {run.requests_per_s:.2f} requests/s, "
        f"{run.output_tokens_per_s:.1f} output tokens/s, {run.total_tokens_per_s:.1f} tokens/s in all, "
        f"{run.cached_prompt_tokens} of {run.prompt_tokens} prompt tokens cached\n"
    )


def json_report(runs: list[list[OfflineRun]], against: list[str] | None) -> dict[str, object]:
    """The passes, and with two engines those of the second, whose settings `against` names, and the ratio."""
    report: dict[str, object] = {"runs": [asdict(run) for run in runs[0]]}
    if against:
        report["against"] = {"settings": against, "runs": [asdict(run) for run in runs[1]]}
        ratio = output_ratio(*runs)
        report["output_tokens_per_s_ratio"] = asdict(ratio) if ratio else None
    return report


def ratio_line(ratio: RatioOfTurns | None, against: list[str]) -> str:
    """The ratio in a line."""
    start = f"output tokens/s, ratio to {' '.join(against)}: "
    if ratio is None:
        return f"{start}none, for a pass had no output\n"
    interval = "" if ratio.low is None else f" (95 % interval {ratio.low:.3f} to {ratio.high:.3f})"
    return f"{start}{ratio.median:.3f} in the median of {ratio.pairs}{interval}\n"


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


def output_ratio(runs: list[OfflineRun], others: list[OfflineRun]) -> RatioOfTurns | None:
    """How many times the output tokens/s of `others` the passes made. None when one had no output at all."""
    rates, other_rates = ([run.output_tokens_per_s for run in side] for side in (runs, others))
    return ratio_of_turns(rates, other_rates) if all(rates) and all(other_rates) else None


async def _run(args: Namespace) -> None:
    configure_logging("warning")
    sides = bench_sides.sides(args)
    requests = args.requests.read_text(encoding="utf-8", errors="replace").split("\n")
    models = [load_offline(args, side.executor, side.scheduling) for side in sides]
    engines = [
        (model.frontend, args.max_concurrency or 2 * side.executor.max_num_seqs)
        for model, side in zip(models, sides, strict=True)
    ]
    runs: list[list[OfflineRun]] = [[] for _ in engines]
    async with AsyncExitStack() as stack:
        for model in models:
            await stack.enter_async_context(model.running())
        async for index, measured in _passes(args, requests, engines):
            runs[index].append(measured)
            if not args.json:
                sys.stdout.write(("", "against: ")[index] + text_line(measured))
                sys.stdout.flush()
    if args.json:
        sys.stdout.write(json.dumps(json_report(runs, args.against)) + "\n")
    elif args.against:
        sys.stdout.write(ratio_line(output_ratio(*runs), args.against))


async def _passes(
    args: Namespace, requests: list[str], engines: list[tuple[Frontend, int]]
) -> AsyncIterator[tuple[int, OfflineRun]]:
    """Each pass that counts: the index of its engine, and its figures. Who goes first changes from pair to pair.

    `engines`: the front side of each, and how many requests it is given at the same time.
    """
    for number in range(args.warm_ups + args.runs):
        order = range(len(engines))
        for index in reversed(order) if number % 2 else order:
            frontend, max_in_flight = engines[index]
            start_s = time.monotonic()
            lines = request_lines(requests)
            if args.cold:
                lines = _of_new_tenants(lines, number)
            batch = BatchRun(frontend, io.StringIO(), max_in_flight)
            tally = await batch.answer(longest_first(lines) if args.order == "longest-first" else lines)
            if number >= args.warm_ups:
                yield index, offline_run(tally, max(time.monotonic() - start_s, 1e-9))


def _of_new_tenants(lines: Iterator[RequestLine], number: int) -> Iterator[RequestLine]:
    """`lines`, of tenants whom no pass of another number has."""
    for line in lines:
        name = hashlib.blake2b(f"{number} {line.tenant}".encode(), digest_size=16).hexdigest()
        yield replace(line, tenant=name)
