"""The sampler's rare features against hand calculation, its gathering against the batch's columns."""

import math

import numpy as np
import pytest

from graphs.op_twins_rows import sample_rows
from service.core.batch_state import BatchState
from service.core.types import Float32Array, Int32Array, Request, SamplingParams
from service.errors import ExecutorError
from service.executor.logit_edits import LogitEdit, log_softmax, token_logprobs
from service.executor.sampler import Sampler
from service.executor.seen_tokens import SeenTokens

VOCAB_SIZE = 6
EOS = 4


class TwinRowSampler:
    """The numpy definition of the op SampleRows, over the same arrays that the op reads."""

    def __init__(self, logits: Float32Array, sampler: Sampler) -> None:
        self.logits = logits
        self.params = sampler.params

    def sample(self, num_rows: int) -> Int32Array:
        p = self.params.prefix(num_rows)
        try:
            return sample_rows(self.logits[:num_rows], p.temperature, p.top_k, p.top_p, p.min_p, p.seed, p.position)
        except ValueError as error:
            raise ExecutorError(str(error)) from error


def request_with(sampling: SamplingParams) -> Request:
    return Request(0, np.zeros(1, np.int32), sampling, eos_token_ids=(EOS,))


def batch_of(*rows: tuple[list[int], list[int], SamplingParams]) -> BatchState:
    """Rows of (prompt, output, parameters)."""
    batch = BatchState(max_num_seqs=8, max_model_len=16, block_size=4)
    for row, (prompt, output, sampling) in enumerate(rows):
        batch.seq_ids[row] = 100 + row
        batch.token_ids[row, : len(prompt + output)] = prompt + output
        batch.num_prompt_tokens[row] = len(prompt)
        batch.num_tokens[row] = len(prompt + output)
        batch.requests[row] = request_with(sampling)
        for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
            getattr(batch, name)[row] = getattr(sampling, name)
    return batch


def edited(logits: list[float], prompt: list[int], output: list[int], **features: object) -> list[float]:
    sampling = SamplingParams(max_tokens=9, **features)  # type: ignore[arg-type]
    row = np.array(logits, np.float32)
    LogitEdit.of(batch_of((prompt, output, sampling)), 0, sampling, SeenTokens()).apply(row)
    return row.tolist()


LOGITS = [2.0, -2.0, 4.0, -4.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        # Prompt 0 1, output 2 2 3. Positive logits are divided, negative ones multiplied, whatever the count.
        ({"repetition_penalty": 2.0}, [1.0, -4.0, 2.0, -8.0, 1.0, 0.0]),
        ({"frequency_penalty": 0.5}, [2.0, -2.0, 3.0, -4.5, 1.0, 0.0]),
        ({"presence_penalty": 0.5}, [2.0, -2.0, 3.5, -4.5, 1.0, 0.0]),
        (
            {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25},
            [1.0, -4.0, 0.75, -8.75, 1.0, 0.0],
        ),
        (
            {"repetition_penalty": 2.0, "logit_bias": ((0, 5.0), (5, -1.5), (5, -1.5))},
            [6.0, -4.0, 2.0, -8.0, 1.0, -3.0],
        ),
        ({"min_tokens": 4}, [2.0, -2.0, 4.0, -4.0, -math.inf, 0.0]),
        ({"min_tokens": 4, "stop_token_ids": (0, 5)}, [-math.inf, -2.0, 4.0, -4.0, -math.inf, -math.inf]),
        ({"min_tokens": 4, "stop_token_ids": (0,), "ignore_eos": True}, [-math.inf, -2.0, 4.0, -4.0, 1.0, 0.0]),
        ({"min_tokens": 3, "stop_token_ids": (0,)}, LOGITS),
        ({"min_tokens": 4, "logit_bias": ((EOS, 100.0),)}, [2.0, -2.0, 4.0, -4.0, -math.inf, 0.0]),
    ],
)
def test_edits_equal_hand_calculation(features: dict[str, object], expected: list[float]) -> None:
    assert expected == edited(LOGITS, [0, 1], [2, 2, 3], **features)


def test_penalties_before_the_first_output_token_touch_the_prompt_only_for_repetition() -> None:
    expected = [1.0, -4.0, 4.0, -4.0, 1.0, 0.0]
    assert expected == edited(LOGITS, [0, 1], [], repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=1.0)


def test_log_softmax_equals_float64_also_for_large_logits() -> None:
    logits = (np.random.default_rng(1).standard_normal(5000) * 10 + 300).astype(np.float32)
    exact = logits.astype(np.float64)
    exact = exact - (exact.max() + np.log(np.exp(exact - exact.max()).sum()))
    assert np.abs(exact - log_softmax(logits)).max() < 4e-6
    assert abs(np.exp(log_softmax(logits).astype(np.float64)).sum() - 1) < 1e-6


@pytest.mark.parametrize(
    ("num_top", "top"), [(0, []), (1, [2]), (2, [2, 0]), (3, [2, 0, 4]), (4, [2, 0, 4, 5]), (9, [2, 0, 4, 5, 1, 3])]
)
def test_top_logprobs_come_likeliest_first_and_lower_ids_first_on_a_tie(num_top: int, top: list[int]) -> None:
    row = np.array([-1, -3, -0.5, -3, -1, -2], np.float32)
    found = token_logprobs(row, 5, num_top)
    assert (-2.0, top, row[top].tolist()) == (found.chosen, found.top_token_ids.tolist(), found.top_logprobs.tolist())


@pytest.mark.parametrize("values", [[math.nan], [math.inf], [-math.inf] * VOCAB_SIZE])
def test_rows_that_cannot_be_sampled_fail_and_the_others_do_not(values: list[float]) -> None:
    plain = SamplingParams(max_tokens=9, temperature=0.0)
    rare = SamplingParams(max_tokens=9, temperature=0.0, num_logprobs=2, presence_penalty=1.0, min_tokens=2)
    batch = batch_of(*(([0], [1], sampling) for sampling in (plain, rare, plain, plain)))
    logits = np.array([LOGITS] * 4, np.float32)
    logits[1, : len(values)] = logits[3, : len(values)] = values
    sampler = Sampler(max_num_seqs=8)
    job = sampler.prepare(batch, np.arange(4, dtype=np.int32))
    result = sampler.finish(job, logits, TwinRowSampler(logits, sampler))
    assert (result.failed.tolist(), result.token_ids[[0, 2]].tolist()) == ([1, 3], [2, 2])


def test_sampling_that_fails_for_no_row_is_an_error_of_the_step() -> None:
    batch = batch_of(([0], [], SamplingParams(max_tokens=9)))
    sampler, logits = Sampler(max_num_seqs=8), np.array([LOGITS], np.float32)

    class Broken:
        def sample(self, num_rows: int) -> Int32Array:
            raise ExecutorError("broken")

    with pytest.raises(ExecutorError, match="broken"):
        sampler.finish(sampler.prepare(batch, np.zeros(1, np.int32)), logits, Broken())


def test_logprobs_are_of_the_raw_logits_whatever_the_edits() -> None:
    sampling = SamplingParams(max_tokens=9, temperature=0.0, logit_bias=((5, 100.0),), num_logprobs=2)
    batch = batch_of(([0], [], SamplingParams(max_tokens=9, temperature=0.0)), ([0], [], sampling))
    logits = np.array([LOGITS, LOGITS], np.float32)
    sampler = Sampler(max_num_seqs=8)
    job = sampler.prepare(batch, np.array([0, 1], np.int32))
    result = sampler.finish(job, logits, TwinRowSampler(logits, sampler))
    total = math.log(sum(math.exp(x) for x in LOGITS))
    assert (result.token_ids.tolist(), list(result.logprobs)) == ([2, 5], [1])
    assert math.isclose(result.logprobs[1].chosen, 0.0 - total, rel_tol=1e-6)
    assert result.logprobs[1].top_token_ids.tolist() == [2, 0]
    assert np.allclose(result.logprobs[1].top_logprobs, [4 - total, 2 - total], rtol=1e-6)


def test_parameters_follow_the_order_of_the_rows_and_position_is_the_number_of_known_tokens() -> None:
    batch = batch_of(
        ([1, 2, 3], [], SamplingParams(max_tokens=1, temperature=0.5, top_k=7, seed=2**63 - 1)),
        ([1], [2], SamplingParams(max_tokens=1, top_p=0.25, min_p=0.125, seed=-5)),
        ([1], [], SamplingParams(max_tokens=1, temperature=0.0)),
    )
    sampler = Sampler(max_num_seqs=8)
    job = sampler.prepare(batch, np.array([2, 0, 1], np.int32))
    columns = {name: getattr(sampler.params.prefix(3), name).tolist() for name in sampler.params.__slots__}
    assert (job.num_rows, job.edits, job.num_logprobs) == (3, {}, {})
    assert columns == {
        "temperature": [0.0, 0.5, 1.0],
        "top_k": [0, 7, 0],
        "top_p": [1.0, 1.0, 0.25],
        "min_p": [0.0, 0.0, 0.125],
        "seed": [0, 2**63 - 1, -5],
        "position": [1, 3, 2],
    }


def test_a_row_that_changes_its_sequence_changes_its_features() -> None:
    plain, penalised = SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, presence_penalty=1.0, num_logprobs=0)
    batch = batch_of(([0], [1], plain), ([0], [1], penalised))
    sampler, rows = Sampler(max_num_seqs=8), np.array([0, 1], np.int32)
    first = sampler.prepare(batch, rows)
    # Swap-remove: the last row's sequence moves into row 0.
    batch.seq_ids[0], batch.requests[0] = batch.seq_ids[1], request_with(penalised)
    batch.seq_ids[1], batch.requests[1] = 777, request_with(plain)
    second = sampler.prepare(batch, rows)
    assert (list(first.edits), first.num_logprobs) == ([1], {1: 0})
    assert (list(second.edits), second.num_logprobs) == ([0], {0: 0})


def test_a_sequence_keeps_its_features_when_it_moves_to_another_row() -> None:
    penalised = SamplingParams(max_tokens=9, presence_penalty=1.0)
    batch = batch_of(([0], [1], SamplingParams(max_tokens=9)), ([0], [1], penalised))
    sampler = Sampler(max_num_seqs=8)
    before = sampler.prepare(batch, np.array([1], np.int32))
    batch.seq_ids[0], batch.requests[0], batch.num_tokens[0] = batch.seq_ids[1], request_with(penalised), 3
    batch.token_ids[0, :3] = [0, 1, 5]
    after = sampler.prepare(batch, np.array([0], np.int32))
    assert ([0], [0]) == (list(before.edits), list(after.edits))
    assert ([0, 1, 5], [0, 1, 1]) == (after.edits[0].seen.tolist(), after.edits[0].num_uses.tolist())


def test_parameters_are_gathered_again_when_the_order_changes() -> None:
    batch = batch_of(*(([0] * (n + 1), [], SamplingParams(max_tokens=9, temperature=n / 4)) for n in range(3)))
    sampler = Sampler(max_num_seqs=8)
    for rows in ([0, 1, 2], [0, 1, 2], [2, 1, 0], [1], [1, 2]):
        sampler.prepare(batch, np.array(rows, np.int32))
        found = sampler.params.prefix(len(rows))
        assert [row / 4 for row in rows] == found.temperature.tolist()
        assert [row + 1 for row in rows] == found.position.tolist()


def test_edits_are_gathered_when_the_step_is_prepared() -> None:
    batch = batch_of(([0], [2], SamplingParams(max_tokens=9, temperature=0.0, frequency_penalty=3.0)))
    logits = np.array([LOGITS], np.float32)
    sampler = Sampler(max_num_seqs=8)
    job = sampler.prepare(batch, np.array([0], np.int32))
    batch.token_ids[:] = 0
    assert sampler.finish(job, logits, TwinRowSampler(logits, sampler)).token_ids.tolist() == [0]
