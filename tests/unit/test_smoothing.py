"""Smoothing, rotation and GPTQ change how weights round, never what the model computes."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from graphs.calibration import RelativeRms
from graphs.channel_store import Calibration, ChannelStore
from graphs.gptq import round_by_moments, transformed_moments
from graphs.quantize import channel_scales
from graphs.reference import ReferenceModel
from graphs.rotation import rotate_channels, rotation_block
from graphs.smoothing import channel_max, repeated_for_query_heads, shared_by_query_heads, smoothing_factors
from graphs.spec import ModelSpec
from graphs.weight_file import WeightFile
from tests.unit.tiny_models import MemorySource, random_source, tiny_spec

SPEC = tiny_spec(tie_word_embeddings=False, has_qkv_bias=True, has_o_bias=True)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9, 7, 9]


def strided_hadamard(num_channels, block):
    """The rotation as one matrix, from its definition."""
    hadamard = np.ones((1, 1))
    while len(hadamard) < block:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    stride = num_channels // block
    matrix = np.zeros((num_channels, num_channels))
    for first in range(stride):
        channels = first + stride * np.arange(block)
        matrix[np.ix_(channels, channels)] = hadamard / np.sqrt(block)
    return matrix


@pytest.mark.parametrize(("num_channels", "block"), [(576, 64), (96, 32), (64, 64), (6, 2), (12, 4)])
def test_rotation_is_the_strided_hadamard_matrix(num_channels, block):
    rows = np.random.default_rng(0).normal(size=(3, num_channels)).astype(np.float32)
    expected = rows @ strided_hadamard(num_channels, block)
    np.testing.assert_allclose(rotate_channels(rows, block), expected, rtol=0, atol=1e-5)


def test_no_rotation_leaves_rows_alone():
    rows = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
    np.testing.assert_array_equal(rotate_channels(rows, 0), rows)


@pytest.mark.parametrize(
    ("num_channels", "block"),
    [(576, 64), (1536, 64), (64, 64), (128, 64), (96, 32), (80, 16), (30, 2), (33, 0), (1, 0)],
)
def test_block_is_the_largest_power_of_two_up_to_64_that_divides(num_channels, block):
    assert rotation_block(num_channels) == block


def test_factors_follow_their_formula():
    rms, largest = np.array([1.0, 4.0, 16.0]), np.array([2.0, 1.0, 0.5])
    raw = rms**0.6 / largest**0.4
    expected = raw / np.prod(raw) ** (1 / 3)
    np.testing.assert_allclose(smoothing_factors(rms, largest, 0.6), expected, rtol=1e-6)


def test_dead_channels_get_finite_positive_factors():
    for rms, largest in [([0, 1, 2], [1, 1, 1]), ([1, 1, 1], [0, 1, 2]), ([0, 0, 0], [0, 0, 0])]:
        factors = smoothing_factors(np.array(rms, float), np.array(largest, float), 0.5)
        assert np.all(np.isfinite(factors) & (factors > 0))


def test_factors_of_o_are_shared_by_the_query_heads_of_a_kv_head():
    by_query_head = np.array([1.0, 2, 5, 1, 3, 3, 0, 9])  # 4 query heads of width 2, two for each KV head
    shared = shared_by_query_heads(by_query_head, num_kv_heads=2, head_dim=2)
    assert shared.tolist() == [5, 2, 3, 9]
    repeated = repeated_for_query_heads(shared.astype(np.float32), num_heads=4, num_kv_heads=2, head_dim=2)
    assert repeated.tolist() == [5, 2, 5, 2, 3, 9, 3, 9]


def test_smoothing_and_rotation_leave_the_product_unchanged():
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(20, 192)) * rng.lognormal(0, 1.5, 192)).astype(np.float32)
    weight = rng.normal(0, 0.05, (40, 192)).astype(np.float32)
    factors = smoothing_factors(np.sqrt(np.mean(np.square(x), axis=0, dtype=np.float64)), channel_max(weight), 0.6)
    block = rotation_block(192)
    product = rotate_channels(x / factors, block) @ rotate_channels(weight * factors, block).T
    expected = x.astype(np.float64) @ weight.T.astype(np.float64)
    np.testing.assert_allclose(product, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@dataclass(frozen=True)
class Recorded:
    """A source's calibration on a few tokens."""

    source: MemorySource
    calibration: Calibration


def recorded(spec: ModelSpec) -> Recorded:
    source = random_source(spec)
    source.tensors["layers.0.norm1"][5] *= 40  # an outlier channel, as real models have
    relative_rms = RelativeRms()
    ReferenceModel(source).final_hidden(TOKENS, observe=relative_rms)
    return Recorded(source, Calibration(relative_rms.result(), {}))


@pytest.mark.parametrize("changes", [{}, {"has_qkv_bias": False, "has_o_bias": False}, {"has_qk_norm": True}])
def test_a_smoothed_layer_computes_what_the_layer_did(tmp_path: Path, changes):
    """Every factor is divided out exactly where its GEMM's input is written."""
    spec = replace(SPEC, **changes)
    model = recorded(spec)
    tensors = dict(model.source.tensors)
    copy = MemorySource(spec, {name: array.copy() for name, array in tensors.items()})
    with WeightFile(tmp_path / "weights.bin") as file:
        store = ChannelStore(copy, file, model.calibration)
        for index in range(spec.num_layers):
            prefix = f"layers.{index}"
            layer = store.smoothed_layer(prefix)
            q_end, k_end = spec.q_size, spec.q_size + spec.kv_size
            q, k, v = np.split(layer.qkv.weight / layer.qkv.factors, [q_end, k_end])
            gate, up = np.split(layer.gate_up.weight / layer.gate_up.factors, 2)
            # The norm's factor is put back beside the weight's: what remains are the folds into v and up.
            parts = {"q": q, "k": k, "v": v, "gate": gate, "up": up, "o": layer.o.weight, "down": layer.down.weight}
            parts["norm1"], parts["norm2"] = layer.norm1 * layer.qkv.factors, layer.norm2 * layer.gate_up.factors
            tensors |= {f"{prefix}.{name}": array for name, array in parts.items()}
            if spec.has_qkv_bias:
                names = [f"{prefix}.{part}.bias" for part in "qkv"]
                tensors |= dict(zip(names, np.split(layer.qkv.bias, [q_end, k_end]), strict=True))
    expected = ReferenceModel(model.source).forward(TOKENS)
    found = ReferenceModel(MemorySource(spec, tensors)).forward(TOKENS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_smoothing_evens_out_an_outlier_channel(tmp_path: Path):
    model = recorded(SPEC)
    with WeightFile(tmp_path / "weights.bin") as file:
        layer = ChannelStore(model.source, file, model.calibration).smoothed_layer("layers.0")
    rms = model.calibration.relative_rms["layers.0.qkv"]
    assert rms.max() / np.median(rms) > 10
    smoothed = rms / layer.qkv.factors
    assert smoothed.max() / np.median(smoothed) < 6


def test_gptq_moves_a_rounding_error_to_the_correlated_channel():
    """Two channels, closed form: the second's target shifts by H01 / H11 times the first's error."""
    moments = np.array([[1.0, 0.8], [0.8, 1.0]], np.float32)
    weight = np.array([[3.4, 10.2]], np.float32)
    # Damped by 1 % of the mean diagonal: 0.4 * 0.8 / 1.01 = 0.317, so 10.2 becomes 10.517 and rounds up.
    assert round_by_moments(weight, np.ones(1, np.float32), moments).tolist() == [[3, 11]]


def test_gptq_of_independent_channels_rounds_to_nearest():
    rng = np.random.default_rng(2)
    weight = rng.normal(0, 0.1, (30, 96)).astype(np.float32)
    scale = channel_scales(weight)
    moments = np.diag(rng.uniform(0.5, 2, 96)).astype(np.float32)
    np.testing.assert_array_equal(round_by_moments(weight, scale, moments), np.rint(weight / scale[:, None]))


def test_gptq_lowers_the_error_of_the_product():
    rng = np.random.default_rng(3)
    x = (rng.normal(size=(400, 20)) @ rng.normal(size=(20, 160)) + 0.3 * rng.normal(size=(400, 160))).astype(np.float32)
    weight = rng.normal(0, 0.1, (50, 160)).astype(np.float32)
    scale = channel_scales(weight)[:, None]
    values = round_by_moments(weight, scale[:, 0], x.T @ x / len(x))
    assert values.dtype == np.int8
    assert np.abs(values).max() <= 127

    def error(rounded):
        return np.square(x @ (rounded * scale - weight).T).sum()

    assert error(values) < 0.5 * error(np.rint(weight / scale))


def test_gptq_bears_channels_that_were_always_zero():
    weight = np.random.default_rng(4).normal(0, 0.1, (3, 40)).astype(np.float32)
    scale = channel_scales(weight)
    values = round_by_moments(weight, scale, np.zeros((40, 40), np.float32))
    np.testing.assert_array_equal(values, np.rint(weight / scale[:, None]))


def test_moments_follow_the_inputs_through_smoothing_and_rotation():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(50, 96)).astype(np.float32)
    factors = rng.uniform(0.5, 2, 96).astype(np.float32)
    rotated = rotate_channels(x / factors, 32)
    found = transformed_moments(x.T @ x / 50, factors, 32)
    np.testing.assert_allclose(found, rotated.T @ rotated / 50, rtol=0, atol=1e-5)
