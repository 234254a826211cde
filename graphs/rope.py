"""Rotary position embedding: which angles a model turns its queries and keys by.

Pairs are half-split: dimension i turns with dimension i + rotary_dim / 2, by the angle position * frequency[i].
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphs.errors import ExportError

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every frequency divided by `factor` (position interpolation)."""

    factor: float

    def apply(self, frequencies: Float64Array) -> Float64Array:
        """Scale `frequencies` [rotary_dim / 2], in radians per position."""
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long waves divided by `factor`, short ones kept, those between blended; the scheme of Llama 3.1."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_length: int

    def apply(self, frequencies: Float64Array) -> Float64Array:
        """Scale `frequencies` [rotary_dim / 2], in radians per position."""
        turns = self.original_context_length * frequencies / (2 * np.pi)  # full turns within the original context
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept: Float64Array = np.clip(blend, 0.0, 1.0)
        return (1 - kept) * frequencies / self.factor + kept * frequencies


@dataclass(frozen=True, slots=True)
class FrequencyDivisors:
    """A divisor for each frequency, as GGUF's tensor `rope_freqs.weight` holds them; `factor` divides all on top."""

    divisors: tuple[float, ...]
    factor: float = 1.0

    def apply(self, frequencies: Float64Array) -> Float64Array:
        """Scale `frequencies` [rotary_dim / 2], in radians per position."""
        return frequencies / (np.asarray(self.divisors, dtype=np.float64) * self.factor)


RopeScaling = LinearScaling | Llama3Scaling | FrequencyDivisors


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Base, rotated width and scaling. Raises ExportError when a value is outside its limit."""

    theta: float
    rotary_dim: int  # the first rotary_dim dimensions of each head are rotated
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        """Check every value."""
        if not np.isfinite(self.theta) or self.theta <= 0:
            raise ExportError(f"rope theta: {self.theta!r} is not allowed: a finite number above 0")
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ExportError(f"rope rotary_dim: {self.rotary_dim} is not allowed: an even number, at least 2")
        match self.scaling:
            case LinearScaling(factor):
                _require_positive("factor", factor)
            case Llama3Scaling():
                _check_llama3(self.scaling)
            case FrequencyDivisors(divisors, factor):
                _require_positive("factor", factor)
                _check_divisors(divisors, self.rotary_dim // 2)

    def frequencies(self) -> Float64Array:
        """Yield float64[rotary_dim / 2], radians per position, scaling applied."""
        exponents = np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim
        frequencies: Float64Array = self.theta**-exponents
        return frequencies if self.scaling is None else self.scaling.apply(frequencies)

    def tables(self, num_positions: int) -> tuple[Float32Array, Float32Array]:
        """Yield cosines and sines, each float32[num_positions, rotary_dim / 2], computed in float64."""
        angles = np.outer(np.arange(num_positions, dtype=np.float64), self.frequencies())
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _require_positive(field: str, value: float) -> None:
    if not np.isfinite(value) or value <= 0:
        raise ExportError(f"rope scaling {field}: {value!r} is not allowed: a finite number above 0")


def _check_llama3(scaling: Llama3Scaling) -> None:
    _require_positive("factor", scaling.factor)
    _require_positive("low_freq_factor", scaling.low_freq_factor)
    if not 1 <= scaling.original_context_length < 2**31:
        value = scaling.original_context_length
        raise ExportError(f"rope scaling original_max_position_embeddings: {value} is not allowed: 1 to {2**31 - 1}")
    if not scaling.high_freq_factor > scaling.low_freq_factor:
        raise ExportError(
            f"rope scaling high_freq_factor: {scaling.high_freq_factor!r} is not allowed: "
            f"above low_freq_factor ({scaling.low_freq_factor!r})"
        )


def _check_divisors(divisors: tuple[float, ...], count: int) -> None:
    if len(divisors) != count:
        raise ExportError(f"rope frequency divisors: {len(divisors)} values, but rotary_dim / 2 is {count}")
    for divisor in divisors:
        _require_positive("divisor", divisor)
