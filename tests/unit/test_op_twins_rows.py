"""The twins of the row-wise ops against closed forms and published vectors."""

import numpy as np
import pytest

from graphs.op_twins_rows import (
    add_rms_norm_quantize,
    gumbel_noise,
    hadamard_blocks,
    integer_linear,
    kept_tokens,
    philox4x32,
    quantize_rows,
    sample_rows,
    swiglu_quantize,
)


def sylvester(size: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron(np.array([[1, 1], [1, -1]]), matrix)
    return matrix / np.sqrt(size)


@pytest.mark.parametrize(("width", "block"), [(8, 1), (8, 8), (40, 8), (576, 64), (96, 2)])
def test_hadamard_blocks_multiply_strided_channels_by_the_sylvester_matrix(width, block):
    x = np.random.default_rng(1).normal(size=(3, width))
    stride = width // block
    expected = np.empty_like(x)
    for j in range(stride):
        expected[:, j::stride] = x[:, j::stride] @ sylvester(block)
    np.testing.assert_allclose(hadamard_blocks(x, block), expected, rtol=0, atol=1e-12)


def test_rotating_inputs_and_weights_leaves_the_product_unchanged():
    generator = np.random.default_rng(2)
    x, weight = generator.normal(size=(4, 48)), generator.normal(size=(5, 48))
    np.testing.assert_allclose(hadamard_blocks(x, 16) @ hadamard_blocks(weight, 16).T, x @ weight.T, atol=1e-12)


@pytest.mark.parametrize("block", [-2, 3, 16])
def test_hadamard_blocks_refuse_a_block_that_is_no_power_of_two_dividing_the_width(block):
    with pytest.raises(ValueError, match=f"rotation {block} .* width 40"):
        hadamard_blocks(np.zeros((1, 40)), block)


def test_quantising_by_hand():
    q, row_params = quantize_rows(np.array([[-1.0, 0.0, 4.1, 0.5], [0, 0, 0, 0], [2, 1.02, 0.5, 0.25]], np.float32))
    np.testing.assert_allclose(row_params[:, 0], [5.1 / 255, 1, 2 / 255], rtol=1e-6)
    assert row_params[:, 1].tolist() == [50, 0, 0]
    assert q.tolist() == [[0, 50, 255, 75], [0, 0, 0, 0], [255, 130, 64, 32]]


def test_rows_come_back_within_half_a_step():
    x = np.random.default_rng(3).normal(size=(20, 100)).astype(np.float32)
    q, row_params = quantize_rows(x)
    scale, zero_point = row_params[:, :1].astype(float), row_params[:, 1:].astype(float)
    assert (np.abs(scale * (q - zero_point) - x) <= scale).all()
    assert np.mean(np.abs(scale * (q - zero_point) - x)) < np.mean(scale) * 0.26


def test_rows_that_are_not_finite_make_everything_after_them_nan():
    x = np.array([[1, np.nan, 2], [np.inf, 0, 1], [1, 2, 3]], np.float32)
    q, row_params = quantize_rows(x)
    assert np.isnan(row_params[:2, 0]).all()
    assert not q[:2].any()
    assert row_params[2].tolist() == [np.float32(3) * np.float32(1 / 255), 0]


def test_integer_linear_equals_the_float_product_of_dequantised_operands():
    generator = np.random.default_rng(4)
    q, row_params = quantize_rows(generator.normal(size=(6, 32)).astype(np.float32))
    weight = generator.integers(-127, 128, (10, 32)).astype(np.int8)
    col_scale, bias = generator.random(10, np.float32), generator.random(10, np.float32)
    rows = row_params[:, :1].astype(float) * (q - row_params[:, 1:].astype(float))
    expected = rows @ (weight * col_scale[:, None]).T + bias
    actual = integer_linear(q, row_params, weight, col_scale, bias)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_norm_and_gate_against_closed_forms():
    residual, delta = np.array([[1, 2, 2, 1]], np.float32), np.array([[2, 2, -2, 2]], np.float32)
    total, q, row_params = add_rms_norm_quantize(residual, delta, np.array([1, 1, 1, 2], np.float32), 0.5)
    assert total.tolist() == [[3, 4, 0, 3]]  # mean square 8.5, with epsilon 9: divided by 3, the last times 2
    np.testing.assert_allclose(row_params[:, 0] * q, [[1, 4 / 3, 0, 2]], atol=0.005)
    q, row_params = swiglu_quantize(np.array([[0, np.log(3), 100, -200, 5, 4, 0.01, 7]], np.float32))
    np.testing.assert_allclose(row_params[:, 0] * q, [[0, 3 * np.log(3), 1, 0]], atol=0.01)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, expected):
    assert philox4x32(np.array(counter, np.uint32), np.array(key, np.uint32)).tolist() == expected


def test_gumbel_noise_has_the_moments_of_its_distribution():
    noise = np.concatenate([gumbel_noise(seed=-5, position=p, num_tokens=999) for p in range(200)])
    assert abs(noise.mean() - 0.57722) < 0.01
    assert abs(noise.var() - np.pi**2 / 6) < 0.03


def test_thresholds_keep_ties_with_the_last_token_kept():
    scaled = np.log(np.array([0.125, 0.5, 0.25, 0.125], np.float32) / np.float32(0.5)).astype(np.float32)
    assert kept_tokens(scaled, 3, 1.0, 0.0).tolist() == [True, True, True, True]
    assert kept_tokens(scaled, 2, 1.0, 0.0).tolist() == [False, True, True, False]
    assert kept_tokens(scaled, 0, 0.7, 0.0).tolist() == [False, True, True, False]
    assert kept_tokens(scaled, 0, 0.8, 0.0).tolist() == [True, True, True, True]
    assert kept_tokens(scaled, 2, 0.66, 0.0).tolist() == [False, True, False, False]  # of the top-k set's mass, 0.75
    assert kept_tokens(scaled, 0, 0.0, 0.0).tolist() == [False, True, False, False]
    assert kept_tokens(scaled, 0, 1.0, 0.4).tolist() == [False, True, True, False]


def test_a_row_without_a_usable_logit_is_refused_by_number():
    logits = np.zeros((2, 3), np.float32)
    for bad in ([0, np.nan, 0], [-np.inf] * 3, [np.inf, 0, 0]):
        logits[1] = bad
        with pytest.raises(ValueError, match="row 1"):
            zeros = np.zeros(2, np.float32)
            sample_rows(
                logits, zeros, zeros.astype(np.int32), zeros, zeros, zeros.astype(np.int64), zeros.astype(np.int32)
            )
