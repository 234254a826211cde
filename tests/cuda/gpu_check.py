"""Are the kernels right on this GPU, and how fast: steps in processes of their own, and one table of what came out.

python -m tests.cuda.gpu_check [--device cuda|sim] [--steps compilation,correctness] --out DIR

Writes DIR/results.json and DIR/results.md; exits with 1 if a step failed. A step that fails, crashes or runs over its
time limit stops no other. On the simulator sizes are small and nothing is timed. Not run on a GPU yet.

A machine without network needs the source tree, Python, an NVIDIA driver, and the wheels, carried there: those of
requirements.lock with onnxruntime-gpu[cuda,cudnn] in place of onnxruntime, and nvidia-cuda-nvrtc:
`pip download --dest wheels ...` on a machine of the same platform, then `pip install --no-index --find-links wheels`.
The op library is built there by `pip install --no-build-isolation --no-deps --editable .`, which takes a C++ compiler.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from tests.cuda.gpu_check_device import NotRunError, StepFailedError, open_device
from tests.cuda.gpu_check_report import FAILED, NOT_RUN, PASSED, Result, write_report

ROOT = Path(__file__).resolve().parents[2]
NOT_IN_THIS_VERSION = "not in this version"


@dataclass(frozen=True)
class Step:
    """`function` is like "package.module:name": it takes a device and yields rows; "": there is none yet."""

    number: int  # in the table of the design
    name: str
    function: str = ""
    limit_s: float = 0.0


STEPS = (
    Step(0, "environment", "tests.cuda.gpu_check_steps:environment", 60),
    Step(1, "compilation", "tests.cuda.gpu_check_steps:compilation", 180),
    Step(1, "cubins of a newer compiler"),
    Step(2, "correctness", "tests.cuda.gpu_check_steps:correctness", 300),
    Step(3, "replay of stored simulator inputs"),
    Step(4, "ceilings", "tests.cuda.gpu_check_speed:ceilings", 60),
    Step(4, "ceilings: read-only kernel, matrix product"),
    Step(5, "decode-times", "tests.cuda.gpu_check_speed:decode_times", 150),
    Step(6, "other libraries' attention beside it"),
    Step(7, "prefill times"),
    Step(8, "decode step in ONNX Runtime's captured graph"),
    Step(9, "compute-sanitizer"),
    Step(10, "ncu"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description="Check the CUDA kernels on this machine's GPU.")
    names = [step.name for step in STEPS if step.function]
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--steps", default=",".join(names), help="comma-separated (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    chosen = options.steps.split(",")
    if unknown := set(chosen) - set(names):
        parser.error(f"--steps: there is no {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    results = run_steps(STEPS, options.device, chosen, options.out)
    print(write_report(results, options.device, options.out))
    return exit_code(results)


def exit_code(results: Sequence[Result]) -> int:
    return int(any(result.status == FAILED for result in results))


def run_steps(steps: Sequence[Step], device: str, chosen: Sequence[str], out: Path) -> list[Result]:
    """A result for each step, in order, whatever becomes of the others."""
    out.mkdir(parents=True, exist_ok=True)
    results = []
    for step in steps:
        if not step.function:
            results.append(Result(step.number, step.name, NOT_RUN, NOT_IN_THIS_VERSION, []))
        elif step.name not in chosen:
            results.append(Result(step.number, step.name, NOT_RUN, "not chosen", []))
        else:
            results.append(_run_in_process(step, device, out))
    return results


def _run_in_process(step: Step, device: str, out: Path) -> Result:
    """Whatever a fault on the device leaves behind ends with the process."""
    written = (out / f"step-{step.name}.json").resolve()
    written.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.cuda.gpu_check_process", step.function, device, str(written)]
    try:
        ended = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=step.limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Result(step.number, step.name, FAILED, f"not done within {step.limit_s:g} s", [])
    if not written.is_file():
        said = (ended.stderr.strip() or "nothing on standard error").splitlines()[-1]
        return Result(step.number, step.name, FAILED, f"its process ended with {ended.returncode}: {said}", [])
    fields = json.loads(written.read_text())
    written.unlink()
    return Result(step.number, step.name, fields["status"], fields["reason"], fields["rows"])


def run_step(function: str, device_name: str, written: Path) -> None:
    """In the step's own process: write how it ended."""
    rows: list[dict[str, object]] = []
    status, reason = PASSED, ""
    try:
        module, _, name = function.partition(":")
        with open_device(device_name, written.parent) as device:
            rows = getattr(import_module(module), name)(device)
    except NotRunError as error:
        status, reason = NOT_RUN, str(error)
    except StepFailedError as error:
        status, reason, rows = FAILED, str(error), error.rows
    except Exception as error:  # a step may fail in any way; that is what is reported
        status, reason = FAILED, f"{type(error).__name__}: {error}"
    unfinished = written.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"status": status, "reason": reason, "rows": rows}))
    unfinished.rename(written)


if __name__ == "__main__":
    sys.exit(main())
