"""The integer grids of GGUF's block types, read from raw rows without rounding anything.

    Q4_0, Q5_0, Q8_0   weight = d * (q - zero)          d float16 per 32 weights
    Q4_1, Q5_1         weight = d * q + m               d, m float16 per 32 weights
    Q4_K, Q5_K         weight = d * s * q - e * m       d, e float16 per 256 weights; s, m six bits per 32

All are weight = scale * code + offset with float32 scale and offset per 32 weights. Types whose scales cover 16
weights (Q2_K, Q3_K, Q6_K) or whose levels are not evenly spaced (IQ4_NL and kin) have no such grid.
"""

from collections.abc import Callable

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import Q4_K
from numpy.typing import NDArray

from graphs.rope import Float32Array
from graphs.tensors import BLOCK_SIZE, BlockWeights, UInt8Array

# Codes uint8[num_blocks, 32], scales and offsets float32[num_blocks]; K types yield eight blocks for each of theirs.
_Grid = tuple[UInt8Array, Float32Array, Float32Array]


def decode_blocks(rows: UInt8Array, kind: GGMLQuantizationType) -> BlockWeights | None:
    """Decode raw rows uint8[out_features, bytes per row], or yield None when `kind` has no grid of 32 weights."""
    if kind not in _DECODERS:
        return None
    bits, block_bytes, decode = _DECODERS[kind]
    codes, scales, offsets = decode(np.ascontiguousarray(rows).reshape(-1, block_bytes))
    num_rows = rows.shape[0]
    return BlockWeights(bits, codes.reshape(num_rows, -1), scales.reshape(num_rows, -1), offsets.reshape(num_rows, -1))


def _float16(raw: UInt8Array, column: int) -> Float32Array:
    return np.ascontiguousarray(raw[:, column : column + 2]).view(np.float16)[:, 0].astype(np.float32)


def _nibbles(packed: UInt8Array) -> UInt8Array:
    """[num_blocks, 16] bytes: the low nibbles are the block's first half, the high ones its second."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)


def _fifth_bits(packed: UInt8Array) -> UInt8Array:
    """[num_blocks, 4] bytes, one bit per weight from the lowest: the bit in place 4 of each code."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=1, bitorder="little") << np.uint8(4)


def _q4_0(raw: UInt8Array) -> _Grid:
    scales = _float16(raw, 0)
    return _nibbles(raw[:, 2:]), scales, scales * np.float32(-8)


def _q4_1(raw: UInt8Array) -> _Grid:
    return _nibbles(raw[:, 4:]), _float16(raw, 0), _float16(raw, 2)


def _q5_0(raw: UInt8Array) -> _Grid:
    scales = _float16(raw, 0)
    return _nibbles(raw[:, 6:]) | _fifth_bits(raw[:, 2:6]), scales, scales * np.float32(-16)


def _q5_1(raw: UInt8Array) -> _Grid:
    return _nibbles(raw[:, 8:]) | _fifth_bits(raw[:, 4:8]), _float16(raw, 0), _float16(raw, 2)


def _q8_0(raw: UInt8Array) -> _Grid:
    scales = _float16(raw, 0)
    return raw[:, 2:] ^ np.uint8(0x80), scales, scales * np.float32(-128)  # flipping the top bit adds 128 to an int8


def _k_scales(raw: UInt8Array) -> tuple[Float32Array, Float32Array]:
    """Scales and offsets, float32[num_blocks, 8] each, of the eight groups of 32 in each block of 256."""
    scales, minima = Q4_K.get_scale_min(np.ascontiguousarray(raw[:, 4:16]))
    d, d_min = _float16(raw, 0)[:, None], _float16(raw, 2)[:, None]
    return d * scales.astype(np.float32), -(d_min * minima.astype(np.float32))


def _k_nibbles(packed: UInt8Array) -> UInt8Array:
    """[num_blocks, 128] bytes: each 32 hold two groups, the low nibbles and then the high ones."""
    groups = packed.reshape(-1, 4, 1, BLOCK_SIZE)
    return np.concatenate([groups & 0x0F, groups >> 4], axis=2)


def _q4_k(raw: UInt8Array) -> _Grid:
    return (_k_nibbles(raw[:, 16:]), *_k_scales(raw))


def _q5_k(raw: UInt8Array) -> _Grid:
    places = np.arange(8, dtype=np.uint8)[None, :, None]
    fifth = ((raw[:, None, 16:48] >> places) & np.uint8(1)) << np.uint8(
        4
    )  # byte i of 32 holds weight i of each of the eight groups
    return (_k_nibbles(raw[:, 48:]).reshape(-1, 8, BLOCK_SIZE) | fifth, *_k_scales(raw))


_DECODERS: dict[GGMLQuantizationType, tuple[int, int, Callable[[NDArray[np.uint8]], _Grid]]] = {
    GGMLQuantizationType.Q4_0: (4, 18, _q4_0),
    GGMLQuantizationType.Q4_1: (4, 20, _q4_1),
    GGMLQuantizationType.Q5_0: (8, 22, _q5_0),
    GGMLQuantizationType.Q5_1: (8, 24, _q5_1),
    GGMLQuantizationType.Q8_0: (8, 34, _q8_0),
    GGMLQuantizationType.Q4_K: (4, 144, _q4_k),
    GGMLQuantizationType.Q5_K: (8, 176, _q5_k),
}
