"""Quantised weights dequantise to what they came from, and a file's own grid is kept exactly."""

import numpy as np
import onnxruntime as ort
import pytest

from graphs.arithmetic import FloatArithmetic, Rows
from graphs.decoder_weights import BlockProjection
from graphs.errors import ExportError
from graphs.graph_builder import GraphBuilder, floats
from graphs.quantize import (
    NBitsWeights,
    pack_blocks,
    pack_channels,
    quantize_blocks,
    quantize_channels,
    stack_blocks,
    zero_points_of,
)
from graphs.tensors import BlockWeights
from graphs.weight_file import WeightFile


def random_grid(rng, bits, shape, offsets=None):
    codes = rng.integers(0, 2**bits, shape, dtype=np.uint8)
    scales = rng.uniform(0.01, 0.1, (shape[0], shape[1] // 32)).astype(np.float32)
    if offsets is None:
        offsets = -scales * np.float32(2 ** (bits - 1))
    return BlockWeights(bits, codes, scales, offsets)


def unpack(packed, bits):
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def dequantize(weights: NBitsWeights):
    """MatMulNBits' definition, and the correction."""
    codes = unpack(weights.packed, weights.bits).astype(np.float32)
    zero_points = np.float32(2 ** (weights.bits - 1))
    if weights.zero_points is not None:
        zero_points = unpack(weights.zero_points, weights.bits)[:, : codes.shape[1], None].astype(np.float32)
    values = weights.scales[..., None] * (codes - zero_points)
    if weights.correction is not None:
        values = values + weights.correction.T[..., None]
    return values.reshape(len(codes), -1)


def test_channel_weights_are_within_half_a_step():
    weight = np.random.default_rng(0).normal(0, 1, (5, 96)).astype(np.float32)
    stored = quantize_channels(weight)
    values = unpanelled(stored.panels, 5, 96)
    np.testing.assert_array_equal(np.abs(values).max(axis=1), [127] * 5)
    error = np.abs(values * stored.col_scale[:, None] - weight)
    assert np.all(error <= stored.col_scale[:, None] * 0.5001)
    np.testing.assert_array_equal(stored.col_sum, values.astype(np.int64).sum(axis=1))


def unpanelled(panels, out_features, in_features):
    """[out_features, in_features], one element at a time, as the layout is defined."""
    return np.array([[panels[n // 16, k // 4, n % 16, k % 4] for k in range(in_features)] for n in range(out_features)])


def test_panels_hold_every_weight_where_the_op_reads_it_and_zeros_elsewhere():
    values = np.random.default_rng(3).integers(-127, 128, (19, 6)).astype(np.int8)
    panels = pack_channels(values, np.ones(19, np.float32)).panels
    assert panels.shape == (2, 2, 16, 4)
    np.testing.assert_array_equal(unpanelled(panels, 19, 6), values)
    assert np.count_nonzero(panels) == np.count_nonzero(values)


def test_a_row_of_zeros_has_scale_one():
    weight = np.zeros((2, 32), np.float32)
    weight[1, 3] = -254
    stored = quantize_channels(weight)
    np.testing.assert_array_equal(stored.col_scale, [1, 2])
    np.testing.assert_array_equal(stored.col_sum, [0, -127])


def test_4_bit_codes_are_packed_with_the_even_channel_low():
    codes = np.arange(32, dtype=np.uint8).reshape(1, 32) % 16
    ones = np.ones((1, 1), np.float32)
    packed = pack_blocks(BlockWeights(4, codes, ones, ones * -8)).packed
    assert packed.shape == (1, 1, 16)
    assert packed[0, 0, :3].tolist() == [0x10, 0x32, 0x54]


@pytest.mark.parametrize("bits", [4, 8])
def test_a_grid_around_the_middle_code_needs_neither_zero_points_nor_correction(bits):
    blocks = random_grid(np.random.default_rng(1), bits, (7, 96))
    weights = pack_blocks(blocks)
    assert weights.zero_points is None
    assert weights.correction is None
    np.testing.assert_allclose(dequantize(weights), blocks.dequantize(), rtol=0, atol=1e-6)


def test_whole_zero_points_are_packed_two_a_byte():
    rng = np.random.default_rng(2)
    scales = rng.uniform(0.01, 0.1, (2, 3)).astype(np.float32)
    zero_points = np.array([[1, 2, 3], [15, 0, 8]], np.float32)
    blocks = BlockWeights(4, rng.integers(0, 16, (2, 96), dtype=np.uint8), scales, -scales * zero_points)
    weights = pack_blocks(blocks)
    assert weights.zero_points.tolist() == [[0x21, 0x03], [0x0F, 0x08]]
    assert weights.correction is None
    np.testing.assert_allclose(dequantize(weights), blocks.dequantize(), rtol=0, atol=1e-6)


def test_a_zero_between_two_codes_becomes_a_correction():
    rng = np.random.default_rng(3)
    offsets = rng.uniform(-1, 0, (6, 2)).astype(np.float32)
    blocks = random_grid(rng, 4, (6, 64), offsets)
    weights = pack_blocks(blocks)
    assert weights.zero_points is None
    np.testing.assert_allclose(weights.correction, (offsets + 8 * blocks.scales).T, rtol=1e-6)
    np.testing.assert_allclose(dequantize(weights), blocks.dequantize(), rtol=0, atol=1e-6)


def test_zero_points_exist_only_inside_the_range_of_codes():
    codes, scales = np.zeros((1, 64), np.uint8), np.full((1, 2), 0.5, np.float32)
    inside = BlockWeights(4, codes, scales, np.array([[0, -7.5]], np.float32))
    assert zero_points_of(inside).tolist() == [[0, 15]]
    assert zero_points_of(BlockWeights(4, codes, scales, np.array([[0, -8.0]], np.float32))) is None
    assert zero_points_of(BlockWeights(4, codes, scales, np.array([[0.5, 0]], np.float32))) is None


def test_a_block_without_scale_keeps_its_constant():
    scales, offsets = np.zeros((1, 2), np.float32), np.array([[0, 0.25]], np.float32)
    blocks = BlockWeights(4, np.zeros((1, 64), np.uint8), scales, offsets)
    np.testing.assert_array_equal(dequantize(pack_blocks(blocks)), [[0] * 32 + [0.25] * 32])


def test_stacked_grids_of_unequal_width_stay_exact():
    rng = np.random.default_rng(4)
    parts = [random_grid(rng, 4, (3, 64)), random_grid(rng, 8, (2, 64))]
    stacked = pack_blocks(stack_blocks(parts))
    assert stacked.bits == 8
    expected = np.concatenate([part.dequantize() for part in parts])
    np.testing.assert_allclose(dequantize(stacked), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("bits", "limit"), [(8, 0.5), (4, 1.6)])
def test_rounded_blocks_are_within_their_step(bits, limit):
    """Clipping may put the one outermost weight further off than half a step, never two steps."""
    weight = np.random.default_rng(5).normal(0, 1, (8, 128)).astype(np.float32)
    blocks = quantize_blocks(weight, bits)
    steps = np.abs(blocks.dequantize() - weight).reshape(8, 4, 32) / blocks.scales[..., None]
    assert steps.max() <= limit + 1e-3
    assert zero_points_of(blocks) is not None


def test_clipping_never_has_a_larger_error_than_the_full_range():
    weight = np.random.default_rng(6).standard_t(3, (64, 32)).astype(np.float32)
    low, high = np.minimum(weight.min(axis=1), 0)[:, None], np.maximum(weight.max(axis=1), 0)[:, None]
    scale = (high - low) / 15
    zero = np.rint(-low / scale)
    plain = (np.clip(np.rint(weight / scale) + zero, 0, 15) - zero) * scale
    error = np.square(quantize_blocks(weight, 4).dequantize() - weight).sum(axis=1)
    assert np.all(error <= np.square(plain - weight).sum(axis=1) * 1.0001)


@pytest.mark.parametrize("size", [2.0**-119, 1e-30, 1.0, 1e19, 1e25, 2.0**126])
@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_of_any_size_are_rounded_alike(bits, size):
    """The grid is relative to the block: scaled by a power of two, which moves nothing, the codes stay."""
    weight = np.random.default_rng(8).uniform(-1, 1, (4, 64)).astype(np.float32)
    weight[:, ::32] = 1
    expected = quantize_blocks(weight, bits)
    power = np.float32(2.0 ** np.floor(np.log2(size)))
    found = quantize_blocks(weight * power, bits)
    np.testing.assert_array_equal(found.codes, expected.codes)
    np.testing.assert_array_equal(found.scales, expected.scales * power)
    np.testing.assert_array_equal(found.offsets, expected.offsets * power)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_block_of_weights_next_to_nothing_becomes_zeros_beside_one_that_is_kept(bits):
    weight = np.full((1, 64), 1e-44, np.float32)
    weight[0, 32:] = 0.25
    blocks = quantize_blocks(weight, bits)
    assert blocks.scales[0, 0] == 1
    np.testing.assert_allclose(blocks.dequantize()[0], [0] * 32 + [0.25] * 32, rtol=1e-6)


def test_a_channel_of_weights_next_to_nothing_becomes_zeros():
    stored = quantize_channels(np.full((1, 32), 1e-44, np.float32))
    np.testing.assert_array_equal(stored.col_scale, [1])
    assert not stored.panels.any()


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_too_large_for_an_offset_are_refused(bits):
    weight = np.full((1, 32), np.nextafter(np.float32(2.0**126), np.float32(np.inf)))
    with pytest.raises(ExportError, match=r"weight: 8.50706e\+37 is not allowed: at most 8.50706e\+37 for int4"):
        quantize_blocks(weight, bits)


def test_channels_that_fill_no_whole_block_are_refused():
    with pytest.raises(ExportError, match="in_features: 40 is not allowed: a multiple of 32"):
        quantize_blocks(np.zeros((2, 40), np.float32), 4)


@pytest.mark.parametrize("kind", ["middle", "whole", "between"])
@pytest.mark.parametrize("bits", [4, 8])
def test_matmulnbits_yields_the_dequantised_product(tmp_path, bits, kind):
    """Activations are whole numbers up to 127 in every block, which int8 activations hold exactly."""
    rng = np.random.default_rng(7)
    scales = rng.uniform(0.01, 0.1, (48, 3)).astype(np.float32)
    zero_points = {
        "middle": np.full((48, 3), 2.0 ** (bits - 1)),
        "whole": rng.integers(0, 2**bits, (48, 3)).astype(np.float64),
        "between": rng.uniform(0, 2**bits, (48, 3)),
    }[kind]
    codes = rng.integers(0, 2**bits, (48, 96), dtype=np.uint8)
    blocks = BlockWeights(bits, codes, scales, (-zero_points * scales).astype(np.float32))
    x = rng.integers(-126, 127, (5, 96)).astype(np.float32)
    x[:, ::32] = 127
    expected = x.astype(np.float64) @ blocks.dequantize().astype(np.float64).T
    np.testing.assert_allclose(run_projection(tmp_path, pack_blocks(blocks), x), expected, rtol=1e-4, atol=2e-3)


def run_projection(folder, weights: NBitsWeights, x):
    """The sub-graph of one projection alone, with a bias of 1 to 48."""
    in_features = x.shape[1]
    bias = np.arange(1, 49, dtype=np.float32)
    with WeightFile(folder / "weights.bin") as file:
        optional = {"zero_points": weights.zero_points, "correction": weights.correction}
        names = {name: None if array is None else file.add(name, array) for name, array in optional.items()}
        projection = BlockProjection(
            out_features=48,
            in_features=in_features,
            bits=weights.bits,
            packed=file.add("packed", weights.packed),
            scales=file.add("scales", weights.scales),
            bias=file.add("bias", bias),
            **names,
        )
        builder = GraphBuilder("one", file, "weights.bin")
        rows = Rows(builder.input(floats("x", "rows", in_features)), "rows", in_features)
        product = FloatArithmetic(builder, 1e-5).project("p", rows, projection)
        builder.output(floats(product.name, "rows", 48))
        model = builder.finish("one projection")
    (folder / "one.onnx").write_bytes(model.SerializeToString())
    session = ort.InferenceSession(str(folder / "one.onnx"), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0] - bias
