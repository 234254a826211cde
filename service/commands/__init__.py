"""One module per command of `chairlift`: `add_arguments(parser)` and `run(args) -> exit code`."""
