"""`chairlift bench step`: what one decode step costs, and where its time goes.

Each case fills a scheduler with sequences of one context length and runs decode steps on the real executor, over a KV
buffer of noise. A second session, with ONNX Runtime's profiler on, repeats every step right after it, so that both see
the same machine: the profiler's node times give GEMM and attention, the unprofiled step gives the sum.
"""

import json
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from service.bench.decode_state import filled_scheduler, noisy_kv_cache
from service.bench.node_times import node_times_ns, split
from service.bench.number_flags import MAX_COUNT, NumberFlag, add_numbers, listed, whole_number
from service.bench.read_bandwidth import ReadBandwidth
from service.core.scheduler import Scheduler
from service.errors import ConfigError
from service.executor.api import ExecutorLimits
from service.executor.config import MAX_BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_THREADS, ExecutorConfig
from service.executor.factory import create_executor
from service.executor.kv_layout import CPU_KV_DTYPES
from service.executor.model_variant import count_nodes
from service.executor.ort import ExecutionTimes, OrtExecutor

_WARM_UP_STEPS: Final = 3
_MOST_EVENTS: Final = 1_000_000  # that ONNX Runtime's profiler keeps; later ones are lost
_EVENTS_BESIDE_NODES: Final = 2  # of a run
_ABOVE_MEMORY: Final = " (unreliable: busy machine, or read from caches)"

NUMBER_FLAGS: Final = (
    NumberFlag("--batch", listed(whole_number(1, MAX_NUM_SEQS)), "1,4,16,64", "sequences per step"),
    NumberFlag("--context", listed(whole_number(1, MAX_MODEL_LEN)), "64,512,2048", "tokens per sequence"),
    NumberFlag("--steps", whole_number(1, MAX_COUNT), 16, "steps per case"),
    NumberFlag("--block-size", whole_number(1, MAX_BLOCK_SIZE), 16, "token positions per block"),
    NumberFlag("--threads", whole_number(1, MAX_THREADS), None, "threads of one step; unset: every usable processor"),
)


@dataclass(frozen=True, slots=True)
class StepCost:
    """One case: medians over its steps, in milliseconds per step.

    Integer GEMMs are one node with the norm, gate or plain quantising ahead of them, so `gemm_ms` holds that too; of a
    graph in floats it holds the products alone.
    """

    batch: int
    context: int
    step_ms: float
    gemm_ms: float
    attention_ms: float
    sampling_ms: float
    scheduling_ms: float  # plan and commit
    rest_ms: float  # all other nodes of the graph, and computing and binding the inputs
    tokens_per_s: float
    kv_read_bytes_per_s: float
    memory_read_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class _Case:
    """What was measured of one case, step by step."""

    batch: int
    context: int
    scheduling_ns: list[int]
    times: list[ExecutionTimes]
    memory_read_bytes_per_s: float


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="model folder")
    add_numbers(parser, NUMBER_FLAGS)
    kv_dtypes = ("auto", *CPU_KV_DTYPES)
    parser.add_argument("--kv-dtype", default="auto", choices=kv_dtypes, help="element type of the KV buffer")
    parser.add_argument("--spin", default="step", choices=("off", "step"), help="whether a step's threads spin")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")


def run(arguments: Namespace) -> int:
    """Measure every case and print it. Raises ConfigError. Returns the exit code."""
    costs = measure(arguments)
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(cost) for cost in costs], indent=2) + "\n")
    else:
        sys.stdout.write(format_table(costs))
    return 0


def measure(arguments: Namespace) -> list[StepCost]:
    """The costs of every case that the model's context and the free memory allow. Raises ConfigError."""
    config = ExecutorConfig(
        model_dir=arguments.model,
        kv_memory="0.8",
        kv_dtype=arguments.kv_dtype,
        block_size=arguments.block_size,
        max_num_seqs=max(arguments.batch),
        max_num_batched_tokens=max(arguments.batch),
        num_threads=arguments.threads,
        spin=arguments.spin,
    )
    with TemporaryDirectory() as folder, closing(create_executor(config)) as timed:
        profile = replace(config, profile_path=Path(folder) / "step")
        with closing(create_executor(profile)) as profiled:
            assert isinstance(timed, OrtExecutor) and isinstance(profiled, OrtExecutor)
            cases = _run_cases(arguments, timed, profiled)
            node_times = node_times_ns(profiled.end_profiling())
    costs = []
    for case in cases:
        runs, node_times = node_times[: len(case.times)], node_times[len(case.times) :]
        costs.append(_cost(case, runs, timed.layout.token_bytes))
    return costs


def format_table(costs: Iterable[StepCost]) -> str:
    """A table with one line per case; times in milliseconds, with their share of the step.

    A share of the memory above 1 is marked: the machine was busier while that was measured than while the steps were,
    or the buffer fits a cache.
    """
    parts = ("gemm", "attention", "sampling", "scheduling", "rest")
    lines = ["batch context   step ms " + "".join(f"{name:>17}" for name in parts) + "   tokens/s  KV GB/s  of memory"]
    for cost in costs:
        shares = "".join(
            f"{getattr(cost, name + '_ms'):9.3f} ({getattr(cost, name + '_ms') / cost.step_ms:5.1%})" for name in parts
        )
        rate, memory = cost.kv_read_bytes_per_s / 1e9, cost.memory_read_bytes_per_s / 1e9
        mark = _ABOVE_MEMORY if rate > memory else ""
        lines.append(
            f"{cost.batch:5} {cost.context:7} {cost.step_ms:9.2f} {shares} {cost.tokens_per_s:10.1f} {rate:8.1f} "
            f"{rate / memory:4.0%} of {memory:.1f}{mark}"
        )
    return "\n".join(lines) + "\n"


def _run_cases(arguments: Namespace, timed: OrtExecutor, profiled: OrtExecutor) -> list[_Case]:
    sizes = _fitting_cases(arguments, timed.limits)
    _check_events(arguments, len(sizes))
    num_steps = arguments.steps + _WARM_UP_STEPS
    limits, layout = timed.limits, timed.layout
    kv_cache = noisy_kv_cache(replace(layout, num_blocks=max(sizes.values())))
    timed.bind_kv_cache(kv_cache)
    profiled.bind_kv_cache(kv_cache)
    with ReadBandwidth(timed.num_threads) as bandwidth:
        cases = []
        for (batch, context), num_blocks in sizes.items():
            scheduler = filled_scheduler(replace(limits, num_blocks=num_blocks), batch, context - num_steps // 2)
            before = bandwidth.measure()
            case = _run_steps(scheduler, timed, profiled, num_steps)
            cases.append(_Case(batch, context, *case, memory_read_bytes_per_s=max(before, bandwidth.measure())))
    return cases


def _fitting_cases(arguments: Namespace, limits: ExecutorLimits) -> dict[tuple[int, int], int]:
    """The blocks that each (batch, context) needs, of those that can be measured. Raises ConfigError when none can."""
    num_steps = arguments.steps + _WARM_UP_STEPS
    sizes = {}
    for batch in arguments.batch:
        for context in arguments.context:
            num_blocks = 1 + batch * -(-(context + num_steps + 1) // limits.block_size)
            if context <= num_steps // 2:
                reason = f"shorter than half of its {num_steps} steps, which add a token each"
            elif context + num_steps >= limits.max_model_len or num_blocks > limits.num_blocks:
                reason = "too long for model or memory"
            else:
                sizes[batch, context] = num_blocks
                continue
            sys.stderr.write(f"batch {batch}, context {context}: left out, {reason}\n")
    if not sizes:
        raise ConfigError("no case fits the number of steps, the model's context and the free memory")
    return sizes


def _check_events(arguments: Namespace, num_cases: int) -> None:
    """Raise ConfigError for more steps than a profile holds, which would be known only after they were run."""
    num_events = num_cases * (count_nodes(arguments.model) + _EVENTS_BESIDE_NODES)
    most_steps = _MOST_EVENTS // num_events - _WARM_UP_STEPS
    if arguments.steps > most_steps:
        limit = f"at most {max(most_steps, 0)} with {num_cases} cases: a profile holds {_MOST_EVENTS:,} events"
        raise ConfigError(f"--steps {arguments.steps}: {limit}")


def _run_steps(
    scheduler: Scheduler, timed: OrtExecutor, profiled: OrtExecutor, num_steps: int
) -> tuple[list[int], list[ExecutionTimes]]:
    scheduling_ns, times = [], []
    for _ in range(num_steps):
        start = time.perf_counter_ns()
        plan = scheduler.plan(start)
        planned = time.perf_counter_ns()
        assert plan is not None, "the sequences never end"
        result = timed.dispatch(plan, scheduler.batch).wait()
        profiled.dispatch(plan, scheduler.batch).wait()
        waited = time.perf_counter_ns()
        scheduler.commit(plan, result)
        scheduling_ns.append(planned - start + time.perf_counter_ns() - waited)
        times.append(timed.last_times)
    return scheduling_ns, times


def _cost(case: _Case, node_times: list[Counter[str]], token_bytes: int) -> StepCost:
    kept = slice(_WARM_UP_STEPS, None)
    times = case.times[kept]
    scheduling, sampling = _median_ms(case.scheduling_ns[kept]), _median_ms(t.sampling_ns for t in times)
    forward = _median_ms(t.forward_ns for t in times)
    step = scheduling + sampling + forward + _median_ms(t.inputs_ns for t in times)
    shares = [_shares(t.forward_ns, counts) for t, counts in zip(times, node_times[kept], strict=True)]
    gemm, attention = (forward * statistics.median(column) for column in zip(*shares, strict=True))
    return StepCost(
        batch=case.batch,
        context=case.context,
        step_ms=step,
        gemm_ms=gemm,
        attention_ms=attention,
        sampling_ms=sampling,
        scheduling_ms=scheduling,
        rest_ms=step - gemm - attention - sampling - scheduling,
        tokens_per_s=case.batch / step * 1e3,
        kv_read_bytes_per_s=case.batch * case.context * token_bytes / attention * 1e3,
        memory_read_bytes_per_s=case.memory_read_bytes_per_s,
    )


def _shares(forward_ns: int, node_times: Counter[str]) -> tuple[float, float]:
    """Shares of (GEMM, attention) in an unprofiled forward pass, from the nodes of its profiled repetition.

    Time between nodes counts as neither. Where the profiler made the nodes take longer than the pass without it, they
    are scaled down to it.
    """
    whole_ns = max(forward_ns, node_times.total())
    gemm_ns, attention_ns = split(node_times)
    return gemm_ns / whole_ns, attention_ns / whole_ns


def _median_ms(values_ns: Iterable[int]) -> float:
    return statistics.median(values_ns) / 1e6
