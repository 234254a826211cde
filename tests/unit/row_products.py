"""The ops that quantise rows and multiply them, by weights that let the quantised rows be seen."""

import numpy as np

from graphs.quantize import pack_channels
from tests.unit.op_session import run_op


def multiplied(op_type, rows, weights, col_scale, bias=None, **options):
    """The op's outputs for the inputs `rows`, ahead of int8 weights [N, K], col_scale [N] and perhaps a bias."""
    stored = pack_channels(weights, col_scale)
    return run_op(op_type, *rows, stored.panels, stored.col_scale, stored.col_sum, bias, **options)


def dequantised(op_type, *rows, width, **options):
    """scale * (q - zero_point) [T, width] of the op's quantised rows: they are multiplied by the identity.

    Other outputs of the op follow.
    """
    return multiplied(op_type, rows, np.eye(width, dtype=np.int8), np.ones(width, np.float32), **options)
