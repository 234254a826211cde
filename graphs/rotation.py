"""The block Hadamard rotation that spreads activation outliers before they are quantised.

K channels fall into S = K / block strided blocks: block j holds the channels j, j + S, j + 2S, ... Each is multiplied
by the normalised Hadamard matrix, which is symmetric and its own inverse, so rotating both the activations (at run
time) and the weights' input channels (here) leaves their product as it was: (x R) (W R)^T = x W^T.
"""

import numpy as np

from graphs.rope import Float32Array

MAX_ROTATION = 64  # channels of one block; wider ones cost more at run time and gained nothing


def rotation_block(num_channels: int) -> int:
    """The largest power of two, at most MAX_ROTATION, that divides `num_channels`; 0 where that would be 1."""
    block = min(MAX_ROTATION, num_channels & -num_channels)
    return block if block > 1 else 0


def rotate_channels(rows: Float32Array, block: int) -> Float32Array:
    """Rotate the last axis of `rows` [..., K] in strided blocks of `block`, a power of two that divides K, or 0: none.

    Yields float32 of the same shape: a copy, or `rows` itself where nothing is rotated.
    """
    if block <= 1:
        return rows
    num_rows, stride = rows.size // rows.shape[-1], rows.shape[-1] // block
    rotated = rows.reshape(num_rows, block, stride)
    half = 1
    while half < block:  # the fast Walsh-Hadamard transform, in Sylvester's order
        pairs = rotated.reshape(num_rows, block // (2 * half), 2, half, stride)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        rotated = np.stack((low + high, low - high), axis=2).reshape(num_rows, block, stride)
        half *= 2
    return (rotated * np.float32(block**-0.5)).reshape(rows.shape)
