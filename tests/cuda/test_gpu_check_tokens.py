"""What the GPU check says of steps ahead and of blocks that were away, right ones and damaged ones, on host memory."""

from dataclasses import replace

import pytest

from tests.cuda.gpu_check.executors import OpenExecutor
from tests.cuda.gpu_check.model_tokens import LENGTHS, restore_blocks, returning, step_ahead
from tests.cuda.host_executor import HostExecutor
from tests.cuda.test_executor import GREEDY, requests
from tests.stepping import run_requests


def opened(made: HostExecutor) -> OpenExecutor:
    made.executor.warm_up()
    return OpenExecutor(made.executor, [], [], 0)


@pytest.fixture
def ahead_of_eager(host_executor, cpu_executor):
    """A function from an executor to what is said of it."""
    plain = requests(replace(GREEDY, max_tokens=24), LENGTHS["cuda"])
    asked = [replace(each, sampling=replace(each.sampling, num_logprobs=2)) for each in plain]
    exact = run_requests(cpu_executor, asked)
    eager = run_requests(host_executor(capture="off").executor, asked)
    return lambda made: step_ahead(opened(made), plain, exact, eager)


def test_steps_ahead_come_to_the_eager_tokens(host_executor, ahead_of_eager):
    row, faults = ahead_of_eager(host_executor())
    assert [] == faults
    assert row["steps ahead"] > 10


def test_steps_ahead_with_stale_tokens_are_a_fault(host_executor, ahead_of_eager):
    made = host_executor()
    made.device.copy_within = lambda *_: None  # of the tokens of the step before
    assert ["stepping ahead: other tokens than eager steps'"] == ahead_of_eager(made)[1]


def test_an_executor_whose_steps_all_wait_is_a_fault(host_executor, ahead_of_eager):
    made = host_executor()
    dispatch = made.executor.dispatch

    def dispatch_alone(*arguments):
        step = dispatch(*arguments)
        step.can_continue = False
        return step

    made.executor.dispatch = dispatch_alone
    row, faults = ahead_of_eager(made)
    assert (0, ["stepping ahead: every step waited for the one before"]) == (row["steps ahead"], faults)


@pytest.mark.parametrize("device_name", ["sim", "cuda"])
def test_a_prompt_that_comes_again_has_its_blocks_from_host_memory(host_executor, cpu_executor, device_name):
    asked = returning(device_name)
    exact = run_requests(cpu_executor, asked)
    row, faults = restore_blocks(opened(host_executor(host_kv_memory="512KiB")), asked, exact)
    assert ([], 0) == (faults, row["tokens"] - row["equal to the CPU's"])
    assert row["restored blocks"] > 0
    assert row["log-probabilities off by"] < 0.002
    without = restore_blocks(opened(host_executor()), asked, exact)[1]
    assert ["blocks from host memory: none was restored"] == without


def test_restored_blocks_that_do_not_arrive_are_a_fault(host_executor, cpu_executor):
    asked = returning("cuda")
    made = host_executor(host_kv_memory="512KiB")
    of_device, kv = opened(made), made.executor._kv
    copy_pieces, layers = made.device.copy_pieces, [range(each, each + kv.layout.layer_bytes) for each in kv.addresses]

    def copy_elsewhere(targets, sources, sizes):
        if not any(int(targets[0]) in layer for layer in layers):
            copy_pieces(targets, sources, sizes)

    made.device.copy_pieces = copy_elsewhere
    row, faults = restore_blocks(of_device, asked, run_requests(cpu_executor, asked))
    assert [f"blocks from host memory: log-probabilities are off by {row['log-probabilities off by']:.3f}"] == faults
