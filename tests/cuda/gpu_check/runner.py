"""Runs steps, each in a process of its own, and takes what they yield as it comes.

Whatever a fault on the device leaves behind ends with the process, and so do the processes that it has started. A
step writes a line of JSON for each row and one for its end, so that what it had found survives however it ends.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO

from service.errors import ConfigError
from tests.cuda.gpu_check.device import NotRunError, StepFailedError, open_device
from tests.cuda.gpu_check.report import FAILED, NOT_RUN, PASSED, Result, Row
from tests.cuda.gpu_check.steps import Step

ROOT = Path(__file__).resolve().parents[3]
KEPT_CHARACTERS = 3000  # of what a failed step printed
OURS = ("graphs", "service", "tests")


def run_steps(
    steps: Sequence[Step],
    device: str,
    chosen: Sequence[str],
    out: Path,
    *,
    patience: float = 1,
    keep: Callable[[Sequence[Result]], object] = len,
) -> list[Result]:
    """A result for each step, in order, whatever becomes of the others. Says on standard error what runs.

    `patience` multiplies every limit. `keep` gets the results so far before each step.
    """
    out.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for step in steps:
        keep(results)
        if step.name not in chosen:
            results.append(Result(step.number, step.name, NOT_RUN, "not chosen", []))
            continue
        limit_s = patience * step.limit_s
        print(f"{step.name}, at most {limit_s:g} s ...", file=sys.stderr, flush=True)
        results.append(_run_in_process(step, device, out, limit_s))
        print(f"{step.name}: {results[-1].status} {results[-1].reason}", file=sys.stderr, flush=True)
    return results


def run_command(command: Sequence[str], limit_s: float, said: IO[str], **options: object) -> int | None:
    """The exit code of a command whose output goes to `said`; None: it ran over its limit, and was killed.

    It stays in the caller's process group: what it has started, and it itself, end at the latest with the step.
    """
    process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, **options)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.kill()
        process.wait()


def run_in_group(command: Sequence[str], limit_s: float, said: IO[str], **options: object) -> int | None:
    """As `run_command`, in a process group of its own; in the end the processes that it started are killed too."""
    process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True, **options)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):  # nobody is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def end_children_when_terminated() -> None:
    """Let a request to end this process unwind it, so that the step that runs ends with it."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def _run_in_process(step: Step, device: str, out: Path, limit_s: float) -> Result:
    written, said = ((out / f"step-{step.name}.{kind}").resolve() for kind in ("jsonl", "log"))
    written.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.cuda.gpu_check.step_process", step.function, device, str(written)]
    started = time.monotonic()
    with said.open("w") as log:
        code = run_in_group(command, limit_s, log, cwd=ROOT)
    seconds = round(time.monotonic() - started, 1)
    rows, end = _read(written)
    text = said.read_text(errors="replace").strip()
    if end is not None:
        status, reason = end["status"], end["reason"]
    elif code is None:
        status, reason = FAILED, f"not done within {limit_s:g} s"
    else:
        status, reason = FAILED, f"its process ended with {code}: {(text or 'it said nothing').splitlines()[-1]}"
    said_at_last = text[-KEPT_CHARACTERS:] if status == FAILED else ""
    return Result(step.number, step.name, status, reason, rows, said_at_last, seconds)


def _read(written: Path) -> tuple[list[Row], dict[str, str] | None]:
    rows, end = [], None
    if written.is_file():
        for line in written.read_text().splitlines():
            with suppress(json.JSONDecodeError):  # the process was killed while it wrote
                entry = json.loads(line)
                if "row" in entry:
                    rows.append(entry["row"])
                else:
                    end = entry
    return rows, end


def run_step(function: str, device_name: str, written: Path) -> None:
    """In the step's own process: write its rows, then how it ended."""
    with written.open("w") as file:

        def write(entry: dict[str, object]) -> None:
            file.write(json.dumps(entry) + "\n")
            file.flush()

        status, reason = FAILED, "yielded nothing"
        try:
            module, _, name = function.partition(":")
            with open_device(device_name, written.parent) as device:
                for row in getattr(import_module(module), name)(device):
                    write({"row": row})
                    status, reason = PASSED, ""
        except Exception as error:  # a step may fail in any way; that is what is reported
            status, reason = _told(error)
            # Here, while the error holds the step's sessions: freed after their stream, they may crash the process.
            write({"status": status, "reason": reason})
        else:
            write({"status": status, "reason": reason})


def _told(error: Exception) -> tuple[str, str]:
    """Status and reason."""
    if isinstance(error, NotRunError):
        return NOT_RUN, str(error)
    if isinstance(error, ModuleNotFoundError):
        is_ours = (error.name or "").partition(".")[0] in OURS
        return FAILED if is_ours else NOT_RUN, str(error)
    if isinstance(error, StepFailedError | ConfigError):  # whose text is a sentence
        return FAILED, str(error)
    traceback.print_exception(error)
    return FAILED, f"{type(error).__name__}: {error}"
