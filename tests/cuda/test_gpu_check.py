"""The GPU check on the simulator: what it reports, and that no step keeps the others from their turn."""

import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import replace
from importlib import import_module

import pytest

from tests.cuda.gpu_check.__main__ import exit_code, main
from tests.cuda.gpu_check.compilation import compilation
from tests.cuda.gpu_check.device import NotRunError, StepFailedError
from tests.cuda.gpu_check.report import Result, write_report
from tests.cuda.gpu_check.resources import KernelResources
from tests.cuda.gpu_check.runner import ROOT, run_command, run_in_group, run_steps
from tests.cuda.gpu_check.steps import PART_LIMIT_S, STEPS, Step
from tests.cudasim.build import missing_tool

pytestmark = pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool()))

HERE = "tests.cuda.test_gpu_check"


def raises(_device):
    yield {"row": 1}
    raise AssertionError("planted | failure\nin two lines")


def finds_a_wrong_case(_device):
    yield {"case": "a"}
    yield {"case": "b"}
    raise StepFailedError("1 of 2 cases is wrong")


def yields_nothing(_device):
    yield from ()


def exits(_device):
    yield {"case": "before"}
    os._exit(3)


def is_killed(_device):
    yield {"case": "before"}
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(_device):
    while True:
        pass


def cannot_run(_device):
    yield from ()
    raise NotRunError("no card")


def lacks_a_package(_device):
    yield {"row": 1}
    import_module("a_package_that_is_not_there")


def lacks_a_module_of_ours(_device):
    yield from ()
    import_module("tests.cuda.not_there")


def passes(device):
    yield {"device": device.name}


def test_steps_that_end_in_any_way_are_reported_and_the_others_still_run(tmp_path):
    names = ("raises", "exits", "is_killed", "cannot_run", "finds_a_wrong_case", "passes")
    names = (*names, "lacks_a_package", "lacks_a_module_of_ours", "yields_nothing")
    steps = [Step(i, name, f"{HERE}:{name}", 60) for i, name in enumerate(names)]
    results = run_steps(steps, "sim", names, tmp_path)
    assert [
        Result(0, "raises", "failed", "AssertionError: planted | failure\nin two lines", [{"row": 1}]),
        Result(1, "exits", "failed", "its process ended with 3: it said nothing", [{"case": "before"}]),
        Result(2, "is_killed", "failed", "its process ended with -9: last words", [{"case": "before"}]),
        Result(3, "cannot_run", "not run", "no card", []),
        Result(4, "finds_a_wrong_case", "failed", "1 of 2 cases is wrong", [{"case": "a"}, {"case": "b"}]),
        Result(5, "passes", "passed", "", [{"device": "sim"}]),
        Result(6, "lacks_a_package", "not run", "No module named 'a_package_that_is_not_there'", [{"row": 1}]),
        Result(7, "lacks_a_module_of_ours", "failed", "No module named 'tests.cuda.not_there'", []),
        Result(8, "yields_nothing", "failed", "yielded nothing", []),
    ] == [replace(each, said="", seconds=0.0) for each in results]
    said = {each.name: each.said for each in results}
    assert "last words" == said["is_killed"]
    assert said["raises"].startswith("Traceback") and said["raises"].endswith("in two lines")
    assert "" == said["cannot_run"] + said["finds_a_wrong_case"] + said["passes"]
    assert 1 == exit_code(results)
    assert 0 == exit_code(results[3:4] + results[5:7])
    text = write_report(results, "sim", tmp_path)
    assert "\n## 5. passes\n\n| device |\n| --- |\n| sim |\n" in text
    assert "\nWhat is_killed printed at last:\n\n    last words\n" in text
    lines = text.splitlines()
    assert "## Steps" == lines[-13]
    line = rf"| 0 | raises | failed | {results[0].seconds:.1f} | AssertionError: planted \| failure in two lines |"
    assert line == lines[-9]


def test_a_step_that_overruns_has_failed(tmp_path):
    (result,) = run_steps([Step(0, "hangs", f"{HERE}:hangs", 0.1)], "sim", ["hangs"], tmp_path, patience=2)
    assert Result(0, "hangs", "failed", "not done within 0.2 s", []) == replace(result, seconds=0.0)
    assert result.seconds >= 0.2


def test_results_are_kept_before_the_next_step_runs(tmp_path):
    """So that whoever ends the check from outside leaves what was found out."""
    kept = []

    def keep(results):
        write_report(results, "sim", tmp_path / "kept")
        kept.append(json.loads((tmp_path / "kept" / "results.json").read_text())["steps"])

    steps = [Step(i, name, f"{HERE}:{name}", 60) for i, name in enumerate(("passes", "exits"))]
    run_steps(steps, "sim", ["passes", "exits"], tmp_path, keep=keep)
    assert [[], [("passes", "passed")]] == [[(step["name"], step["status"]) for step in steps] for steps in kept]
    assert {"results.json", "results.md"} == {path.name for path in (tmp_path / "kept").iterdir()}


class HoldsASession:
    """What a step's frames hold while its error is told: freed before, it ends the process, as a session may."""

    def __del__(self):
        os._exit(9)


def fails_with_a_session(_device):
    yield {"row": 1}
    session = HoldsASession()
    raise StepFailedError(f"found by {type(session).__name__}")


def test_a_failure_is_told_before_what_the_step_holds_is_freed(tmp_path):
    step = Step(0, "fails", f"{HERE}:fails_with_a_session", 60)
    (result,) = run_steps([step], "sim", ["fails"], tmp_path)
    assert ("failed", "found by HoldsASession") == (result.status, result.reason)


LEAVES_A_CHILD = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "while True: pass"]).pid)
"""


# Ends while a command of its own runs, which has said its number through a pipe.
LEAVES_A_COMMAND = """
import os, sys, threading
from tests.cuda.gpu_check.runner import run_command
said, saying = (os.fdopen(end, mode) for end, mode in zip(os.pipe(), "rw"))
nested = [sys.executable, "-c", "import os, signal; print(os.getpid(), flush=True); signal.pause()"]
threading.Thread(target=run_command, args=(nested, 600, saying)).start()
print(said.readline(), flush=True)
os._exit(0)
"""


# Has a command run, whose number it says, and is told to end.
IS_TERMINATED = """
import os, sys, threading
from tests.cuda.gpu_check.runner import end_children_when_terminated, run_in_group
end_children_when_terminated()
said, saying = (os.fdopen(end, mode) for end, mode in zip(os.pipe(), "rw"))
nested = [sys.executable, "-c", "import os, signal; print(os.getpid(), flush=True); signal.pause()"]
def terminate():
    print(said.readline(), flush=True)
    os.kill(os.getpid(), 15)
threading.Thread(target=terminate).start()
run_in_group(nested, 600, saying)
"""


def test_the_step_that_runs_ends_with_the_check(tmp_path):
    said = tmp_path / "said"
    with said.open("w") as file:
        assert (
            143 == subprocess.run([sys.executable, "-c", IS_TERMINATED], stdout=file, cwd=ROOT, check=False).returncode
        )
    assert has_ended(int(said.read_text()))


@pytest.mark.parametrize("program", [LEAVES_A_CHILD, LEAVES_A_COMMAND], ids=["child", "command of its own"])
def test_the_processes_that_a_step_started_end_with_it(tmp_path, program):
    said = tmp_path / "said"
    with said.open("w") as file:
        assert 0 == run_in_group([sys.executable, "-c", program], 60, file, cwd=ROOT)
    assert has_ended(int(said.read_text()))


def has_ended(process: int) -> bool:
    """Whether it is gone, or dead and not waited for, within ten seconds."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 10)[0])
    finally:
        os.close(handle)


@pytest.mark.parametrize("run", [run_command, run_in_group])
def test_a_command_ends_with_its_exit_code_or_with_its_limit(tmp_path, run):
    with (tmp_path / "said").open("w") as said:
        assert 7 == run([sys.executable, "-c", "print('x'); raise SystemExit(7)"], 60, said)
        assert run([sys.executable, "-c", "while True: pass"], 0.1, said) is None
    assert "x\n" == (tmp_path / "said").read_text()


def test_steps_that_were_not_chosen_are_not_run(tmp_path):
    (result,) = run_steps([Step(0, "raises", f"{HERE}:raises", 60)], "sim", [], tmp_path)
    assert ("not run", "not chosen", 2) == (result.status, result.reason, exit_code([result]))


@pytest.mark.parametrize("part", [1, 2])
def test_a_part_takes_at_most_eight_minutes(part):
    assert 8 * 60 == PART_LIMIT_S
    assert sum(step.limit_s for step in STEPS if step.part == part) <= PART_LIMIT_S


NEEDS_TORCH = {"flashinfer", "sdpa", "torch-matmul", "flex-attention", "triton"}
NEEDS_GPU = {"newer-cubin", "sanitizers", "ort-paged-attention", "ncu"}


@pytest.mark.parametrize("part", [1, 2])
def test_every_step_passes_on_the_simulator_or_says_why_not(tmp_path, part):
    report = tmp_path / "report"
    assert 0 == main(["--device", "sim", "--part", str(part), "--out", str(tmp_path), "--report", str(report)])
    assert ["results.json", "results.md"] == sorted(path.name for path in report.iterdir())
    found = json.loads((report / "results.json").read_text())
    ran = {step["name"]: step for step in found["steps"] if step["name"] not in NEEDS_TORCH}
    for name in NEEDS_GPU & ran.keys():
        assert "not run" == ran[name]["status"]
        assert ran.pop(name)["reason"].startswith("needs a GPU: ")
    comparison = ran.pop("comparison", {"status": "not run"})
    assert comparison["status"] in ("passed", "not run")  # there is torch, or there is none
    expected = {step.name for step in STEPS if step.part == part} - NEEDS_TORCH - NEEDS_GPU
    assert dict.fromkeys(expected, ("passed", "")) == {name: (x["status"], x["reason"]) for name, x in ran.items()}
    assert all(step["rows"] for step in ran.values())
    assert {"date", "device", "machine"} <= found.keys()
    if part == 1:
        assert "simulator" == found["machine"]["card"]
        assert {"driver", "NVRTC", "python"} <= found["machine"].keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--steps ropes", "there is no ropes"),
        ("--part 2 --steps decode-times,rope", "--steps: not in part 2: rope"),
        ("--patience 0", "--patience: invalid positive value: '0'"),
        ("--patience -1", "--patience: invalid positive value: '-1'"),
        ("--patience nan", "--patience: invalid positive value: 'nan'"),
    ],
)
def test_what_would_run_nothing_is_refused(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as refused:
        main([*arguments.split(), "--device", "sim", "--out", str(tmp_path)])
    assert 2 == refused.value.code
    assert message in capsys.readouterr().err


class SpilledDevice:
    name = "sim"
    max_shared_bytes = 227 << 10

    def resources(self, _config):
        return [KernelResources("attn_decode", 255, 0, 128, 0, 2), KernelResources("attn_prefill", 255, 8, 128, 0, 0)]


def test_a_kernel_that_spills_or_fits_nowhere_fails_the_compilation():
    rows = []
    with pytest.raises(StepFailedError, match="2 kernels have stack or spills, 2 fit no multiprocessor"):
        rows.extend(compilation(SpilledDevice()))  # two kinds of KV
