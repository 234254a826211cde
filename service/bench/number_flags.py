"""Flags that take numbers, or lists of them: complaints name flag, value and limit."""

import math
from argparse import ArgumentParser, ArgumentTypeError, _ArgumentGroup
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

Number = TypeVar("Number", int, float)

MAX_COUNT = 1_000_000_000
MAX_SEED = (1 << 64) - 1
MAX_SECONDS = 1e6
MIN_RATE = 1e-6
MAX_RATE = 1e9  # of simulated requests: the virtual clock counts nanoseconds


@dataclass(frozen=True, slots=True)
class NumberFlag:
    """A flag that takes a number, or several."""

    name: str
    read: Callable[[str], object]
    default: int | float | str | None  # a string is read as one that was typed
    text: str  # of the help, which adds the default


def add_numbers(parser: ArgumentParser | _ArgumentGroup, flags: Iterable[NumberFlag]) -> None:
    """Add the flags to a command."""
    metavars = {int: "N", float: "X", str: "N,.."}
    for flag in flags:
        metavar = metavars.get(type(flag.default), "N")
        text = flag.text if flag.default is None else f"{flag.text} (default {flag.default})"
        parser.add_argument(flag.name, type=flag.read, default=flag.default, metavar=metavar, help=text)


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Reads an integer from `least` to `most`."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:  # also for thousands of digits
            number = least - 1
        if not least <= number <= most:
            raise ArgumentTypeError(f"{text!r} is no whole number from {least:,} to {most:,}")
        return number

    return read


def real_number(least: float, most: float) -> Callable[[str], float]:
    """Reads a number from `least` to `most`."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            raise ArgumentTypeError(f"{text!r} is no number from {least:,g} to {most:,g}")
        return number

    return read


def listed(read: Callable[[str], Number]) -> Callable[[str], list[Number]]:
    """Reads several of what `read` reads, with commas between them."""
    return lambda text: [read(part) for part in text.split(",")]


rates = listed(real_number(MIN_RATE, math.inf))
"""Reads requests per second; infinity is all at once."""

finite_rates = listed(real_number(MIN_RATE, MAX_RATE))
"""Reads requests per second, or speeds of a trace, that a simulation can place on its clock."""

ARRIVAL_FLAGS = (
    NumberFlag("--burstiness", real_number(1e-3, 1e6), 0.5, "gamma: below 1 is burstier"),
    NumberFlag("--on-s", real_number(1e-3, MAX_SECONDS), 10.0, "on-off: seconds of a burst"),
    NumberFlag("--off-s", real_number(0, MAX_SECONDS), 30.0, "on-off: seconds of silence"),
    NumberFlag("--seed", whole_number(0, MAX_SEED), 0, "same seed, same load"),
)
"""Of simulated loads and real ones."""
