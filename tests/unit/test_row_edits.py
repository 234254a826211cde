"""What the sampling kernel is given to edit and to report, by hand calculation."""

import numpy as np
import pytest

from service.core.types import SamplingParams
from service.executor.cuda.row_edits import DividedJob, SamplingBounds, divide, edit_columns
from service.executor.logit_edits import LogitEdit
from service.executor.sampler import SamplingJob
from tests.unit.edit_cases import edit_of

BOUNDS = SamplingBounds(max_edits=10, max_top=3)


def edit(tokens: tuple[int, ...] = (), num_prompt: int = 0, banned: tuple[int, ...] = (), **features) -> LogitEdit:
    return edit_of(SamplingParams(max_tokens=9, **features), tokens, num_prompt, banned)


def penalized(num_tokens: int) -> LogitEdit:
    """Of so many different tokens."""
    return edit(tuple(range(num_tokens)), presence_penalty=0.5)


def test_each_token_is_edited_once_with_its_uses_in_the_output_and_its_bias() -> None:
    """Prompt 8, 3, 8; output 5, 3, 5: 8 was in the prompt alone, 3 once and 5 twice in the output, 9 nowhere."""
    made = edit((8, 3, 8, 5, 3, 5), 3, (5, 2), logit_bias=((3, 1.5), (9, -2.0)), repetition_penalty=1.2)
    tokens, counts, biases = edit_columns(made)
    assert [2, 3, 5, 8, 9] == tokens.tolist()
    assert [-1, 1, 2, 0, -1] == counts.tolist()
    assert [-np.inf, 1.5, -np.inf, 0.0, -2.0] == biases.view(np.float32).tolist()


def test_a_banned_token_stays_banned_whatever_its_bias() -> None:
    assert -np.inf == edit_columns(edit(banned=(4,), logit_bias=((4, 50.0),)))[2].view(np.float32)[0]


def test_a_step_without_features_is_the_devices_and_holds_up_nothing() -> None:
    job = SamplingJob(5, {}, {})
    assert DividedJob(job) == divide(job, BOUNDS)
    assert not divide(job, BOUNDS).holds_up_next


def test_rows_are_packed_one_behind_the_other() -> None:
    """Rows 1 and 3 of 5 are edited, 3 and 4 report."""
    job = SamplingJob(5, {1: edit(logit_bias=((7, 1.0),)), 3: edit((6, 6), 1, frequency_penalty=0.3)}, {3: 2, 4: 0})
    divided = divide(job, BOUNDS)
    assert ((), ((3, 2), (4, 0))) == (divided.host_rows, divided.num_logprobs)
    edits = divided.edits
    assert edits is not None
    assert [0, 0, 1, 1, 2, 2] == edits.indptr.tolist()
    assert [[7, 6], [-1, 1]] == edits.columns[:2].tolist()
    assert [1.0, 0.0] == edits.columns[2].view(np.float32).tolist()
    assert [[1, 0, 0], [1, np.float32(0.3), 0]] == edits.penalties[[1, 3]].tolist()
    assert [-1, -1, -1, 2, 0] == edits.num_logprobs.tolist()


@pytest.mark.parametrize(("num_tokens", "host_rows"), [(4, ()), (5, (2,))])
def test_rows_go_to_the_host_once_the_bound_is_full(num_tokens: int, host_rows: tuple[int, ...]) -> None:
    """6 and 4 are the 10 that fit; a later row that still fits is the device's."""
    edits = {0: penalized(6), 2: penalized(num_tokens), 3: edit()}
    divided = divide(SamplingJob(4, edits, dict.fromkeys(range(4), 1)), BOUNDS)
    assert host_rows == divided.host_rows
    assert tuple((row, 1) for row in range(4) if row not in host_rows) == divided.num_logprobs
    assert divided.edits is not None
    assert 6 + (4 if not host_rows else 0) == divided.edits.indptr[-1]


@pytest.mark.parametrize(("num_top", "host_rows"), [(3, ()), (4, (1,))])
def test_more_of_the_likeliest_than_there_is_room_for_are_the_hosts(num_top: int, host_rows: tuple[int, ...]) -> None:
    divided = divide(SamplingJob(2, {1: penalized(2)}, {1: num_top}), BOUNDS)
    assert host_rows == divided.host_rows
    assert (divided.edits is None) == bool(host_rows)


@pytest.mark.parametrize(
    ("edits", "num_logprobs", "expected"),
    [
        ({0: edit(logit_bias=((7, 1.0),))}, {}, False),
        ({0: edit(banned=(7,))}, {}, False),
        ({}, {0: 3}, False),
        ({}, {0: 4}, True),
        ({0: penalized(1)}, {}, True),
        ({0: edit(banned=tuple(range(11)))}, {}, True),
    ],
    ids=["bias", "bans", "logprobs", "logprobs of the host", "penalties", "edits of the host"],
)
def test_the_next_step_waits_for_tokens_that_the_host_samples_or_that_penalties_follow(
    edits, num_logprobs, *, expected: bool
) -> None:
    assert expected is divide(SamplingJob(1, edits, num_logprobs), BOUNDS).holds_up_next
