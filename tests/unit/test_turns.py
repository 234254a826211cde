"""Ratios of passes that take turns."""

import math

import pytest

from service.bench.turns import ratio_of_turns


def test_median_is_of_the_pairs_ratios_and_not_the_ratio_of_medians() -> None:
    assert 2.0 == ratio_of_turns([2.0, 9.0, 10.0], [1.0, 3.0, 10.0]).median  # of 2, 3 and 1; of medians 9 over 3


def test_median_of_an_even_number_lies_between() -> None:
    assert 2.0 == ratio_of_turns([1.0, 3.0], [1.0, 1.0]).median


@pytest.mark.parametrize("pairs", [1, 5])
def test_few_pairs_have_no_interval(pairs: int) -> None:
    ratio = ratio_of_turns([1.0] * pairs, [1.0] * pairs)
    assert (pairs, None, None) == (ratio.num_pairs, ratio.low, ratio.high)


# Ranks of the 95 % interval of a median, from printed tables of order statistics.
@pytest.mark.parametrize(
    ("pairs", "low", "high"), [(6, 1, 6), (8, 1, 8), (9, 2, 8), (10, 2, 9), (20, 6, 15), (25, 8, 18), (30, 10, 21)]
)
def test_interval_is_that_of_the_sign_test(pairs: int, low: int, high: int) -> None:
    ranks = [float(rank) for rank in range(pairs, 0, -1)]
    ratio = ratio_of_turns(ranks, [1.0] * pairs)
    assert (low, high) == (ratio.low, ratio.high)


def test_thousands_of_pairs_have_an_interval_near_that_of_a_normal_distribution() -> None:
    ratio = ratio_of_turns([float(rank) for rank in range(10_000)], [1.0] * 10_000)
    assert pytest.approx(5_000 - 1.96 * math.sqrt(10_000) / 2, abs=2) == ratio.low


def test_sides_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        ratio_of_turns([1.0, 2.0], [1.0])
