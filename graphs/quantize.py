"""Weight matrices as the initializers that integer GEMMs read.

`ChannelWeights` feeds our integer GEMMs (w8a8): int8 with one scale per output channel. `NBitsWeights` feeds ONNX
Runtime's MatMulNBits (int4, int8): codes with one scale per 32 input channels. A file's own grid of blocks is kept
exactly.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphs.errors import ExportError
from graphs.rope import Float32Array
from graphs.tensors import BLOCK_SIZE, BlockWeights, UInt8Array

Int8Array = NDArray[np.int8]
Int32Array = NDArray[np.int32]

# The tiles of weights that integer GEMMs read; kPanelColumns and kGroupChannels in ops/linear_kernels.h.
PANEL_OUTPUTS = 16
GROUP_INPUTS = 4

# What share of a block's range the 4-bit grid spans; the one with the least squared error is taken.
_CLIP_RATIOS = (1.0, 0.95, 0.9, 0.85, 0.8)
# A smaller range has no scale that is a normal float32: such weights, and a row or block of zeros, count as zeros.
_SMALLEST = 127 * np.finfo(np.float32).tiny
_LARGEST = 2.0**126
# A zero point that is an integer up to this comes from float32 arithmetic on an integer, not from a file's own offset.
_ZERO_POINT_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class ChannelWeights:
    """weight[n, k] = col_scale[n] * panels[n // 16, k // 4, n % 16, k % 4]."""

    panels: Int8Array  # [ceil(out_features / 16), ceil(in_features / 4), 16, 4], -127 to 127; the rest is zero
    col_scale: Float32Array  # [out_features]
    col_sum: Int32Array  # [out_features] sum of values over in_features


@dataclass(frozen=True, slots=True)
class NBitsWeights:
    """weight = scale * (code - zero point), plus `correction` where the grid's zero lies between two codes."""

    bits: int  # 4 or 8
    packed: UInt8Array  # [out_features, in_features / 32, 4 * bits] two 4-bit codes a byte, the even one low
    scales: Float32Array  # [out_features, in_features / 32]
    zero_points: UInt8Array | None  # [out_features, ceil(in_features / 64)] two a byte; None: 2^(bits - 1) throughout
    correction: Float32Array | None  # [in_features / 32, out_features] what each weight of a block lacks


def quantize_channels(weight: Float32Array) -> ChannelWeights:
    """Round `weight` [out_features, in_features] to int8, symmetric, with a scale of max|row| / 127 per row."""
    scale = channel_scales(weight)
    values = np.rint(weight / scale[:, None]).astype(np.int8)
    return pack_channels(values, scale)


def channel_scales(weight: Float32Array) -> Float32Array:
    """max|row| / 127 of each row of `weight` [out_features, in_features]; 1 for rows that round to zeros."""
    return _scales_to_8_bits(np.abs(weight).max(axis=1))


def _scales_to_8_bits(largest: Float32Array) -> Float32Array:
    """largest / 127; 1 where all weights round to zeros."""
    return np.where(largest >= _SMALLEST, largest / np.float32(127), np.float32(1)).astype(np.float32)


def pack_channels(values: Int8Array, scale: Float32Array) -> ChannelWeights:
    """Lay out rounded `values` [out_features, in_features] for integer GEMMs and add up each output's.

    Panels of 16 outputs, in which the same four inputs of each lie together: a vector of any width holds whole groups
    of four, whose products one instruction adds up, and a panel is read from front to end.
    """
    out_features, in_features = values.shape
    padded = np.pad(values, ((0, -out_features % PANEL_OUTPUTS), (0, -in_features % GROUP_INPUTS)))
    tiles = padded.reshape(len(padded) // PANEL_OUTPUTS, PANEL_OUTPUTS, -1, GROUP_INPUTS)
    return ChannelWeights(np.ascontiguousarray(tiles.swapaxes(1, 2)), scale, values.sum(axis=1, dtype=np.int32))


def quantize_blocks(weight: Float32Array, bits: int) -> BlockWeights:
    """Round `weight` [out_features, in_features] to blocks of 32: 8 bits symmetric, 4 bits with an integer zero point.

    Raises ExportError when in_features is no multiple of 32, or a weight is too large for a block's offset.
    """
    if weight.shape[1] % BLOCK_SIZE:
        raise ExportError(
            f"in_features: {weight.shape[1]} is not allowed: a multiple of {BLOCK_SIZE} for int4 and int8"
        )
    grouped = weight.reshape(weight.shape[0], -1, BLOCK_SIZE)
    largest = np.abs(grouped).max(axis=2)
    if not largest.max() <= _LARGEST:
        raise ExportError(f"weight: {largest.max():g} is not allowed: at most {_LARGEST:g} for int4 and int8")
    if bits == 8:
        scales = _scales_to_8_bits(largest)
        codes = (np.rint(grouped / scales[..., None]) + 128).astype(np.uint8)
        return BlockWeights(8, codes.reshape(weight.shape), scales, scales * np.float32(-128))
    # Errors are squared, so each block is brought below 1 first, by a power of two, which moves no weight on its grid.
    is_zero = largest < _SMALLEST
    exponents = np.where(is_zero, 0, np.frexp(largest)[1])
    normalised = np.where(is_zero[..., None], np.float32(0), np.ldexp(grouped, -exponents[..., None]))
    codes, scales, zero_points = _round_to_4_bits(normalised)
    scales = np.ldexp(scales, exponents)
    return BlockWeights(4, codes.reshape(weight.shape), scales, -zero_points * scales)


def _round_to_4_bits(grouped: Float32Array) -> tuple[UInt8Array, Float32Array, Float32Array]:
    """Codes, scales and zero points of the clipped range with the least squared error, block by block."""
    low = np.minimum(grouped.min(axis=2), 0)
    high = np.maximum(grouped.max(axis=2), 0)
    best_error = np.full(low.shape, np.inf, np.float32)
    best_codes = np.zeros(grouped.shape, np.uint8)
    best_scales = np.ones(low.shape, np.float32)
    best_zero_points = np.full(low.shape, 8, np.float32)
    for ratio in _CLIP_RATIOS:
        span = (high - low) * np.float32(ratio / 15)
        scales = np.where(span > 0, span, np.float32(1))
        zero_points = np.clip(np.rint(-low * np.float32(ratio) / scales), 0, 15)
        codes = np.clip(np.rint(grouped / scales[..., None]) + zero_points[..., None], 0, 15)
        error = np.square((codes - zero_points[..., None]) * scales[..., None] - grouped).sum(axis=2)
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best_scales = np.where(better, scales, best_scales)
        best_zero_points = np.where(better, zero_points, best_zero_points)
        best_codes[better] = codes[better].astype(np.uint8)
    return best_codes, best_scales, best_zero_points


def stack_blocks(parts: list[BlockWeights]) -> BlockWeights:
    """One matrix of the rows of all `parts`, on their own grids, with as many bits as the widest needs."""
    if len(parts) == 1:
        return parts[0]
    return BlockWeights(
        max(part.bits for part in parts),
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate([part.offsets for part in parts]),
    )


def zero_points_of(blocks: BlockWeights) -> UInt8Array | None:
    """The code that means zero, per block [out_features, in_features / 32], where that is a whole code everywhere."""
    scales = np.where(blocks.scales != 0, blocks.scales, np.float32(1))
    exact = np.where(blocks.scales != 0, -blocks.offsets / scales, np.where(blocks.offsets == 0, 0, np.nan))
    rounded = np.rint(exact)
    limit = 2**blocks.bits - 1
    if not np.all((np.abs(exact - rounded) <= _ZERO_POINT_TOLERANCE) & (rounded >= 0) & (rounded <= limit)):
        return None
    return rounded.astype(np.uint8)


def pack_blocks(blocks: BlockWeights) -> NBitsWeights:
    """Lay out `blocks` for MatMulNBits without moving a weight off its grid.

    Whole zero points go into `zero_points`, unless all are the default. Others would need float zero points, which
    leave MatMulNBits' fast path, so there the default stands and `correction` holds the rest, offset + default * scale.
    """
    default = 2 ** (blocks.bits - 1)
    zero_points = zero_points_of(blocks)
    correction = None
    if zero_points is None:
        correction = np.ascontiguousarray((blocks.offsets + blocks.scales * np.float32(default)).T)
    elif np.all((zero_points == default) | (blocks.scales == 0)):
        zero_points = None
    return NBitsWeights(
        bits=blocks.bits,
        packed=_pack_codes(blocks),
        scales=blocks.scales,
        zero_points=_pack_zero_points(zero_points, blocks.bits),
        correction=correction,
    )


def _pack_codes(blocks: BlockWeights) -> UInt8Array:
    grouped = blocks.codes.reshape(*blocks.scales.shape, BLOCK_SIZE)
    if blocks.bits == 8:
        return grouped
    return _pack_pairs(grouped)


def _pack_zero_points(zero_points: UInt8Array | None, bits: int) -> UInt8Array | None:
    if zero_points is None or bits == 8:
        return zero_points
    if zero_points.shape[1] % 2:
        zero_points = np.pad(zero_points, ((0, 0), (0, 1)))
    return _pack_pairs(zero_points)


def _pack_pairs(nibbles: UInt8Array) -> UInt8Array:
    return np.bitwise_or(nibbles[..., 0::2], np.left_shift(nibbles[..., 1::2], np.uint8(4)))
