"""`chairlift pull`: fetch a known model."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from graphs.pull import pull


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `pull`."""
    parser.add_argument("name", metavar="NAME", help="the model's name, as smollm2-135m")
    parser.add_argument(
        "--out", type=Path, default=Path("models"), metavar="DIR", help="folder for the file (default models)"
    )


def run(args: Namespace) -> int:
    """Fetch, check, and print where the file is."""
    print(pull(args.name, args.out))
    return 0
