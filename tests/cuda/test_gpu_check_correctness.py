"""What the GPU check calls right: errors beyond a limit, distances from stored outputs, draws against chances."""

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from service.errors import ExecutorError
from tests.cuda.attention_problem import Problem, expected_attention, make_arrays
from tests.cuda.gpu_check import sampling, stored
from tests.cuda.gpu_check.compilation import all_cubins
from tests.cuda.gpu_check.correctness import (
    Case,
    attention_case,
    attention_cases,
    check,
    planned_case,
    planned_steps,
    rope_cases,
)
from tests.cuda.gpu_check.device import StepFailedError, open_device
from tests.cuda.gpu_check.resources import KernelResources, expected_blocks
from tests.cuda.gpu_check.sampling import chi_square, critical_value, draws_case
from tests.cuda.gpu_check.stored import CASES, FOLDER, distance_in_ulps, read, write
from tests.cudasim.build import missing_tool

BF16 = ml_dtypes.bfloat16
needs_simulator = pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool()))


def test_an_answer_with_a_wrong_head_is_beyond_the_limit():
    problem = Problem((5, 40), (1, 1), 3)
    case = attention_case(problem, "decode")
    right = expected_attention(problem, make_arrays(problem))
    wrong = right.copy()
    wrong[1, 2] = right[1, 1]
    assert case.error([right]) == 0.0
    assert case.error([wrong]) > 1.0


@needs_simulator
def test_a_step_that_is_cut_comes_to_what_it_does_whole_in_every_row(tmp_path):
    turn, mixed = planned_steps("sim")
    with open_device("sim", tmp_path) as device:
        for step in (turn, mixed):
            case = planned_case(step)
            cut, whole = case.run(device)
            assert cut.tobytes() != whole.tobytes()
            assert 0 < case.error([cut, whole]) <= 1
            cut[3 % len(cut), 2] = cut[3 % len(cut), 1]
            assert case.error([cut, whole]) > 1
        uncut = replace(turn, contexts=(20,))
        with pytest.raises(StepFailedError, match="the plan cuts none of 1 items"):
            planned_case(uncut).run(device)


class Sim:
    name = "sim"


@pytest.mark.parametrize(
    ("answers", "error", "is_right"),
    [([1.0, 1.0], 1.0, True), ([1.0, 1.0], 1.01, False), ([1.0, 1.0], math.nan, False), ([1.0, 2.0], 0.0, False)],
    ids=["at the limit", "beyond it", "not a number", "another answer"],
)
def test_a_case_is_right_if_it_is_near_and_always_the_same(answers, error, is_right):
    left = list(answers)
    case = Case("family", lambda _: [np.array([left.pop(0)])], lambda _: error)
    rows = []
    try:
        rows.extend(row for row in check(Sim(), [case]))
        assert is_right
    except StepFailedError as failed:
        assert not is_right
        assert "1 of 1 rows are wrong" == str(failed)


def test_a_case_that_cannot_run_is_wrong_and_the_next_one_runs():
    def refused(_device):
        raise ExecutorError("cuLaunchKernel failed: CUDA error 1")

    cases = [Case("a", refused, lambda _: 0.0), Case("b", lambda _: [np.zeros(1)], lambda _: 0.0)]
    rows = []
    with pytest.raises(StepFailedError, match="1 of 2 rows are wrong"):
        rows.extend(check(Sim(), cases))
    assert [False, True] == [row["right"] for row in rows]
    assert "ExecutorError: cuLaunchKernel failed: CUDA error 1" == rows[0]["said"]


def test_the_matrix_on_a_gpu_is_the_whole_product():
    """2 types, 4 head dimensions, 2 block sizes, 2 kinds of KV, 4 groups; 6 problems each; 10 long a type and D."""
    assert 2 * 4 * 2 * 2 * 4 * 6 + 2 * 4 * 10 == len(attention_cases("cuda"))
    assert 2 * 4 * 2 * 2 * 2 == len(rope_cases("cuda"))
    # rope: 2 types, 4 D, 2 BS, 2 KV; attention the same; combine: 2 types, 4 D; sampling: 3 kinds of logits;
    # as the product compiles them: 4 sources, 2 types, 4 D, 2 KV
    assert 32 + 32 + 8 + 3 + 4 * 2 * 4 * 2 == len(all_cubins(227 << 10))


def test_blocks_that_fit_follow_from_registers_shared_memory_and_threads():
    def blocks(registers, threads, shared):
        return expected_blocks(KernelResources("k", registers, 0, threads, shared, None))

    # 124 registers round to 128 a thread: 4096 a warp, 4 in a quarter, 16 warps, 4 blocks; shared 228 / (74 + 1) = 3
    assert 3 == blocks(124, 128, 74 << 10)
    assert 4 == blocks(124, 128, 56 << 10)
    assert 3 == blocks(129, 128, 0)  # 136 a thread, 4352 a warp: 3 in a quarter's 16384, 12 warps
    assert 5 == blocks(104, 96, 0)  # 3328 a warp: 4 in a quarter, 16 warps; 19 would be 6 blocks of 3
    assert 2 == blocks(16, 1024, 0)  # 2048 threads
    assert 32 == blocks(16, 32, 0)


def test_a_distance_is_in_units_of_the_last_place():
    row = np.array([[1.0, 1.5, -2.0, 0.001]], BF16)
    near = row.copy()
    near[0, 0] += np.asarray(2**-7, BF16)  # the next number; the row's root mean square is 1.35
    near[0, 3] = -0.001  # 0.002 of a unit of 2^-7
    assert 1.0 == distance_in_ulps(near, row)
    assert 2.0 == distance_in_ulps(row + np.asarray([[0, 0, 2**-5, 0]], BF16), row)  # the unit at 2 is 2^-6
    assert math.inf == distance_in_ulps(np.array([[np.nan, 1.5, -2.0, 0.001]], BF16), row)
    assert math.inf == distance_in_ulps(np.array([1, 2]), np.array([1, 3]))
    holes = np.array([[np.nan, 1.0]], np.float32)
    assert 0.0 == distance_in_ulps(holes, holes)


def test_stored_cases_are_read_as_they_were_written(tmp_path):
    before = {"q": np.array([1.5, np.nan], BF16), "kv": np.array([2, 3], np.uint8).view(stored.E4M3)}
    write(tmp_path / "case.npz", before, {"q": np.arange(3)})
    read_before, read_after = read(tmp_path / "case.npz")
    assert {name: (each.dtype, each.tobytes()) for name, each in before.items()} == {
        name: (each.dtype, each.tobytes()) for name, each in read_before.items()
    }
    assert [0, 1, 2] == read_after["q"].tolist()


@needs_simulator
def test_a_stored_output_that_differs_fails_the_replay(tmp_path, monkeypatch):
    for name in CASES:
        before, after = read(FOLDER / f"{name}.npz")
        if name == "rope-bf16":
            after["q"][0, 0, 0] = 9.0
        write(tmp_path / f"{name}.npz", before, after)
    monkeypatch.setattr(stored, "FOLDER", tmp_path)
    rows = []
    with open_device("sim", tmp_path) as device, pytest.raises(StepFailedError, match="1 of 7 cases"):
        rows.extend(stored.replay(device))
    assert ["rope-bf16"] == [row["case"] for row in rows if not row["near"]]


@needs_simulator
def test_draws_do_not_depend_on_how_many_a_launch_makes(tmp_path, monkeypatch):
    with open_device("sim", tmp_path) as device:
        (in_one,) = draws_case(20, 5).run(device)
        monkeypatch.setattr(sampling, "LAUNCH_ROWS", 8)
        (in_three,) = draws_case(20, 5).run(device)
    assert 20 == len(in_one)
    assert in_one.tolist() == in_three.tolist()
    assert len(set(in_one.tolist())) > 1


def test_stored_cases_are_small():
    assert sum(path.stat().st_size for path in FOLDER.glob("*.npz")) < 400_000
    assert {f"{name}.npz" for name in CASES} == {path.name for path in FOLDER.glob("*.npz")}


def test_critical_values_are_those_of_tables():
    """Chi-square exceeded with probability 0.05 and 0.001, from a printed table."""
    assert 5.991 == pytest.approx(critical_value(2, 0.05), abs=5e-4)
    assert 18.307 == pytest.approx(critical_value(10, 0.05), abs=5e-4)
    assert 59.703 == pytest.approx(critical_value(30, 0.001), abs=5e-4)


def test_draws_that_follow_other_chances_fail():
    expected = np.array([500.0, 300.0, 200.0, 0.0])

    def error(*counts: int) -> float:
        return chi_square(np.repeat(np.arange(-1, 5), counts), expected)

    assert 0.0 == error(0, 500, 300, 200, 0, 0)
    # (60^2 / 500 + 60^2 / 300) = 19.2; the critical value of 2 at 1e-6 is -2 ln 1e-6 = 27.6
    assert 19.2 / 27.631 == pytest.approx(error(0, 560, 240, 200, 0, 0), rel=1e-4)
    assert error(0, 600, 200, 200, 0, 0) > 1
    assert math.inf == error(0, 499, 300, 200, 1, 0), "it has no chance"
    assert math.inf == error(1, 499, 300, 200, 0, 0), "it is no token"
    assert math.inf == error(0, 499, 300, 200, 0, 1), "it is no token"
