"""PagedAttention against its numpy twin and against itself, on every instruction set of the machine."""

import ctypes
import itertools
import os
from dataclasses import replace

import numpy as np
import pytest

from graphs.op_twins_attention import AttentionSpec, RaggedBatch, attend, int8_views, split_heads, write_kv
from tests.unit.attention_cases import KV_DTYPES, RAGGED, SPEC, AttentionCase, make_case, run_attention, scatter_blocks
from tests.unit.op_session import LIBRARY, supported_isas

FEW = [(1, 70), (18, 18), (5, 90)]
SPECS = {
    "gqa 3": (SPEC, RAGGED, {}),
    "mha": (replace(SPEC, num_kv_heads=6), FEW, {}),
    "gqa 4, dim 40": (AttentionSpec(8, 2, 40), FEW, {}),
    "mqa of 64 heads, dim 256": (AttentionSpec(64, 1, 256), [(1, 70), (2, 5)], {}),
    "gqa 8, dim 128": (AttentionSpec(8, 1, 128), FEW, {}),
    "dim 200, partly rotated": (AttentionSpec(3, 1, 200), FEW, {"rotary_dim": 24}),
    "window": (replace(SPEC, sliding_window=37), RAGGED, {}),
    "window across splits": (replace(SPEC, sliding_window=530), [(40, 1100), (1, 560)], {}),
    "softcap, scale": (replace(SPEC, softcap=2.0, scale=0.7), FEW, {}),
    "norms": (replace(SPEC, norm_epsilon=1e-2), FEW, {"has_norms": True}),
    "blocks of 1": (SPEC, FEW, {"block_size": 1}),
    "blocks of 2": (SPEC, FEW, {"block_size": 2}),
    "blocks of 4": (SPEC, FEW, {"block_size": 4}),
    "blocks of 8": (SPEC, FEW, {"block_size": 8}),
    "blocks of 32": (SPEC, FEW, {"block_size": 32}),
    "blocks of 128": (SPEC, FEW, {"block_size": 128}),
    "blocks of 24, no rotation": (SPEC, FEW, {"block_size": 24, "rotary_dim": 0}),
}


@pytest.fixture(params=supported_isas())
def isa(request):
    LIBRARY.chairlift_set_isa(request.param.encode())
    yield request.param
    LIBRARY.chairlift_set_isa(b"auto")


@pytest.fixture(params=KV_DTYPES, ids=lambda dtype: dtype.__name__)
def kv_dtype(request):
    return request.param


def assert_same_kv(actual, expected):
    """Equal but for the last bit or step that float32 instead of float64 arithmetic may cost."""
    if actual.dtype == np.int8:
        (values, scales), (expected_values, expected_scales) = int8_views(actual), int8_views(expected)
        assert np.abs(values.astype(int) - expected_values).max(initial=0) <= 1
        np.testing.assert_allclose(scales, expected_scales, rtol=3e-6)
    else:
        rtol = 1e-3 if actual.dtype == np.float16 else 3e-6
        np.testing.assert_allclose(actual, expected, rtol=rtol, atol=rtol / 10)


def rows_of(case: AttentionCase, out: np.ndarray) -> list[np.ndarray]:
    """The output rows of each sequence."""
    return np.split(out, case.batch.cu_seqlens[1:-1])


@pytest.mark.parametrize("name", SPECS)
def test_attention_equals_its_definition(isa, kv_dtype, name):
    spec, lengths, options = SPECS[name]
    case = make_case(spec, lengths, kv_dtype, **options)
    expected_kv = case.kv_cache.copy()
    query, key, value = split_heads(spec, case.qkv, case.batch.positions, case.tables)
    write_kv(expected_kv, key, value, case.batch.slot_mapping)
    out = case.run()
    assert_same_kv(case.kv_cache, expected_kv)
    np.testing.assert_allclose(out, attend(spec, query, case.kv_cache, case.batch), rtol=0, atol=5e-6)


def test_a_lone_token_yields_its_value(isa):
    case = make_case(SPEC, [(1, 1)])
    value = case.qkv[0, -2 * 32 :].reshape(2, 1, 32)
    assert np.array_equal(np.broadcast_to(value, (2, 3, 32)).reshape(1, -1), case.run())


def test_equal_scores_average_the_values(isa):
    case = make_case(SPEC, [(100, 100)])
    case.qkv[:, : 6 * 32] = 0
    values = case.qkv[:, -2 * 32 :].reshape(100, 2, 1, 32).astype(np.float64)
    means = values.cumsum(axis=0) / np.arange(1, 101)[:, None, None, None]
    np.testing.assert_allclose(case.run().reshape(100, 2, 3, 32), np.broadcast_to(means, (100, 2, 3, 32)), atol=2e-6)


@pytest.mark.parametrize("sliding_window", [0, 90])
def test_chunks_change_no_bit(isa, kv_dtype, sliding_window):
    spec = replace(SPEC, sliding_window=sliding_window)
    whole = make_case(spec, [(150, 560)], kv_dtype)
    chunked = whole.copy()
    expected = whole.run()
    bounds = [0, 1, 2, 40, 41, 102, 103, 149, 150]  # position 512 is token 102
    for begin, end in itertools.pairwise(bounds):
        chunk = replace(
            chunked,
            qkv=whole.qkv[begin:end],
            batch=RaggedBatch(
                np.array([0, end - begin], np.int32),
                np.array([410 + end], np.int32),
                whole.batch.block_table,
                whole.batch.slot_mapping[begin:end],
                whole.batch.positions[begin:end],
            ),
        )
        assert expected[begin:end].tobytes() == chunk.run().tobytes()
    assert whole.kv_cache.tobytes() == chunked.kv_cache.tobytes()


def test_the_batch_changes_no_bit(isa, kv_dtype):
    together = make_case(SPEC, RAGGED, kv_dtype)
    cu_seqlens = together.batch.cu_seqlens
    alone = []
    for sequence, (first, last) in enumerate(itertools.pairwise(cu_seqlens)):
        one = slice(sequence, sequence + 1)
        batch = RaggedBatch(
            np.array([0, last - first], np.int32),
            together.batch.context_lens[one],
            together.batch.block_table[one],
            together.batch.slot_mapping[first:last],
            together.batch.positions[first:last],
        )
        alone.append(replace(together.copy(), qkv=together.qkv[first:last], batch=batch).run())
    assert np.concatenate(alone).tobytes() == together.run().tobytes()


def test_threads_and_workspace_change_no_bit(isa, kv_dtype):
    """The long sequence is cut between threads when there is workspace for the pieces."""
    spec = replace(SPEC, sliding_window=3500)
    whole = make_case(spec, [(1, 4000), (1, 30), (20, 700)], kv_dtype)
    expected = whole.copy().run(num_threads=1)
    for num_threads, workspace_floats in [(2, 0), (2, 200_000), (4, 200_000), (1, 200_000), (2, 900)]:
        case = replace(whole.copy(), workspace=np.full(workspace_floats, np.nan, np.float32))
        assert expected.tobytes() == case.run(num_threads).tobytes()
        if workspace_floats == 200_000 and (os.cpu_count() or 1) > 1:
            assert not np.isnan(case.workspace).all(), "the long sequence was cut"


def test_only_the_given_slots_are_written(isa, kv_dtype):
    case = make_case(SPEC, FEW, kv_dtype)
    before = case.kv_cache.copy()
    case.run()
    expected = before.copy()
    _, key, value = split_heads(SPEC, case.qkv, case.batch.positions, case.tables)
    write_kv(expected, key, value, case.batch.slot_mapping)
    is_changed = before.view(np.uint8) != case.kv_cache.view(np.uint8)
    may_change = before.view(np.uint8) != expected.view(np.uint8)
    block, offset = np.divmod(case.batch.slot_mapping, 16)
    if kv_dtype == np.int8:
        assert set(np.flatnonzero(is_changed.any(axis=(1, 2, 3, 4)))) == set(block)
        assert is_changed.sum() <= len(case.qkv) * 2 * 2 * 36
    else:
        may_change[block, :, :, offset] = True
        assert not (is_changed & ~may_change).any()
        assert not np.isnan(case.kv_cache[block, :, :, offset]).any()


def test_keys_lie_by_channel_within_sixteen_tokens(isa):
    case = make_case(SPEC, [(1, 21)], block_size=32)
    kv_cache = case.kv_cache = np.zeros_like(case.kv_cache)
    inputs = case.inputs()
    run_attention(SPEC, inputs)
    _, key, value = split_heads(SPEC, case.qkv, case.batch.positions, case.tables)
    block = kv_cache[case.batch.block_table[0, 0]]  # [2, heads, 32 tokens, 32 channels], 20 being the only token
    keys = block[0].reshape(2, 2, 32, 16)
    np.testing.assert_allclose(keys[:, 1, :, 4], key[0], rtol=3e-6, atol=3e-7)
    np.testing.assert_allclose(block[1, :, 20], value[0], rtol=3e-6, atol=3e-7)
    assert np.count_nonzero(kv_cache) == 2 * 2 * 32


def test_slot_minus_one_is_not_written_and_padding_rows_are_zero(isa):
    case = make_case(SPEC, [(1, 20), (3, 9)])
    padded = replace(
        case,
        qkv=np.concatenate([case.qkv, np.full((2, case.qkv.shape[1]), np.nan, np.float32)]),
        batch=replace(
            case.batch,
            slot_mapping=np.array([-1, *case.batch.slot_mapping[1:], -1, 99_999], np.int32),
            positions=np.array([*case.batch.positions, 0, 99_999], np.int32),
        ),
    )
    block, offset = divmod(int(case.batch.slot_mapping[0]), 16)
    case.kv_cache[block, :, :, offset] = 0.5
    out = padded.run()
    assert (case.kv_cache[block, :, :, offset] == 0.5).all()
    assert np.isfinite(out[:4]).all()
    assert (out[4:] == 0).all()


def test_float16_saturates_instead_of_overflowing(isa):
    case = make_case(SPEC, [(1, 1)], np.float16)
    case.qkv[0, -32:] = 1e6
    case.qkv[0, -64:-32] = -1e6
    assert (np.array([-65504.0] * 96 + [65504.0] * 96, np.float32) == case.run()[0]).all()


@pytest.mark.parametrize("lengths", [[], [(0, 0), (0, 40)]])
def test_a_step_without_tokens_yields_no_rows(isa, lengths):
    assert make_case(SPEC, lengths).run().shape == (0, 192)


def test_the_workspace_worth_having_is_bounded():
    floats = LIBRARY.chairlift_attention_workspace_floats
    floats.restype, floats.argtypes = ctypes.c_int64, [ctypes.c_int64] * 6

    assert floats(16, 16, 9, 3, 64, 512) == 1, "one split has no pieces"
    assert 3 * 16 * 3 * 66 <= floats(1, 1, 9, 3, 64, 8192) <= 12 * 16 * 3 * 66, "3 units of 3 rows and 16 splits"
    assert floats(65536, 4096, 64, 8, 128, 1 << 20) == 4 << 20
    assert floats(0, 16, 9, 3, 64, 512) == -1


def test_blocks_of_a_case_are_scattered():
    batch = scatter_blocks([(1, 64), (1, 64)], 16, np.random.default_rng(0))
    assert not np.array_equal(np.sort(batch.block_table[0, :4]), batch.block_table[0, :4])
