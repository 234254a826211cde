"""Steps with chunks that are enqueued, and followed, before they have been waited for."""

from dataclasses import replace

import numpy as np
import pytest

from service.core.plan import StepPlan
from service.core.types import Request, SamplingParams
from tests.cuda.test_executor import EDITED, GREEDY, SAMPLED, requests
from tests.stepping import dispatched, run_requests, scheduler_for

# A step holds 48 tokens: prompts of a few chunks, one of them last, which goes on while others decode.
LENGTHS = (9, 120, 5, 30, 200)
LONG = replace(GREEDY, max_tokens=12)


@pytest.mark.parametrize("capture", ["eager", "lazy", "off"])
@pytest.mark.parametrize(
    "sampling",
    [LONG, replace(SAMPLED, max_tokens=12), replace(SAMPLED, max_tokens=12, num_logprobs=3, min_tokens=5)],
    ids=["greedy", "sampled", "logprobs"],
)
def test_tokens_are_those_of_steps_that_wait_for_each_other(host_executor, sampling: SamplingParams, capture) -> None:
    made = host_executor(deterministic="on", capture=capture, max_num_seqs=8)
    made.executor.warm_up()
    asked = requests(sampling, LENGTHS)
    expected = run_requests(made.executor, asked)
    found = run_requests(made.executor, asked, looks_ahead=True)
    assert found.num_chunk_steps_ahead > 4 and found.num_ahead_of_chunks > 5
    assert expected.tokens == found.tokens
    for seq_id, entries in expected.logprobs.items():
        assert [entry.chosen for entry in entries] == [entry.chosen for entry in found.logprobs[seq_id]]


def test_a_prompt_with_penalties_may_be_computed_ahead_and_holds_up_who_follows(host_executor) -> None:
    """Its own first token depends on the prompt alone; the one after, on that token."""
    made = host_executor(deterministic="on", max_num_seqs=8)
    made.executor.warm_up()
    asked = requests(LONG, LENGTHS)
    asked[4] = replace(asked[4], sampling=replace(EDITED, seed=3, max_tokens=4))
    expected = run_requests(made.executor, asked)
    found = run_requests(made.executor, asked, looks_ahead=True)
    assert found.num_chunk_steps_ahead > 4
    assert expected.tokens == found.tokens


def test_a_step_with_chunks_takes_its_first_tokens_from_the_step_before(host_executor) -> None:
    """Of four prompts three are done, and the second has its only token: row 1 of the next reads that of the third."""
    made = host_executor(deterministic="on")
    made.executor.warm_up()
    scheduler = scheduler_for(made.executor)
    for seq_id, length in enumerate((4, 6, 5, 70)):
        sampling = replace(LONG, max_tokens=1 if seq_id == 1 else 12)
        scheduler.add(Request(seq_id, np.arange(3, 3 + length, dtype=np.int32), sampling))
    first = dispatched(made.executor, scheduler, scheduler.plan(0))
    made.device.events.clear()
    second = dispatched(made.executor, scheduler, scheduler.plan_ahead(0))
    assert first is not None and second is not None
    assert ["copy_in", "copy_in_rows", "copy_within", "copy_within", "run", "copy_out", "mark"] == made.device.events
    plan: StepPlan = second[0]
    assert ([1, 1, 37], [0, 2]) == (plan.num_scheduled.tolist(), plan.continues.tolist())
    sampled = first[1].wait().token_ids
    assert not made.device.is_idle
    second[1].wait()
    read = made.device.bytes_at(made.executor._runner.mixed.address("token_ids"), 8).view(np.int32)
    assert sampled[[0, 2]].tolist() == read.tolist()


def test_a_step_that_cannot_follow_chunks_leaves_them_as_they_are(host_executor) -> None:
    made = host_executor(deterministic="on")
    made.executor.warm_up()
    asked = requests(LONG, (9, 60))
    expected = run_requests(made.executor, asked).tokens
    scheduler = scheduler_for(made.executor)
    for request in asked:
        scheduler.add(request)
    outputs: dict[int, list[int]] = {request.seq_id: [] for request in asked}
    while (flight := dispatched(made.executor, scheduler, scheduler.plan(0))) is not None:
        plan, handle = flight
        ahead = scheduler.plan_ahead(0)
        if ahead is not None:
            made.device.broken = {"copy_out"}
            with pytest.raises(Exception, match="copy_out failed"):
                made.executor.dispatch(ahead, scheduler.batch)
            made.device.broken = set()
            scheduler.abort(ahead, has_written=True)
        delta = scheduler.commit(plan, handle.wait())
        for seq_id, token_id in zip(delta.seq_ids.tolist(), delta.token_ids.tolist(), strict=True):
            outputs[seq_id].append(token_id)
    assert expected == outputs
