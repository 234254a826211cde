"""python -m tests.cuda.gpu_check [--device cuda|sim] [--part 1|2] [--steps compilation,attention] --out DIR

Steps run in processes of their own, each with a limit in seconds; one that fails, crashes or overruns stops no other.
Writes DIR/results.json and DIR/results.md, anew after every step; exits with 1 if a step failed, with 2 if none failed
and none passed, and at once where there is no GPU. On the simulator sizes are small, and times are printed but not
judged.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from service.errors import ConfigError
from service.executor.cuda.probe import require_driver
from tests.cuda.gpu_check.comparison import compare
from tests.cuda.gpu_check.report import FAILED, PASSED, Result, write_report
from tests.cuda.gpu_check.runner import end_children_when_terminated, run_steps
from tests.cuda.gpu_check.steps import STEPS


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description="Check the CUDA kernels on this machine's GPU.", allow_abbrev=False)
    names = [step.name for step in STEPS]
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--part", type=int, choices=(1, 2), help="1: right? 2: fast? (default: both)")
    parser.add_argument("--steps", help=f"comma-separated, of {', '.join(names)} (default: all)")
    parser.add_argument(
        "--patience", type=positive, help="multiplies every step's limit (default: 1, on the simulator 10)"
    )
    parser.add_argument("--out", type=Path, required=True, help="for results, compiled kernels, logs and models")
    parser.add_argument("--report", type=Path, help="for results.json and results.md alone (default: --out)")
    options = parser.parse_args(arguments)
    chosen = options.steps.split(",") if options.steps else names
    if unknown := set(chosen) - set(names):
        parser.error(f"--steps: there is no {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    steps = [step for step in STEPS if options.part in (None, step.part)]
    if elsewhere := options.steps and set(chosen) - {step.name for step in steps}:
        parser.error(f"--steps: not in part {options.part}: {', '.join(sorted(elsewhere))}")
    if options.device == "cuda" and (missing := missing_gpu()) is not None:
        print(f"{missing}: nothing to check; DEVICE=sim runs the same steps on the simulator", file=sys.stderr)
        return 2
    patience = options.patience or (10 if options.device == "sim" else 1)
    report = partial(write_report, device=options.device, out=options.report or options.out)
    results = run_steps(steps, options.device, chosen, options.out, patience=patience, keep=report)
    if options.part != 1:
        results.append(compare(results, options.device))
    print(report(results))
    return exit_code(results)


def missing_gpu() -> str | None:
    """Why no step could run on a GPU here; None: nothing that can be told before trying."""
    try:
        require_driver()
    except ConfigError as error:
        return str(error)
    return None


def positive(text: str) -> float:
    """Raises ValueError."""
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError(text)
    return number


def exit_code(results: Sequence[Result]) -> int:
    """0: steps passed, and none failed; 1: some failed; 2: nothing was found out."""
    statuses = {result.status for result in results}
    return 1 if FAILED in statuses else 0 if PASSED in statuses else 2


if __name__ == "__main__":
    end_children_when_terminated()
    sys.exit(main())
