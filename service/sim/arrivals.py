"""When requests arrive: processes as endless streams of gaps, drawn in batches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from service.errors import ConfigError

Float64Array = npt.NDArray[np.float64]

_BATCH: Final = 4096


@dataclass(frozen=True, slots=True)
class PoissonArrivals:
    """Independent arrivals, `rate` per second: exponential gaps."""

    rate: float

    def __post_init__(self) -> None:
        """Raise ConfigError unless the rate is positive."""
        _check_positive("rate", self.rate)

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        """Arrival times from 0 on, ascending, without end."""
        return _summed(lambda: rng.exponential(1 / self.rate, _BATCH))


@dataclass(frozen=True, slots=True)
class GammaArrivals:
    """Gamma gaps of mean 1 / `rate`. `burstiness` 1 is Poisson, less is burstier, more is more even.

    The shape of the gamma distribution is `burstiness`, so the gaps' squared coefficient of variation is its inverse,
    as in `vllm bench serve`.
    """

    rate: float
    burstiness: float

    def __post_init__(self) -> None:
        """Raise ConfigError unless both are positive."""
        _check_positive("rate", self.rate)
        _check_positive("burstiness", self.burstiness)

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        """Arrival times from 0 on, ascending, without end."""
        return _summed(lambda: rng.gamma(self.burstiness, 1 / (self.rate * self.burstiness), _BATCH))


@dataclass(frozen=True, slots=True)
class OnOffArrivals:
    """Poisson arrivals in bursts of `on_s` seconds, silence of `off_s` between them; `rate` is the mean of both."""

    rate: float
    on_s: float
    off_s: float

    def __post_init__(self) -> None:
        """Raise ConfigError unless rate and burst are positive, and the silence is not negative."""
        _check_positive("rate", self.rate)
        _check_positive("on_s", self.on_s)
        if self.off_s < 0:
            raise ConfigError(f"off_s is {self.off_s}, but must be at least 0")

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        """Arrival times from 0 on, ascending, without end."""
        burst_rate = self.rate * (self.on_s + self.off_s) / self.on_s
        # A Poisson process on the clock of the bursts alone, with the silences put in between afterwards.
        for busy_s in PoissonArrivals(burst_rate).times_s(rng):
            yield busy_s + self.off_s * (busy_s // self.on_s)


Arrivals = PoissonArrivals | GammaArrivals | OnOffArrivals


def arrivals_named(name: str, rate: float, *, burstiness: float, on_s: float, off_s: float) -> Arrivals:
    """The process called poisson, gamma or on-off. Raises ConfigError for a setting out of range."""
    if name == "gamma":
        return GammaArrivals(rate, burstiness)
    if name == "on-off":
        return OnOffArrivals(rate, on_s, off_s)
    return PoissonArrivals(rate)


def _summed(draw_gaps: Callable[[], Float64Array]) -> Iterator[float]:
    start_s = 0.0
    while True:
        times_s = start_s + np.cumsum(draw_gaps())
        yield from times_s.tolist()
        start_s = float(times_s[-1])


def _check_positive(name: str, value: float) -> None:
    if not value > 0 or value == float("inf"):
        raise ConfigError(f"{name} is {value}, but must be a positive number")
