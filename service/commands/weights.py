"""The --weights flag."""

from argparse import ArgumentParser

from graphs.manifest import WEIGHT_FORMATS

DEFAULT_WEIGHTS = "w8a8"
CUDA_WEIGHTS = "float16"


def add_weights_argument(parser: ArgumentParser, default: str | None) -> None:
    """Add --weights to the flags of a command that exports; without `default` the device decides."""
    for_cuda = "" if default else f", on cuda {CUDA_WEIGHTS}"
    parser.add_argument(
        "--weights",
        choices=WEIGHT_FORMATS,
        default=default,
        help="weight format; float16, bfloat16, int8 and int4 run on both devices, w8a8 and float32 on a cpu; w8a8 is "
        f"the quick one for batches there (default {DEFAULT_WEIGHTS}{for_cuda})",
    )
