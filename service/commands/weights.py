"""The --weights flag."""

from argparse import ArgumentParser

from graphs.manifest import WEIGHT_FORMATS

DEFAULT_WEIGHTS = "w8a8"


def add_weights_argument(parser: ArgumentParser, default: str | None) -> None:
    """Add --weights to the flags of a command that exports."""
    parser.add_argument(
        "--weights",
        choices=WEIGHT_FORMATS,
        default=default,
        help=f"weight format; w8a8 is the quick one for batches on a CPU (default {DEFAULT_WEIGHTS})",
    )
