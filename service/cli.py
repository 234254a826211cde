"""The `chairlift` command: finds the command's module, and turns every expected error into one line on stderr."""

import importlib
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import Any, NoReturn

from graphs.errors import ExportError
from graphs.manifest import ManifestError
from service.errors import ChairliftError

COMMANDS = {
    "serve": "serve a model over gRPC until SIGTERM",
    "generate": "stream one answer to the terminal, from a server or from a model folder",
    "run": "answer a file of requests, batched through the same engine, without a server",
    "pull": "fetch a model that is known by name",
    "export": "turn a GGUF file or Hugging Face folder into a model folder",
    "health": "ask a server whether it serves",
    "bench": "measure steps, the scheduler, a server or an offline run",
    "simulate": "run the real scheduler on a virtual clock, and report",
    "chart": "draw one metric of simulated or measured runs, for a Markdown file",
    "version": "print the version",
}
DESCRIPTION = """Serves language models: continuous batching over ONNX Runtime, streamed over gRPC.

  chairlift pull smollm2-135m
  chairlift export models/SmolLM2-135M-Instruct.Q4_1.gguf --out models/smollm2-135m-w8a8
  chairlift serve --model models/smollm2-135m-w8a8
  chairlift generate --target 127.0.0.1:50051 --temperature 0 "What is the capital of France?"
"""
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; yields the process's exit code: 2 after an error, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = ""
    try:
        parser = build_parser(arguments[0] if arguments else None)
        args = parser.parse_args(arguments)
        if args.command is None:
            parser.print_help()
            return EXIT_ERROR
        command = args.command
        return int(args.run(args))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read our output has seen enough
        sys.stdout = None
        return 1
    except OSError as error:
        return fail(command, f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error))
    except MemoryError as error:
        return fail(command, f"too little memory: {str(error) or 'none is left'}")
    except (ChairliftError, ExportError, ManifestError) as error:
        return fail(command, str(error))


def fail(command: str, message: str) -> int:
    """Print one line on stderr; yields the exit code."""
    print(f"chairlift {command}: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_ERROR


class OneLineParser(ArgumentParser):
    """A parser of whole flags only, whose complaints are one line, without the usage before it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options | {"allow_abbrev": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As `parse_args`: what the parser of a command does not know, those above do not know either."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Print the complaint and leave."""
        self.exit(EXIT_ERROR, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


def build_parser(command: str | None) -> ArgumentParser:
    """The parser with all commands' names, but the flags of `command` alone: the other modules stay unloaded."""
    parser = OneLineParser("chairlift", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        child = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name == command:
            module = importlib.import_module(f"service.commands.{name}")
            module.add_arguments(child)
            child.set_defaults(command=name, run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
