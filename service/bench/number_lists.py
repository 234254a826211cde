"""Lists of numbers on the command line."""

from argparse import ArgumentTypeError


def positive_numbers(text: str) -> list[int]:
    """A comma-separated list of positive integers."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a list of numbers like 1,4,16") from None
    if min(numbers) < 1:
        raise ArgumentTypeError(f"{text!r} holds a number below 1")
    return numbers
