"""compute-sanitizer's four tools: each must find the bug that is planted for it, and none in the kernels."""

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.cuda.gpu_check.device import CheckDevice, NotRunError, StepFailedError, need_gpu
from tests.cuda.gpu_check.report import NOT_RUN, Row
from tests.cuda.gpu_check.runner import ROOT, run_command
from tests.cuda.gpu_check.tools import find_tool, module_command

TOOLS: Final = ("memcheck", "racecheck", "synccheck", "initcheck")
CASES: Final = (
    "decode",
    "decode_fp8",
    "prefill",
    "prefill_cut",
    "prefill_wide",
    "rope",
    "sampling",
    "sampling_unsure",
)
RUN_LIMIT_S: Final = 50  # two runs of a tool, one after the other, fit the limit of the step
FOUND_ERRORS: Final = 86  # the exit code that says so
OPTIONS: Final = {
    "memcheck": ("--report-api-errors", "no"),  # probing for what a driver has is no error
    "racecheck": (),
    "synccheck": (),
    "initcheck": (),
}
SUMMARY: Final = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
NOT_SUPPORTED: Final = "Device not supported"


@dataclass(frozen=True)
class Outcome:
    """`errors` is None if the tool said nothing that can be counted; `said` is why."""

    errors: int | None
    said: str


def sanitizers(device: CheckDevice) -> Iterator[Row]:
    """All tools at a time; with each, the planted bug first."""
    gpu = need_gpu(device, "the simulator's own sanitizers are what tests/cuda/test_sanitized_kernels.py runs")
    path = find_tool("compute-sanitizer")
    if path is None:
        raise NotRunError("compute-sanitizer is not found: neither CUDA toolkit nor wheel nvidia-cuda-sanitizer-api")
    yield from judged(path, gpu.folder)


def judged(path: Path, folder: Path) -> Iterator[Row]:
    """A row for each kind of run, a tool's when it has ended.

    Raises StepFailedError for faults, NotRunError with the tools that do not support the device.
    """
    outcomes: dict[str, tuple[Outcome, Outcome]] = {}
    with ThreadPoolExecutor(len(TOOLS)) as pool:
        running = {pool.submit(_run_tool, path, tool, folder): tool for tool in TOOLS}
        for ended in as_completed(running):
            tool = running[ended]
            outcomes[tool] = ended.result()
            for what, outcome in zip(("planted bug", f"{len(CASES)} cases"), outcomes[tool], strict=True):
                yield {"tool": tool, "run": what, "errors": outcome.errors, "said": outcome.said}
    faults, unsupported = [], []
    for tool in TOOLS:
        planted, cases = outcomes[tool]
        if planted.said == NOT_RUN and cases.said == NOT_RUN:
            unsupported.append(tool)
            continue
        if not planted.errors:
            faults.append(f"{tool} does not find its planted bug")
        if cases.errors != 0:
            faults.append(f"{tool}: {cases.said or f'{cases.errors} errors'}")
    reason = f"{', '.join(unsupported)}: {NOT_SUPPORTED}"
    if faults:
        raise StepFailedError("; ".join([*faults, *([reason] if unsupported else [])]))
    if unsupported:
        raise NotRunError(reason)


def _run_tool(path: Path, tool: str, folder: Path) -> tuple[Outcome, Outcome]:
    planted = _run(path, tool, folder, "planted", [f"planted_{tool}"])
    return planted, _run(path, tool, folder, "cases", CASES)


def _run(path: Path, tool: str, folder: Path, what: str, names: Sequence[str]) -> Outcome:
    log, said = (folder / f"{tool}-{what}.{kind}" for kind in ("log", "out"))
    log.unlink(missing_ok=True)
    with said.open("w") as output:
        code = run_command(command(path, tool, log, folder, names), RUN_LIMIT_S, output, cwd=ROOT)
    texts = [file.read_text(errors="replace") for file in (log, said) if file.is_file()]
    return outcome_of(code, "\n".join(texts))


def command(path: Path, tool: str, log: Path, folder: Path, names: Sequence[str]) -> list[str]:
    options = ["--tool", tool, "--error-exitcode", str(FOUND_ERRORS), "--log-file", str(log), *OPTIONS[tool]]
    options += ["--show-backtrace", "no"]
    return [str(path), *options, *module_command("sanitized_cases", [str(folder), *names])]


def outcome_of(code: int | None, text: str) -> Outcome:
    """What a run said, by its summary; `code` None: it ran over its limit."""
    if code is None:
        return Outcome(None, f"not done within {RUN_LIMIT_S} s")
    if NOT_SUPPORTED in text:
        return Outcome(None, NOT_RUN)
    counts = [int(found[1] or found[2]) for found in SUMMARY.finditer(text)]
    if not counts:
        return Outcome(None, f"no summary, exit code {code}: {(text.strip() or 'nothing').splitlines()[-1]}")
    if code and not max(counts):
        return Outcome(None, f"no errors, but exit code {code}: {text.strip().splitlines()[-1]}")
    return Outcome(max(counts), "")
