"""`chairlift bench`: measurements."""

from argparse import ArgumentParser, Namespace

from service.bench import schedule, step
from service.commands import bench_offline, bench_serve

MEASURES = {
    "serve": (bench_serve, "a running server's latencies and throughput under open-loop load"),
    "offline": (bench_offline, "the engine's throughput on a file of requests, without a server"),
    "step": (step, "the parts of a step's time, by batch size and context"),
    "schedule": (schedule, "what planning and committing a step costs, by running sequences"),
}


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `bench`; what it measures is a sub-command."""
    measures = parser.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    for name, (module, summary) in MEASURES.items():
        child = measures.add_parser(name, help=summary, description=f"Measure {summary}.")
        module.add_arguments(child)
        child.set_defaults(measure=module.run, command=f"bench {name}")


def run(args: Namespace) -> int:
    """Measure, and print."""
    return int(args.measure(args) or 0)
