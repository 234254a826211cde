"""`chairlift run`: a file of requests through the engine, without a server."""

import asyncio
import heapq
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import uvloop

from service import config
from service.api.frontend import Frontend
from service.api.samples import Samples
from service.commands.assembly import ServedModel, load_model
from service.commands.model_source import model_folder
from service.commands.request_lines import BadLineError, RequestLine, error_line, parse_line, result_line
from service.commands.result_file import open_results
from service.commands.weights import add_weights_argument
from service.engine.scheduling import SchedulingSettings
from service.engine.settings import EngineSettings
from service.errors import ChairliftError, ConfigError, EngineDeadError
from service.executor.cuda.probe import require_cuda
from service.obs.engine_log import EngineLog
from service.obs.logging import configure_logging

EPILOG = """A request line is a JSON object: an `id`, one of `prompt`, `prompt_token_ids` and `messages`, perhaps a
`tenant` whose it is, and sampling fields (max_tokens, temperature, top_k, top_p, min_p, seed, stop, ignore_eos, ...). A
result line has the `id`, `token_ids`, `text`, `finish_reason`, `usage` and `timings`, or `error` and its place, `line`,
when the request was bad; with `n` there is a line for each sample, with its `index`. Results are written as they
finish, and long requests start first, so join them to their requests by `id`."""
WINDOW_LINES = 4096
"""Lines read ahead, of which the longest starts next: what starts last should end soon, for it runs nearly alone."""

OFFLINE = EngineSettings(max_waiting_requests=1 << 20, max_waiting_tokens=1 << 40, max_pending_tokens=1 << 30)
"""The reader is this process, and it submits no more than it wants to wait for."""


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `run`."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--model", required=True, type=Path, metavar="DIR|SOURCE", help="a model folder, or what --weights exports"
    )
    parser.add_argument(
        "--requests", required=True, type=Path, metavar="FILE", help="requests, a JSON object a line; may be a pipe"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="results, a JSON object a line")
    add_weights_argument(parser, None)
    config.add_arguments(parser, config.ExecutorSettings, SchedulingSettings)


def run(args: Namespace) -> int:
    """Answer every line; bad ones with an error line."""
    config.check_environment()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(args))
    return 0


async def _run(args: Namespace) -> None:
    configure_logging("warning")
    executor, scheduling = config.load(config.ExecutorSettings, args), config.load(SchedulingSettings, args)
    if not args.requests.exists():  # a pipe will do: it is read once
        raise ConfigError(f"{args.requests}: no such file")
    if args.requests.is_dir():
        raise ConfigError(f"{args.requests}: is a folder")
    if args.output.exists() and args.output.samefile(args.requests):
        raise ConfigError(f"{args.output}: is the file of requests")
    if not args.output.parent.is_dir():
        raise ConfigError(f"{args.output}: its folder does not exist")
    model = load_offline(args, executor, scheduling)
    async with model.running():
        # Opened now, not before: a model that does not load leaves the results of an earlier run as they are.
        with _raised_interrupts():  # of a pipe that nobody writes to
            requests = args.requests.open(encoding="utf-8", errors="replace")
        with requests, open_results(args.output) as output:
            batch = BatchRun(model.frontend, output, 2 * executor.max_num_seqs)
            tally = await batch.answer(longest_first(request_lines(_read(requests))))
    print(tally.summary(), file=sys.stderr)


@contextmanager
def _raised_interrupts() -> Iterator[None]:
    """Let an interrupt end what waits in here at once: else it is the event loop's to tell, which stands still."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _read(requests: TextIO) -> Iterator[str]:
    """The lines, each of which may be waited for. Raises CancelledError when an interrupt came before that."""
    task = asyncio.current_task()
    while True:
        with _raised_interrupts():
            if task is not None and task.cancelling():
                raise asyncio.CancelledError
            line = requests.readline()
        if not line:
            return
        yield line


def load_offline(args: Namespace, executor: config.ExecutorSettings, scheduling: SchedulingSettings) -> ServedModel:
    """What --model and --weights name, loaded for the one reader that this process is. Raises what `load_model` does,
    and ExportError.
    """
    before_export = require_cuda if executor.device == "cuda" else None  # not in vain, of a large model
    folder = model_folder(args.model, args.weights, executor.device, before_export)
    return load_model(folder, executor, OFFLINE, EngineLog(), scheduling)


@dataclass
class Tally:
    """What a run has done so far."""

    start_s: float
    num_requests: int = 0
    num_errors: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    first_error: str = ""  # and the number of its line

    def summary(self) -> str:
        """One line."""
        elapsed_s = max(time.monotonic() - self.start_s, 1e-9)
        errors = f", {self.num_errors} bad" if self.num_errors else ""
        return (
            f"{self.num_requests} requests{errors}, {self.prompt_tokens} prompt tokens, "
            f"{self.completion_tokens} output tokens in {elapsed_s:.2f} s: "
            f"{self.completion_tokens / elapsed_s:.1f} output tokens/s"
        )


class BatchRun:
    """Answers lines with at most `max_in_flight` requests at the engine. Lives on the event loop's thread."""

    def __init__(self, frontend: Frontend, output: TextIO, max_in_flight: int) -> None:
        """`output` stays the caller's."""
        self._frontend = frontend
        self._output = output
        self._slots = asyncio.Semaphore(max_in_flight)
        self._tally = Tally(time.monotonic())
        self._is_terminal = sys.stderr.isatty()

    async def answer(self, lines: Iterable[RequestLine]) -> Tally:
        """Answer `lines`, started in their order.

        Raises EngineDeadError when the engine has stopped, OSError when a result cannot be written.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for number, line in enumerate(lines):
                    if number == 0:  # what came before was waiting for the requests
                        self._tally.start_s = time.monotonic()
                    await self._slots.acquire()
                    tasks.create_task(self._answer_line(line))
        except* (EngineDeadError, OSError) as errors:
            raise errors.exceptions[0] from None
        finally:
            if self._is_terminal:
                sys.stderr.write("\r\033[K")
        return self._tally

    async def _answer_line(self, line: RequestLine) -> None:
        try:
            self._write(await self._results(line))
        except EngineDeadError:
            raise
        except ChairliftError as error:
            self._tally.num_errors += 1
            place = "" if isinstance(error, BadLineError) else f"line {line.number}: "  # which the error names itself
            self._tally.first_error = self._tally.first_error or f"{place}{error}"
            self._write(error_line(line, error))
        finally:
            self._slots.release()

    async def _results(self, line: RequestLine) -> str:
        if isinstance(line.request, ChairliftError):
            raise line.request
        with Samples(await self._frontend.submit_samples(*line.request, line.tenant)) as samples:
            wholes = await samples.collect()
        self._tally.prompt_tokens += samples.generations[0].num_prompt_tokens
        self._tally.cached_prompt_tokens += samples.generations[0].num_cached_prompt_tokens
        has_index = line.request[1].n is not None
        lines = []
        for index, (generation, whole) in enumerate(zip(samples.generations, wholes, strict=True)):
            self._tally.completion_tokens += generation.num_completion_tokens
            lines.append(result_line(line.id, generation, whole, index if has_index else None))
        return "".join(lines)

    def _write(self, line: str) -> None:
        self._output.write(line)
        self._tally.num_requests += 1
        if self._is_terminal:
            sys.stderr.write(f"\r\033[K{self._tally.summary()}")
            sys.stderr.flush()


def request_lines(requests: Iterable[str]) -> Iterator[RequestLine]:
    """The lines that are not blank. Their numbers count from 1, blank ones included."""
    return (parse_line(text, number) for number, text in enumerate(requests, 1) if text.strip())


def longest_first(lines: Iterable[RequestLine]) -> Iterator[RequestLine]:
    """`lines`, of the next WINDOW_LINES always the one with the largest max_tokens; unset counts as largest."""
    window: list[tuple[float, int, RequestLine]] = []
    for number, line in enumerate(lines):
        heapq.heappush(window, (-_max_tokens(line), number, line))
        if len(window) >= WINDOW_LINES:
            yield heapq.heappop(window)[2]
    while window:
        yield heapq.heappop(window)[2]


def _max_tokens(line: RequestLine) -> float:
    if isinstance(line.request, ChairliftError):
        return float("inf")  # answered at once
    max_tokens = line.request[1].max_tokens
    return float("inf") if max_tokens is None else max_tokens
