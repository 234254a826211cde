"""`chairlift export`: from a published model to a model folder."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from graphs.export import export_model
from graphs.progress import ProgressBar
from service.commands.weights import DEFAULT_WEIGHTS, add_weights_argument
from service.executor.machine import available_memory_bytes
from service.obs.logging import configure_logging


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `export`."""
    parser.add_argument("source", metavar="SOURCE", help="a GGUF file, a Hugging Face folder, or a hub id")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="the model folder to write")
    add_weights_argument(parser, DEFAULT_WEIGHTS)
    parser.add_argument("--overwrite", action="store_true", help="replace DIR if it exists")


def run(args: Namespace) -> int:
    """Export, and print the folder and how near its graphs are to the reference."""
    configure_logging("warning")
    result = export_model(
        args.source,
        args.out,
        args.weights,
        overwrite=args.overwrite,
        progress=ProgressBar(),
        available_memory_bytes=available_memory_bytes(),
    )
    print(f"{result.folder}: {result.verification}")
    return 0
