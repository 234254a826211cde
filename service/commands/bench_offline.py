"""`chairlift bench offline`: what the engine makes of a file of requests, in this process and without a server."""

import asyncio
import io
import json
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from service import config
from service.bench.number_flags import MAX_COUNT, whole_number
from service.commands.run import BatchRun, Tally, load_offline, longest_first, request_lines
from service.commands.weights import add_weights_argument
from service.engine.scheduling import SchedulingSettings
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
    add_weights_argument(parser, None)
    config.add_arguments(parser, config.ExecutorSettings, SchedulingSettings)


def run(args: Namespace) -> int:
    """Answer the file as often as asked for, and report each time."""
    config.check_environment()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runs = runner.run(_measure(args))
    if args.json:
        sys.stdout.write(json.dumps({"runs": [asdict(run) for run in runs]}) + "\n")
    else:
        sys.stdout.write(text_report(runs))
    return 0


def text_report(runs: list[OfflineRun]) -> str:
    """A line per pass."""
    return "".join(
        f"{run.requests} requests, {run.errors} bad, in {run.elapsed_s:.2f} s: {run.requests_per_s:.2f} requests/s, "
        f"{run.output_tokens_per_s:.1f} output tokens/s, {run.total_tokens_per_s:.1f} tokens/s in all, "
        f"{run.cached_prompt_tokens} of {run.prompt_tokens} prompt tokens cached\n"
        for run in runs
    )


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


async def _measure(args: Namespace) -> list[OfflineRun]:
    configure_logging("warning")
    executor, scheduling = config.load(config.ExecutorSettings, args), config.load(SchedulingSettings, args)
    requests = args.requests.read_text(encoding="utf-8", errors="replace").split("\n")
    model = load_offline(args, executor, scheduling)
    max_in_flight = args.max_concurrency or 2 * executor.max_num_seqs
    runs = []
    async with model.running():
        loop = asyncio.get_running_loop()
        for _ in range(args.runs):
            start_s = loop.time()
            lines = request_lines(requests)
            batch = BatchRun(model.frontend, io.StringIO(), max_in_flight)
            tally = await batch.answer(longest_first(lines) if args.order == "longest-first" else lines)
            runs.append(offline_run(tally, max(loop.time() - start_s, 1e-9)))
    return runs
