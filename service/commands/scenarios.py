"""The runs of `chairlift simulate`: every combination of the flags that take several values."""

import itertools
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, cast, get_args

from service.core.scheduler_config import BatchingMode, OrderingConfig, Policy, SchedulerConfig
from service.errors import ConfigError
from service.sim.arrivals import arrivals_named
from service.sim.autoscaler import AutoscaleRule
from service.sim.latency import StepLatency, load_latency
from service.sim.lengths import RequestLengths, SeparateLengths, load_lengths, parse_lengths
from service.sim.router import ROUTERS
from service.sim.run import Deployment
from service.sim.workload import NO_PREFIXES, SharedPrefixes, Tenant, Trace, Workload

AXES = {
    "batching": get_args(BatchingMode),
    "policy": get_args(Policy),
    "router": tuple(ROUTERS),
    "prefix_cache": ("on", "off"),
    "host_kv": ("off", "on"),
}
"""Flags that take several values, beside the rates."""
_NUM_REQUESTS: Final = 10_000  # that are drawn unless the flags say how many


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run: a name of what differs between runs, a rate, what is asked, and of whom."""

    name: str
    rate: float
    workload: Workload | Trace
    deployment: Deployment


def scenarios(args: Namespace, tenants: tuple[Tenant, ...]) -> Iterator[Scenario]:
    """Every combination of what has several values; a name says where it differs from the others.

    Raises ConfigError.
    """
    latency = load_latency(args.step_times)
    workloads = _workloads(args, tenants)
    varied = [axis for axis in AXES if len(getattr(args, axis)) > 1]
    for axis, known in AXES.items():
        for value in getattr(args, axis):
            if value not in known:
                raise ConfigError(f"{axis} {value!r}: must be one of {', '.join(known)}")
    for values in itertools.product(*(getattr(args, axis) for axis in AXES)):
        chosen = dict(zip(AXES, values, strict=True))
        if chosen["host_kv"] == "on" and not _has_cache(chosen):
            raise ConfigError("--host-kv on: needs --prefix-cache on and --batching continuous, in every combination")
        name = ", ".join(_shown(axis, chosen[axis]) for axis in varied) or chosen["policy"]
        deployment = _deployment(args, latency, chosen, tenants)
        for rate, workload in workloads:
            yield Scenario(name, rate, workload, deployment)


def _shown(axis: str, value: str) -> str:
    return f"{axis.replace('_', ' ')} {value}" if value in {"on", "off"} else value


def _has_cache(chosen: dict[str, str]) -> bool:
    return chosen["prefix_cache"] == "on" and chosen["batching"] == "continuous"


def _deployment(
    args: Namespace, latency: StepLatency, chosen: dict[str, str], tenants: tuple[Tenant, ...]
) -> Deployment:
    has_cache = _has_cache(chosen)
    weights = tuple((tenant.name, tenant.weight) for tenant in tenants)
    config = SchedulerConfig(
        num_blocks=args.num_blocks,
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        max_waiting_requests=args.max_waiting_requests,
        max_waiting_tokens=1 << 50,
        ordering=OrderingConfig(policy=cast(Policy, chosen["policy"]), tenant_weights=weights),
        prefix_cache=has_cache,
        num_host_blocks=args.host_blocks if has_cache and chosen["host_kv"] == "on" else 0,
        host_block_ns=args.host_block_us * 1e3,
        batching=cast(BatchingMode, chosen["batching"]),
        batch_window_ns=round(args.batch_window_ms * 1e6) if chosen["batching"] == "dynamic" else 0,
        target_itl_ns=round(args.target_itl_ms * 1e6),
        max_chunk_tokens=args.max_chunk_tokens,
    )
    rule = _autoscale_rule(args) if args.autoscale else None
    num_replicas = max(args.replicas, rule.min_replicas) if rule else args.replicas
    return Deployment(config, latency, num_replicas, chosen["router"], rule)


def _autoscale_rule(args: Namespace) -> AutoscaleRule:
    try:
        least, most, load = args.autoscale.split(":")
        rule = AutoscaleRule(int(least), int(most), float(load))
    except ValueError as error:
        raise ConfigError(f"--autoscale {args.autoscale!r}: must be MIN:MAX:LOAD, as 1:8:64") from error
    return replace(rule, interval_s=args.scale_interval_s, startup_s=args.startup_s, cooldown_s=args.cooldown_s)


def _workloads(args: Namespace, tenants: tuple[Tenant, ...]) -> list[tuple[float, Workload | Trace]]:
    """What is asked at each rate."""
    if args.trace is not None:
        return [(rate, Trace(args.trace, tenants, args.requests, speed=rate)) for rate in args.rates]
    lengths = _lengths(args)
    prefixes = SharedPrefixes(args.prefixes, args.prefix_tokens, args.prefix_share) if args.prefixes else NO_PREFIXES
    num_requests = args.requests if args.requests is not None else _NUM_REQUESTS
    bursts = {"burstiness": args.burstiness, "on_s": args.on_s, "off_s": args.off_s}
    return [
        (
            rate,
            Workload(
                arrivals_named(args.arrivals, rate, **bursts), lengths, num_requests, tenants, prefixes, args.seed
            ),
        )
        for rate in args.rates
    ]


def _lengths(args: Namespace) -> RequestLengths:
    if args.lengths_from is not None:
        return load_lengths(args.lengths_from)
    return SeparateLengths(parse_lengths(args.prompts), parse_lengths(args.outputs))
