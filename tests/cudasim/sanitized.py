"""Runs a case of kernel launches under a sanitizer, in a process of its own.

A case is a function `case(device, *strings)` at the top of a test module that raises if anything is wrong.
"""

import importlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.cudasim.build import compiler_library, sanitizer_library
from tests.cudasim.device import SimDevice, SimError

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a case ended in its process."""

    returncode: int
    output: str

    @property
    def fault(self) -> str:
        """What went wrong, in one line; empty if nothing did."""
        if found := re.search(r"AddressSanitizer: (\S+)|ThreadSanitizer: ([\w -]+) \(", self.output):
            num_lines = 1 if found[1] else 2
            return f"{found[1] or found[2]} at {' and '.join(self._lines()[:num_lines])}"
        if found := re.search(r"SimError: (.*)", self.output):
            return found[1]
        if found := re.search(r"AssertionError.*", self.output):
            return found[0]
        return "" if self.returncode == 0 else f"exit status {self.returncode}: {self.output.strip()[-300:]}"

    def _lines(self) -> list[str]:
        """Lines of kernels in a sanitizer's stacks, the innermost first."""
        return list(dict.fromkeys(re.findall(r"[\w.]+\.cuh?:\d+", self.output)))


def run_case(flavour: str, seed: int, case: str, *arguments: str, sources: Path | None = None) -> Outcome:
    """Run "package.module:function" on a device of a flavour, of `sources` in place of the kernels' own, if given."""
    environment = dict(os.environ)
    device = [flavour, str(seed), str(sources or "")]
    command = [sys.executable, "-m", "tests.cudasim.sanitized", *device, case, *arguments]
    if flavour != "plain":
        preloaded = f"{sanitizer_library(flavour)} {compiler_library('libstdc++.so')}"
        environment |= {
            "LD_PRELOAD": preloaded,
            "ASAN_OPTIONS": "detect_leaks=0",
            "TSAN_OPTIONS": "halt_on_error=1 report_signal_unsafe=0",
        }
    if flavour == "tsan" and (setarch := shutil.which("setarch")):
        command = [setarch, "-R", *command]  # ThreadSanitizer wants a fixed layout of addresses
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    return Outcome(result.returncode, result.stdout)


def main(flavour: str, seed: str, sources: str, case: str, *arguments: str) -> None:
    """The process that `run_case` starts."""
    os.environ.pop("LD_PRELOAD", None)  # not for g++
    module, _, function = case.partition(":")
    device = SimDevice(flavour, int(seed), Path(sources) if sources else None)
    try:
        getattr(importlib.import_module(module), function)(device, *arguments)
    except SimError as error:
        sys.exit(f"SimError: {error}")
    finally:
        device.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
