"""`chairlift simulate`: the real scheduler on a virtual clock, without the machine that could run the model."""

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

from graphs.progress import ProgressBar
from service.bench.number_flags import (
    ARRIVAL_FLAGS,
    MAX_COUNT,
    MAX_SECONDS,
    NumberFlag,
    add_numbers,
    finite_rates,
    real_number,
    whole_number,
)
from service.commands.report_output import add_output_arguments, check_output, good_limits, write_output
from service.commands.scenarios import AXES, Scenario, scenarios
from service.core.scheduler_config import MAX_KV_SLOTS
from service.executor.config import MAX_BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS
from service.report.latency_figures import REQUESTS_PER_S, TIMES_THE_TRACE
from service.report.latency_limits import LatencyLimits
from service.sim.autoscaler import MAX_REPLICAS
from service.sim.latency import H200_HOST_BLOCK_US, H200_HOST_BLOCKS, H200_NUM_BLOCKS, PROFILES
from service.sim.report import RunReport, html_report, json_report, run_report, text_report
from service.sim.run import Simulation
from service.sim.workload import MAX_PREFIXES, Tenant, parse_tenants

EPILOG = """Lengths are fixed:N, uniform:LEAST:MOST or lognormal:MEDIAN:SIGMA. A trace is a file of JSON objects with
arrival_s, prompt_tokens (or prompt_token_ids), output_tokens (or max_tokens) and perhaps tenant. Step times are a
profile's name, a JSON object of overhead_ns, prefill_token_ns, decode_row_ns, context_token_ns and weights_ns, or what
`chairlift bench step --json` printed. --rates, --batching, --policy, --router, --prefix-cache and --host-kv take
several values: every combination is run, and the report compares them."""
WORKLOAD_FLAGS = (
    NumberFlag("--requests", whole_number(1, MAX_COUNT), None, "how many (default 10000, or the whole trace)"),
    NumberFlag("--prefixes", whole_number(0, MAX_PREFIXES), 0, "shared prompt prefixes of each tenant"),
    NumberFlag("--prefix-tokens", whole_number(1, MAX_MODEL_LEN), 1024, "tokens of one"),
    NumberFlag("--prefix-share", real_number(0, 1), 0.9, "requests that begin with one"),
)
DEPLOYMENT_FLAGS = (
    NumberFlag("--num-blocks", whole_number(2, MAX_KV_SLOTS), H200_NUM_BLOCKS, "KV blocks"),
    NumberFlag("--block-size", whole_number(1, MAX_BLOCK_SIZE), 16, "tokens per block"),
    NumberFlag("--host-blocks", whole_number(1, MAX_KV_SLOTS), H200_HOST_BLOCKS, "with --host-kv on: in host memory"),
    NumberFlag("--host-block-us", real_number(0, 1e9), H200_HOST_BLOCK_US, "microseconds to copy one there, or back"),
    NumberFlag("--max-num-seqs", whole_number(1, MAX_NUM_SEQS), 512, "running sequences"),
    NumberFlag("--max-num-batched-tokens", whole_number(1, MAX_NUM_BATCHED_TOKENS), 8192, "tokens of a step"),
    NumberFlag("--max-model-len", whole_number(2, MAX_MODEL_LEN), 8192, "tokens of a sequence"),
    NumberFlag("--max-waiting-requests", whole_number(1, MAX_COUNT), 1 << 20, "queue's bound"),
    NumberFlag("--replicas", whole_number(1, MAX_REPLICAS), 1, "at the start"),
    NumberFlag("--batch-window-ms", real_number(0, 60_000), 100.0, "dynamic batching: milliseconds"),
    NumberFlag("--target-itl-ms", real_number(0, 1e6), 0.0, "chunks respect these milliseconds; 0: no target"),
    NumberFlag("--max-chunk-tokens", whole_number(0, 1 << 30), 0, "prompt tokens of a step; 0: what fits it"),
)
AUTOSCALE_FLAGS = (
    NumberFlag("--scale-interval-s", real_number(1e-3, MAX_SECONDS), 15.0, "seconds between looks at the load"),
    NumberFlag("--startup-s", real_number(0, MAX_SECONDS), 60.0, "seconds until a new replica serves"),
    NumberFlag("--cooldown-s", real_number(0, MAX_SECONDS), 300.0, "seconds of low load before one goes"),
)


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `simulate`."""
    parser.epilog = EPILOG
    _add_workload_arguments(parser)
    _add_deployment_arguments(parser)
    add_output_arguments(parser.add_argument_group("output"))


def run(args: Namespace) -> int:
    """Run every scenario and report. Raises ConfigError."""
    check_output(args)
    limits = good_limits(args)
    tenants = parse_tenants(args.tenants)
    bar = ProgressBar()
    runs = list(scenarios(args, tenants))  # all of them are checked before the first one runs
    reports = [_run_scenario(args, scenario, tenants, limits, bar) for scenario in runs]
    write_output(
        args,
        lambda command: html_report(command, reports, limits),
        lambda command: json_report(command, reports, limits),
        lambda: text_report(reports, limits),
    )
    return 0


def _add_workload_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--rates", type=finite_rates, default="10", metavar="R,..", help="requests per second (default 10)"
    )
    group.add_argument("--arrivals", default="poisson", choices=("poisson", "gamma", "on-off"), help="default poisson")
    add_numbers(group, (*ARRIVAL_FLAGS, *WORKLOAD_FLAGS))
    group.add_argument("--prompts", default="lognormal:256:0.8", metavar="LENGTHS", help="default %(default)s")
    group.add_argument("--outputs", default="lognormal:200:0.7", metavar="LENGTHS", help="default %(default)s")
    group.add_argument("--lengths-from", type=Path, metavar="FILE", help="draw both from this file of requests instead")
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="replay this file; --rates are then speeds, 1 as it was"
    )
    group.add_argument("--tenants", default="default", metavar="NAME[:SHARE[:WEIGHT]],..", help="who sends how much")


def _add_deployment_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("deployment")
    profiles = ", ".join(PROFILES)
    group.add_argument(
        "--step-times", default="h200-like", metavar="PROFILE|FILE", help=f"profiles: {profiles} (default)"
    )
    for axis, default in (
        ("batching", "continuous"),
        ("policy", "fcfs"),
        ("router", "least-loaded"),
        ("prefix_cache", "on"),
        ("host_kv", "off"),
    ):
        text = f"{', '.join(AXES[axis])} (default {default})"
        group.add_argument(f"--{axis.replace('_', '-')}", type=_names, default=default, metavar="NAME,..", help=text)
    add_numbers(group, DEPLOYMENT_FLAGS)
    group.add_argument(
        "--autoscale", metavar="MIN:MAX:LOAD", help="keep LOAD live requests on each of MIN to MAX replicas"
    )
    add_numbers(group, AUTOSCALE_FLAGS)


def _run_scenario(
    args: Namespace, scenario: Scenario, tenants: tuple[Tenant, ...], limits: LatencyLimits, bar: ProgressBar
) -> RunReport:
    simulation = Simulation(scenario.deployment, tenants, limits)
    rate_unit = TIMES_THE_TRACE if args.trace else REQUESTS_PER_S
    stage, num_requests = f"{scenario.name} {scenario.rate:g} {rate_unit}", scenario.workload.num_requests
    with bar.open(stage, 1 if num_requests is None else num_requests) as show:
        on_progress = show if num_requests is not None else lambda num: show(0, f", {num} requests")
        simulation.run(scenario.workload.requests(), on_progress)
    return replace(run_report(scenario.name, scenario.rate, simulation, tenants), rate_unit=rate_unit)


def _names(text: str) -> list[str]:
    return text.split(",")
