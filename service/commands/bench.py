"""`chairlift bench`: measurements."""

from argparse import ArgumentParser, Namespace

from service.bench import schedule, step

MEASURES = {
    "step": (step, "the parts of a step's time, by batch size and context"),
    "schedule": (schedule, "what planning and committing a step costs, by running sequences"),
}


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `bench`; what it measures is a sub-command."""
    measures = parser.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    for name, (module, summary) in MEASURES.items():
        child = measures.add_parser(name, help=summary, description=f"Measure {summary}.")
        module.add_arguments(child)
        child.set_defaults(measure=module.run)


def run(args: Namespace) -> int:
    """Measure, and print."""
    return int(args.measure(args) or 0)
