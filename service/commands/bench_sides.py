"""The settings of an engine that is measured, and of a second one that it takes turns with."""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass

from service import config
from service.engine.scheduling import SchedulingSettings
from service.errors import ConfigError
from service.executor.kv_layout import parse_kv_memory


@dataclass(frozen=True, slots=True)
class Side:
    """The settings of one engine."""

    executor: config.ExecutorSettings
    scheduling: SchedulingSettings


def add_arguments(parser: ArgumentParser) -> None:
    """A flag for each setting, and --against."""
    parser.add_argument(
        "--against",
        nargs="+",
        action="extend",
        metavar="NAME=VALUE",
        help="settings of a second engine, as batching=static: passes of both in turns, and the ratio of their rates; "
        "needs kv_memory in bytes, which each takes",
    )
    config.add_arguments(parser, config.ExecutorSettings, SchedulingSettings)


def sides(args: Namespace) -> list[Side]:
    """The settings as given, and with --against a second time with those that it names. Raises ConfigError."""
    first = _side(args)
    if args.against is None:
        return [first]
    try:
        second = _side(_changed(args))
    except ConfigError as error:
        raise ConfigError(f"--against: {error}") from error
    for side in (first, second):
        if _is_share(side.executor.kv_memory):
            limit = "with --against each of two engines needs bytes of its own, as 1GiB"
            raise ConfigError(f"kv_memory: {side.executor.kv_memory!r} is a share of free memory: {limit}")
    return [first, second]


def _side(args: Namespace) -> Side:
    return Side(config.load(config.ExecutorSettings, args), config.load(SchedulingSettings, args))


def _changed(args: Namespace) -> Namespace:
    """The arguments with the settings of --against. Raises ConfigError for what is none."""
    names = {*config.ExecutorSettings.model_fields, *SchedulingSettings.model_fields}
    changed = Namespace(**vars(args))
    for assignment in args.against:
        name, equals, value = assignment.partition("=")
        field = name.strip().replace("-", "_")
        if not equals or field not in names:
            raise ConfigError(f"{assignment!r} is no NAME=VALUE of a setting, as prefix_cache=off")
        setattr(changed, field, value.strip())
    return changed


def _is_share(memory: str) -> bool:
    """Whether how many bytes these are depends on how many there are. Raises ConfigError when they are none."""
    return parse_kv_memory(memory, 1 << 61) != parse_kv_memory(memory, 1 << 60)
