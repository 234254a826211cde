"""The sampling kernel on the simulator against the numpy twin and the host's edits and log-probabilities."""

import numpy as np
import pytest

from service.core.types import SamplingParams
from service.executor.logit_edits import log_softmax, token_logprobs
from tests.cuda.gpu_check.sampling import expected_changed
from tests.cuda.sampling_rows import LOGITS, Rows, run_sample_rows
from tests.cudasim.build import missing_tool
from tests.cudasim.device import SimDevice
from tests.unit.edit_cases import edit_of

pytestmark = pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool()))

FILTERS = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.5},
    {"top_p": 0.0},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.7, "min_p": 0.01, "temperature": 1.7},
]


def random_logits(num_rows, vocab_size, kind="float", *, spread=3.0, seed=5):
    rng = np.random.default_rng(seed)
    return (spread * rng.standard_normal((num_rows, vocab_size))).astype(np.float32).astype(LOGITS[kind])


def check_tokens(rows, device=None):
    sampled = run_sample_rows(rows, device)
    assert rows.expected_tokens().tolist() == sampled.tokens.tolist()
    return sampled


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_tokens_are_the_twins(options):
    rows = Rows.of(random_logits(6, 1003), **options, seed=np.arange(6) - 2, position=[0, 1, 2, 9, 4096, 131071])
    check_tokens(rows)


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("vocab_size", [1, 3, 64, 4100])
def test_any_vocabulary_and_type(vocab_size, kind):
    logits = random_logits(3, vocab_size, kind)
    check_tokens(Rows.of(logits, temperature=[0.0, 0.8, 2.0], top_k=[0, 20, 0], top_p=[1.0, 0.9, 0.8], seed=7))


@pytest.mark.slow
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_tokens_of_a_large_vocabulary_are_the_twins(options):
    logits = random_logits(8, 50_257, spread=2.5)
    check_tokens(Rows.of(logits, **options, seed=3, position=np.arange(8)))


def test_greedy_takes_the_lowest_of_tied_tokens():
    logits = np.zeros((3, 5000), np.float32)
    logits[0, [4999, 4100, 17, 1030]] = 2.5
    logits[1, 4998] = 1.0
    assert [17, 4998, 0] == run_sample_rows(Rows.of(logits, temperature=0.0)).tokens.tolist()


def test_tokens_tied_with_the_last_one_kept_stay():
    logits = np.full((64, 40), -30.0, np.float32)
    logits[:, [3, 5, 7, 11]] = 1.0
    rows = Rows.of(logits, top_k=2, position=np.arange(64))
    assert {3, 5, 7, 11} == set(check_tokens(rows).tokens.tolist())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_without_a_usable_logit_gets_no_token(temperature):
    logits = random_logits(4, 300)
    logits[0, 299] = np.nan
    logits[1, 7] = np.inf
    logits[2] = -np.inf
    logits[3, 1:] = -np.inf
    rows = Rows.of(logits, temperature=temperature, top_k=5, top_p=0.9)
    assert [-1, -1, -1, 0] == run_sample_rows(rows).tokens.tolist()


def test_draws_follow_the_masses():
    masses = np.array([0.4, 0.3, 0.2, 0.1])
    num_draws = 300
    logits = np.tile(np.log(masses).astype(np.float32), (num_draws, 1))
    tokens = check_tokens(Rows.of(logits, seed=11, position=np.arange(num_draws))).tokens
    counts, expected = np.bincount(tokens, minlength=4), num_draws * masses
    assert ((counts - expected) ** 2 / expected).sum() < 16.27  # chi-square, 3 degrees of freedom, 1 in 1,000


@pytest.mark.parametrize("kind", ["float", "half"])
def test_edits_are_the_hosts(kind):
    params = SamplingParams(
        max_tokens=9,
        repetition_penalty=1.3,
        frequency_penalty=0.7,
        presence_penalty=0.4,
        logit_bias=((3, 4.5), (20, -2.0), (30, 1.0)),
    )
    edit = edit_of(params, [3, 4, 5, 5, 6, 20, 5, 6], 3, banned=[6, 31])
    plain = edit_of(SamplingParams(max_tokens=9, logit_bias=((2, 1.5),)))
    rows = Rows.of(random_logits(4, 200, kind), temperature=[0.0, 0.9, 0.9, 0.0], position=5)
    rows.edits = {0: edit, 1: edit, 3: plain}
    sampled = run_sample_rows(rows)
    assert np.array_equal(rows.changed_logits().astype(rows.logits.dtype), sampled.logits)
    rows = Rows.of(sampled.logits, temperature=rows.temperature, position=5)
    assert rows.expected_tokens().tolist() == sampled.tokens.tolist()


def test_ban_holds_for_a_token_whose_logit_is_no_number():
    logits = random_logits(1, 50)
    logits[0, 7] = np.nan
    rows = Rows.of(logits, temperature=0.0)
    rows.edits = {0: edit_of(SamplingParams(max_tokens=1), banned=[7])}
    check_tokens(rows)


def edited_and_masked_rows(vocab_size=64):
    rng = np.random.default_rng(3)
    rows = Rows.of(random_logits(12, vocab_size), temperature=[0.0, 1.5] * 6, top_k=30, position=np.arange(12))
    rows.masks = {row: rng.random(vocab_size) < 0.1 for row in range(12) if row % 3}
    rows.edits = {4: edit_of(SamplingParams(max_tokens=1, logit_bias=((9, 50.0),)))}
    rows.num_logprobs = np.tile(np.array([-1, 2], np.int32), 6)
    return rows


@pytest.mark.parametrize("vocab_size", [64, 1003])
def test_masked_tokens_are_never_chosen(vocab_size):
    rows = edited_and_masked_rows(vocab_size)
    sampled = check_tokens(rows)
    assert all(rows.masks[row][sampled.tokens[row]] for row in rows.masks)


@pytest.mark.parametrize(
    ("vocab_size", "kind"), [(1, "float"), (31, "half"), (33, "bf16"), (64, "half"), (1003, "float")]
)
def test_masks_ban_what_they_do_not_allow_and_change_nothing_else(vocab_size, kind):
    """Rows of no mask, of shares of tokens, of none of them, whose row gets no token, and of the last one alone."""
    rng, shares = np.random.default_rng(vocab_size), (None, 0.0, 0.05, 0.5, 1.0, None, 0.0, 0.5)
    rows = Rows.of(random_logits(9, vocab_size, kind), temperature=[0.0, 0.0, 0.8] * 3, top_k=20, position=np.arange(9))
    rows.masks = {row: rng.random(vocab_size) < share for row, share in enumerate(shares) if share is not None}
    rows.masks[8] = np.arange(vocab_size) == vocab_size - 1
    sampled = run_sample_rows(rows)
    allowed = np.ones((9, vocab_size), np.bool_)
    for row, mask in rows.masks.items():
        allowed[row] = mask
    left = np.where(allowed, rows.logits.astype(np.float32), -np.inf)
    assert left.astype(rows.logits.dtype).tobytes() == sampled.logits.tobytes()
    drawn = expected_changed(rows, left)
    for row, token in enumerate(sampled.tokens.tolist()):
        if not allowed[row].any():
            assert token == -1, row
        elif rows.temperature[row] == 0:
            assert token == left[row].argmax(), row
        else:
            assert token == drawn[row], row
    assert vocab_size - 1 == sampled.tokens[8]


def test_logprobs_are_the_models_own():
    params = SamplingParams(max_tokens=1, logit_bias=((17, 30.0),))
    rows = Rows.of(random_logits(5, 1003), temperature=[0.0, 1.0, 0.5, 1.0, 1.0], top_k=[0, 50, 0, 0, 0])
    rows.logits[2, [8, 90, 700]] = 20.0  # tied at the top
    rows.edits = {3: edit_of(params)}
    rows.num_logprobs = np.array([3, 0, 2, 5, -1], np.int32)
    sampled = check_tokens(rows)
    assert 17 == sampled.tokens[3]
    for row, num_top in enumerate(rows.num_logprobs.tolist()):
        if num_top < 0:
            assert np.isnan(sampled.logprob[row])
            continue
        expected = token_logprobs(log_softmax(rows.logits[row].copy()), int(sampled.tokens[row]), num_top)
        assert expected.chosen == pytest.approx(sampled.logprob[row], abs=2e-5)
        assert expected.top_token_ids.tolist() == sampled.top_tokens[row, :num_top].tolist()
        assert expected.top_logprobs == pytest.approx(sampled.top_logprobs[row, :num_top], abs=2e-5)
        assert (sampled.top_tokens[row, num_top:] == -7).all()


def test_result_is_the_same_in_any_order_of_threads():
    rows = Rows.of(random_logits(4, 4100), top_k=60, top_p=0.8, position=np.arange(4))
    rows.num_logprobs = np.array([2, 2, 0, 1], np.int32)
    results = [run_sample_rows(rows, SimDevice(seed=seed)) for seed in range(3)]
    for other in results[1:]:
        assert results[0].tokens.tobytes() == other.tokens.tobytes()
        assert results[0].logprob.tobytes() == other.logprob.tobytes()
        assert results[0].top_logprobs.tobytes() == other.top_logprobs.tobytes()
