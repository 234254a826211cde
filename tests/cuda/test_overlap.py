"""Steps that are enqueued before the one before has been waited for, on host memory that acts as late as it may."""

from dataclasses import replace

import numpy as np
import pytest

from service.core.batch_state import BatchState
from service.core.plan import StepPlan
from service.core.types import Request, SamplingParams
from service.errors import ExecutorError
from tests.cuda.host_executor import HostExecutor
from tests.cuda.numpy_kernels import fixed_arguments
from tests.cuda.test_executor import EDITED, GREEDY, SAMPLED, decode_plan, requests
from tests.cuda.test_sampling_in_graph import NOTHING_FITS
from tests.stepping import run_requests

LENGTHS = (5, 17, 70, 9)
LONG = replace(GREEDY, max_tokens=20)
BIASED = replace(
    SAMPLED, max_tokens=20, logit_bias=((7, 3.0), (9, -2.0)), min_tokens=9, stop_token_ids=tuple(range(99))
)


def ahead_of(plan: StepPlan, batch: BatchState, continues: list[int]) -> StepPlan:
    """A step of some rows of `plan`, as the scheduler makes it."""
    places, count = np.array(continues, np.int32), len(continues)
    ones, trues = np.ones(count, np.int32), np.ones(count, np.bool_)
    return StepPlan(1, plan.rows[places], ones, trues, count, count, num_in_flight=ones, continues=places)


def land(batch: BatchState, rows: np.ndarray, token_ids: np.ndarray) -> None:
    """What a commit does to the columns that a step reads."""
    batch.num_computed_tokens[rows] += 1
    batch.append_tokens(rows, token_ids)


@pytest.fixture
def made(host_executor) -> HostExecutor:
    made = host_executor(deterministic="on")
    made.executor.warm_up()
    return made


@pytest.mark.parametrize(
    "sampling",
    [LONG, replace(SAMPLED, max_tokens=20), BIASED, replace(LONG, num_logprobs=3)],
    ids=["greedy", "sampled", "biased", "logprobs"],
)
def test_tokens_are_those_of_steps_that_wait_for_each_other(made, sampling: SamplingParams) -> None:
    asked = requests(sampling, LENGTHS)
    expected, found = (run_requests(made.executor, asked, looks_ahead=looks) for looks in (False, True))
    assert expected.num_ahead == 0 and found.num_ahead > 10
    assert expected.tokens == found.tokens
    for seq_id, entries in expected.logprobs.items():
        assert [entry.chosen for entry in entries] == [entry.chosen for entry in found.logprobs[seq_id]]


def test_a_stop_token_ends_a_sequence_whose_next_step_is_in_flight(made) -> None:
    asked = requests(replace(SAMPLED, max_tokens=20), LENGTHS)
    whole = run_requests(made.executor, asked).tokens
    stops = {  # a token that comes late, and not before
        seq_id: next(token for token in tokens[6 + seq_id :] if token not in tokens[: 6 + seq_id])
        for seq_id, tokens in whole.items()
    }
    stopped = [
        replace(request, sampling=replace(request.sampling, stop_token_ids=(stops[request.seq_id],)))
        for request in asked
    ]
    found = run_requests(made.executor, stopped, looks_ahead=True)
    assert found.num_ahead > 5
    for seq_id, tokens in whole.items():
        assert tokens[: tokens.index(stops[seq_id]) + 1] == found.tokens[seq_id]


@pytest.mark.parametrize(
    ("sampling", "bounds"),
    [(EDITED, None), (BIASED, NOTHING_FITS), (replace(SAMPLED, num_logprobs=2), NOTHING_FITS)],
    ids=["penalties", "logits that the host edits", "logprobs from the host"],
)
def test_steps_that_hold_up_the_next_are_waited_for(host_executor, sampling: SamplingParams, bounds) -> None:
    """The host is to see tokens of theirs first, or samples some of them itself."""
    made = host_executor(deterministic="on", bounds=bounds)
    made.executor.warm_up()
    asked = requests(replace(sampling, max_tokens=8), LENGTHS)
    expected, found = (run_requests(made.executor, asked, looks_ahead=looks) for looks in (False, True))
    assert found.num_ahead == 0
    assert expected.tokens == found.tokens


def test_blocks_that_a_step_ahead_evicts_are_kept_in_host_memory(host_executor) -> None:
    """Prompts that were computed before come back from there, after sequences that left no device block alone."""
    options = {"deterministic": "on", "kv_memory": "400KiB"}
    tight = host_executor(host_kv_memory="1MiB", **options)
    asked = requests(LONG, (40, 50, 60))
    asked += [Request(10 + each.seq_id, each.prompt_token_ids, replace(each.sampling, max_tokens=60)) for each in asked]
    expected, found = (run_requests(tight.executor, asked, looks_ahead=looks) for looks in (False, True))
    assert found.num_ahead > 10
    assert expected.tokens == found.tokens


def test_each_step_is_waited_for_once_behind_the_next_ones_work(made) -> None:
    made.device.events.clear()
    plan, batch = decode_plan(made, [70, 5])
    steps = [made.executor.dispatch(plan, batch)]
    for _ in range(3):
        ahead = ahead_of(plan, batch, [0, 1])
        steps.append(made.executor.dispatch(ahead, batch))
        land(batch, plan.rows, steps[-2].wait().token_ids)
        assert not made.device.is_idle, "the step ahead has not been waited for"
        plan = ahead
    steps[-1].wait()
    assert made.device.is_idle
    begins, ends = ["copy_in", "copy_in_rows"], ["replay", "copy_out", "mark"]
    enqueued = [*begins, "copy_within", *ends]
    assert [*begins, *ends, *[*enqueued, "wait"] * 3, "wait"] == made.device.events


def test_rows_that_have_left_are_skipped_in_the_next_steps_tokens(made) -> None:
    """Rows 0, 2 and 3 of four go on, in two runs; their tokens are those of a step that waits."""
    plan, batch = decode_plan(made, [70, 5, 33, 12])
    other = decode_plan(made, [70, 5, 33, 12])[1]
    first = made.executor.dispatch(plan, batch)
    made.device.events.clear()
    second = made.executor.dispatch(ahead_of(plan, batch, [0, 2, 3]), batch)
    assert 2 == made.device.events.count("copy_within")
    first_ids, found = first.wait().token_ids, second.wait().token_ids
    land(other, plan.rows, first_ids)
    rows = plan.rows[[0, 2, 3]]
    again = StepPlan(1, rows, np.ones(3, np.int32), np.ones(3, np.bool_), 3, 3)
    assert made.executor.dispatch(again, other).wait().token_ids.tolist() == found.tolist()


def test_a_row_that_cannot_be_sampled_from_fails_in_both_steps_and_alone(made) -> None:
    plan, batch = decode_plan(made, [40, 5])
    good = made.executor.dispatch(plan, batch).wait()
    land(batch, plan.rows, good.token_ids)
    expected = made.executor.dispatch(plan, batch).wait()
    kv = made.executor.layout
    block_bytes = kv.layer_bytes // kv.num_blocks
    plan, batch = decode_plan(made, [40, 5])
    address = made.executor._kv.addresses[0]
    made.device.bytes_at(address + int(batch.block_table[0, 0]) * block_bytes, block_bytes)[:] = 0xFF
    first = made.executor.dispatch(plan, batch)
    second = made.executor.dispatch(ahead_of(plan, batch, [0, 1]), batch)
    for found, alone in ((first.wait(), good), (second.wait(), expected)):
        assert ([0], alone.token_ids[1]) == (found.failed.tolist(), found.token_ids[1])


def test_a_step_ahead_follows_a_step_that_it_can_go_on_with_or_is_refused(made, host_executor) -> None:
    refusal = "which it does not go on with"
    plan, batch = decode_plan(made, [3, 9])
    ahead = ahead_of(plan, batch, [0, 1])
    with pytest.raises(ExecutorError, match=refusal):
        made.executor.dispatch(ahead, batch)
    first = made.executor.dispatch(plan, batch)
    with pytest.raises(ExecutorError, match=refusal):
        made.executor.dispatch(plan, batch)
    second = made.executor.dispatch(ahead, batch)
    with pytest.raises(ExecutorError, match=refusal):
        made.executor.dispatch(ahead, batch)
    assert first.can_continue and second.can_continue
    assert 2 == len(first.wait().token_ids) == len(second.wait().token_ids)
    lazy = host_executor(capture="lazy")
    for can_continue in (False, True):
        step = lazy.executor.dispatch(*decode_plan(lazy, [3]))
        assert step.can_continue == can_continue, "the first one captures"
        step.wait()


@pytest.mark.parametrize("broken", ["copy_in", "copy_within", "replay", "copy_out", "mark"])
def test_a_step_that_cannot_follow_leaves_the_one_before_as_it_is(made, broken: str) -> None:
    """Whatever it had enqueued. It is dispatched again behind that one's tokens, which may be lost on the device."""
    plan, batch = decode_plan(made, [70, 5])
    expected = made.executor.dispatch(plan, batch).wait()
    other = decode_plan(made, [70, 5])[1]
    land(other, plan.rows, expected.token_ids)
    after = made.executor.dispatch(plan, other).wait().token_ids.tolist()
    plan, batch = decode_plan(made, [70, 5])
    ahead = ahead_of(plan, batch, [0, 1])
    first = made.executor.dispatch(plan, batch)
    made.device.broken = {broken}
    with pytest.raises(ExecutorError, match=f"{broken} failed: CUDA error 700"):
        made.executor.dispatch(ahead, batch)
    made.device.broken = set()
    assert not first.can_continue
    with pytest.raises(ExecutorError, match="which it does not go on with"):
        made.executor.dispatch(ahead, batch)
    assert expected.token_ids.tolist() == first.wait().token_ids.tolist()
    land(batch, plan.rows, expected.token_ids)
    assert after == made.executor.dispatch(plan, batch).wait().token_ids.tolist()


def test_closing_waits_for_steps_in_flight_before_it_frees_what_they_use(host_executor) -> None:
    """As when a step's results cannot be published while the next one is on its way."""
    made = host_executor(host_kv_memory="512KiB")
    made.executor.warm_up()
    plan, batch = decode_plan(made, [70, 5])
    made.executor.dispatch(replace(plan, offload=np.array([[1, 0]], np.int32)), batch)
    made.executor.dispatch(ahead_of(plan, batch, [0, 1]), batch)
    made.executor.close()
    assert (0, True) == (made.device.num_buffers, made.device.is_closed)


def test_a_replay_ahead_launches_the_same_as_one_that_waits(made) -> None:
    """Byte for byte, though its inputs were staged elsewhere and one of four rows has left."""
    plan, batch = decode_plan(made, [70, 5, 9, 20])
    made.kernels.take_log()
    first = made.executor.dispatch(plan, batch)
    second = made.executor.dispatch(ahead_of(plan, batch, [0, 1, 2]), batch)
    logs = []
    for step in (first, second):
        step.wait()
        launches = made.kernels.take_log()
        logs.append([(*launch[:4], fixed_arguments(launch.name, launch.arguments)) for launch in launches])
    assert len(logs[0]) == 2 * 3 + 3, "rotation, decode and combine, of two layers; sampling"
    assert logs[0] == logs[1]
