"""What stands ahead of the integer GEMMs against its numpy twins, on every instruction set of the machine."""

import numpy as np
import pytest

from graphs import op_twins_rows as twins
from tests.unit.op_session import LIBRARY, run_op, supported_isas
from tests.unit.row_products import dequantised, multiplied

WIDTHS_AND_ROTATIONS = [
    (576, 64),
    (1536, 64),
    (40, 8),
    (100, 4),
    (1000, 8),
    (576, 0),
    (16, 16),
    (7, 0),
    (64, 2),
    (32, 1),
    (1024, 512),
    (480, 32),
    (144, 16),
    (112, 16),
    (4096, 4096),
]


@pytest.fixture(params=supported_isas(), autouse=True)
def isa(request):
    LIBRARY.chairlift_set_isa(request.param.encode())
    yield request.param
    LIBRARY.chairlift_set_isa(b"auto")


def floats(num_rows, width, seed=0):
    return np.random.default_rng(seed).normal(size=(num_rows, width)).astype(np.float32)


def values_of(q, row_params):
    """What quantised rows stand for, in the op's own arithmetic."""
    width = q.shape[1]
    return twins.integer_linear(q, row_params, np.eye(width, dtype=np.int8), np.ones(width, np.float32))


def assert_quantised_alike(actual, expected):
    """Equal but for values that lie on the edge between two steps."""
    scale, values = expected[1][:, :1], values_of(*expected)
    distance = np.abs(actual - values)
    assert (distance <= scale * 1.001 + 1e-5 * np.abs(values)).all()
    assert (distance > 1e-5 * np.abs(values)).mean() < 0.005


@pytest.mark.parametrize(("width", "rotation"), WIDTHS_AND_ROTATIONS)
def test_quantised_rows_have_the_bits_of_their_definition(width, rotation):
    x = floats(9, width)
    x[1] = 0
    x[2] = np.abs(x[2])
    x[3] = -np.abs(x[3])
    actual = dequantised("QuantizedLinear", x, width=width, rotation=rotation)
    np.testing.assert_array_equal(actual, values_of(*twins.quantize_rows(x, rotation)))


@pytest.mark.parametrize(("width", "rotation"), WIDTHS_AND_ROTATIONS)
def test_norms_follow_their_twin(width, rotation):
    x, weight = 3 * floats(5, width), np.abs(floats(1, width, seed=1)[0])
    actual = dequantised("RmsNormLinear", x, weight, width=width, epsilon=1e-5, rotation=rotation)
    assert_quantised_alike(actual, twins.rms_norm_quantize(x, weight, 1e-5, rotation))


def test_epsilon_is_added_to_the_mean_square():
    x, weight = floats(5, 40), np.ones(40, np.float32)
    actual = dequantised("RmsNormLinear", x, weight, width=40, epsilon=0.7)
    assert_quantised_alike(actual, twins.rms_norm_quantize(x, weight, 0.7))


@pytest.mark.parametrize(("width", "rotation"), WIDTHS_AND_ROTATIONS)
def test_residual_adds_follow_their_twin(width, rotation):
    x, weight = 3 * floats(5, width), np.abs(floats(1, width, seed=1)[0])
    delta = floats(5, width, seed=2)
    actual, total = dequantised("AddRmsNormLinear", x, delta, weight, width=width, epsilon=1e-5, rotation=rotation)
    expected_total, *expected = twins.add_rms_norm_quantize(x, delta, weight, 1e-5, rotation)
    np.testing.assert_array_equal(total, expected_total)
    assert_quantised_alike(actual, expected)


@pytest.mark.parametrize(("width", "rotation"), WIDTHS_AND_ROTATIONS)
def test_gates_follow_their_twin(width, rotation):
    gate_up = floats(5, 2 * width)
    gate_up[4] *= 300  # gates of several hundred: silu must go to 0 and to the gate itself
    actual = dequantised("SwiGluLinear", gate_up, width=width, rotation=rotation)
    assert_quantised_alike(actual, twins.swiglu_quantize(gate_up, rotation))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_row_is_the_same_alone_and_in_any_batch(num_threads):
    num_rows, width = 96, 576
    x, weight = floats(num_rows, width), np.abs(floats(1, width, seed=1)[0])
    delta, gate_up = floats(num_rows, width, seed=2), floats(num_rows, 2 * width, seed=3)

    def run(rows, threads):
        options = {"width": width, "rotation": 64, "num_threads": threads}
        return [
            dequantised("QuantizedLinear", x[rows], **options),
            dequantised("RmsNormLinear", x[rows], weight, **options),
            *dequantised("AddRmsNormLinear", x[rows], delta[rows], weight, **options),
            dequantised("SwiGluLinear", gate_up[rows], **options),
        ]

    together = run(slice(None), num_threads)
    for row in (0, 1, 50, 95):
        for whole, alone in zip(together, run(slice(row, row + 1), 1), strict=True):
            np.testing.assert_array_equal(whole[row : row + 1], alone)


def test_no_rows_give_no_rows():
    x, weight = np.zeros((0, 48), np.float32), np.ones(48, np.float32)
    assert dequantised("QuantizedLinear", x, width=48).shape == (0, 48)
    assert dequantised("RmsNormLinear", x, weight, width=48).shape == (0, 48)
    assert [a.shape for a in dequantised("AddRmsNormLinear", x, x, weight, width=48)] == [(0, 48), (0, 48)]
    assert dequantised("SwiGluLinear", x, width=24).shape == (0, 24)


def test_a_sum_does_not_need_a_column():
    x, weight = floats(3, 48), np.ones(48, np.float32)
    no_columns = np.zeros((0, 12, 16, 4), np.int8), np.zeros(0, np.float32), np.zeros(0, np.int32)
    y, total = run_op("AddRmsNormLinear", x, x, weight, *no_columns)
    assert y.shape == (3, 0)
    np.testing.assert_array_equal(total, x + x)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("channel", [0, 17, 39])
def test_a_row_that_is_not_finite_becomes_nan_and_leaves_its_neighbours_alone(bad, channel):
    x = floats(3, 40)
    x[1, channel] = bad
    for rotation in (0, 8):
        actual = dequantised("QuantizedLinear", x, width=40, rotation=rotation)
        assert np.isnan(actual[1]).all()
        np.testing.assert_array_equal(actual[[0, 2]], values_of(*twins.quantize_rows(x[[0, 2]], rotation)))
    actual = dequantised("RmsNormLinear", x, np.ones(40, np.float32), width=40)
    assert np.isnan(actual).all(axis=1).tolist() == [False, True, False]
    assert not np.isnan(actual[[0, 2]]).any()


def test_tiny_rows_count_as_zero():
    x = np.array([[1e-37, -1e-37], [1e-35, 0]], np.float32)
    actual = dequantised("QuantizedLinear", x, width=2)
    assert actual[0].tolist() == [0, 0]
    assert actual[1].tolist() == [pytest.approx(1e-35), 0]


def test_a_row_may_have_65793_channels_and_no_more():
    ones = np.ones((1, 65793), np.float32)
    one, scale = np.ones((1, 65793), np.int8), np.ones(1, np.float32)
    assert multiplied("QuantizedLinear", (ones,), one, scale)[0, 0] == pytest.approx(65793)
    with pytest.raises(Exception, match="'x' has 65794 channels; at most 65793"):
        multiplied("QuantizedLinear", (np.ones((1, 65794), np.float32),), np.ones((1, 65794), np.int8), scale)


ROWS, WEIGHT = floats(4, 48), np.ones(48, np.float32)


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes", "message"),
    [
        ("QuantizedLinear", [ROWS], {"rotation": 12}, "rotation is 12; it must be 0 or a power of two"),
        ("QuantizedLinear", [ROWS], {"rotation": -4}, "rotation is -4"),
        ("QuantizedLinear", [ROWS], {"rotation": 32}, "rotation 32 does not divide the 48 channels of 'x'"),
        ("QuantizedLinear", [ROWS[0]], {}, r"'x' has shape \[48\], expected 2 dimensions"),
        ("RmsNormLinear", [ROWS, WEIGHT[:47]], {}, r"'norm_weight' has shape \[47\], expected \[48\]"),
        ("RmsNormLinear", [ROWS, WEIGHT], {"epsilon": 0.0}, "epsilon is 0; it must be above 0"),
        ("AddRmsNormLinear", [ROWS, ROWS[:3], WEIGHT], {}, r"'delta' has shape \[3, 48\], expected \[4, 48\]"),
        ("AddRmsNormLinear", [ROWS, ROWS, WEIGHT[1:]], {}, r"'norm_weight' has shape \[47\]"),
        ("SwiGluLinear", [ROWS[:, :47]], {}, "'gate_up' has 47 columns"),
        ("SwiGluLinear", [ROWS], {"rotation": 16}, "rotation 16 does not divide the 24 channels of the gated"),
    ],
)
def test_wrong_inputs_are_named(op_type, inputs, attributes, message):
    with pytest.raises(Exception, match=message):
        dequantised(op_type, *inputs, width=48, **attributes)
