"""QuantizedLinear against exact integer arithmetic, on every instruction set of this machine."""

import numpy as np
import pytest

from graphs import op_twins_rows as twins
from graphs.quantize import pack_channels
from tests.unit.op_session import LIBRARY, run_op, supported_isas


@pytest.fixture(params=supported_isas(), autouse=True)
def isa(request):
    LIBRARY.chairlift_set_isa(request.param.encode())
    yield request.param
    LIBRARY.chairlift_set_isa(b"auto")


def operands(num_rows, in_features, out_features, seed=0):
    """q, row_params, weights [N, K], col_scale, bias."""
    generator = np.random.default_rng(seed)
    row_params = np.stack([generator.uniform(0.01, 0.03, num_rows), generator.integers(0, 256, num_rows)], axis=1)
    return (
        generator.integers(0, 256, (num_rows, in_features), dtype=np.uint8),
        row_params.astype(np.float32),
        generator.integers(-127, 128, (out_features, in_features), dtype=np.int8),
        generator.uniform(0.001, 0.004, out_features).astype(np.float32),
        generator.normal(size=out_features).astype(np.float32),
    )


def linear(q, row_params, weights, col_scale, bias=None, **options):
    stored = pack_channels(weights, col_scale)
    return run_op("QuantizedLinear", q, row_params, stored.panels, stored.col_scale, stored.col_sum, bias, **options)


# Every remainder of the tiles: rows of a strip, columns of a tile, a panel and a vector, channels of a group.
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 25])
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 64), (576, 80), (7, 1), (33, 17), (130, 143), (4, 200)])
def test_every_shape_gives_the_bits_of_its_definition(num_rows, in_features, out_features):
    inputs = operands(num_rows, in_features, out_features)
    np.testing.assert_array_equal(linear(*inputs), twins.quantized_linear(*inputs))


def test_a_bias_may_be_left_out():
    *inputs, _ = operands(5, 40, 50)
    np.testing.assert_array_equal(linear(*inputs), twins.quantized_linear(*inputs))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_is_the_same_alone_and_in_any_batch(num_threads):
    q, row_params, *rest = operands(40, 576, 3072)
    together = linear(q, row_params, *rest, num_threads=num_threads)
    for row in (0, 1, 17, 39):
        alone = linear(q[row : row + 1], row_params[row : row + 1], *rest)
        np.testing.assert_array_equal(together[row : row + 1], alone)


def test_the_widest_rows_sum_up_exactly():
    # 65,793 products of 255 and -127, in 32 bits; the correction for zero point 255 takes all of them away.
    width = twins.MAX_QUANTIZED_WIDTH
    q, weights = np.full((3, width), 255, np.uint8), np.full((1, width), -127, np.int8)
    row_params = np.array([[1, 255], [1, 0], [1, 254]], np.float32)
    y = linear(q, row_params, weights, np.ones(1, np.float32))
    assert y.ravel().tolist() == [0, float(np.float32(-255 * 127 * width)), float(np.float32(-127 * width))]


def test_pairs_of_large_products_do_not_saturate():
    # Two products of 255 and 127 are more than 16 bits hold.
    q, weights = np.full((1, 8), 255, np.uint8), np.full((16, 8), 127, np.int8)
    y = linear(q, np.array([[1, 0]], np.float32), weights, np.ones(16, np.float32))
    assert y.tolist() == [[255 * 127 * 8] * 16]


def test_no_rows_give_no_rows():
    assert linear(*operands(0, 48, 20)).shape == (0, 20)


def test_a_row_without_a_finite_range_becomes_nan_and_leaves_its_neighbours_alone():
    q, row_params, *rest = operands(3, 48, 20)
    expected = linear(q, row_params, *rest)
    row_params[1] = np.nan, 0
    y = linear(q, row_params, *rest)
    assert np.isnan(y[1]).all()
    np.testing.assert_array_equal(y[[0, 2]], expected[[0, 2]])


def inputs_with(**changes):
    q, row_params, weights, col_scale, bias = operands(4, 48, 20)
    stored = pack_channels(weights, col_scale)
    arrays = {
        "q": q,
        "row_params": row_params,
        "weights": stored.panels,
        "col_scale": col_scale,
        "col_sum": stored.col_sum,
        "bias": bias,
    }
    return [*(arrays | changes).values()]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": np.zeros(48, np.uint8)}, r"'q' has shape \[48\], expected 2 dimensions"),
        ({"q": np.zeros((4, 52), np.uint8)}, r"'weights' has shape \[2, 12, 16, 4\], expected \[2, 13, 16, 4\]"),
        ({"q": np.zeros((4, 65_794), np.uint8)}, "'q' has 65794 channels; at most 65793"),
        ({"row_params": np.zeros((4, 1), np.float32)}, r"'row_params' has shape \[4, 1\], expected \[4, 2\]"),
        ({"row_params": np.full((4, 2), 256, np.float32)}, "'row_params' row 0 has zero point 256; it must be within"),
        ({"row_params": np.full((4, 2), np.nan, np.float32)}, "'row_params' row 0 has zero point"),
        ({"col_scale": np.ones(40, np.float32)}, r"'weights' has shape \[2, 12, 16, 4\], expected \[3, 12, 16, 4\]"),
        ({"col_sum": np.zeros(19, np.int32)}, r"'col_sum' has shape \[19\], expected \[20\]"),
        ({"bias": np.zeros((20, 1), np.float32)}, r"'bias' has shape \[20, 1\], expected \[20\]"),
    ],
)
def test_wrong_inputs_are_named(changes, message):
    with pytest.raises(Exception, match=message):
        run_op("QuantizedLinear", *inputs_with(**changes))
