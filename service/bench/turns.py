"""Two ways of doing the same work that take turns: how much faster the first one is, as a ratio of each turn's pair.

What slows a shared machine for a while slows both of a pair; what is left of it decides no median.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MAX_OUTSIDE_PERCENT = 5


@dataclass(frozen=True, slots=True)
class RatioOfTurns:
    """First over second, of pairs."""

    pairs: int
    median: float
    low: float | None  # of the median's confidence interval; None below 6 pairs, which do not have one
    high: float | None


def ratio_of_turns(first: Sequence[float], second: Sequence[float]) -> RatioOfTurns:
    """The ratio of `first` to `second`, which are positive and of one length, at least 1.

    The interval is free of assumptions on how ratios scatter: as many of the smallest and of the largest ratios are
    left out as keep the chance that the median lies outside, a binomial one, at 5 % or less (W. J. Conover, Practical
    Nonparametric Statistics, chapter 3.2).
    """
    ratios = sorted(a / b for a, b in zip(first, second, strict=True))
    pairs = len(ratios)
    left_out = 0
    ways = beyond = 1  # of 2**pairs: that exactly, or at most, `left_out` of the ratios lie below the median
    while 2 * beyond * 100 <= MAX_OUTSIDE_PERCENT << pairs:
        ways = ways * (pairs - left_out) // (left_out + 1)
        left_out += 1
        beyond += ways
    low, high = (ratios[left_out - 1], ratios[-left_out]) if left_out else (None, None)
    return RatioOfTurns(pairs, statistics.median(ratios), low, high)
