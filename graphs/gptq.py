"""GPTQ rounding (Frantar et al. 2022): each weight's rounding error is made up for by the weights still to be rounded.

What counts is the error of the product x W^T over the calibration inputs. With their second moments H, the sum or
mean of x^T x, it is a quadratic form per row of W, and H's inverse says how to spread a channel's error over those
after it.
"""

from typing import Final

import numpy as np

from graphs.quantize import Int8Array
from graphs.rope import Float32Array, Float64Array
from graphs.rotation import rotate_channels

_DAMPING: Final = 0.01  # of the mean of H's diagonal, added to it: few tokens leave H nearly singular
_NUM_CHANNELS: Final = 32  # rounded one by one, before the rest is updated by one GEMM
_NUM_ROWS: Final = 2048  # of the weight at a time, so that a block of channels stays in the cache
_LIMIT: Final = 127


def transformed_moments(moments: Float32Array, factors: Float32Array, block: int) -> Float32Array:
    """Second moments [K, K] of the inputs after division by `factors` [K] and rotation in blocks of `block`."""
    smoothed = moments / factors[:, None] / factors[None, :]
    return rotate_channels(np.ascontiguousarray(rotate_channels(smoothed, block).T), block)


def round_by_moments(weight: Float32Array, scale: Float32Array, moments: Float32Array) -> Int8Array:
    """Round `weight` [N, K] to multiples of `scale` [N] within -127 to 127, by the inputs' `moments` [K, K].

    Yields int8[N, K]. Channels that were always zero are rounded to nearest.
    """
    spread = _error_spread(moments)
    values = np.empty(weight.shape, np.int8)
    for start in range(0, weight.shape[0], _NUM_ROWS):
        rows = slice(start, start + _NUM_ROWS)
        values[rows] = _round_rows(np.ascontiguousarray(weight[rows].T), scale[rows], spread).T
    return values


def _error_spread(moments: Float32Array) -> Float32Array:
    """The upper Cholesky factor of H's inverse, each row divided by its diagonal: float32[K, K].

    With the order of channels reversed, H's own lower factor L gives it: inv(L), reversed back, is upper triangular and
    its square is H's inverse. That is a quarter of the work of inverting H itself.
    """
    damped = moments.astype(np.float64)
    diagonal = np.einsum("kk->k", damped)
    mean = float(diagonal.mean())
    diagonal += _DAMPING * mean if mean > 0 else 1.0
    upper = _inverse_of_lower(np.asarray(np.linalg.cholesky(damped[::-1, ::-1]), np.float64))[::-1, ::-1]
    return np.asarray(upper / np.diagonal(upper)[:, None], dtype=np.float32)


def _inverse_of_lower(lower: Float64Array) -> Float64Array:
    """The inverse of a lower triangular matrix, by halves, so that nearly all of it is matrix products."""
    size = len(lower)
    if size <= _NUM_CHANNELS:
        return np.asarray(np.linalg.inv(lower), np.float64)
    half = size // 2
    inverse = np.zeros_like(lower)
    inverse[:half, :half] = first = _inverse_of_lower(lower[:half, :half])
    inverse[half:, half:] = second = _inverse_of_lower(lower[half:, half:])
    inverse[half:, :half] = -second @ (lower[half:, :half] @ first)
    return inverse


def _round_rows(channels: Float32Array, scale: Float32Array, spread: Float32Array) -> Int8Array:
    """Round `channels` [K, N], which it consumes, one channel after the other; yield int8[K, N]."""
    num_channels = channels.shape[0]
    values = np.empty(channels.shape, np.int8)
    errors = np.empty((_NUM_CHANNELS, channels.shape[1]), np.float32)
    for start in range(0, num_channels, _NUM_CHANNELS):
        end = min(start + _NUM_CHANNELS, num_channels)
        for channel in range(start, end):
            rounded = np.clip(np.rint(channels[channel] / scale), -_LIMIT, _LIMIT)
            values[channel] = rounded
            error = channels[channel] - rounded * scale
            errors[channel - start] = error
            channels[channel + 1 : end] -= spread[channel, channel + 1 : end, None] * error
        channels[end:] -= spread[start:end, end:].T @ errors[: end - start]
    return values
