"""Rows of several slices, each a block's: merges, what is read how often, and what one step leaves to the next."""

import numpy as np
import pytest

from graphs.op_twins_rows import gumbel_noise
from service.core.types import SamplingParams
from service.executor.cuda.kernels import SLICE_LOGITS, sample_workspace_words
from service.executor.logit_edits import log_softmax, token_logprobs
from tests.cuda.sampling_rows import LOGITS, Rows, SampleLaunches, run_sample_rows, sample_workspace
from tests.cuda.test_sample_kernel import FILTERS, check_tokens, random_logits
from tests.cudasim.build import missing_tool
from tests.cudasim.device import SimDevice
from tests.unit.edit_cases import edit_of

pytestmark = pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool()))

ALL_FILTERS = {
    "temperature": [0.0, 0.3, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.7],
    "top_k": [0, 0, 1, 7, 0, 0, 0, 0, 40],
    "top_p": [1.0, 1.0, 1.0, 1.0, 0.5, 0.0, 1.0, 1.0, 0.7],
    "min_p": [0, 0, 0, 0, 0, 0, 0.2, 1.0, 0.01],
}


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("vocab_size", [SLICE_LOGITS - 1, SLICE_LOGITS, SLICE_LOGITS + 1, 3 * SLICE_LOGITS - 5])
def test_rows_of_any_length_and_alignment(vocab_size, kind):
    """All filters at once: rows of an odd length begin on any multiple of a logit's size."""
    logits = random_logits(9, vocab_size, kind, seed=vocab_size)
    check_tokens(Rows.of(logits, **ALL_FILTERS, seed=np.arange(9), position=np.arange(9) * 7))


def test_few_rows_of_many_slices_and_many_of_few():
    check_tokens(Rows.of(random_logits(2, 7 * SLICE_LOGITS + 8), top_k=[0, 30], top_p=[1.0, 0.9]))
    check_tokens(Rows.of(random_logits(40, SLICE_LOGITS + 8), top_k=[0, 30] * 20, top_p=0.9, position=np.arange(40)))


@pytest.mark.parametrize("slices_each", [2, 3, 4])
def test_tokens_do_not_depend_on_how_many_slices_a_block_takes(slices_each):
    """Of seven, so that the last block takes fewer; which it is depends on the other rows of a step."""
    rows = Rows.of(random_logits(9, 7 * SLICE_LOGITS - 3, "half"), **ALL_FILTERS, position=np.arange(9))
    rows.edits = {2: edit_of(SamplingParams(max_tokens=1), banned=range(0, 7 * SLICE_LOGITS - 3, 3))}
    rows.masks = {5: np.random.default_rng(1).random(7 * SLICE_LOGITS - 3) < 0.1}
    rows.num_logprobs = np.array([2, -1, 0, 1, -1, 3, 20, 1, 4], np.int32)
    sampled, alone = (run_sample_rows(rows, num_blocks=num_blocks) for num_blocks in (63 // slices_each, 63))
    assert rows.expected_tokens().tolist() == sampled.tokens.tolist()
    assert alone.top_tokens.tolist() == sampled.top_tokens.tolist()
    assert alone.logits.tobytes() == sampled.logits.tobytes()
    for name in ("logprob", "top_logprobs"):
        expected, found = getattr(alone, name), getattr(sampled, name)
        assert np.allclose(expected, found, rtol=0, atol=1e-5, equal_nan=True), "sums in another order"


def test_the_lowest_of_tied_tokens_is_taken_whichever_slices_they_are_of():
    logits = np.zeros((3, 3 * SLICE_LOGITS), np.float32)
    logits[0, [2 * SLICE_LOGITS + 5, SLICE_LOGITS + 9, SLICE_LOGITS + 700]] = 2.5
    logits[1, -1] = 1.0
    assert [SLICE_LOGITS + 9, 3 * SLICE_LOGITS - 1, 0] == run_sample_rows(
        Rows.of(logits, temperature=0.0)
    ).tokens.tolist()


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.5}, {"top_k": 5, "top_p": 0.3}], ids=str)
def test_more_tied_tokens_than_a_block_lists_all_stay(options):
    """Of 6,000 tokens 5,000 are tied behind the first; 4,096 are listed. A share of the mass cuts through them."""
    logits = np.full((16, 6000), -3.0, np.float32)
    logits[:, :5001] = 1.0
    logits[:, 0] = 1.5
    rows = Rows.of(logits, **options, position=np.arange(16))
    assert 14 <= len(set(check_tokens(rows).tokens.tolist())), "of 16"


def test_top_p_is_a_share_of_what_top_k_leaves_of_its_last_bin():
    """Of 300 tokens within 1/16 of z top_k leaves two, and by their masses alone top_p cuts more off.

    All of that bin would have 40 times the mass of what is left, and top_p would keep everything before it. Drawn are
    only rows whose race a token wins that top_p cuts off.
    """
    logits = np.full((1, 320), -30.0, np.float32)
    logits[0, 0], logits[0, 1:9] = 0.0, -1.0 - 0.1 * np.arange(8)
    logits[0, 9:309] = -2.01 - 0.0001 * np.arange(300)
    masses = np.exp(logits[0].astype(np.float64))
    num_kept = 1 + int(np.searchsorted(np.cumsum(masses[:11]), 0.5 * masses[:11].sum()))
    assert 3 == num_kept
    winners = [int(np.argmax(logits[0] + gumbel_noise(0, position, 320))) for position in range(900)]
    positions = [position for position, winner in enumerate(winners) if num_kept <= winner < 9]
    assert 10 <= len(positions)
    rows = Rows.of(np.repeat(logits, len(positions), axis=0), top_k=11, top_p=0.5, position=positions)
    assert check_tokens(rows).tokens.max() < num_kept


def test_tokens_of_the_bin_in_which_top_k_cuts_are_told_apart():
    """Six tokens within 1/16 of z, of which three stay."""
    rows = Rows.of(
        np.tile(np.float32(-0.01) * np.arange(6, dtype=np.float32), (64, 1)), top_k=3, position=np.arange(64)
    )
    assert {0, 1, 2} == set(check_tokens(rows).tokens.tolist())


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_k": 5000}, {"top_k": 5400, "top_p": 0.9}], ids=str)
def test_filters_of_more_tokens_than_a_block_lists_are_the_twins(options):
    """Of 6,000 tokens of nearly equal mass some 5,000 stay. Drawn are only rows whose race another one wins."""
    logits = np.random.default_rng(4).permutation(np.linspace(-0.5, 0.0, 6000, dtype=np.float32))[None]
    plain = Rows.of(np.repeat(logits, 40, axis=0), position=np.arange(40)).expected_tokens()
    kept = Rows.of(np.repeat(logits, 40, axis=0), **options, position=np.arange(40)).expected_tokens()
    positions = np.flatnonzero(plain != kept)
    assert len(positions) >= 2
    check_tokens(Rows.of(np.repeat(logits, len(positions), axis=0), **options, position=positions))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_logit_fails_its_row_whichever_slice_it_is_of(temperature):
    logits = random_logits(5, 2 * SLICE_LOGITS + 3)
    logits[0, 5], logits[1, -1] = np.nan, np.inf
    logits[2] = -np.inf
    logits[3, :-1] = -np.inf
    logits[4, SLICE_LOGITS : 2 * SLICE_LOGITS] = -np.inf
    rows = Rows.of(logits, temperature=temperature, top_k=[0, 5, 5, 5, 5], top_p=[0.9, 1, 0.9, 0.9, 0.9])
    rows.num_logprobs = np.array([-1, -1, -1, 1, 1], np.int32)
    sampled = run_sample_rows(rows)
    whole = Rows.of(logits[3:], temperature=temperature, top_k=5, top_p=0.9).expected_tokens()
    assert [-1, -1, -1, *whole] == sampled.tokens.tolist()
    assert 0.0 == sampled.logprob[3], "the only token that is left"


def test_edits_and_masks_reach_into_every_slice():
    vocab_size, rng = 2 * SLICE_LOGITS + 77, np.random.default_rng(2)
    logits = random_logits(6, vocab_size, "half")
    rows = Rows.of(logits, temperature=[0.0, 0.9] * 3, top_k=30, position=np.arange(6))
    params = SamplingParams(max_tokens=1, repetition_penalty=1.3, logit_bias=((vocab_size - 1, 9.0), (4, 9.5)))
    rows.edits = {row: edit_of(params, rng.choice(vocab_size, 900, replace=False), 300) for row in (1, 2, 4)}
    rows.masks = {row: rng.random(vocab_size) < 0.3 for row in (0, 1, 4, 5)}
    sampled = run_sample_rows(rows)
    changed = rows.changed_logits().astype(logits.dtype)
    assert changed.tobytes() == sampled.logits.tobytes()
    rounded = Rows.of(changed, temperature=rows.temperature, top_k=30, position=np.arange(6))
    assert rounded.expected_tokens().tolist() == sampled.tokens.tolist()


@pytest.mark.parametrize("vocab_size", [SLICE_LOGITS + 1, 3 * SLICE_LOGITS])
def test_logprobs_are_summed_and_the_likeliest_found_over_all_slices(vocab_size):
    logits = random_logits(3, vocab_size)
    logits[1, [3, SLICE_LOGITS - 1, SLICE_LOGITS]] = 20.0  # tied at the top, in two slices
    logits[2, SLICE_LOGITS:] = -np.inf
    rows = Rows.of(logits, temperature=[0.0, 1.0, 0.7], top_k=[0, 50, 0])
    rows.edits = {0: edit_of(SamplingParams(max_tokens=1, logit_bias=((SLICE_LOGITS, 90.0),)))}
    rows.num_logprobs = np.array([2, 5, 20], np.int32)
    sampled = check_tokens(rows)
    assert SLICE_LOGITS == sampled.tokens[0]
    for row, num_top in enumerate(rows.num_logprobs.tolist()):
        expected = token_logprobs(log_softmax(logits[row].copy()), int(sampled.tokens[row]), num_top)
        assert expected.chosen == pytest.approx(sampled.logprob[row], abs=2e-5)
        assert expected.top_token_ids.tolist() == sampled.top_tokens[row, :num_top].tolist()
        assert expected.top_logprobs == pytest.approx(sampled.top_logprobs[row, :num_top], abs=2e-5)


def scores(rows, row):
    """Of the race between all tokens: float64, as the twin has them."""
    wide = rows.logits[row].astype(np.float32)
    z = (wide - wide.max()) * (np.float32(1) / rows.temperature[row])
    return z + gumbel_noise(int(rows.seed[row]), int(rows.position[row]), len(wide))


def close_race(gaps):
    """Rows whose best two tokens are both of the second slice, and so far apart in score. The likeliest is far away."""
    logits = random_logits(len(gaps), 3 * SLICE_LOGITS, spread=1.0)
    logits[:, 7] = 9.0
    rows = Rows.of(logits, position=np.arange(len(gaps)))
    for row, gap in enumerate(gaps):
        noise = gumbel_noise(0, row, 3 * SLICE_LOGITS)
        first, second = SLICE_LOGITS + np.argsort(-noise[SLICE_LOGITS : 2 * SLICE_LOGITS])[[1, 0]]
        best = max(0.0, scores(rows, row).max()) + 0.5
        logits[row, first] = 9.0 + best - noise[first]
        logits[row, second] = 9.0 + best - gap - noise[second]
        assert [first, second] == np.argsort(-scores(rows, row))[:2].tolist()
    return rows


def test_one_pass_draws_without_filters_unless_a_race_was_close():
    """Slices are raced relative to their own largest logit, so that only scores further apart than that have an order.

    2e-5 is within the rounding that the kernels allow for, and beyond what there is; 1e-3 is not close.
    """
    rows = close_race([1e-3, 2e-5] * 4)
    launches = SampleLaunches(rows)
    launches.launch("sample_scan")
    launches.launch("sample_count")
    expected = rows.expected_tokens()
    assert [expected[row] if row % 2 == 0 else -7 for row in range(8)] == launches.sampled.tokens.tolist()
    launches.launch("sample_draw")
    assert expected.tolist() == launches.sampled.tokens.tolist()


def test_tokens_of_nearly_equal_scores_are_drawn_by_their_exact_ones():
    """Every token has the same score up to rounding: whichever is drawn, no other one's is really better."""
    rows = Rows.of(np.zeros((6, SLICE_LOGITS + 90), np.float32), position=np.arange(6), top_p=[1, 1, 1, 0.999, 1, 1])
    for row in range(6):
        rows.logits[row] = -gumbel_noise(0, row, SLICE_LOGITS + 90)
    tokens = run_sample_rows(rows).tokens
    for row, token in enumerate(tokens.tolist()):
        assert scores(rows, row)[token] == pytest.approx(scores(rows, row).max(), abs=4e-6)


def test_greedy_rows_are_done_after_one_pass_and_most_filtered_ones_after_two():
    """What a kernel must not read again is gone when it runs."""
    num_rows, likely = 24, [100, 200]
    logits = random_logits(num_rows, SLICE_LOGITS + 24)
    logits[:, likely] = 14.0, 13.0  # some 0.8 of the mass: top_p cuts behind them
    rows = Rows.of(logits, temperature=[0.0, 1.0] * 12, top_k=[0, 0, 40] * 8, top_p=[0.99, 0.99, 1.0] * 8)
    rows.position[:] = np.arange(num_rows)
    winners = Rows.of(logits, position=rows.position).expected_tokens()  # of the race between all tokens
    assert set(likely) <= set(winners[1::2].tolist())
    expected = rows.expected_tokens()
    launches = SampleLaunches(rows)
    launches.launch("sample_scan")
    launches.sampled.logits[::2] = -np.inf
    launches.launch("sample_count")
    launches.sampled.logits[np.isin(winners, likely)] = -np.inf
    launches.launch("sample_draw")
    assert expected.tolist() == launches.sampled.tokens.tolist()


def test_a_steps_leftovers_do_not_reach_the_next_one():
    """The workspace begins as anything, and is used by step after step of other rows and parameters."""
    vocab_size = 2 * SLICE_LOGITS - 9
    workspace = sample_workspace(9, vocab_size, 0)
    rng = np.random.default_rng(1)
    for step in range(4):
        logits = random_logits(9, vocab_size, seed=step)
        columns = {name: rng.permutation(values) for name, values in ALL_FILTERS.items()}
        rows = Rows.of(logits, **columns, seed=step)
        for _ in range(2):
            assert rows.expected_tokens().tolist() == run_sample_rows(rows, workspace=workspace).tokens.tolist()


def test_result_is_the_same_in_any_order_of_blocks():
    rows = Rows.of(random_logits(9, 3 * SLICE_LOGITS + 1), **ALL_FILTERS, position=np.arange(9))
    rows.num_logprobs = np.array([2, 2, 0, 1, -1, 3, 0, 1, 4], np.int32)
    results = [run_sample_rows(rows, SimDevice(seed=seed)) for seed in range(4)]
    for other in results[1:]:
        for name in ("tokens", "logprob", "top_tokens", "top_logprobs"):
            assert getattr(results[0], name).tobytes() == getattr(other, name).tobytes(), name


def test_workspace_is_what_the_kernels_take():
    """By hand: of a row 2,048 bins of 12 bytes and 32 bytes; of each slice 24, and 8 for each likeliest token."""
    assert 5 * (2048 * 12 + 32 + 32 * (24 + 20 * 8)) == 4 * sample_workspace_words(5, 128_256, 20)


@pytest.mark.slow
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_tokens_of_128_thousand_logits_are_the_twins(options):
    check_tokens(Rows.of(random_logits(4, 128_256, "bf16", spread=2.5), **options, seed=3, position=np.arange(4)))
