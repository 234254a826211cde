"""The whole engine on the real kernels: scheduler, plan, op library, cuda/*.cu on the simulator, sampling."""

import ctypes
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from graphs.op_twins_attention import AttentionSpec
from graphs.ops import library_path
from service.core.types import SamplingParams
from service.errors import ExecutorError
from service.executor.cuda.launch import CudaOps
from tests.cuda.conftest import HEAD_DIM
from tests.cuda.numpy_kernels import SIGNATURES, fixed_arguments
from tests.cuda.simulated_kernels import SimulatedKernels
from tests.cuda.test_executor import decode_plan, requests
from tests.cuda.test_paged_attention_cuda import DECODES, CudaCase
from tests.cudasim.build import missing_tool
from tests.stepping import run_requests
from tests.unit.attention_cases import RAGGED, make_case

pytestmark = pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool()))

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, top_k=40, top_p=0.95, min_p=0.01)
LENGTHS = (70, 1, 130)


@pytest.fixture(scope="module")
def kernels() -> Iterator[SimulatedKernels]:
    kernels = SimulatedKernels(HEAD_DIM, block_size=16)
    yield kernels
    kernels.close()


@pytest.mark.parametrize("lengths", [RAGGED, DECODES], ids=["ragged", "decode"])
@pytest.mark.parametrize("changes", [{}, {"sliding_window": 70, "softcap": 3.0}], ids=["plain", "window and soft cap"])
def test_the_op_computes_what_it_is_defined_to(kernels, lengths, changes: dict) -> None:
    spec = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=HEAD_DIM, **changes)
    case = CudaCase(make_case(spec, lengths, np.float16, has_norms=True), kernels)
    expected, cache = case.expected()
    ops = CudaOps(ctypes.CDLL(str(library_path())))
    out = case.run(ops)
    ops.use(None)
    assert case.counts.num_merges > 0
    assert np.abs(expected - out.astype(np.float64)).max() < 8e-3
    assert np.array_equal(np.isnan(cache), np.isnan(case.case.kv_cache))
    assert np.nanmax(np.abs(cache.astype(np.float32) - case.case.kv_cache.astype(np.float32))) < 4e-3


def test_greedy_tokens_are_the_cpu_kernels_until_a_near_tie(host_executor, cpu_executor, kernels) -> None:
    """Prefill in chunks, mixed steps, decode steps in buckets: the first three tokens of three texts, at least."""
    made = host_executor(kernels)
    asked = requests(replace(GREEDY, num_logprobs=256), LENGTHS)
    found, expected = run_requests(made.executor, asked), run_requests(cpu_executor, asked)
    assert set(SIGNATURES) == {x.kernel for x in kernels.take_log()}
    num_equal = 0
    for seq_id, tokens in expected.tokens.items():
        for index, token_id in enumerate(tokens):
            exact, ours = expected.logprobs[seq_id][index], found.logprobs[seq_id][index]
            by_token = np.empty((2, 256))
            by_token[0, exact.top_token_ids], by_token[1, ours.top_token_ids] = exact.top_logprobs, ours.top_logprobs
            assert np.abs(by_token[0] - by_token[1]).max() < 0.05
            if token_id != found.tokens[seq_id][index]:
                assert exact.top_logprobs[0] - exact.top_logprobs[1] < 0.05
                break
            num_equal += 1
    assert num_equal >= 9


def test_sampled_tokens_are_the_numpy_kernels(host_executor, kernels) -> None:
    """The device samples here, from logits that differ in their last bits."""
    asked = requests(SAMPLED, LENGTHS)
    made = host_executor(kernels)
    found, expected = run_requests(made.executor, asked).tokens, run_requests(host_executor().executor, asked).tokens
    assert "sample_draw" in {launch.kernel for launch in kernels.take_log()}
    assert expected == found


def test_tokens_are_the_same_when_steps_are_enqueued_ahead(host_executor, kernels) -> None:
    """One wait for each step, at most one of which is in flight ahead."""
    made = host_executor(kernels, deterministic="on")
    made.executor.warm_up()
    asked = requests(replace(SAMPLED, max_tokens=6), LENGTHS)
    expected = run_requests(made.executor, asked)
    made.device.events.clear()
    found = run_requests(made.executor, asked, looks_ahead=True)
    assert (expected.num_ahead, expected.tokens) == (0, found.tokens)
    assert found.num_ahead > 3
    assert made.device.events.count("wait") == made.device.events.count("mark")


def test_replays_launch_the_same_whatever_the_lengths_and_the_block_tables(host_executor, kernels) -> None:
    made = host_executor(kernels, capture_buckets=(4,))
    logs, tokens = [], []
    for lens in ([5, 250, 64], [131, 1, 2, 65]):
        made.executor.dispatch(*decode_plan(made, lens)).wait()
        kernels.take_log()
        tokens.append(made.executor.dispatch(*decode_plan(made, lens)).wait().token_ids)
        launches = kernels.take_log()
        logs.append(
            [replace(launch, arguments=fixed_arguments(launch.kernel, launch.arguments)) for launch in launches]
        )
    assert len(logs[0]) == 2 * 3 + 3, "rotation, decode and combine, of two layers; sampling"
    assert logs[0] == logs[1]
    assert [3, 4] == [len(each) for each in tokens]


def test_a_fault_in_a_kernel_is_a_failed_step(host_executor, kernels) -> None:
    made = host_executor(kernels, capture="off")
    made.executor._runner._decode_step.attn_decode.block_threads = 96
    with pytest.raises(ExecutorError, match="attn_decode cannot be launched: CUDA error"):
        made.executor.dispatch(*decode_plan(made, [5])).wait()
    assert kernels.failure != ""
