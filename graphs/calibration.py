"""What the inputs of a model's GEMMs look like on a small set of texts: the measurements behind w8a8.

The texts ship with the package: prose, dialogue, code, tables, mathematics and several languages, written for this
purpose, so that they share nothing with texts that quality is measured on.
"""

from importlib.resources import files

import numpy as np

from graphs.reference import Array
from graphs.rope import Float32Array, Float64Array

_SEPARATOR = "\n%%\n"


def calibration_texts() -> list[str]:
    """Yield the texts that ship with the package."""
    text = files("graphs").joinpath("data/calibration.txt").read_text(encoding="utf-8")
    return text.rstrip("\n").split(_SEPARATOR)


class RelativeRms:
    """An observer that adds up squares of x / rms(x), per GEMM input and channel. Rows of zeros count for nothing."""

    def __init__(self) -> None:
        """Start with nothing seen."""
        self._sums: dict[str, Float64Array] = {}
        self._num_rows: dict[str, int] = {}

    def __call__(self, name: str, x: Array) -> None:
        """Add the rows of `x` [num_tokens, in_features]."""
        squares = np.square(x, dtype=np.float64)
        mean_squares = squares.mean(axis=1, keepdims=True)
        relative = np.divide(squares, mean_squares, out=np.zeros_like(squares), where=mean_squares > 0)
        self._sums[name] = self._sums.get(name, 0.0) + relative.sum(axis=0)
        self._num_rows[name] = self._num_rows.get(name, 0) + int(np.count_nonzero(mean_squares))

    def result(self) -> dict[str, Float64Array]:
        """Yield sqrt(mean((x / rms(x))^2)), float64[in_features], by the GEMM's name."""
        return {name: np.sqrt(total / max(self._num_rows[name], 1)) for name, total in self._sums.items()}


class RelativeMoments:
    """An observer that adds up y^T y of y = x / rms(x), per GEMM input: the Hessian that GPTQ rounds by.

    Relative, since a few tokens are a thousand times as large as the rest and their errors matter no more: the norms
    divide by that size. Holds float32[in_features, in_features] for each name.
    """

    def __init__(self) -> None:
        """Start with nothing seen."""
        self._sums: dict[str, Float32Array] = {}

    def __call__(self, name: str, x: Array) -> None:
        """Add the rows of `x` [num_tokens, in_features]; rows of zeros count for nothing."""
        rms = np.sqrt(np.mean(np.square(x), axis=1, keepdims=True))
        relative = np.divide(x, rms, out=np.zeros_like(x), where=rms > 0)
        product = np.asarray(relative.T @ relative, dtype=np.float32)
        if name in self._sums:
            self._sums[name] += product
        else:
            self._sums[name] = product

    def result(self) -> dict[str, Float32Array]:
        """Yield the sums, float32[in_features, in_features], by the GEMM's name. They are no longer this observer's."""
        return self._sums
