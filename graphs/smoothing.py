"""Smoothing: per channel, a factor moves from a GEMM's activations into its weights, offline.

SmoothQuant (Xiao et al. 2022) with relative rms in place of the maximum: for y = x W^T, channel k of x is divided by
s[k] and column k of W multiplied by it, so the product stays and neither side keeps an outlier channel. Division by s
costs nothing at run time: it is folded into whatever wrote x (norm weights, rows of `up`, rows of `v`).
"""

from typing import Final

import numpy as np

from graphs.rope import Float32Array, Float64Array

# How much of the activations' unevenness moves into the weights, by projection (measured on SmolLM2-135M).
EXPONENTS: Final = {"qkv": 0.6, "gate_up": 0.6, "o": 0.5, "head": 0.5, "down": 0.9}

_FLOOR = 1e-5  # relative to the largest channel: a dead channel must not get a factor of zero or infinity


def smoothing_factors(relative_rms: Float64Array, weight_max: Float64Array, exponent: float) -> Float32Array:
    """Factors s = r^a / w^(1 - a), scaled to a geometric mean of 1.

    `relative_rms` [K] is each input channel's root mean square, `weight_max` [K] the largest |weight| of each input
    channel, `exponent` is a, from 0 (all to the weights' liking) to 1. Yields float32[K], positive and finite.
    """
    rms_logs = np.log(_floored(relative_rms))
    weight_logs = np.log(_floored(weight_max))
    logs = exponent * rms_logs - (1.0 - exponent) * weight_logs
    factors: Float32Array = np.exp(logs - logs.mean()).astype(np.float32)
    return factors


def shared_by_query_heads(relative_rms: Float64Array, num_kv_heads: int, head_dim: int) -> Float64Array:
    """The maximum over the query heads that read one KV head, so that a factor fits into that head's rows of V.

    `relative_rms` or weight maxima [num_heads * head_dim], ordered by KV head -> float64[num_kv_heads * head_dim].
    """
    grouped = relative_rms.reshape(num_kv_heads, -1, head_dim)
    return np.asarray(grouped.max(axis=1).reshape(-1))


def repeated_for_query_heads(factors: Float32Array, num_heads: int, num_kv_heads: int, head_dim: int) -> Float32Array:
    """Each KV head's `factors` [num_kv_heads * head_dim], repeated -> float32[num_heads * head_dim]."""
    grouped = factors.reshape(num_kv_heads, 1, head_dim)
    return np.repeat(grouped, num_heads // num_kv_heads, axis=1).reshape(-1)


def channel_max(*weights: Float32Array) -> Float64Array:
    """The largest |weight| of each input channel over several matrices [N_i, K]. Yields float64[K]."""
    largest = np.stack([np.abs(weight).max(axis=0) for weight in weights])
    return np.asarray(largest.max(axis=0), dtype=np.float64)


def _floored(values: Float64Array) -> Float64Array:
    largest = values.max(initial=0.0)
    return np.maximum(values, largest * _FLOOR if largest > 0 else 1.0)
