"""`chairlift bench`: measurements."""

from argparse import ArgumentParser, Namespace

from service.bench import step


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `bench`; what it measures is a sub-command."""
    measures = parser.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    summary = "the parts of a step's time, by batch size and context"
    child = measures.add_parser("step", help=summary, description=f"Measure {summary}.")
    step.add_arguments(child)
    child.set_defaults(measure=step.run)


def run(args: Namespace) -> int:
    """Measure, and print."""
    return int(args.measure(args) or 0)
