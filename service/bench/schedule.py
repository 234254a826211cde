"""`chairlift bench schedule`: what planning and committing a step costs the host, without any model.

A scheduler decodes in steady state: sequences of uneven lengths finish in every step, and as many are admitted from a
backlog; with the prefix cache on, all free blocks are cached ones, so that every new one is evicted. Prompts share
nothing. `plan` and `commit` are what a step waits for. `add` takes requests in between steps, and is timed apart;
making requests, hashing their prompts and sampling tokens is not the scheduler's work.
"""

import gc
import json
import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np

from service.bench.number_flags import MAX_COUNT, NumberFlag, add_numbers, listed, whole_number
from service.core.block_hash import extend_digests, tenant_root
from service.core.scheduler import Scheduler, SchedulerConfig
from service.core.types import Int32Array, Request, SamplingParams, StepResult
from service.executor.config import MAX_MODEL_LEN, MAX_NUM_SEQS

_BLOCK_SIZE: Final = 16
_WARM_UP_STEPS: Final = 50
_MAX_WARM_UP_STEPS: Final = 1000  # sequences that never fill a block leave none in the cache
_CHUNK_TOKENS: Final = 8192  # of a step, beside its decode tokens
_VOCAB_SIZE: Final = 32_000

NUMBER_FLAGS: Final = (
    NumberFlag("--running", listed(whole_number(1, MAX_NUM_SEQS)), "64,256,1024,4096,8192", "running sequences"),
    NumberFlag("--steps", whole_number(1, MAX_COUNT), 500, "timed steps per case"),
    NumberFlag("--prompt-tokens", whole_number(1, MAX_MODEL_LEN), 128, "mean tokens of a prompt"),
    NumberFlag("--output-tokens", whole_number(1, MAX_MODEL_LEN), 300, "mean tokens of an output"),
)


@dataclass(frozen=True, slots=True)
class ScheduleCost:
    """One case; times are microseconds per step."""

    running: int  # rows of the batch, full in nearly every step
    plan_commit_us_p50: float
    plan_commit_us_p99: float
    plan_us_p50: float
    commit_us_p50: float
    add_us_p50: float  # of the requests that came before the step
    rows_per_step: float
    prompt_tokens_per_step: float
    finished_per_step: float
    admitted_per_step: float


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of the command."""
    add_numbers(parser, NUMBER_FLAGS)
    parser.add_argument("--prefix-cache", choices=("on", "off"), default="on", help="whether blocks are kept")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")


def run(arguments: Namespace) -> int:
    """Measure every case and print it. Raises ConfigError. Returns the exit code."""
    lengths = (arguments.prompt_tokens, arguments.output_tokens)
    has_cache = arguments.prefix_cache == "on"
    costs = [measure(running, arguments.steps, lengths, has_cache=has_cache) for running in arguments.running]
    if arguments.json:
        sys.stdout.write(json.dumps({"rows": [asdict(cost) for cost in costs]}, indent=2) + "\n")
    else:
        sys.stdout.write(format_table(costs))
    return 0


def format_table(costs: list[ScheduleCost]) -> str:
    """A table with one line per case; times in microseconds."""
    lines = [
        "running  plan+commit p50     p99    plan  commit     add  finished/step  admitted/step  prompt tokens/step",
        "                      us      us      us      us      us",
    ]
    lines += [
        f"{cost.running:7} {cost.plan_commit_us_p50:16.0f} {cost.plan_commit_us_p99:7.0f} {cost.plan_us_p50:7.0f} "
        f"{cost.commit_us_p50:7.0f} {cost.add_us_p50:7.0f} {cost.finished_per_step:14.1f} "
        f"{cost.admitted_per_step:14.1f} {cost.prompt_tokens_per_step:19.0f}"
        for cost in costs
    ]
    return "\n".join(lines) + "\n"


def measure(running: int, num_steps: int, mean_lengths: tuple[int, int], *, has_cache: bool = True) -> ScheduleCost:
    """The cost of one case. Prompts and outputs are uniform between half and one and a half times their means."""
    feed = _Feed(*mean_lengths)
    scheduler = Scheduler(_config(running, feed, has_cache=has_cache))
    _fill(scheduler, feed, running)
    _warm_up(scheduler, feed)
    gc.collect()
    gc.freeze()  # as a server does after its warm-up
    try:
        before = scheduler.counters
        steps = [_step(scheduler, feed) for _ in range(num_steps)]
        after = scheduler.counters
    finally:
        gc.unfreeze()
    add_us, plan_us, commit_us, rows, prompts = np.array(steps).T
    p50, p99 = np.percentile(plan_us + commit_us, (50, 99)).tolist()
    num_finished = after.totals.num_finished - before.totals.num_finished
    return ScheduleCost(
        running=running,
        plan_commit_us_p50=round(p50, 1),
        plan_commit_us_p99=round(p99, 1),
        plan_us_p50=round(float(np.median(plan_us)), 1),
        commit_us_p50=round(float(np.median(commit_us)), 1),
        add_us_p50=round(float(np.median(add_us)), 1),
        rows_per_step=round(float(rows.mean()), 1),
        prompt_tokens_per_step=round(float(prompts.mean()), 1),
        finished_per_step=round(num_finished / num_steps, 2),
        admitted_per_step=round((num_finished + after.num_running - before.num_running) / num_steps, 2),
    )


class _Feed:
    """Makes requests of random tokens. The same ones in every run."""

    def __init__(self, prompt_tokens: int, output_tokens: int) -> None:
        self._rng = np.random.default_rng(0)
        self._means = (prompt_tokens, output_tokens)
        self._num_made = 0

    @property
    def max_lengths(self) -> tuple[int, int]:
        """Longest prompt and longest output, in tokens."""
        longest_prompt, longest_output = (mean + mean // 2 for mean in self._means)
        return longest_prompt, longest_output

    def request(self, num_done: float = 0.0) -> Request:
        """The next request. `num_done` in [0, 1) is the share of its output that counts as generated before."""
        num_prompt, num_output = (
            int(self._rng.integers(mean - mean // 2, mean + mean // 2 + 1)) for mean in self._means
        )
        self._num_made += 1
        max_tokens = max(1, int(num_output * (1 - num_done)))
        sampling = SamplingParams(max_tokens, temperature=0.8, top_p=0.95, ignore_eos=True)
        tenant, prompt = f"tenant-{self._num_made % 8}", self.tokens(num_prompt)
        root = tenant_root("", tenant)
        digests = extend_digests(b"", root, prompt, _BLOCK_SIZE)  # the front side's work, so not timed
        return Request(self._num_made, prompt, sampling, tenant=tenant, cache_root=root, block_digests=digests)

    def residual(self) -> Request:
        """A request somewhere in the middle of its output, as those that run in steady state are."""
        return self.request(num_done=float(self._rng.random()))

    def tokens(self, count: int) -> Int32Array:
        """Random token ids: int32[count]."""
        return self._rng.integers(0, _VOCAB_SIZE, count, np.int32)


def _config(running: int, feed: _Feed, *, has_cache: bool) -> SchedulerConfig:
    max_model_len = sum(feed.max_lengths) + 1
    blocks_per_seq = -(-max_model_len // _BLOCK_SIZE)
    return SchedulerConfig(
        num_blocks=1 + running * blocks_per_seq * 11 // 10,
        block_size=_BLOCK_SIZE,
        max_num_seqs=running,
        max_num_batched_tokens=running + _CHUNK_TOKENS,
        max_model_len=max_model_len,
        max_waiting_requests=1 << 20,
        max_waiting_tokens=1 << 40,
        prefix_cache=has_cache,
    )


def _fill(scheduler: Scheduler, feed: _Feed, running: int) -> None:
    """Bring the batch to its full size, every sequence at a random place of its output."""
    for _ in range(running):
        scheduler.add(feed.residual())
    while scheduler.counters.num_waiting:
        _step(scheduler, feed, has_backlog=False)


def _warm_up(scheduler: Scheduler, feed: _Feed) -> None:
    """Some steps, and with the cache as many as use up the blocks that no sequence has had before."""
    for number in range(_MAX_WARM_UP_STEPS):
        counters = scheduler.counters
        num_blank_blocks = counters.num_free_blocks - counters.num_evictable_blocks
        is_steady = not scheduler.config.prefix_cache or num_blank_blocks <= counters.num_running
        if is_steady and number >= _WARM_UP_STEPS:
            return
        _step(scheduler, feed)


def _step(scheduler: Scheduler, feed: _Feed, *, has_backlog: bool = True) -> tuple[float, float, float, int, int]:
    """One step: microseconds of adding requests, of plan and of commit, rows, and prompt tokens."""
    add_ns = 0
    if has_backlog:
        num_missing = scheduler.config.max_num_seqs // 16 + 8 - scheduler.counters.num_waiting
        requests = [feed.request() for _ in range(num_missing)]
        start_ns = time.perf_counter_ns()
        for request in requests:
            scheduler.add(request)
        add_ns = time.perf_counter_ns() - start_ns
    start_ns = time.perf_counter_ns()
    plan = scheduler.plan(start_ns)
    planned_ns = time.perf_counter_ns()
    assert plan is not None, "there is a backlog, so there is a step"
    result = StepResult(feed.tokens(int(np.count_nonzero(plan.samples))))
    sampled_ns = time.perf_counter_ns()
    scheduler.commit(plan, result)
    commit_ns = time.perf_counter_ns() - sampled_ns
    num_rows = len(plan.rows)
    prompt_tokens = plan.num_tokens - plan.num_decode_rows
    return add_ns / 1e3, (planned_ns - start_ns) / 1e3, commit_ns / 1e3, num_rows, prompt_tokens
