"""`chairlift version`."""

from argparse import ArgumentParser, Namespace
from importlib.metadata import PackageNotFoundError, version


def add_arguments(parser: ArgumentParser) -> None:
    """No flags."""


def run(args: Namespace) -> int:  # noqa: ARG001 every command has the same signature
    """Print the distribution's version."""
    try:
        print(f"chairlift {version('chairlift')}")
    except PackageNotFoundError:
        print("chairlift (not installed)")
    return 0
