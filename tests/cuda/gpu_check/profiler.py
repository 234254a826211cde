"""What ncu counts in a decode and a prefill launch: memory, bank conflicts, occupancy, stalls."""

import csv
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tests.cuda.gpu_check.device import CheckDevice, NotRunError, StepFailedError, need_gpu
from tests.cuda.gpu_check.report import Row
from tests.cuda.gpu_check.runner import ROOT, run_command
from tests.cuda.gpu_check.tools import find_tool, module_command

RUN_LIMIT_S: Final = 25  # of all runs, if there are several
STALL: Final = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
METRICS: Final = {
    "time": "gpu__time_duration.sum",
    "DRAM read": "dram__bytes_read.sum",
    "DRAM of peak": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "bank conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "warps active": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "tensor instructions": "sm__inst_executed_pipe_tensor.sum",
    "registers": "launch__registers_per_thread",
    "shared KiB a multiprocessor": "launch__shared_mem_config_size",
    "blocks by shared memory": "launch__occupancy_limit_shared_mem",
    "stall: memory": STALL.format("long_scoreboard"),
    "stall: barrier": STALL.format("barrier"),
    "stall: shared memory": STALL.format("mio_throttle"),
}
UNKNOWN: Final = re.compile(r"Failed to find metric ([\w.]+)")
NO_PERMISSION: Final = "ERR_NVGPUCTRPERM"


def profile(device: CheckDevice) -> Iterator[Row]:
    """A row for each launch; the file stays beside the results as ncu.csv."""
    gpu = need_gpu(device, "a profiler counts on a card")
    path = find_tool("ncu")
    if path is None:
        raise NotRunError("ncu is not found: it comes with the CUDA toolkit or Nsight Compute")
    yield from profiled(path, gpu.folder)


def profiled(path: Path, folder: Path) -> Iterator[Row]:
    """Counted again without the metrics that this ncu does not know for the card, if that is what it says."""
    end, metrics = time.monotonic() + RUN_LIMIT_S, tuple(METRICS.values())
    code, text, everything = _run(path, folder, metrics, RUN_LIMIT_S)
    while code and (unknown := set(UNKNOWN.findall(everything)) & set(metrics)):
        metrics = tuple(name for name in metrics if name not in unknown)
        code, text, everything = _run(path, folder, metrics, end - time.monotonic())
    if NO_PERMISSION in everything:
        raise NotRunError(f"{NO_PERMISSION}: the driver lets only an administrator read counters")
    rows = list(parsed(text))
    yield from rows
    if code != 0 or not rows:
        last = (everything.strip() or "nothing").splitlines()[-1]
        raise StepFailedError(f"ncu {'ran over its limit' if code is None else f'ended with {code}'}: {last}")


def _run(path: Path, folder: Path, metrics: Sequence[str], limit_s: float) -> tuple[int | None, str, str]:
    """Exit code, what was counted, and that with all that was said."""
    counted, said = folder / "ncu.csv", folder / "ncu.out"
    counted.unlink(missing_ok=True)
    with said.open("w") as output:
        code = run_command(command(path, counted, folder, metrics), limit_s, output, cwd=ROOT)
    text = counted.read_text(errors="replace") if counted.is_file() else ""
    return code, text, text + said.read_text(errors="replace")


def command(path: Path, counted: Path, folder: Path, metrics: Sequence[str]) -> list[str]:
    """Clocks stay as they are: what is counted belongs to the times of the other steps."""
    options = ["--csv", "--page", "raw", "--clock-control", "none"]
    options += ["--kernel-name", "regex:attn_", "--metrics", ",".join(metrics), "--log-file", str(counted)]
    return [str(path), *options, *module_command("profiled_case", [str(folder)])]


def parsed(text: str) -> Iterator[Row]:
    """Rows of ncu's raw page as CSV: after a line of names one of units, among lines that begin with "==" ."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if len(lines) < 2:
        return
    names, units, *launches = csv.reader(lines)
    for values in launches:
        cells = dict(zip(names, zip(values, units, strict=True), strict=True))
        row: Row = {"kernel": cells["Kernel Name"][0], "grid": cells["Grid Size"][0]}
        for title, metric in METRICS.items():
            if metric in cells:
                row[title] = " ".join(part for part in cells[metric] if part)
        yield row
