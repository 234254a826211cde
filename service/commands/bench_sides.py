"""The settings of an engine that is measured, and of a second one that it takes turns with."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from service import config
from service.engine.scheduling import SchedulingSettings
from service.errors import ConfigError
from service.executor.kv_layout import is_share_of_memory, parse_kv_memory


@dataclass(frozen=True, slots=True)
class Side:
    """The settings of one engine."""

    executor: config.ExecutorSettings
    scheduling: SchedulingSettings
    against: Mapping[str, str]  # those of --against, as given; none for the first engine


def add_arguments(parser: ArgumentParser) -> None:
    """A flag for each setting, and --against."""
    parser.add_argument(
        "--against",
        nargs="+",
        action="extend",
        metavar="NAME=VALUE",
        help="settings of a second engine, as batching=static: passes of both in turns, and the ratio of their rates; "
        "with an interval from 6 runs on; needs --kv-memory in bytes, which each takes",
    )
    config.add_arguments(parser, config.ExecutorSettings, SchedulingSettings)


def sides(args: Namespace, available_bytes: int) -> list[Side]:
    """The settings as given, and with --against a second time with those that it names.

    Raises ConfigError, also when two KV buffers want more memory than `available_bytes`.
    """
    first = _side(args, {})
    if args.against is None:
        return [first]
    both = [first, _side(args, _changes(args.against))]
    _check_memory(both, available_bytes)
    return both


@contextmanager
def naming_errors(against: Mapping[str, str]) -> Iterator[None]:
    """A ConfigError says so when it is that of the second engine, which has settings of --against."""
    try:
        yield
    except ConfigError as error:
        if not against:
            raise
        raise ConfigError(f"--against: {error}") from error


def _changes(assignments: Sequence[str]) -> dict[str, str]:
    """The settings of --against. Raises ConfigError for what is none."""
    settings = {*config.ExecutorSettings.model_fields, *SchedulingSettings.model_fields}
    changes: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = (part.strip() for part in assignment.partition("="))
        setting = name.replace("-", "_")
        if not equals:
            raise ConfigError(f"--against: {assignment!r} is no NAME=VALUE, as prefix_cache=off")
        if setting not in settings:
            raise ConfigError(
                f"--against: {name!r} is no setting of an engine: they are those from --device on in --help"
            )
        if setting in changes:
            raise ConfigError(f"--against: {setting!r} is given twice")
        changes[setting] = value
    return changes


def _side(args: Namespace, changes: dict[str, str]) -> Side:
    given = Namespace(**(vars(args) | changes))
    with naming_errors(changes):
        executor, scheduling = config.load(config.ExecutorSettings, given), config.load(SchedulingSettings, given)
        if args.cold:
            _check_tenants(scheduling)
    return Side(executor, scheduling, changes)


def _check_tenants(scheduling: SchedulingSettings) -> None:
    """Raise ConfigError for what is not as it should be when passes have tenants of their own."""
    if scheduling.shared_prefix_scope:
        reason = "passes would find each other's prompts, in spite of --cold"
        raise ConfigError(f"shared_prefix_scope: {scheduling.shared_prefix_scope!r}: {reason}")
    if scheduling.tenant_weights:
        reason = "with --cold each pass has tenants of other names"
        raise ConfigError(f"tenant_weights: {scheduling.tenant_weights!r}: {reason}")


def _check_memory(both: Sequence[Side], available_bytes: int) -> None:
    """Raise ConfigError for memory that is not each engine's own, or not there for both."""
    kv_bytes = 0
    for side in both:
        executor = side.executor
        with naming_errors(side.against):
            for setting, memory in (("kv_memory", executor.kv_memory), ("host_kv_memory", executor.host_kv_memory)):
                if is_share_of_memory(memory, setting):
                    limit = "each of two engines needs bytes of its own, as 1GiB"
                    raise ConfigError(f"{setting}: {memory!r} is a share of free memory: {limit}")
            # The second buffer would find the first one's memory free: a CPU's is taken only as it fills.
            kv_bytes += parse_kv_memory(executor.kv_memory, available_bytes) if executor.device == "cpu" else 0
    if kv_bytes > available_bytes:
        limit = f"more than the {available_bytes:,} bytes of free memory"
        raise ConfigError(f"kv_memory: the two engines' {kv_bytes:,} bytes are {limit}")
