"""The sampling op on the real kernel, on the simulator: alone, and as the last op of the engine's graph."""

import ctypes
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from graphs.ops import library_path
from service.core.types import SamplingParams
from service.executor.cuda.kernels import SLICE_LOGITS
from service.executor.cuda.launch import CudaOps
from tests.cuda.conftest import HEAD_DIM
from tests.cuda.simulated_kernels import SimulatedKernels
from tests.cuda.test_executor import GREEDY, SAMPLED, requests
from tests.cuda.test_sample_rows_cuda import MAX_TOP, SampleCase
from tests.cuda.test_sampling_in_graph import FEATURES, NOTHING_FITS, dispatched
from tests.cudasim.build import missing_tool
from tests.stepping import run_requests

pytestmark = pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool()))

LENGTHS = (70, 1, 130)


@pytest.fixture(scope="module")
def kernels() -> Iterator[SimulatedKernels]:
    kernels = SimulatedKernels(HEAD_DIM, block_size=16)
    yield kernels
    kernels.close()


def few(sampling: SamplingParams) -> list:
    return requests(replace(sampling, max_tokens=4, num_logprobs=max(sampling.num_logprobs, 2)), LENGTHS)


def test_draws_of_the_op_follow_the_masses(kernels) -> None:
    masses = np.array([0.4, 0.3, 0.2, 0.1])
    num_draws = 300
    case = SampleCase(num_draws, 4, kernels)
    case.inputs[0][:] = np.log(masses)
    for place, value in enumerate((1.0, 0, 1.0, 0.0, 11)):
        case.inputs[1 + place][:] = value
    ops = CudaOps(ctypes.CDLL(str(library_path())))
    tokens = case.run(ops)
    ops.use(None)
    counts, expected = np.bincount(tokens, minlength=4), num_draws * masses
    assert ((counts - expected) ** 2 / expected).sum() < 16.27  # chi-square, 3 degrees of freedom, 1 in 1,000


def test_deterministic_steps_log_probabilities_are_the_same_bytes_in_any_batch(host_executor, kernels) -> None:
    """Rows of five slices, in 12 blocks that the device holds at once: they would take one slice each, or three."""
    sample_blocks = host_executor(deterministic="on").executor._runner._decode_step.sample_blocks
    ops, together = CudaOps(ctypes.CDLL(str(library_path()))), SampleCase(6, 4 * SLICE_LOGITS + 99, kernels)
    together.inputs[0] -= 14  # of float16: the masses' sum is about 1, whose last bits its logarithm then shows
    together.inputs[0][:, 7] = 0
    cases = [together]
    for row in range(6):
        cases.append(alone := SampleCase(1, 4 * SLICE_LOGITS + 99, kernels))
        alone.inputs = [each[row : row + 1] for each in together.inputs]
    for case in cases:
        case.step.sample_blocks = sample_blocks
        case.buffers["num_logprobs"][:] = MAX_TOP
        case.run(ops)
    ops.use(None)
    assert np.isfinite(together.buffers["top_logprobs"]).all()
    for name in ("logprob", "top_tokens", "top_logprobs"):
        alone = np.concatenate([case.buffers[name] for case in cases[1:]])
        assert together.buffers[name].tobytes() == alone.tobytes()


@pytest.mark.parametrize("sampling", FEATURES.values(), ids=FEATURES)
def test_what_rows_may_ask_for_is_what_the_host_makes_of_it(host_executor, kernels, sampling: SamplingParams) -> None:
    """Edits on the host, and the CPU op's sampling, over the same kernels' logits."""
    on_device = run_requests(host_executor(kernels).executor, few(sampling))
    on_host = run_requests(host_executor(kernels, bounds=NOTHING_FITS).executor, few(sampling))
    assert on_host.tokens == on_device.tokens
    for seq_id, entries in on_host.logprobs.items():
        for its, ours in zip(entries, on_device.logprobs[seq_id], strict=True):
            assert its.chosen == pytest.approx(ours.chosen, abs=1e-4)
            assert its.top_token_ids.tolist() == ours.top_token_ids.tolist()
            assert its.top_logprobs == pytest.approx(ours.top_logprobs, abs=1e-4)


@pytest.mark.parametrize("sampling", FEATURES.values(), ids=FEATURES)
def test_the_first_tokens_are_the_cpu_executors(host_executor, cpu_executor, kernels, sampling: SamplingParams) -> None:
    """Its activations are float32, these float16: log-probabilities differ in the third digit, few tokens do."""
    found, expected = (run_requests(each, few(sampling)) for each in (host_executor(kernels).executor, cpu_executor))
    num_equal = 0
    for seq_id, tokens in expected.tokens.items():
        for index, token_id in enumerate(tokens):
            if found.tokens[seq_id][index] != token_id:
                break
            num_equal += 1
            its, ours = expected.logprobs[seq_id][index], found.logprobs[seq_id][index]
            assert its.chosen == pytest.approx(ours.chosen, abs=0.05)
    assert num_equal >= 12, "of 15"


def test_a_replay_samples_by_its_own_steps_parameters(host_executor, kernels) -> None:
    steps = [[replace(SAMPLED, seed=seed)] * 3 for seed in (1, 2)] + [[GREEDY, FEATURES["bias"], FEATURES["logprobs"]]]
    eager = host_executor(kernels, capture="off")
    expected = [dispatched(eager, [70, 5, 9], sampling) for sampling in steps]
    made = host_executor(kernels, capture_buckets=(4,))
    made.executor.warm_up()
    made.session.run_ids.clear()
    assert expected == [dispatched(made, [70, 5, 9], sampling) for sampling in steps]
    assert [2] * 3 == made.session.run_ids
    assert 3 == len(set(map(tuple, expected)))
