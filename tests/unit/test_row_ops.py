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


def gemm_result(num_rows, width, seed=0, with_bias=True):
    """What an integer GEMM and its quantisers leave: acc, row_params, col_scale, col_sum, bias."""
    generator = np.random.default_rng(seed)
    row_params = np.stack([generator.uniform(0.01, 0.03, num_rows), generator.integers(0, 256, num_rows)], axis=1)
    return (
        generator.integers(-40_000, 40_000, (num_rows, width), dtype=np.int32),
        row_params.astype(np.float32),
        generator.uniform(0.001, 0.004, width).astype(np.float32),
        generator.integers(-300, 300, width, dtype=np.int32),
        generator.normal(size=width).astype(np.float32) if with_bias else None,
    )


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


@pytest.mark.parametrize("width", [3, 40, 100, 960, 4099])
@pytest.mark.parametrize("with_bias", [True, False])
def test_rescale_gives_the_bits_of_its_definition(width, with_bias):
    inputs = gemm_result(18, width, with_bias=with_bias)
    np.testing.assert_array_equal(run_op("Rescale", *inputs), twins.rescale(*inputs))


def test_the_widest_sums_are_corrected_exactly():
    # K = 65793 products of q = 255 and w = -128: the correction for zero point 255 takes all of it away.
    total = -255 * 128 * twins.MAX_QUANTIZED_WIDTH
    col_sum = np.array([-128 * twins.MAX_QUANTIZED_WIDTH], np.int32)
    row_params = np.array([[1, 255], [1, 0], [1, 254]], np.float32)
    y = run_op("Rescale", np.full((3, 1), total, np.int32), row_params, np.ones(1, np.float32), col_sum)
    assert y.ravel().tolist() == [0, float(np.float32(total)), float(np.float32(col_sum[0]))]


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
@pytest.mark.parametrize("with_bias", [True, False])
def test_residual_adds_follow_their_twin(width, rotation, with_bias):
    x, weight = 3 * floats(5, width), np.abs(floats(1, width, seed=1)[0])
    *gemm, bias = gemm_result(5, width, with_bias=with_bias)
    total, *quantised = run_op("AddRmsNormQuantize", x, *gemm, weight, bias, epsilon=1e-5, rotation=rotation)
    delta = twins.rescale(*gemm, bias)
    expected_total, *expected = twins.add_rms_norm_quantize(x, delta, weight, 1e-5, rotation)
    np.testing.assert_array_equal(total, expected_total)
    assert_quantised_alike(quantised, expected)


@pytest.mark.parametrize(("width", "rotation"), WIDTHS_AND_ROTATIONS)
def test_gates_follow_their_twin(width, rotation):
    gemm = gemm_result(5, 2 * width)[:4]
    gemm[2][:] *= np.float32(4)
    gemm[0][4] *= 1000  # gates of several hundred: silu must go to 0 and to the gate itself
    actual = run_op("SwiGluQuantize", *gemm, rotation=rotation)
    assert_quantised_alike(actual, twins.swiglu_quantize(twins.rescale(*gemm, None), rotation))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_is_the_same_alone_and_in_any_batch(num_threads):
    num_rows, width = 96, 576
    x, weight = floats(num_rows, width), np.abs(floats(1, width, seed=1)[0])
    acc, row_params, *columns, bias = gemm_result(num_rows, width)
    wide_acc, wide_params, *wide_columns, _ = gemm_result(num_rows, 1152, seed=5)
    logit_acc, logit_params, *logit_columns, _ = gemm_result(num_rows, 5000, seed=6)

    def run(rows, threads):
        return [
            *run_op("Quantize", x[rows], rotation=64, num_threads=threads),
            *run_op("RmsNormQuantize", x[rows], weight, rotation=64, num_threads=threads),
            *run_op(
                *("AddRmsNormQuantize", x[rows], acc[rows], row_params[rows], *columns, weight, bias),
                rotation=64,
                num_threads=threads,
            ),
            *run_op(
                "SwiGluQuantize", wide_acc[rows], wide_params[rows], *wide_columns, rotation=64, num_threads=threads
            ),
            run_op("Rescale", logit_acc[rows], logit_params[rows], *logit_columns, None, num_threads=threads),
        ]

    together = run(slice(None), num_threads)
    for row in (0, 1, 50, 95):
        for whole, alone in zip(together, run(slice(row, row + 1), 1), strict=True):
            np.testing.assert_array_equal(whole[row : row + 1], alone)


def test_no_rows_give_no_rows():
    *gemm, bias = gemm_result(0, 48)
    x, weight = np.zeros((0, 48), np.float32), np.ones(48, np.float32)
    assert [a.shape for a in run_op("Quantize", x)] == [(0, 48), (0, 2)]
    assert [a.shape for a in run_op("RmsNormQuantize", x, weight)] == [(0, 48), (0, 2)]
    assert [a.shape for a in run_op("AddRmsNormQuantize", x, *gemm, weight)] == [(0, 48), (0, 48), (0, 2)]
    assert [a.shape for a in run_op("SwiGluQuantize", *gemm)] == [(0, 24), (0, 2)]
    assert run_op("Rescale", *gemm, bias).shape == (0, 48)


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
    y = run_op("Rescale", np.zeros((3, 2), np.int32), row_params, np.ones(2, np.float32), np.zeros(2, np.int32))
    assert np.isnan(y).all(axis=1).tolist() == [False, True, False]


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


def gemm_with(**changes):
    names = ("acc", "row_params", "col_scale", "col_sum", "bias")
    arrays = dict(zip(names, gemm_result(4, 48), strict=True))
    return [*(arrays | changes).values()]


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
        ("AddRmsNormQuantize", [ROWS[:3], *gemm_with()[:4], WEIGHT], {}, r"'residual' has shape \[3, 48\]"),
        ("AddRmsNormQuantize", [ROWS, *gemm_with()[:4], WEIGHT, WEIGHT[1:]], {}, "'bias' has shape"),
        ("Rescale", gemm_with(row_params=np.zeros((4, 1), np.float32)), {}, r"'row_params' has shape \[4, 1\]"),
        (
            "Rescale",
            gemm_with(row_params=np.full((4, 2), 256, np.float32)),
            {},
            "'row_params' row 0 has zero point 256",
        ),
        ("Rescale", gemm_with(row_params=np.full((4, 2), np.nan, np.float32)), {}, "'row_params' row 0 has zero point"),
        ("Rescale", gemm_with(col_scale=WEIGHT[:5]), {}, "'col_scale' has shape"),
        ("Rescale", gemm_with(col_sum=np.zeros((48, 1), np.int32)), {}, "'col_sum' has shape"),
        ("SwiGluQuantize", [a[..., :47] if a.shape[-1] == 48 else a for a in gemm_with()[:4]], {}, "47 columns"),
        (
            "SwiGluQuantize",
            gemm_with()[:4],
            {"rotation": 16},
            "rotation 16 does not divide the 24 channels of the gated",
        ),
    ],
)
def test_wrong_inputs_are_named(op_type, inputs, attributes, message):
    with pytest.raises(Exception, match=message):
        run_op(op_type, *inputs, **attributes)
