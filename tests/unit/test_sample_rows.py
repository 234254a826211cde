"""SampleRows against its numpy twin and against probability, on every instruction set of the machine."""

import numpy as np
import pytest

from graphs import op_twins_rows as twins
from tests.unit.op_session import LIBRARY, run_op, supported_isas


@pytest.fixture(params=supported_isas(), autouse=True)
def isa(request):
    LIBRARY.chairlift_set_isa(request.param.encode())
    yield request.param
    LIBRARY.chairlift_set_isa(b"auto")


def arguments(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0):
    """The op's inputs; scalars are repeated for every row."""
    rows = len(logits)
    columns = (temperature, top_k, top_p, min_p, seed, position)
    dtypes = (np.float32, np.int32, np.float32, np.float32, np.int64, np.int32)
    return [
        np.asarray(logits, np.float32),
        *(np.ascontiguousarray(np.broadcast_to(np.asarray(c, t), rows)) for c, t in zip(columns, dtypes, strict=True)),
    ]


def sample(logits, num_threads=1, **columns):
    return run_op("SampleRows", *arguments(logits, **columns), num_threads=num_threads)


def mixed_batch(num_rows, vocab_size, seed):
    """Rows with every mix of parameters."""
    generator = np.random.default_rng(seed)
    spread = generator.choice([0.01, 1, 3, 8], (num_rows, 1))
    logits = (generator.normal(size=(num_rows, vocab_size)) * spread).astype(np.float32)
    logits[generator.random(logits.shape) < 0.02] = -np.inf
    logits[:, generator.integers(vocab_size)] = 1
    return arguments(
        logits,
        temperature=generator.choice([0, 0.3, 1, 2], num_rows),
        top_k=generator.choice([0, 1, 5, 50, 900, vocab_size], num_rows),
        top_p=generator.choice([1, 0.99, 0.9, 0.5, 0.1, 0], num_rows),
        min_p=generator.choice([0, 0, 0.05, 0.5, 1], num_rows),
        seed=generator.integers(-(2**63), 2**63 - 1, num_rows),
        position=generator.integers(0, 2**31 - 1, num_rows),
    )


@pytest.mark.parametrize(
    ("vocab_size", "num_rows"), [(1, 8), (5, 100), (40, 100), (257, 200), (1000, 200), (49152, 40)]
)
def test_tokens_are_those_of_the_twin(vocab_size, num_rows):
    batch = mixed_batch(num_rows, vocab_size, seed=vocab_size)
    assert run_op("SampleRows", *batch).tolist() == twins.sample_rows(*batch).tolist()


def test_a_row_is_the_same_alone_and_in_any_batch():
    batch = mixed_batch(24, 5000, seed=3)
    together = run_op("SampleRows", *batch, num_threads=2)
    for row in range(24):
        assert run_op("SampleRows", *(column[row : row + 1] for column in batch)).tolist() == [together[row]]


@pytest.mark.parametrize("vocab_size", [1, 7, 16, 100, 255, 256, 300, 4097])
def test_greedy_takes_the_lowest_of_the_largest(vocab_size):
    generator = np.random.default_rng(vocab_size)
    logits = generator.integers(-9, 9, (60, vocab_size)).astype(np.float32)
    logits[:20] -= 100
    logits[20:30, 1:] = -np.inf
    assert sample(logits, temperature=0).tolist() == logits.argmax(1).tolist()


def test_frequencies_follow_the_probabilities():
    num_rows = 20_000
    logits = np.random.default_rng(11).normal(size=16).astype(np.float32) * 1.5
    for columns in ({"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        tokens = sample(np.tile(logits, (num_rows, 1)), seed=1234, position=np.arange(num_rows), **columns)
        temperature = np.float32(columns.get("temperature", 1.0))
        scaled = (logits - logits.max()) / temperature
        keep = twins.kept_tokens(scaled, columns.get("top_k", 0), columns.get("top_p", 1.0), columns.get("min_p", 0.0))
        expected = np.where(keep, np.exp(scaled), 0)
        expected *= num_rows / expected.sum()
        counts = np.bincount(tokens, minlength=16)
        assert not counts[~keep].any()
        chi_square = np.sum((counts[keep] - expected[keep]) ** 2 / expected[keep])
        freedom = int(keep.sum()) - 1
        assert chi_square < freedom + 4 * np.sqrt(2 * freedom)  # four standard deviations above the mean


def test_frequencies_over_seeds_follow_the_probabilities_too():
    tokens = sample(np.zeros((20_000, 4)), seed=np.arange(20_000) << 32, position=7)
    assert (np.abs(np.bincount(tokens, minlength=4) - 5000) < 300).all()


def test_one_token_kept_is_greedy_even_one_rounding_step_from_the_next():
    logits = np.zeros((300, 1000), np.float32)
    logits[:, 3] = 1
    logits[:, 700] = np.nextafter(np.float32(1), np.float32(2))
    for columns in ({"top_k": 1}, {"temperature": 1e-6}):
        tokens = sample(logits, position=np.arange(300), **columns)
        assert set(tokens.tolist()) == {700} if "top_k" in columns else {3, 700} >= set(tokens.tolist())


def test_ties_with_the_threshold_stay():
    logits = np.full((4000, 300), -5, np.float32)
    logits[:, [2, 130, 299]] = 1
    for columns in ({"top_k": 1}, {"top_k": 2}, {"top_p": 0.0}, {"top_p": 0.1}, {"min_p": 1.0}):
        counts = np.bincount(sample(logits, position=np.arange(4000), **columns), minlength=300)
        assert (np.abs(counts[[2, 130, 299]] - 4000 / 3) < 180).all()
        assert counts.sum() == counts[[2, 130, 299]].sum()


@pytest.mark.parametrize("num_high", [3, 20, 60, 2000])
def test_exactly_top_k_tokens_are_kept_where_the_logits_have_two_levels(num_high):
    logits = np.zeros((100, 3000), np.float32)
    high = np.random.default_rng(1).permutation(3000)[:num_high]
    logits[:, high] = 0.5
    assert np.isin(sample(logits, position=np.arange(100), top_k=num_high), high).all()
    assert not np.isin(sample(logits, position=np.arange(100), top_k=num_high + 1), high).all()  # now ties get in


def test_tokens_at_minus_infinity_are_never_chosen():
    logits = np.full((2000, 70), -np.inf, np.float32)
    logits[:, [0, 33, 69]] = [-200, -199, -200.5]
    for columns in ({}, {"top_k": 10}, {"top_p": 0.999}, {"min_p": 1e-9}, {"temperature": 3.0}):
        assert set(sample(logits, position=np.arange(2000), **columns).tolist()) == {0, 33, 69}


@pytest.mark.parametrize("columns", [{"top_k": 3}, {"top_p": 0.7}, {"top_k": 200, "top_p": 0.5, "min_p": 0.01}, {}])
@pytest.mark.parametrize("temperature", [1e-38, 1e-20, 1.0, 3e38])
def test_extreme_ranges_follow_the_twin(columns, temperature):
    generator = np.random.default_rng(5)
    logits = np.stack(
        [
            generator.normal(size=500) * 1e30,
            generator.normal(size=500) * 1e-30,
            10.0 ** generator.uniform(-37, 37, 500),
            -(10.0 ** generator.uniform(-37, 37, 500)),
            np.zeros(500),
            np.repeat([1.0, -1.0], 250),
        ]
    )
    batch = arguments(logits, temperature=temperature, seed=np.arange(6), position=3, **columns)
    with np.errstate(over="ignore", under="ignore"):
        assert run_op("SampleRows", *batch).tolist() == twins.sample_rows(*batch).tolist()


def test_no_rows_give_no_tokens():
    assert sample(np.zeros((0, 10))).tolist() == []


LOGITS = np.zeros((3, 20), np.float32)


@pytest.mark.parametrize("bad", [np.nan, np.inf, None])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("column", [0, 7, 19])
def test_a_row_without_usable_logits_is_named(bad, temperature, column):
    logits = LOGITS.copy()
    if bad is None:
        logits[1] = -np.inf
    else:
        logits[1, column] = bad
    with pytest.raises(Exception, match=r"'logits' row 1 holds NaN or \+inf, or nothing but -inf"):
        sample(logits, temperature=temperature)


@pytest.mark.parametrize(
    ("logits", "columns", "message"),
    [
        (LOGITS, {"temperature": [1, -1, 1]}, "'temperature' row 1 is -1; it must be finite and not negative"),
        (LOGITS, {"temperature": np.nan}, "'temperature' row 0 is nan"),
        (LOGITS, {"temperature": np.inf}, "'temperature' row 0 is inf"),
        (LOGITS, {"top_p": [1, 1, 1.5]}, "'top_p' row 2 is 1.5; it must be within 0 and 1"),
        (LOGITS, {"top_p": np.nan}, "'top_p' row 0 is nan"),
        (LOGITS, {"min_p": -0.5}, "'min_p' row 0 is -0.5; it must be within 0 and 1"),
        (LOGITS[:, :0], {}, "'logits' has 0 columns"),
    ],
)
def test_wrong_parameters_are_named(logits, columns, message):
    with pytest.raises(Exception, match=message):
        sample(logits, **columns)


@pytest.mark.parametrize("index", range(1, 7))
def test_columns_of_another_length_are_named(index):
    batch = arguments(LOGITS)
    batch[index] = batch[index][:2]
    name = ("temperature", "top_k", "top_p", "min_p", "seed", "position")[index - 1]
    with pytest.raises(Exception, match=rf"'{name}' has shape \[2\], expected \[3\]"):
        run_op("SampleRows", *batch)


def test_parameters_of_greedy_rows_do_not_matter():
    assert sample(LOGITS + np.arange(20), temperature=0, top_p=np.nan, min_p=9).tolist() == [19] * 3
