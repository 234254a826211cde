"""What the inputs of a model's GEMMs look like on a small set of texts: the measurements behind w8a8.

The texts ship with the package: prose, dialogue, code, tables, mathematics and several languages, written for this
purpose, so that they share nothing with texts that quality is measured on.
"""

from collections.abc import Iterable, Sequence
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from graphs.reference import Array, ReferenceModel
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


class SecondMoments:
    """An observer that adds up X^T X per GEMM input: the Hessian that GPTQ rounds by.

    Holds float32[in_features, in_features] for each name, so restrict `names` where a model is large.
    """

    def __init__(self, names: Iterable[str] | None = None) -> None:
        """Start with nothing seen; of `names` only, if given."""
        self._names = None if names is None else frozenset(names)
        self._sums: dict[str, Float32Array] = {}
        self._num_rows: dict[str, int] = {}

    def __call__(self, name: str, x: Array) -> None:
        """Add the rows of `x` [num_tokens, in_features]."""
        if self._names is not None and name not in self._names:
            return
        rows: NDArray[np.float32] = x.astype(np.float32, copy=False)
        product = rows.T @ rows
        if name in self._sums:
            self._sums[name] += product
        else:
            self._sums[name] = product
        self._num_rows[name] = self._num_rows.get(name, 0) + len(rows)

    def result(self) -> dict[str, Float32Array]:
        """Yield the mean of x^T x over rows, float32[in_features, in_features], by the GEMM's name."""
        return {name: total / np.float32(max(self._num_rows[name], 1)) for name, total in self._sums.items()}


def collect_activation_stats(
    model: ReferenceModel, token_id_sequences: Iterable[Sequence[int]]
) -> dict[str, Float64Array]:
    """Yield the relative rms of each GEMM input, float64[in_features], by name (see `graphs.reference.Observer`).

    Empty sequences are passed over.
    """
    relative_rms = RelativeRms()
    for token_ids in token_id_sequences:
        if len(token_ids):
            model.final_hidden(token_ids, observe=relative_rms)
    return relative_rms.result()


def collect_second_moments(
    model: ReferenceModel, token_id_sequences: Iterable[Sequence[int]], names: Iterable[str] | None = None
) -> dict[str, Float32Array]:
    """Yield the mean of x^T x of each GEMM input, or of `names` only, float32[in_features, in_features]."""
    moments = SecondMoments(names)
    for token_ids in token_id_sequences:
        if len(token_ids):
            model.final_hidden(token_ids, observe=moments)
    return moments.result()
