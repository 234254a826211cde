"""The CUDA executor end to end on host memory: scheduler, plan, op library, kernels, sampling."""

from dataclasses import replace

import numpy as np
import pytest

from service.core.batch_state import BatchState
from service.core.plan import StepPlan
from service.core.types import Request, SamplingParams
from service.errors import ConfigError, ExecutorError
from service.executor.cuda.memory import DeviceKv
from service.executor.kv_layout import KvDtype, KvLayout
from tests.cuda.conftest import CONFIG, HEAD_DIM
from tests.cuda.host_device import HostDevice
from tests.cuda.host_executor import HostExecutor
from tests.cuda.numpy_kernels import NumpyKernels
from tests.stepping import run_requests

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, top_k=40, top_p=0.95, min_p=0.01)
EDITED = replace(SAMPLED, repetition_penalty=1.1, presence_penalty=0.2)
LENGTHS = (1, 17, 130, 70, 9, 45)


def requests(sampling: SamplingParams, lengths: tuple[int, ...] = LENGTHS) -> list[Request]:
    rng = np.random.default_rng(5)
    return [
        Request(
            seq_id=index,
            prompt_token_ids=rng.integers(3, 256, length).astype(np.int32),
            sampling=replace(sampling, seed=1000 + index, max_tokens=sampling.max_tokens + index),
        )
        for index, length in enumerate(lengths)
    ]


def test_log_probabilities_are_the_cpu_executors(host_executor, cpu_executor) -> None:
    """First tokens only, of all tokens: activations are float16 here and float32 there."""
    asked = requests(replace(GREEDY, num_logprobs=256))
    asked = [replace(request, sampling=replace(request.sampling, max_tokens=1)) for request in asked]
    found, expected = (run_requests(each, asked) for each in (host_executor().executor, cpu_executor))
    for seq_id, (exact,) in expected.logprobs.items():
        ours, its = np.empty(256), np.empty(256)
        (logprobs,) = found.logprobs[seq_id]
        ours[logprobs.top_token_ids] = logprobs.top_logprobs
        its[exact.top_token_ids] = exact.top_logprobs
        assert np.abs(ours - its).max() < 0.05


def test_greedy_tokens_are_the_cpu_executors_until_a_near_tie(host_executor, cpu_executor) -> None:
    asked = requests(replace(GREEDY, num_logprobs=2))
    found, expected = (run_requests(each, asked) for each in (host_executor().executor, cpu_executor))
    num_equal = 0
    for seq_id, tokens in expected.tokens.items():
        for ours, its, logprobs in zip(found.tokens[seq_id], tokens, expected.logprobs[seq_id], strict=True):
            if ours != its:
                assert logprobs.top_logprobs[0] - logprobs.top_logprobs[1] < 0.05
                break
            num_equal += 1
    assert num_equal > 50, "of 63: most of the texts were compared"


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, EDITED], ids=["greedy", "sampled", "edited"])
def test_tokens_do_not_depend_on_company_or_buckets(host_executor, sampling: SamplingParams) -> None:
    executor, asked = host_executor(deterministic="on").executor, requests(sampling)
    together = run_requests(executor, asked)
    alone = {request.seq_id: run_requests(executor, [request]).tokens[request.seq_id] for request in asked}
    assert alone == together.tokens
    eager = host_executor(deterministic="on", capture="off").executor
    assert alone == run_requests(eager, asked).tokens


def test_a_preempted_sequence_comes_to_the_same_tokens(host_executor) -> None:
    """Three times 4 blocks, growing to 7: 15 do not hold them. What was decoded is prefilled on the way back."""
    executor, asked = host_executor(deterministic="on").executor, requests(replace(GREEDY, max_tokens=40), (60, 60, 60))
    expected, crowded = run_requests(executor, asked), run_requests(executor, asked, num_blocks=16)
    assert (0, True) == (expected.num_preemptions, crowded.num_preemptions > 0)
    assert expected.tokens == crowded.tokens


def test_samples_that_share_a_prompt_yield_what_each_yields_alone(host_executor) -> None:
    """Their last block is copied on the device."""
    made = host_executor(deterministic="on")
    first = replace(requests(SAMPLED, (21,))[0], seq_id=1)
    forks = [
        replace(first, seq_id=seq_id, sampling=replace(first.sampling, seed=1000 + seq_id), fork_of=1)
        for seq_id in (2, 3)
    ]
    together = run_requests(made.executor, [first, *forks])
    assert "copy_pieces" in made.device.events
    for request in (first, *forks):
        alone = run_requests(made.executor, [replace(request, fork_of=None)])
        assert alone.tokens[request.seq_id] == together.tokens[request.seq_id]


def decode_plan(made: HostExecutor, context_lens: list[int]) -> tuple[StepPlan, BatchState]:
    """One token more for sequences of these lengths, whose earlier K and V are zeros, in blocks of their own."""
    limits, num_rows = made.executor.limits, len(context_lens)
    batch = BatchState(limits.max_num_seqs, limits.max_model_len, limits.block_size)
    batch.num_tokens[:num_rows] = batch.num_prompt_tokens[:num_rows] = context_lens
    batch.num_computed_tokens[:num_rows] = np.array(context_lens) - 1
    width = limits.max_model_len // limits.block_size
    for row in range(num_rows):
        batch.block_table[row] = 1 + (np.arange(width) + row * 7) % (limits.num_blocks - 1)
    rows = np.arange(num_rows, dtype=np.int32)
    return StepPlan(0, rows, np.ones(num_rows, np.int32), np.ones(num_rows, np.bool_), num_rows, num_rows), batch


def test_a_replayed_step_copies_in_twice_and_out_once_and_waits_once(host_executor) -> None:
    made = host_executor()
    made.executor.warm_up()
    plan, batch = decode_plan(made, [70, 5])
    made.device.events.clear()
    made.executor.dispatch(plan, batch).wait()
    assert ["copy_in", "copy_in_rows", "replay", "copy_out", "mark", "wait"] == made.device.events


def test_a_steps_tokens_outlive_the_next_step(host_executor) -> None:
    made = host_executor()
    plan, batch = decode_plan(made, [70, 5])
    result = made.executor.dispatch(plan, batch).wait()
    tokens = result.token_ids.tolist()
    batch.token_ids[:2, [69, 4]] = 77
    other = made.executor.dispatch(plan, batch).wait()
    assert tokens != other.token_ids.tolist()
    assert tokens == result.token_ids.tolist()


def test_rows_that_cannot_be_sampled_fail_alone_on_the_device(host_executor) -> None:
    made = host_executor()
    plan, batch = decode_plan(made, [40, 5])
    good = made.executor.dispatch(plan, batch).wait()
    assert good.failed.tolist() == []
    kv = made.executor.layout
    address = made.executor._kv.addresses[0]
    block_bytes = kv.layer_bytes // kv.num_blocks
    made.device.bytes_at(address + int(batch.block_table[0, 0]) * block_bytes, block_bytes)[:] = 0xFF
    plan, batch = decode_plan(made, [40, 5])
    result = made.executor.dispatch(plan, batch).wait()
    assert ([0], good.token_ids[1]) == (result.failed.tolist(), result.token_ids[1])


def test_a_step_while_another_is_in_flight_or_after_closing_is_refused(host_executor) -> None:
    made = host_executor()
    plan, batch = decode_plan(made, [3])
    step = made.executor.dispatch(plan, batch)
    with pytest.raises(ExecutorError, match="another is in flight"):
        made.executor.dispatch(plan, batch)
    step.wait()
    made.executor.close()
    made.executor.close()
    assert (True, True) == (made.session.is_closed, made.device.is_closed)
    with pytest.raises(ExecutorError, match="closed"):
        made.executor.dispatch(plan, batch)


def test_a_failed_launch_is_an_executor_error_and_the_next_step_runs(host_executor) -> None:
    made = host_executor(capture="off")
    plan, batch = decode_plan(made, [30])
    good = made.executor.dispatch(plan, batch).wait().token_ids
    function = made.executor._runner._decode_step.attn_decode.function
    made.executor._runner._decode_step.attn_decode.function = 99
    with pytest.raises(ExecutorError, match="attn_decode cannot be launched: CUDA error 400"):
        made.executor.dispatch(plan, batch).wait()
    made.executor._runner._decode_step.attn_decode.function = function
    assert good.tolist() == made.executor.dispatch(plan, batch).wait().token_ids.tolist()


@pytest.mark.parametrize("broken", [{"copy_out"}, {"copy_out", "wait"}], ids=["copy", "copy and wait"])
def test_a_step_whose_tokens_cannot_be_copied_back_is_over_when_that_is_told(host_executor, broken: set[str]) -> None:
    """The replay before it was enqueued, and reads what the next step will overwrite."""
    made = host_executor()
    made.executor.warm_up()
    plan, batch = decode_plan(made, [70, 5])
    made.device.events.clear()
    made.device.broken = broken
    with pytest.raises(ExecutorError, match="copy_out failed: CUDA error 700"):
        made.executor.dispatch(plan, batch)
    assert ["copy_in", "copy_in_rows", "replay", "wait"] == made.device.events
    made.device.broken = set()
    assert 2 == len(made.executor.dispatch(plan, batch).wait().token_ids)


def test_warm_up_leaves_the_kv_buffer_as_it_was(host_executor) -> None:
    made = host_executor()
    made.executor.warm_up()
    kv = made.executor.layout
    for address in made.executor._kv.addresses:
        assert not made.device.bytes_at(address, kv.layer_bytes).any()


def test_the_kv_buffer_takes_its_share_of_what_measured_steps_leave(host_executor) -> None:
    made = host_executor(kv_memory="0.5")
    kv_bytes = made.executor.layout.total_bytes
    left_bytes = made.device.free_bytes()
    # Host memory is not taken by runs and captures: only the margin, a 64th, is reserved.
    share_bytes = (left_bytes + kv_bytes) * 63 // 128
    assert 0 <= share_bytes - kv_bytes <= kv_bytes // made.executor.limits.num_blocks + 1


def test_block_tables_are_gathered_in_pinned_memory_of_the_step(host_executor) -> None:
    made = host_executor(capture="off")
    runner = made.executor._runner
    for context_lens in ([20, 70], [33, 50]):
        table = runner.next_table(is_decode_only=True)
        plan, batch = decode_plan(made, context_lens)
        made.executor.dispatch(plan, batch).wait()
        width = -(-max(context_lens) // 16)
        assert batch.block_table[:2, :width].tolist() == table[: 2 * width].reshape(2, width).tolist()
        assert not np.shares_memory(table, runner.next_table(is_decode_only=True)), "the next step's is another"
    assert not made.executor._inputs._block_table.any(), "none was gathered elsewhere"


def test_a_device_with_too_little_memory_is_refused(tiny_float16) -> None:
    kernels = NumpyKernels(HEAD_DIM, 16)
    config = replace(CONFIG, model_dir=tiny_float16, kv_memory="1MiB")
    with pytest.raises(ConfigError, match=r"kv_memory: '1MiB' is more than the|are not free"):
        HostExecutor.create(config, kernels, HostDevice(kernels.launch_address, capacity_bytes=1 << 20))


def test_no_buffer_is_left_whichever_allocation_fails(tiny_float16, host_executor) -> None:
    """Of the 29 of an executor: nine of each kind of step, four of the runner, three for results, two KV buffers."""
    kernels = NumpyKernels(HEAD_DIM, 16)
    num_allocations = host_executor().device.num_allocations
    assert 2 * 9 + 4 + 3 + 2 * 2 == num_allocations
    for place in range(num_allocations):
        device = HostDevice(kernels.launch_address)
        device.refused_allocation = place
        with pytest.raises(ConfigError, match="bytes of memory are not free"):
            HostExecutor.create(replace(CONFIG, model_dir=tiny_float16), kernels, device)
        assert (place, 0) == (place, device.num_buffers)


def test_a_kv_buffer_that_cannot_be_cleared_is_freed() -> None:
    device = HostDevice(launch_address=0)
    device.broken = {"clear"}
    with pytest.raises(ExecutorError, match="clear failed"):
        DeviceKv(device, KvLayout(KvDtype.FLOAT16, 2, 4, 2, 16, HEAD_DIM))
    assert 0 == device.num_buffers


def test_closing_after_a_fault_closes_everything_and_tells_it(host_executor) -> None:
    """As a GPU does it, which after a fault refuses every call."""
    made = host_executor()
    made.device.wait()
    num_on_device = made.device.num_buffers - made.device.num_pinned
    made.device.broken = {"free", "wait"}
    with pytest.raises(ExecutorError, match="free failed"):
        made.executor.close()
    assert (0, num_on_device) == (made.device.num_pinned, made.device.num_buffers)
    assert (True, True) == (made.session.is_closed, made.device.is_closed)
    made.device.lose_everything()
