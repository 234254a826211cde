"""Numpy twins of the integer GEMMs and of SampleRows: their definition, and the oracle of their tests.

A GEMM's op quantises its rows and multiplies them; each half has its twin here, the second is always `integer_linear`:

    QuantizedLinear     quantize_rows
    RmsNormLinear       rms_norm_quantize
    AddRmsNormLinear    add_rms_norm_quantize, whose sum is the op's second output
    SwiGluLinear        swiglu_quantize

What is exact in the kernels is exact here: the integer sums, `integer_linear` and `quantize_rows` (float32, the same
operations in the same order, so equal bit for bit on every instruction set) and the random bits. Norms, SiLU and
probability masses are computed in float64 here and in float32 there; results may differ where a rounding decision lies
within that noise.

Every function works on each row by itself.
"""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

Int8Array = npt.NDArray[np.int8]
UInt8Array = npt.NDArray[np.uint8]
UInt32Array = npt.NDArray[np.uint32]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
FloatT = TypeVar("FloatT", np.float32, np.float64)

MAX_QUANTIZED_WIDTH = 65_793
"""Widest row that may be quantised: more u8 x s8 products, 255 * 128 each, could sum to more than int32 holds."""

_SMALLEST_NORMAL = np.finfo(np.float32).tiny
_PHILOX_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_PHILOX_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW_32 = np.uint64(0xFFFFFFFF)


def hadamard_blocks(x: npt.NDArray[FloatT], block: int) -> npt.NDArray[FloatT]:
    """Multiply strided blocks of the last axis by the normalised Sylvester Hadamard matrix of size `block`.

    With K channels and S = K / block, block j holds channels j, j + S, j + 2S, ... The transform is its own inverse.
    Keeps shape and dtype; for float32 the operations are those of the kernels, in their order. `block` 0 copies.
    Raises ValueError unless `block` is 0 or a power of two that divides K.
    """
    width = x.shape[-1]
    if block == 0:
        return x.copy()
    if block < 0 or block & (block - 1) or width % block:
        raise ValueError(f"rotation {block} is not a power of two that divides the width {width}")
    view = (x * x.dtype.type(1 / np.sqrt(block))).reshape(-1, block, width // block)
    half = block // 2
    while half > 0:
        pairs = view.reshape(len(view), block // (2 * half), 2, half, width // block)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        view = np.stack([low + high, low - high], axis=2).reshape(view.shape)
        half //= 2
    return view.reshape(x.shape)


def quantize_rows(x: Float32Array, rotation: int = 0) -> tuple[UInt8Array, Float32Array]:
    """Quantise each row of x [T, K] to 8 bits after rotating it: x ~ scale * (q - zero_point).

    Returns q uint8[T, K] and row_params float32[T, 2] = (scale, zero_point). The range always holds 0, so 0 is exact.
    A row whose scale would be below the smallest normal float32 counts as all zeros: scale 1, zero point 0. A row that
    holds NaN or an infinity gets scale NaN and q 0, which makes every number computed from it NaN.
    """
    width = x.shape[-1]
    if width > MAX_QUANTIZED_WIDTH:
        raise ValueError(f"rows of {width} channels; at most {MAX_QUANTIZED_WIDTH} keep integer sums within int32")
    rotated = hadamard_blocks(x, rotation)
    is_finite = np.isfinite(rotated).all(axis=-1, keepdims=True)
    rotated = np.where(is_finite, rotated, np.float32(0))
    low = rotated.min(axis=-1, keepdims=True, initial=0)
    high = rotated.max(axis=-1, keepdims=True, initial=0)
    scale = (high - low) * np.float32(1 / 255)
    is_zero = scale < _SMALLEST_NORMAL
    scale = np.where(is_zero, np.float32(1), scale)
    inverse = np.float32(1) / scale
    zero_point = np.where(is_zero, np.float32(0), np.clip(np.rint(-low * inverse), 0, 255))
    q = np.where(is_zero, np.float32(0), np.clip(np.rint(rotated * inverse) + zero_point, 0, 255)).astype(np.uint8)
    scale = np.where(is_finite, scale, np.float32(np.nan))
    return q, np.concatenate([scale, zero_point], axis=-1).astype(np.float32)


def integer_linear(
    q: UInt8Array,
    row_params: Float32Array,
    weights: Int8Array,
    col_scale: Float32Array,
    bias: Float32Array | None = None,
) -> Float32Array:
    """Multiply quantised rows q [T, K] by int8 weights [N, K] -> float32[T, N].

    row_params [T, 2] is the quantiser's; col_scale [N] scales each row of weights. With the exact sums acc and col_sum,
    y = (row_scale * col_scale) * (acc - zero_point * col_sum) + bias, each operation rounded to float32. The ops read
    the weights as `quantize.pack_channels` lays them out, and get col_sum as an input.
    """
    row_scale, zero_point = row_params[:, :1], row_params[:, 1:].astype(np.int64)
    wide = weights.astype(np.int64)
    acc = q.astype(np.int64) @ wide.T - zero_point * wide.sum(axis=1)
    product: Float32Array = (row_scale * col_scale) * acc.astype(np.float32)
    if bias is not None:
        product += bias
    return product


def _norm_rows(x: Float32Array, weight: Float32Array, epsilon: float) -> Float32Array:
    wide = x.astype(np.float64)
    mean_square = np.mean(wide * wide, axis=-1, keepdims=True)
    normed: Float32Array = (wide / np.sqrt(mean_square + epsilon) * weight).astype(np.float32)
    return normed


def rms_norm_quantize(
    x: Float32Array, weight: Float32Array, epsilon: float, rotation: int = 0
) -> tuple[UInt8Array, Float32Array]:
    """Normalise rows of x [T, H], then rotate and quantise them; results as `quantize_rows`."""
    return quantize_rows(_norm_rows(x, weight, epsilon), rotation)


def add_rms_norm_quantize(
    residual: Float32Array, delta: Float32Array, weight: Float32Array, epsilon: float, rotation: int = 0
) -> tuple[Float32Array, UInt8Array, Float32Array]:
    """Add delta [T, H] to the residual, and quantise the normalised sum.

    Returns (the sum, exact in float32; q; row_params).
    """
    total = residual + delta
    return total, *rms_norm_quantize(total, weight, epsilon, rotation)


def swiglu_quantize(gate_up: Float32Array, rotation: int = 0) -> tuple[UInt8Array, Float32Array]:
    """Quantise silu(gate) * up of gate_up [T, 2I], the gate half first."""
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
    with np.errstate(over="ignore"):
        gated = gate / (1 + np.exp(-gate)) * up
    return quantize_rows(gated.astype(np.float32), rotation)


def philox4x32(counter: UInt32Array, key: UInt32Array) -> UInt32Array:
    """Philox4x32-10 (Salmon et al. 2011): counter [..., 4] and key [..., 2] -> 32 random bits in each of [..., 4]."""
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[..., i].astype(np.uint64) for i in range(2))
    for _ in range(10):
        product0, product1 = c0 * _PHILOX_MULTIPLIERS[0], c2 * _PHILOX_MULTIPLIERS[1]
        c0, c1 = (product1 >> np.uint64(32)) ^ c1 ^ k0, product1 & _LOW_32
        c2, c3 = (product0 >> np.uint64(32)) ^ c3 ^ k1, product0 & _LOW_32
        k0, k1 = (k0 + _PHILOX_WEYL[0]) & _LOW_32, (k1 + _PHILOX_WEYL[1]) & _LOW_32
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def gumbel_noise(seed: int, position: int, num_tokens: int) -> Float64Array:
    """The Gumbel noise of tokens 0..num_tokens-1 at one position of one request: float64[num_tokens].

    Key: the two halves of the 64-bit seed, low first. Counter: (token >> 2, position, 0, 0), lane token & 3. The top 24
    bits give u = (bits + 0.5) / 2^24, and the noise is -log(-log(u)).
    """
    counter = np.zeros(((num_tokens + 3) // 4, 4), np.uint32)
    counter[:, 0] = np.arange(len(counter))
    counter[:, 1] = np.uint32(position & 0xFFFFFFFF)
    key = np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], np.uint32)
    bits = philox4x32(counter, key).reshape(-1)[:num_tokens]
    noise: Float64Array = -np.log(-np.log(((bits >> np.uint32(8)) + 0.5) / 2**24))
    return noise


def kept_tokens(scaled: Float32Array, top_k: int, top_p: float, min_p: float) -> npt.NDArray[np.bool_]:
    """Which tokens of one row survive: bool[V]. `scaled` [V] is (logit - largest logit) / temperature.

    Thresholds, not ranks: tokens tied with the last one kept stay. top_k keeps what is at least the k-th largest (0 or
    less, or V and more: all). top_p keeps a token if the tokens of larger mass hold less than top_p of the mass of the
    top-k set (1: all; the largest always stays). min_p keeps what has at least min_p times the largest's mass. Masses
    are float32: tokens whose masses are equal there are tied.
    """
    mass = np.exp(scaled.astype(np.float64)).astype(np.float32)
    keep = scaled > -np.inf
    if 0 < top_k < len(scaled):
        keep &= scaled >= np.partition(scaled, -top_k)[-top_k]
    if top_p < 1:
        order = np.argsort(-mass, kind="stable")
        cumulative = np.cumsum(np.where(keep, mass, 0)[order], dtype=np.float64)
        first_of_tie = np.searchsorted(-mass[order], -mass, side="left")
        mass_above = np.concatenate([[0.0], cumulative])[first_of_tie]
        keep &= (mass_above < np.float32(top_p) * cumulative[-1]) | (mass == 1)
    return keep & (mass >= np.float32(min_p))


def sample_rows(  # noqa: PLR0913, PLR0917 (the op's inputs)
    logits: Float32Array,
    temperature: Float32Array,
    top_k: Int32Array,
    top_p: Float32Array,
    min_p: Float32Array,
    seed: Int64Array,
    position: Int32Array,
) -> Int32Array:
    """Choose a token id for each row of logits [R, V]; the other arguments are [R]. The op SampleRows: int32[R].

    Temperature 0 (or denormal) takes the largest logit, the lowest id on a tie. Otherwise the token is the argmax over
    `kept_tokens` of the scaled logit plus `gumbel_noise`. Raises ValueError naming the row if it holds NaN or +inf, or
    only -inf.
    """
    tokens = np.empty(len(logits), np.int32)
    for row, values in enumerate(logits):
        largest = values.max()
        if not np.isfinite(largest):
            raise ValueError(f"row {row} has a NaN or infinite logit, or no finite one")
        if temperature[row] < _SMALLEST_NORMAL:
            tokens[row] = values.argmax()
            continue
        scaled = (values - largest) * (np.float32(1) / temperature[row])
        keep = kept_tokens(scaled, int(top_k[row]), float(top_p[row]), float(min_p[row]))
        score = scaled + gumbel_noise(int(seed[row]), int(position[row]), len(values))
        tokens[row] = np.where(keep, score, -np.inf).argmax()
    return tokens
