"""The GPU check's own calls of a driver, against a libcuda.so.1 of our own whose launches do nothing.

So outputs stay as they were: steps must fail by what they judge, and by nothing else.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.gpu_check.runner import ROOT
from tests.cuda.kernel_builds import missing_nvrtc

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(missing_nvrtc() is not None, reason=str(missing_nvrtc())),
]
STEPS = ("environment", "stored-outputs", "newer-cubin", "ceilings", "matmul", "prefill-times", "sanitizers", "ncu")
MEMORY_BYTES = 1 << 28


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> dict[str, dict]:
    """What became of STEPS on the stub; every event of it is a millisecond after the one before."""
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("stub_driver.cc")
    sizes = [f"-DSTUB_MEMORY_BYTES={MEMORY_BYTES}", "-DSTUB_MAX_BLOCKS=2"]  # as many as attention has on a card
    flags = ["-std=c++17", "-O1", *sizes, "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, str(source), "-o", str(folder / "libcuda.so.1"), "-ldl"], check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder), "PATH": str(folder)}  # no tools there
    command = [sys.executable, "-m", "tests.cuda.gpu_check", "--steps", ",".join(STEPS), "--patience", "10"]
    command += ["--out", str(folder / "out")]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert 1 == ended.returncode, ended.stderr
    found = json.loads((folder / "out" / "results.json").read_text())
    return {step["name"]: step for step in found["steps"] if step["reason"] != "not chosen"}


def test_the_card_is_described(steps):
    (row,) = steps["environment"]["rows"]
    assert "stub, sm_90, 132 SMs, 268,435,456 bytes free" == row["card"]
    # 3.2 GHz, twice a cycle, 6144 bits
    assert "50 MiB of L2, at most 1980 MHz, data sheet 4915 GB/s" == row["memory"]


def test_kernels_that_write_nothing_are_far_from_stored_outputs(steps):
    assert "7 of 7 cases are further than 2 bf16 ulps from what is stored" == steps["stored-outputs"]["reason"]


def test_a_copy_is_timed_by_events_and_an_unread_word_is_seen(steps):
    *waits, row = steps["ceilings"]["rows"]
    assert ["a word copied, waited for asleep", "the same, spinning"] == [each["ceiling"] for each in waits]
    # a quarter of the memory, read and written in a millisecond
    assert {"ceiling": "copy, read + written", "GB/s": round(2 * MEMORY_BYTES / 4 / 1e-3 / 1e9, 1)} == {
        key: row[key] for key in ("ceiling", "GB/s")
    }
    for name in ("ceilings", "newer-cubin"):
        assert "the read-only kernel did not read every word once" == steps[name]["reason"]


def test_outputs_that_were_not_written_are_not_timed(steps):
    """The last case's keys and values take 4 KiB for each of 64 * 2048 + 1024 tokens, which is more than there is."""
    reasons = [row["not timed"] for row in steps["prefill-times"]["rows"]]
    assert [*["not timed: NaN or infinity in the output"] * 5, "not enough memory"] == reasons
    expected = "5 outputs are not finite; none of 6 cases was timed: not enough memory"
    assert ("failed", expected) == (steps["prefill-times"]["status"], steps["prefill-times"]["reason"])


def test_tools_that_are_missing_are_named(steps):
    for name, tool in (("sanitizers", "compute-sanitizer"), ("ncu", "ncu")):
        assert ("not run", f"{tool} is not found") == (steps[name]["status"], steps[name]["reason"].partition(":")[0])
