"""Numbers, and lists of them, on the command line."""

from argparse import ArgumentTypeError


def positive_number(text: str) -> int:
    """A positive integer."""
    return _whole_number(text, 1)


def whole_number(text: str) -> int:
    """An integer of at least 0."""
    return _whole_number(text, 0)


def _whole_number(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
    return int(text)


def positive_numbers(text: str) -> list[int]:
    """A comma-separated list of positive integers."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a list of numbers like 1,4,16") from None
    if min(numbers) < 1:
        raise ArgumentTypeError(f"{text!r} holds a number below 1")
    return numbers


def positive_rates(text: str) -> list[float]:
    """A comma-separated list of numbers above 0; infinity is one."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a list of numbers like 2.5,5,10") from None
    if not all(rate > 0 for rate in rates):
        raise ArgumentTypeError(f"{text!r} holds a number that is not above 0")
    return rates
