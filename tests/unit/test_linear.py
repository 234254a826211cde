"""The integer GEMM, in its plain form QuantizedLinear, against exact integer arithmetic, on every instruction set."""

import numpy as np
import pytest

from graphs import op_twins_rows as twins
from graphs.quantize import pack_channels
from tests.unit.op_session import LIBRARY, OUTPUT_TYPES, OpSession, run_op, supported_isas
from tests.unit.row_products import multiplied


@pytest.fixture(params=supported_isas(), autouse=True)
def isa(request):
    LIBRARY.chairlift_set_isa(request.param.encode())
    yield request.param
    LIBRARY.chairlift_set_isa(b"auto")


def operands(num_rows, in_features, out_features, seed=0):
    """x [T, K], weights [N, K], col_scale, bias. Rows have zero points from 0 to 255."""
    generator = np.random.default_rng(seed)
    centres = generator.uniform(-2, 2, (num_rows, 1))
    return (
        (centres + generator.uniform(-1, 1, (num_rows, in_features))).astype(np.float32),
        generator.integers(-127, 128, (out_features, in_features), dtype=np.int8),
        generator.uniform(0.001, 0.004, out_features).astype(np.float32),
        generator.normal(size=out_features).astype(np.float32),
    )


def linear(x, weights, col_scale, bias=None, **options):
    return multiplied("QuantizedLinear", (x,), weights, col_scale, bias, **options)


def expected_of(x, *rest):
    return twins.integer_linear(*twins.quantize_rows(x), *rest)


# Every remainder of the tiles: rows of a strip, columns of a tile, a panel and a vector, channels of a group.
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 25])
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 64), (576, 80), (7, 1), (33, 17), (130, 143), (4, 200)])
def test_every_shape_gives_the_bits_of_its_definition(num_rows, in_features, out_features):
    inputs = operands(num_rows, in_features, out_features)
    np.testing.assert_array_equal(linear(*inputs), expected_of(*inputs))


def test_a_bias_may_be_left_out():
    *inputs, _ = operands(5, 40, 50)
    np.testing.assert_array_equal(linear(*inputs), expected_of(*inputs))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_is_the_same_alone_and_in_any_batch(num_threads):
    x, *rest = operands(40, 576, 3072)
    together = linear(x, *rest, num_threads=num_threads)
    for row in (0, 1, 17, 39):
        alone = linear(x[row : row + 1], *rest)
        np.testing.assert_array_equal(together[row : row + 1], alone)


def test_threads_wait_for_the_rows_that_others_quantise():
    # Rows so wide that a second thread joins in, and all in one strip: a row not waited for shows the run before.
    x, weights, col_scale, _ = operands(5, 65536, 128)
    stored = pack_channels(weights, col_scale)
    inputs = [x, stored.panels, stored.col_scale, stored.col_sum]
    session = OpSession("QuantizedLinear", inputs, 1, OUTPUT_TYPES["QuantizedLinear"], num_threads=2)
    expected = expected_of(x, weights, col_scale)
    for shift in range(20):
        (y,) = session.run([np.roll(x, shift, axis=0), *inputs[1:]])
        np.testing.assert_array_equal(y, np.roll(expected, shift, axis=0))


def test_the_widest_rows_sum_up_exactly():
    # Up to 65,793 products of 255 and -127, in 32 bits, and corrections as large. All scales are 1.
    width = twins.MAX_QUANTIZED_WIDTH
    x = np.empty((3, width), np.float32)
    x[0] = 255  # q 255, zero point 0
    x[1] = -255  # q 0, zero point 255
    x[2], x[2, 0] = 1, -254  # q 255 but for one 0, zero point 254
    y = linear(x, np.full((1, width), -127, np.int8), np.ones(1, np.float32))
    expected = [-255 * 127 * width, 255 * 127 * width, -127 * (width - 255)]
    assert y.ravel().tolist() == [float(np.float32(value)) for value in expected]


def test_pairs_of_large_products_do_not_saturate():
    # Two products of 255 and 127 are more than 16 bits hold.
    x, weights = np.full((1, 8), 255, np.float32), np.full((16, 8), 127, np.int8)
    assert linear(x, weights, np.ones(16, np.float32)).tolist() == [[255 * 127 * 8] * 16]


def test_no_rows_give_no_rows():
    assert linear(*operands(0, 48, 20)).shape == (0, 20)


def test_a_row_without_a_finite_range_becomes_nan_and_leaves_its_neighbours_alone():
    x, *rest = operands(3, 48, 20)
    expected = linear(x, *rest)
    x[1, 7] = np.nan
    y = linear(x, *rest)
    assert np.isnan(y[1]).all()
    np.testing.assert_array_equal(y[[0, 2]], expected[[0, 2]])


def inputs_with(**changes):
    x, weights, col_scale, bias = operands(4, 48, 20)
    stored = pack_channels(weights, col_scale)
    arrays = {
        "x": x,
        "weights": stored.panels,
        "col_scale": col_scale,
        "col_sum": stored.col_sum,
        "bias": bias,
    }
    return [*(arrays | changes).values()]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.zeros(48, np.float32)}, r"'x' has shape \[48\], expected 2 dimensions"),
        ({"x": np.zeros((4, 52), np.float32)}, r"'weights' has shape \[2, 12, 16, 4\], expected \[2, 13, 16, 4\]"),
        ({"col_scale": np.ones(40, np.float32)}, r"'weights' has shape \[2, 12, 16, 4\], expected \[3, 12, 16, 4\]"),
        ({"col_sum": np.zeros(19, np.int32)}, r"'col_sum' has shape \[19\], expected \[20\]"),
        ({"bias": np.zeros((20, 1), np.float32)}, r"'bias' has shape \[20, 1\], expected \[20\]"),
    ],
)
def test_wrong_inputs_are_named(changes, message):
    with pytest.raises(Exception, match=message):
        run_op("QuantizedLinear", *inputs_with(**changes))
