"""The GPU check on the simulator: what it reports, and that no step keeps the others from their turn."""

import json
import os

import pytest

from tests.cuda.attention_problem import Problem, expected_attention, make_arrays
from tests.cuda.gpu_check import NOT_IN_THIS_VERSION, STEPS, Step, exit_code, main, run_steps
from tests.cuda.gpu_check_device import KernelResources, StepFailedError
from tests.cuda.gpu_check_report import Result, write_report
from tests.cuda.gpu_check_steps import attention_case, compilation
from tests.cudasim.build import missing_tool

pytestmark = pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool()))

HERE = "tests.cuda.test_gpu_check"


def fails(_device):
    raise AssertionError("planted | failure\nin two lines")


def finds_a_wrong_case(_device):
    raise StepFailedError("1 of 2 cases is wrong", [{"case": "a"}, {"case": "b"}])


def dies(_device):
    os._exit(3)


def hangs(_device):
    while True:
        pass


def passes(device):
    return [{"device": device.name}]


def test_every_step_of_this_version_passes_on_the_simulator_or_says_why_not(tmp_path):
    assert 0 == main(["--device", "sim", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "results.json").read_text())
    ran = {step["name"]: (step["status"], step["reason"]) for step in found["steps"]}
    no_times = ("not run", "needs a GPU: the simulator tells no times")
    expected = {step.name: ("not run", NOT_IN_THIS_VERSION) for step in STEPS}
    expected |= dict.fromkeys(("environment", "compilation", "correctness"), ("passed", ""))
    assert expected | {"ceilings": no_times, "decode-times": no_times} == ran
    assert "simulator" == found["machine"]["card"]
    assert {"date", "device"} <= found.keys()
    assert {"driver", "NVRTC", "python"} <= found["machine"].keys()
    kernels = {row["case"].split()[0] for step in found["steps"] for row in step["rows"] if "case" in row}
    assert {"rope_kv_write", "attn_decode", "attn_prefill", "sample_rows"} == kernels


def test_failed_steps_are_reported_and_the_others_still_run(tmp_path):
    steps = [
        Step(i, name, f"{HERE}:{name}", 60) for i, name in enumerate(("fails", "dies", "passes", "finds_a_wrong_case"))
    ]
    steps.insert(2, Step(7, "hangs", f"{HERE}:hangs", 0.1))
    results = run_steps(steps, "sim", [step.name for step in steps], tmp_path)
    assert [
        Result(0, "fails", "failed", "AssertionError: planted | failure\nin two lines", []),
        Result(1, "dies", "failed", "its process ended with 3: nothing on standard error", []),
        Result(7, "hangs", "failed", "not done within 0.1 s", []),
        Result(2, "passes", "passed", "", [{"device": "sim"}]),
        Result(3, "finds_a_wrong_case", "failed", "1 of 2 cases is wrong", [{"case": "a"}, {"case": "b"}]),
    ] == results
    assert 1 == exit_code(results)
    text = write_report(results, "sim", tmp_path)
    assert r"| 0 | fails | failed | AssertionError: planted \| failure in two lines |" in text.splitlines()
    assert "\n## 2. passes\n\n| device |\n| --- |\n| sim |\n" in text
    assert text.endswith("\n## 3. finds_a_wrong_case\n\n| case |\n| --- |\n| a |\n| b |\n")


class SpilledDevice:
    name = "sim"

    def resources(self, _config):
        return [KernelResources("attn_decode", 255, 0, 2), KernelResources("attn_prefill", 255, 8, 1)]


def test_a_kernel_that_spills_fails_the_compilation():
    with pytest.raises(StepFailedError, match="1 of 2 kernels have stack or spills") as raised:
        compilation(SpilledDevice())
    assert [0, 8] == [row["local_bytes"] for row in raised.value.rows]


def test_steps_that_were_not_chosen_are_not_run(tmp_path):
    (result,) = run_steps([Step(0, "fails", f"{HERE}:fails", 60)], "sim", [], tmp_path)
    assert ("not run", "not chosen", 0) == (result.status, result.reason, exit_code([result]))


def test_an_answer_with_a_wrong_head_is_beyond_the_limit():
    problem = Problem((5, 40), (1, 1), 3)
    case = attention_case(problem, "decode")
    right = expected_attention(problem, make_arrays(problem))
    wrong = right.copy()
    wrong[1, 2] = right[1, 1]
    assert case.error([right]) == 0.0
    assert case.error([wrong]) > 1.0
