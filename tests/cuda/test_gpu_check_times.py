"""What the GPU check times: launches that compute attention, counted bytes and operations, judgements by hand."""

from contextlib import closing

import ml_dtypes
import numpy as np
import pytest

from service.errors import ConfigError
from service.executor.api import ExecutorLimits
from service.executor.simulated import SimulatedExecutor
from tests.cuda.attention_problem import Arrays, Problem, expected_attention
from tests.cuda.attention_runs import LIMIT
from tests.cuda.gpu_check.attention_cases import HEADS, Heads, TimedCase, decode_case, decode_cases, prefill_cases
from tests.cuda.gpu_check.attention_step import BLOCK_SIZE, AttentionStep
from tests.cuda.gpu_check.attention_times import (
    JUDGED,
    NOT_FINITE,
    conclude,
    decode_times,
    judge,
    num_pools,
    prefill_times,
)
from tests.cuda.gpu_check.ceilings import read_rate
from tests.cuda.gpu_check.comparison import compare
from tests.cuda.gpu_check.decode_steps import StepTimes, time_steps
from tests.cuda.gpu_check.device import NotRunError, StepFailedError, open_device
from tests.cuda.gpu_check.matmul import random_matrix
from tests.cuda.gpu_check.model_times import host_share
from tests.cuda.gpu_check.model_times import judge as judge_model
from tests.cuda.gpu_check.model_tokens import Comparison
from tests.cuda.gpu_check.model_tokens import compare as compare_tokens
from tests.cuda.gpu_check.report import Result
from tests.cuda.gpu_check.shaped_model import shaped_spec
from tests.cuda.gpu_check.sim_device import SimCheckDevice
from tests.cuda.gpu_check.timing import Timing, time_graph
from tests.cudasim.build import missing_tool
from tests.stepping import Outcome

needs_simulator = pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool()))


@needs_simulator
@pytest.mark.parametrize(
    ("q_lens", "contexts", "heads", "is_deterministic"),
    [
        ((1,), (512,), HEADS[0], False),
        ((1, 1, 40, 3), (100, 257, 40, 90), Heads(4, 2, 64), False),
        ((1, 1), (1030, 90), Heads(4, 2, 64), True),
        ((33,), (1100,), Heads(4, 2, 64), False),
    ],
    ids=["decode", "mixed", "deterministic", "turn"],
)
def test_timed_launches_compute_attention_in_every_pool(tmp_path, q_lens, contexts, heads, is_deterministic):
    case = TimedCase("case", q_lens, contexts, heads, is_deterministic=is_deterministic)
    problem = Problem(
        contexts,
        q_lens,
        heads.num_heads // heads.num_kv_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
    )
    bf16, pools, columns = ml_dtypes.bfloat16, 2, -(-max(contexts) // BLOCK_SIZE)
    with open_device("sim", tmp_path) as device:
        step = AttentionStep(device, case, pools)
        assert not step.is_output_finite(), "nothing has been written yet"
        assert step.counts.num_merges > 0, "some sequence is cut, so that the results are merged too"
        num_blocks = pools * case.num_blocks(BLOCK_SIZE)
        kv_shape = (num_blocks, 2, heads.num_kv_heads, BLOCK_SIZE, heads.head_dim)
        for call in range(pools):
            step(call)
            assert step.is_output_finite()
            q, kv, table = (each.value for each in step.decode_arguments[call][:3])
            arrays = Arrays(
                device.download(q, step.out.shape, np.uint16).view(bf16),
                device.download(kv, kv_shape, np.uint16).view(bf16),
                device.download(table, (len(contexts), columns), np.int32),
            )
            expected = expected_attention(problem, arrays)
            distance = np.linalg.norm(step.out.view(bf16).astype(np.float64) - expected)
            assert distance < LIMIT["bf16"] * np.linalg.norm(expected)
        step.close()


@needs_simulator
def test_the_read_only_kernel_reads_every_word(tmp_path):
    """An odd number of copies of a random chunk: their xor is that of the chunk, or the step fails."""
    with open_device("sim", tmp_path) as device:
        assert read_rate(device, 3 << 20) > 0
        # 62,501 quads for 6,144 threads: ten each, eight of them at a time, and 1,061 threads have one more
        assert read_rate(device, 1_000_016) > 0


def test_bytes_and_operations_are_counted():
    case = decode_case(64, 2048, HEADS[0])
    assert 536_870_912 + 2 * 64 * 32 * 128 * 2 == case.num_bytes  # 64 * 2048 * 8 heads * 128 * 2 bytes, K and V
    assert 4 * 128 * 32 * 64 * 2048 == case.num_operations
    chunk = TimedCase("chunk", (2,), (5,), Heads(3, 1, 64))
    assert 4 * 64 * 3 * (4 + 5) == chunk.num_operations  # the first of two tokens sees 4, the last 5
    e4m3 = decode_case(1, 32, Heads(4, 2, 64), is_kv_fp8=True)
    assert 32 * 2 * 2 * 64 + 2 * 4 * 64 * 2 == e4m3.num_bytes
    assert 3 + 2 == TimedCase("two", (1, 1), (33, 17), Heads(4, 2, 64)).num_blocks(16)


def test_every_case_of_the_plan_is_timed():
    names = [case.name for case in decode_cases()]
    assert 4 * 4 * 4 + 4 + 2 == len(set(names)) == len(names)
    assert f"{JUDGED} deterministic" in names
    assert JUDGED == "decode 64 x 2048, 32/8 D128"
    assert JUDGED in names
    assert [2048, 8192, 8 * 1024, 512, 32, 64 + 1024] == [case.num_tokens for case in prefill_cases()]


def test_matrices_that_are_multiplied_hold_the_same_numbers_in_either_type():
    half = random_matrix("half", 64).astype(np.float64)
    from_bits = random_matrix("bf16", 64).view(ml_dtypes.bfloat16).astype(np.float64)
    assert 0.9 < half.std() < 1.1
    assert np.abs(from_bits / half - 1).max() < 2**-7 + 2**-11  # cut after 7 bits, rounded to 11 of a significand


def test_pools_outgrow_the_cache_four_times_and_fit_the_memory():
    mib = 1 << 20
    assert 256 == num_pools(2 * mib, 512 * mib, 50 * mib, 1 << 37)
    assert 21 == num_pools(10 * mib, 64 * mib, 50 * mib, 1 << 37)  # 4 x 50 MiB and a byte
    assert 1 == num_pools(1 << 34, 512 * mib, 50 * mib, 1 << 37)
    assert 3 == num_pools(100 * mib, 512 * mib, 50 * mib, 400 * mib)  # 0.8 of 400 MiB
    assert 0 == num_pools(1 << 34, 512 * mib, 50 * mib, 1 << 34)


class RefusingDevice(SimCheckDevice):
    """Its kernels do not compile, or once they are loaded it has no memory left."""

    does_compile, is_full = True, False

    def kernels(self, config):
        if not self.does_compile:
            raise ConfigError("attention.cu does not compile for sm_90:\nerror")
        self.is_full = True
        return super().kernels(config)

    def allocate(self, num_bytes):
        if self.is_full:
            raise ConfigError(f"{num_bytes} bytes of GPU memory are not free")
        return super().allocate(num_bytes)


@needs_simulator
@pytest.mark.parametrize("step", [decode_times, prefill_times])
def test_what_no_memory_is_left_for_is_not_timed_and_nothing_timed_is_a_failure(tmp_path, step):
    device, rows = RefusingDevice(tmp_path), []
    with closing(device), pytest.raises(StepFailedError, match=r"none of 1 cases was timed: \d+ bytes of GPU memory"):
        rows.extend(step(device))
    ((case, reason),) = (row.values() for row in rows)
    assert reason.endswith("bytes of GPU memory are not free"), case


@needs_simulator
@pytest.mark.parametrize("step", [decode_times, prefill_times])
def test_kernels_that_do_not_compile_fail_a_timing(tmp_path, step):
    device = RefusingDevice(tmp_path)
    device.does_compile = False
    with closing(device), pytest.raises(ConfigError, match=r"attention\.cu does not compile"):
        list(step(device))


def test_a_timing_without_the_judged_case_has_not_judged():
    other, rates = {"case": "decode 1 x 512", "us": 1.0, "GB/s": 1.0}, (4.5e12, 4.8e12)
    conclude([other])
    conclude([other, {"case": JUDGED, "us": 1.0, "GB/s": 3840.0}], rates)
    with pytest.raises(NotRunError, match=f"{JUDGED}, which is judged, was not timed: not enough memory"):
        conclude([other, {"case": JUDGED, "not timed": "not enough memory"}], rates)
    with pytest.raises(StepFailedError, match="1 outputs are not finite"):
        conclude([other, {"case": JUDGED, "not timed": NOT_FINITE}], rates)
    with pytest.raises(StepFailedError, match="none of 1 cases was timed: not enough memory"):
        conclude([{"case": JUDGED, "not timed": "not enough memory"}], rates)
    with pytest.raises(StepFailedError, match=f"{JUDGED} reaches 79.2% of the memory's data sheet"):
        conclude([other, {"case": JUDGED, "us": 1.0, "GB/s": 3800.0}], (4.0e12, 4.8e12))


def test_the_judged_case_needs_both_shares():
    assert "" == judge(3.84e12, 4.5e12, 4.8e12)
    assert "85.0%" not in judge(3.84e12, 4.5e12, 4.8e12)
    assert "79.2% of the memory's data sheet, not 80%" in judge(3.8e12, 4.0e12, 4.8e12)
    assert "84.4% of what a kernel reads, not 85%" in judge(3.9e12, 4.62e12, 4.8e12)


class ScriptedDevice:
    """Tells times that were set before: of the warm-up, then of both series."""

    name = "sim"

    def __init__(self, *seconds):
        self.left = list(seconds)
        self.calls = []

    def capture(self, enqueue, num_calls):
        return lambda: [enqueue(call) for call in range(num_calls)]

    def seconds(self, group, num_calls):
        for call in range(num_calls):
            group(call)
        return self.left.pop(0)


def test_a_timing_is_of_one_call_and_tells_how_far_series_lie_apart():
    device = ScriptedDevice(9.0, 0.5, 0.4)
    timing = time_graph(device, device.calls.append, 4)
    assert Timing((0.125, 0.1)) == timing
    assert {"us": 100_000.0, "spread": "25.0%"} == timing.cells()
    assert 3 * [0, 1, 2, 3] == device.calls


def step(name, *rows):
    return Result(5, name, "passed", "", [*rows])


def test_others_times_are_compared_case_by_case():
    ours = step("decode-times", {"case": "decode a", "us": 100.0}, {"case": "decode b", "not timed": "no memory"})
    peers = [
        {"case": "decode a", "peer": "flashinfer", "us": 120.0},
        {"case": "decode a", "peer": "sdpa", "not timed": "its answer is wrong"},
        {"case": "decode b", "peer": "flashinfer", "us": 1.0},
    ]
    result = compare([ours, step("flashinfer", *peers)], "sim")
    assert [{"case": "decode a", "us": 100.0, "flashinfer": 1.2}] == result.rows
    assert ("passed", "") == (result.status, result.reason)
    assert "not run" == compare([ours], "cuda").status


SHAPES = ("prefill 1 x 2048", "prefill 1 x 8192", "prefill 8 x 1024", "chunk of 512 at 8192", "turn of 32 at 32800")
SDPA_CASES = [f"{shape}, 32/8 D128" for shape in SHAPES]


@pytest.mark.parametrize(
    ("num_ours", "num_theirs", "their_us", "expected"),
    [
        (5, 5, 30.0, ("passed", "")),
        (5, 5, 29.0, ("failed", f"below 60% of SDPA: {SDPA_CASES[0]}")),
        (5, 4, 30.0, ("not run", f"SDPA was not timed for {SDPA_CASES[4]}")),
        (4, 5, 30.0, ("not run", f"prefill-times has not timed {SDPA_CASES[4]}")),
        (5, 0, 0.0, ("not run", f"SDPA was not timed for {', '.join(SDPA_CASES)}")),
        (5, 1, 29.0, ("failed", f"below 60% of SDPA: {SDPA_CASES[0]}")),
    ],
    ids=["fast enough", "too slow", "SDPA lacks one", "we lack one", "SDPA has none", "too slow, others missing"],
)
def test_prefill_is_judged_by_every_case_that_sdpa_can_run(num_ours, num_theirs, their_us, expected):
    ours = step("prefill-times", *({"case": name, "us": 50.0} for name in SDPA_CASES[:num_ours]))
    decode = step("decode-times", {"case": JUDGED, "us": 140.0})
    theirs = [{"case": name, "peer": "sdpa", "us": 60.0} for name in SDPA_CASES[:num_theirs]]
    if theirs:
        theirs[0]["us"] = their_us
    others = step("triton", {"case": SDPA_CASES[0], "peer": "triton", "us": 9.0})
    flashinfer = step("flashinfer", {"case": JUDGED, "peer": "flashinfer", "us": 150.0})
    found = compare([ours, decode, step("sdpa", *theirs), others, flashinfer], "cuda")
    assert expected == (found.status, found.reason)
    assert "passed" == compare([ours, step("sdpa", *theirs), others], "sim").status


@pytest.mark.parametrize(
    ("their_us", "expected"),
    [
        ((140.0, 150.0), ("passed", "")),
        ((150.0, 133.0), ("failed", f"{JUDGED} takes 1.05 times as long as in flashinfer tensor cores")),
        ((), ("not run", f"FlashInfer was not timed for {JUDGED}")),
        (None, ("not run", f"decode-times has not timed {JUDGED}")),
    ],
    ids=["as fast", "slower than one of its kernels", "it has no time", "we have none"],
)
def test_decode_must_not_be_slower_than_flashinfer(their_us, expected):
    prefill = step("prefill-times", *({"case": name, "us": 50.0} for name in SDPA_CASES))
    sdpa = step("sdpa", *({"case": name, "peer": "sdpa", "us": 60.0} for name in SDPA_CASES))
    ours = [] if their_us is None else [{"case": JUDGED, "us": 140.0}]
    theirs = zip(("flashinfer", "flashinfer tensor cores"), their_us or (), strict=False)
    rows = [{"case": JUDGED, "peer": peer, "us": us} for peer, us in theirs]
    found = compare([prefill, sdpa, step("decode-times", *ours), step("flashinfer", *rows)], "cuda")
    assert expected == (found.status, found.reason)


def spec(hidden, layers):
    return shaped_spec("m", hidden, 96, layers, (2, 1, 64), 256)


def test_graphs_and_the_host_are_judged_by_whole_steps():
    small, large = spec(576, 30), spec(4096, 4)
    assert [] == judge_model(small, 1, StepTimes(100.0, 1150.0), StepTimes(100.0, 900.0))  # 1250 / 1000
    assert ["m: graphs are 1.24 times as fast, not 1.25"] == judge_model(
        small, 1, StepTimes(100.0, 1140.0), StepTimes(100.0, 900.0)
    )
    # 4 of 32 layers were measured: the device waits 8 times as long. 800 / (800 + 8 * 900) = 10 %
    assert 0.1 == host_share(large, StepTimes(800.0, 900.0))
    assert [] == judge_model(large, 256, StepTimes(1.0, 1.0), StepTimes(800.0, 900.0))
    assert ["m: the host takes 10.1% of a step of 256, not 10%"] == judge_model(
        large, 256, StepTimes(1.0, 1.0), StepTimes(810.0, 900.0)
    )


class Logprobs:
    def __init__(self, *top):
        self.top_logprobs = np.array(top)


def outcome(tokens, gap=1.0):
    made = Outcome()
    made.tokens, made.logprobs = {0: tokens}, {0: [Logprobs(-0.1, -0.1 - gap) for _ in tokens]}
    return made


def test_texts_may_part_at_a_near_tie_only():
    exact = outcome([1, 2, 3, 4])
    assert Comparison(4, 4, True) == compare_tokens(exact, outcome([1, 2, 3, 4]))
    assert Comparison(4, 3, False) == compare_tokens(exact, outcome([1, 2, 3, 9]))
    assert Comparison(4, 3, True) == compare_tokens(outcome([1, 2, 3, 4], gap=0.04), outcome([1, 2, 3, 9]))
    assert Comparison(4, 1, False) == compare_tokens(outcome([1, 2, 3, 4], gap=0.04), outcome([1, 9, 3, 4]))


@pytest.mark.parametrize("can_continue", [False, True])
def test_steps_that_follow_each_other_in_flight_are_timed_where_an_executor_lets_them(can_continue):
    limits = ExecutorLimits(100, 16, 4, 64, 512)
    found = time_steps(SimulatedExecutor(limits, can_continue=can_continue), 3, 5)
    assert (True, True, can_continue) == (found.host_us > 0, found.wait_us > 0, found.ahead_us is not None)
