"""NVIDIA's tools as the GPU check calls them, and what it reads from their output; the tools are scripts here."""

import os

import pytest

from service.executor.cuda.compiler import compile_cubin
from tests.cuda.gpu_check import sanitizers
from tests.cuda.gpu_check.device import NotRunError, StepFailedError, open_device
from tests.cuda.gpu_check.profiler import METRICS, parsed, profiled
from tests.cuda.gpu_check.profiler import command as ncu_command
from tests.cuda.gpu_check.sanitized_cases import PLANTED, run
from tests.cuda.gpu_check.sanitizers import CASES, TOOLS, Outcome, command, judged, outcome_of
from tests.cuda.gpu_check.steps import STEPS
from tests.cuda.gpu_check.tools import find_tool
from tests.cuda.kernel_builds import missing_nvrtc
from tests.cuda.kernel_cases import CASES as KERNEL_CASES
from tests.cudasim.build import missing_tool
from tests.cudasim.device import SimError


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_tools_are_found_on_the_path_and_in_the_newest_toolkit(tmp_path, monkeypatch):
    for version in ("13.0", "13.2"):
        folder = tmp_path / "usr/local" / f"cuda-{version}" / "bin"
        folder.mkdir(parents=True)
        script(folder / "ncu", "")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert tmp_path / "usr/local/cuda-13.2/bin/ncu" == find_tool("ncu", tmp_path)
    assert find_tool("nsys", tmp_path) is None
    on_path = tmp_path / "bin"
    on_path.mkdir()
    script(on_path / "ncu", "")
    monkeypatch.setenv("PATH", str(on_path))
    assert on_path / "ncu" == find_tool("ncu", tmp_path)


def test_the_sanitizers_command_names_tool_cases_and_exit_code(tmp_path):
    words = command(tmp_path / "compute-sanitizer", "racecheck", tmp_path / "log", tmp_path, ["decode", "rope"])
    assert [str(tmp_path / "compute-sanitizer"), "--tool", "racecheck", "--error-exitcode", "86"] == words[:5]
    assert ["-m", "tests.cuda.gpu_check.sanitized_cases", str(tmp_path), "decode", "rope"] == words[-5:]
    assert str(tmp_path / "log") == words[words.index("--log-file") + 1]


def test_the_sanitizers_run_every_kernel_case_but_those_of_the_same_code_in_another_type():
    assert set(KERNEL_CASES) - {"prefill_fp8", "rope_fp8", "sampling_half"} == set(CASES)


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        (0, "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n", Outcome(0, "")),
        (86, "========= ERROR SUMMARY: 64 errors\n", Outcome(64, "")),
        (86, "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n", Outcome(1, "")),
        (0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", Outcome(0, "")),
        (1, "x\nAssertionError: wrong\n", Outcome(None, "no summary, exit code 1: AssertionError: wrong")),
        (1, "= ERROR SUMMARY: 0 errors\nboom", Outcome(None, "no errors, but exit code 1: boom")),
        (255, "Error: Device not supported. Please refer to", Outcome(None, "not run")),
        (None, "", Outcome(None, f"not done within {sanitizers.RUN_LIMIT_S} s")),
    ],
)
def test_an_outcome_is_read_from_the_summary(code, text, expected):
    assert expected == outcome_of(code, text)


FINDS = 'case "$*" in *planted*) n=3;; *) n={clean};; esac; echo "ERROR SUMMARY: $n errors"; exit $((n ? 86 : 0))'
MEMCHECK_ONLY = 'case "$*" in *memcheck*) ;; *) echo "Device not supported"; exit 255;; esac\n'


def test_a_tool_that_finds_its_planted_bug_and_no_other_passes(tmp_path):
    rows = list(judged(script(tmp_path / "tool", FINDS.format(clean=0)), tmp_path))
    found = {tool: [row["errors"] for row in rows if row["tool"] == tool] for tool in TOOLS}
    assert {tool: [3, 0] for tool in TOOLS} == found


def test_a_tools_rows_do_not_wait_for_other_tools(tmp_path):
    """initcheck's runs wait for a line each, which they are sent once the rows of the others are there."""
    os.mkfifo(tmp_path / "lines")
    lines = os.open(tmp_path / "lines", os.O_RDWR)
    waits = f'case "$*" in *initcheck*) read line < {tmp_path / "lines"};; esac\n'
    rows = judged(script(tmp_path / "tool", waits + FINDS.format(clean=0)), tmp_path)
    first = [next(rows) for _ in range(6)]
    assert set(TOOLS) - {"initcheck"} == {row["tool"] for row in first}
    os.write(lines, b"go on\ngo on\n")
    assert [("initcheck", 3), ("initcheck", 0)] == [(row["tool"], row["errors"]) for row in rows]
    os.close(lines)


def test_both_runs_of_a_sanitizer_fit_the_limit_of_their_step():
    (step,) = (step for step in STEPS if step.name == "sanitizers")
    assert 2 * sanitizers.RUN_LIMIT_S + 10 <= step.limit_s, "ten seconds for what is not a run"


@pytest.mark.parametrize(
    ("text", "error", "reason"),
    [
        (FINDS.format(clean=2), StepFailedError, "memcheck: 2 errors; racecheck: 2 errors"),
        ('echo "ERROR SUMMARY: 0 errors"', StepFailedError, "memcheck does not find its planted bug; racecheck does"),
        ('echo "Device not supported"; exit 255', NotRunError, f"^{', '.join(TOOLS)}: Device not supported"),
        (MEMCHECK_ONLY + FINDS.format(clean=0), NotRunError, f"^{', '.join(TOOLS[1:])}: Device not supported"),
        (MEMCHECK_ONLY + FINDS.format(clean=2), StepFailedError, r"^memcheck: 2 errors; racecheck, .*not supported$"),
        ("exit 4", StepFailedError, "memcheck: no summary, exit code 4: nothing"),
    ],
)
def test_a_tool_that_finds_too_much_or_too_little_fails(tmp_path, text, error, reason):
    rows = []
    with pytest.raises(error, match=reason):
        rows.extend(judged(script(tmp_path / "tool", text), tmp_path))


@pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool()))
def test_the_planted_bugs_are_bugs(tmp_path):
    """The simulator names the one that it sees without a sanitizer of its own; the others run."""
    with open_device("sim", tmp_path) as device:
        with pytest.raises(SimError, match=r"barrier|deadlock"):
            run(device, "planted_synccheck")
        run(device, "planted_initcheck")
        with pytest.raises(SimError, match="wrote"):
            run(device, "planted_racecheck")


@pytest.mark.skipif(missing_nvrtc() is not None, reason=str(missing_nvrtc()))
def test_there_is_a_planted_bug_for_every_tool():
    cubin = compile_cubin(PLANTED, "sm_90").cubin
    assert all(f"planted_{tool}".encode() in cubin for tool in TOOLS)


NCU = """==PROF== Connected to process 7
==PROF== Profiling "attn_decode" - 0: 0%....50%....100% - 9 passes
"ID","Kernel Name","Grid Size","gpu__time_duration.sum","dram__bytes_read.sum","launch__registers_per_thread"
"","","","us","Mbyte","register/thread"
"0","attn_decode","(49, 8, 1)","140.5","537.1","124"
"1","attn_combine","(64, 8, 1)","4.2","1.5","32"
"""


def test_what_ncu_counts_is_read_from_its_table():
    assert [
        {
            "kernel": "attn_decode",
            "grid": "(49, 8, 1)",
            "time": "140.5 us",
            "DRAM read": "537.1 Mbyte",
            "registers": "124 register/thread",
        },
        {
            "kernel": "attn_combine",
            "grid": "(64, 8, 1)",
            "time": "4.2 us",
            "DRAM read": "1.5 Mbyte",
            "registers": "32 register/thread",
        },
    ] == list(parsed(NCU))
    assert [] == list(parsed("==ERROR== no kernels were profiled\n"))


# Knows no tensor instructions; told without them, it counts into the file that it is to write.
FORGETFUL_NCU = """
case "$*" in
*pipe_tensor*) echo "==ERROR== Failed to find metric sm__inst_executed_pipe_tensor.sum"; exit 1;;
esac
while [ "$1" != --log-file ]; do shift; done
cat > "$2" <<'END'
{table}END
"""


def test_a_metric_that_ncu_does_not_know_is_left_out(tmp_path):
    ncu = script(tmp_path / "ncu", FORGETFUL_NCU.format(table=NCU))
    assert ["attn_decode", "attn_combine"] == [row["kernel"] for row in profiled(ncu, tmp_path)]
    with pytest.raises(StepFailedError, match="ncu ended with 1: ==ERROR== no kernels"):
        list(profiled(script(tmp_path / "other", 'echo "==ERROR== no kernels"; exit 1'), tmp_path))


def test_ncus_command_leaves_clocks_alone(tmp_path):
    words = ncu_command(tmp_path / "ncu", tmp_path / "ncu.csv", tmp_path, tuple(METRICS.values()))
    assert "none" == words[words.index("--clock-control") + 1]
    assert "regex:attn_" == words[words.index("--kernel-name") + 1]
    assert ["-m", "tests.cuda.gpu_check.profiled_case", str(tmp_path)] == words[-3:]
    assert os.pathsep not in words[words.index("--metrics") + 1]
