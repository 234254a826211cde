"""The row-wise ops against their numpy twins, on every instruction set of the machine."""

import numpy as np
import pytest

from graphs import op_twins_rows as twins
from tests.unit.op_session import LIBRARY, run_op, supported_isas

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


def assert_quantised_alike(actual, expected):
    """Equal but for values that lie on the edge between two steps."""
    (q, row_params), (expected_q, expected_params) = actual, expected
    np.testing.assert_allclose(row_params[:, 0], expected_params[:, 0], rtol=3e-6)
    assert np.abs(row_params[:, 1] - expected_params[:, 1]).max(initial=0) <= 1
    distance = np.abs(q.astype(int) - row_params[:, 1:] - expected_q + expected_params[:, 1:])
    assert distance.max(initial=0) <= 1
    assert (distance > 0).mean() < 0.005


@pytest.mark.parametrize(("width", "rotation"), WIDTHS_AND_ROTATIONS)
def test_quantize_gives_the_bits_of_its_definition(width, rotation):
    x = floats(9, width)
    x[1] = 0
    x[2] = np.abs(x[2])
    x[3] = -np.abs(x[3])
    q, row_params = run_op("Quantize", x, rotation=rotation)
    expected_q, expected_params = twins.quantize_rows(x, rotation)
    np.testing.assert_array_equal(row_params, expected_params)
    np.testing.assert_array_equal(q, expected_q)


@pytest.mark.parametrize(("width", "rotation"), WIDTHS_AND_ROTATIONS)
def test_norms_follow_their_twin(width, rotation):
    x, weight = 3 * floats(5, width), np.abs(floats(1, width, seed=1)[0])
    actual = run_op("RmsNormQuantize", x, weight, epsilon=1e-5, rotation=rotation)
    assert_quantised_alike(actual, twins.rms_norm_quantize(x, weight, 1e-5, rotation))


def test_epsilon_is_added_to_the_mean_square():
    x, weight = floats(5, 40), np.ones(40, np.float32)
    actual = run_op("RmsNormQuantize", x, weight, epsilon=0.7)
    assert_quantised_alike(actual, twins.rms_norm_quantize(x, weight, 0.7))


@pytest.mark.parametrize(("width", "rotation"), WIDTHS_AND_ROTATIONS)
def test_residual_adds_follow_their_twin(width, rotation):
    x, weight = 3 * floats(5, width), np.abs(floats(1, width, seed=1)[0])
    delta = floats(5, width, seed=2)
    total, *quantised = run_op("AddRmsNormQuantize", x, delta, weight, epsilon=1e-5, rotation=rotation)
    expected_total, *expected = twins.add_rms_norm_quantize(x, delta, weight, 1e-5, rotation)
    np.testing.assert_array_equal(total, expected_total)
    assert_quantised_alike(quantised, expected)


@pytest.mark.parametrize(("width", "rotation"), WIDTHS_AND_ROTATIONS)
def test_gates_follow_their_twin(width, rotation):
    gate_up = floats(5, 2 * width)
    gate_up[4] *= 300  # gates of several hundred: silu must go to 0 and to the gate itself
    actual = run_op("SwiGluQuantize", gate_up, rotation=rotation)
    assert_quantised_alike(actual, twins.swiglu_quantize(gate_up, rotation))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_is_the_same_alone_and_in_any_batch(num_threads):
    num_rows, width = 96, 576
    x, weight = floats(num_rows, width), np.abs(floats(1, width, seed=1)[0])
    delta, gate_up = floats(num_rows, width, seed=2), floats(num_rows, 2 * width, seed=3)

    def run(rows, threads):
        return [
            *run_op("Quantize", x[rows], rotation=64, num_threads=threads),
            *run_op("RmsNormQuantize", x[rows], weight, rotation=64, num_threads=threads),
            *run_op("AddRmsNormQuantize", x[rows], delta[rows], weight, rotation=64, num_threads=threads),
            *run_op("SwiGluQuantize", gate_up[rows], rotation=64, num_threads=threads),
        ]

    together = run(slice(None), num_threads)
    for row in (0, 1, 50, 95):
        for whole, alone in zip(together, run(slice(row, row + 1), 1), strict=True):
            np.testing.assert_array_equal(whole[row : row + 1], alone)


def test_no_rows_give_no_rows():
    x, weight = np.zeros((0, 48), np.float32), np.ones(48, np.float32)
    assert [a.shape for a in run_op("Quantize", x)] == [(0, 48), (0, 2)]
    assert [a.shape for a in run_op("RmsNormQuantize", x, weight)] == [(0, 48), (0, 2)]
    assert [a.shape for a in run_op("AddRmsNormQuantize", x, x, weight)] == [(0, 48), (0, 48), (0, 2)]
    assert [a.shape for a in run_op("SwiGluQuantize", x)] == [(0, 24), (0, 2)]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("channel", [0, 17, 39])
def test_a_row_that_is_not_finite_becomes_nan_and_leaves_its_neighbours_alone(bad, channel):
    x = floats(3, 40)
    x[1, channel] = bad
    for rotation in (0, 8):
        _, row_params = run_op("Quantize", x, rotation=rotation)
        assert np.isnan(row_params[1, 0])
        np.testing.assert_array_equal(row_params[[0, 2]], twins.quantize_rows(x[[0, 2]], rotation)[1])
    _, row_params = run_op("RmsNormQuantize", x, np.ones(40, np.float32))
    assert np.isnan(row_params[:, 0]).tolist() == [False, True, False]


def test_tiny_rows_count_as_zero():
    x = np.array([[1e-37, -1e-37], [1e-35, 0]], np.float32)
    q, row_params = run_op("Quantize", x)
    assert row_params[0].tolist() == [1, 0]
    assert q[0].tolist() == [0, 0]
    assert q[1].tolist() == [255, 0]


def test_a_row_may_have_65793_channels_and_no_more():
    assert run_op("Quantize", np.ones((1, 65793), np.float32))[0].min() == 255
    with pytest.raises(Exception, match="'x' has 65794 channels; at most 65793"):
        run_op("Quantize", np.ones((1, 65794), np.float32))


ROWS, WEIGHT = floats(4, 48), np.ones(48, np.float32)


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes", "message"),
    [
        ("Quantize", [ROWS], {"rotation": 12}, "rotation is 12; it must be 0 or a power of two"),
        ("Quantize", [ROWS], {"rotation": -4}, "rotation is -4"),
        ("Quantize", [ROWS], {"rotation": 32}, "rotation 32 does not divide the 48 channels of 'x'"),
        ("Quantize", [ROWS[0]], {}, r"'x' has shape \[48\], expected 2 dimensions"),
        ("RmsNormQuantize", [ROWS, WEIGHT[:47]], {}, r"'weight' has shape \[47\], expected \[48\]"),
        ("RmsNormQuantize", [ROWS, WEIGHT], {"epsilon": 0.0}, "epsilon is 0; it must be above 0"),
        ("AddRmsNormQuantize", [ROWS, ROWS[:3], WEIGHT], {}, r"'delta' has shape \[3, 48\], expected \[4, 48\]"),
        ("AddRmsNormQuantize", [ROWS, ROWS, WEIGHT[1:]], {}, r"'weight' has shape \[47\]"),
        ("SwiGluQuantize", [ROWS[:, :47]], {}, "'gate_up' has 47 columns"),
        ("SwiGluQuantize", [ROWS], {"rotation": 16}, "rotation 16 does not divide the 24 channels of the gated"),
    ],
)
def test_wrong_inputs_are_named(op_type, inputs, attributes, message):
    with pytest.raises(Exception, match=message):
        run_op(op_type, *inputs, **attributes)
