"""Two ways of doing the same work that take turns: how much faster the first one is, as a ratio of each turn's pair.

What slows a shared machine for a while slows both of a pair; what is left of it decides no median.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

CONFIDENCE_PERCENT: Final = 95


@dataclass(frozen=True, slots=True)
class RatioOfTurns:
    """First over second, of pairs."""

    num_pairs: int
    median: float
    low: float | None  # of the median's confidence interval; None when there are too few pairs for one
    high: float | None


def ratio_of_turns(first: Sequence[float], second: Sequence[float]) -> RatioOfTurns:
    """The ratio of `first` to `second`, which are positive and of one length, at least 1.

    The interval takes pairs to be independent of each other and to have one median, and nothing else of how they
    scatter: its bounds have the largest rank from either end with which the median lies between them in
    CONFIDENCE_PERCENT of cases, by a binomial distribution (W. J. Conover, Practical Nonparametric Statistics, chapter
    3.2). It says nothing of pairs of other processes: where a process has its memory, say, all of its pairs share.
    """
    ratios = sorted(a / b for a, b in zip(first, second, strict=True))
    num_pairs = len(ratios)
    rank = 0
    ways = beyond = 1  # of 2**num_pairs: that exactly, or at most, `rank` of the ratios lie below the median
    while 2 * beyond * 100 <= (100 - CONFIDENCE_PERCENT) << num_pairs:
        ways = ways * (num_pairs - rank) // (rank + 1)
        rank += 1
        beyond += ways
    low, high = (ratios[rank - 1], ratios[-rank]) if rank else (None, None)
    return RatioOfTurns(num_pairs, statistics.median(ratios), low, high)
