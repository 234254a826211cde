"""The op library under AddressSanitizer and UndefinedBehaviorSanitizer, through the other tests of the ops."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Kept between runs, so that only what changed is compiled again; too deep for library_path() to find it.
BUILD = ROOT / "build" / "tests" / "sanitized"
# A virtual environment's own cmake and ninja come first.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
CMAKE = shutil.which("cmake", path=PATH)
TESTS = (
    "test_linear.py",
    "test_paged_attention.py",
    "test_paged_attention_errors.py",
    "test_row_ops.py",
    "test_sample_rows.py",
)


def run(*command: object, **environment: str) -> None:
    """Run a command; fail with the end of its output if it does."""
    result = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:]


def runtime_library(name: str) -> str:
    """The compiler's own copy of a shared library."""
    return subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.skipif(shutil.which("g++") is None or CMAKE is None, reason="needs g++ and cmake")
def test_sanitizers_find_nothing_in_the_ops() -> None:
    if not Path(runtime_library("libasan.so")).is_file():
        pytest.skip("this g++ has no libasan")
    flags = ("-DCHAIRLIFT_SANITIZE=address,undefined", "-DCHAIRLIFT_PROTO=OFF")
    run(CMAKE, "-S", ROOT / "graphs" / "ops", "-B", BUILD, "-DCMAKE_CXX_COMPILER=g++", *flags)
    run(CMAKE, "--build", BUILD, "--parallel", "2")
    # The interpreter is not built with it, so the sanitizer must be loaded before everything else, and before the C++
    # library whose exceptions it intercepts. Leaks are Python's and the runtime's own: they free little at exit.
    preloaded = f"{runtime_library('libasan.so')} {runtime_library('libstdc++.so')}"
    tests = [ROOT / "tests" / "unit" / name for name in TESTS]
    # Not the tests that draw thousands of samples for their statistics, nor the slowest kernels where threads wait for
    # each other, as they do in all kernels alike: they show the sanitizers nothing new.
    chosen = "not frequencies and not ties_with_the_threshold and not (others_quantise and generic)"
    options = ("-q", "-x", "-p", "no:cacheprovider", "-k", chosen)
    run(
        *(sys.executable, "-m", "tests.unit.with_library", BUILD / "libchairlift_ops.so", *options, *tests),
        LD_PRELOAD=preloaded,
        ASAN_OPTIONS="detect_leaks=0",
        UBSAN_OPTIONS="print_stacktrace=1",
    )
