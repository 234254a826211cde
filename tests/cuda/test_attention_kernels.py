"""Attention kernels on the simulator against attention from its definition, in float64."""

from dataclasses import replace

import numpy as np
import pytest

from service.executor.cuda.kernels import KernelConfig, PrefillShape, Scalar, choose_prefill_shape
from tests.cuda.attention_problem import Problem, decode_plan, expected_attention, make_arrays, prefill_plan
from tests.cuda.attention_runs import check_attention, run_attention
from tests.cuda.kernel_builds import MAX_SHARED_BYTES
from tests.cuda.sim_kernels import Out, SimKernels
from tests.cudasim.build import missing_tool
from tests.cudasim.device import SimDevice

pytestmark = pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool()))

# Around blocks of 16 and 32 and tiles of 64; one empty row; the last sequence is the longest.
LENGTHS = (1, 15, 16, 17, 0, 31, 33, 63, 64, 65, 150)
SEEDS = (0, 2)  # threads in order, and shuffled


def check(problem, shape, *, seed=0, **options):
    check_attention(SimDevice(seed=seed), problem, shape, **options)


def decode(group_size, **options):
    return Problem(LENGTHS, (1,) * len(LENGTHS), group_size, **options)


def mixed(group_size, **options):
    return Problem((5, 97, 1, 0, 70, 150), (3, 47, 1, 1, 1, 30), group_size, **options)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("group_size", [1, 3, 4, 8])
def test_decode_of_whole_sequences(group_size, seed):
    check(decode(group_size), "decode", seed=seed)


@pytest.mark.parametrize("chunk", [32, 64])
def test_decode_of_cut_sequences(chunk):
    check(decode(4), "decode", chunk=chunk, seed=2)


@pytest.mark.parametrize("chunk", [0, 64])
def test_decode_of_several_tokens(chunk):
    check(Problem((1, 40, 70, 160), (1, 1, 2, 5), 3), "decode", chunk=chunk)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("group_size", [1, 3, 4, 8])
def test_prefill_of_chunks_and_single_tokens(group_size, seed):
    check(mixed(group_size), "prefill", seed=seed)


@pytest.mark.parametrize("group_size", [1, 3, 8])
@pytest.mark.parametrize(
    "prefill",
    [PrefillShape(64, 4, 64), PrefillShape(128, 4, 64), PrefillShape(128, 4, 32), PrefillShape(128, 8, 32)],
    ids=str,
)
def test_prefill_in_other_shapes(prefill, group_size):
    """Items that are full, begin within a token's heads, and leave warps without rows."""
    problem = Problem((5, 40, 129, 260), (3, 1, 129, 45), group_size)
    check(problem, "prefill", prefill=prefill, seed=2)
    check(replace(problem, window=20, softcap=1.5), "prefill", prefill=prefill)


@pytest.mark.parametrize("chunk", [16, 64])
def test_prefill_of_cut_items(chunk):
    """Pieces of less than a tile, and behind the last token that a row sees; an item of 18 rows."""
    check(Problem((5, 97, 1, 0, 70, 150), (3, 47, 1, 1, 6, 30), 3), "prefill", chunk=chunk, seed=2)


@pytest.mark.parametrize(
    ("options", "prefill"),
    [
        ({"window": 20}, PrefillShape(64, 4, 64)),
        ({"softcap": 1.5, "window": 70}, PrefillShape(128, 4, 64)),
        ({"is_fp8": True, "k_scale": 0.5, "v_scale": 2.0}, PrefillShape(64, 4, 32)),
        pytest.param({"head_dim": 96, "scalar": "half"}, PrefillShape(128, 8, 32), marks=pytest.mark.slow),
        pytest.param({"head_dim": 256}, PrefillShape(64, 4, 32), marks=pytest.mark.slow),
    ],
    ids=["window", "soft cap", "fp8", "half D96", "D256"],
)
def test_prefill_of_cut_items_in_other_shapes(options, prefill):
    check(Problem((40, 200), (1, 45), 4, num_kv_heads=1, **options), "prefill", prefill=prefill, chunk=64, seed=2)


@pytest.mark.parametrize(("head_dim", "group_size", "num_parts"), [(64, 1, 70), (96, 5, 3), (128, 4, 49), (256, 16, 9)])
def test_merge_of_parts(head_dim, group_size, num_parts):
    """More parts than lanes, than groups of threads a row, and fewer; parts and rows that saw nothing."""
    rng = np.random.default_rng(4)
    part = rng.standard_normal((2 * num_parts, 2, 16, head_dim)).astype(np.float32)
    lse = (8 * rng.standard_normal(part.shape[:3])).astype(np.float32)
    lse[::3, :, 0] = -1e30
    lse[:, :, group_size - 1] = -1e30 if group_size > 1 else lse[:, :, 0]
    part[lse == np.float32(-1e30)] = 0.0
    part[:, :, group_size:], lse[:, :, group_size:] = np.nan, np.nan  # rows that nobody wrote
    merges = np.array([[at, num_parts, 2, 0, group_size, 1 - at, 0, 0] for at in (0, 1)], np.int32)
    out = Out(np.full((2, 2 * group_size, head_dim), np.nan, np.float16))
    kernels = SimKernels(KernelConfig(Scalar.HALF, head_dim, 16, 64, Scalar.HALF), SimDevice(seed=2))
    kernels.launch("attn_combine", (4, 2), part, lse, merges, np.array([2], np.int32), out, 2, group_size)
    for token in range(2):
        mine = slice(1 - token, None, 2)
        parts, logs = (each[mine, :, :group_size].astype(np.float64) for each in (part, lse))
        weights = np.where(logs > -1e30, np.exp2(logs - logs.max(axis=0)), 0.0)
        expected = (weights[..., None] * parts).sum(axis=0) / np.maximum(weights.sum(axis=0), 1e-300)[..., None]
        assert np.allclose(out.array[token].reshape(expected.shape).astype(np.float64), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("window", [1, 16, 20, 70])
@pytest.mark.parametrize("shape", ["decode", "prefill"])
def test_sliding_window(shape, window):
    check(Problem((5, 40, 70, 160), (1, 1, 2, 5), 3, window=window), shape)


@pytest.mark.parametrize("shape", ["decode", "prefill"])
def test_soft_cap(shape):
    check(Problem((5, 40, 70, 160), (1, 1, 2, 5), 3, softcap=1.5), shape, chunk=64 if shape == "decode" else 0)


@pytest.mark.parametrize(("block_size", "tile_tokens"), [(32, 64), (32, 32), (16, 32)])
def test_other_blocks_and_tiles(block_size, tile_tokens):
    check(decode(4, block_size=block_size, scalar="half"), "decode", tile_tokens=tile_tokens, chunk=32)
    prefill = PrefillShape(64, 4, tile_tokens)
    check(mixed(4, block_size=block_size, scalar="half"), "prefill", prefill=prefill)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_copies_whose_rounds_are_no_whole_rows(is_fp8):
    """A row of D 96 is 12 or 6 chunks, which divide neither 64 threads nor 128; a tile is one block."""
    options = {"head_dim": 96, "block_size": 32, "is_fp8": is_fp8}
    check(decode(4, **options), "decode", tile_tokens=32)
    check(mixed(4, **options), "prefill")


@pytest.mark.parametrize("scalar", ["bf16", "half"])
def test_fp8_keys_and_values(scalar):
    options = {"scalar": scalar, "is_fp8": True, "k_scale": 0.5, "v_scale": 2.0}
    check(decode(4, **options), "decode", chunk=64)
    check(mixed(3, **options), "prefill")


def test_queries_beyond_float16_are_cut_to_it_where_keys_are_fp8():
    """Each sees one token, whatever the score: the value comes back, and not NaN."""
    problem = Problem((1, 1), (1, 1), 1, is_fp8=True)
    arrays = make_arrays(problem)
    arrays.q[:] = 1e6
    for shape in ("decode", "prefill"):
        got = run_attention(SimDevice(), problem, shape, arrays=arrays).astype(np.float64)
        assert np.array_equal(expected_attention(problem, arrays), got)


@pytest.mark.slow
@pytest.mark.parametrize("scalar", ["bf16", "half"])
def test_long_and_skewed_contexts(scalar):
    lengths = (2047, 1, 2048, 33, 2049)
    check(Problem(lengths, (1,) * 5, 4, scalar=scalar), "decode", seed=1)
    check(Problem(lengths, (1,) * 5, 4, scalar=scalar), "decode", chunk=512, seed=2)
    check(Problem(lengths, (100, 1, 17, 33, 65), 4, scalar=scalar), "prefill", seed=3)
    check(Problem(lengths, (100, 1, 17, 33, 65), 4, scalar=scalar), "prefill", chunk=448, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize(("head_dim", "tile_tokens"), [(64, 64), (96, 64), (96, 32), (128, 64), (128, 32), (256, 32)])
@pytest.mark.parametrize("scalar", ["bf16", "half"])
def test_every_head_dim(scalar, head_dim, tile_tokens, block_size, is_fp8):
    options = {"scalar": scalar, "head_dim": head_dim, "block_size": block_size, "is_fp8": is_fp8}
    shapes = {choose_prefill_shape(head_dim, is_fp8, most) for most in MAX_SHARED_BYTES.values()}
    for group_size, seed in ((1, 0), (3, 1), (8, 2), (16, 3)):
        check(decode(group_size, **options), "decode", tile_tokens=tile_tokens, seed=seed, chunk=64 * (seed % 2))
        for shape in shapes:
            check(mixed(group_size, **options), "prefill", prefill=shape, seed=seed, chunk=64 * (seed % 2))


def test_queries_may_lie_in_the_output():
    problem = mixed(3)
    arrays = make_arrays(problem)
    config = KernelConfig(Scalar.BF16, problem.head_dim, problem.block_size, 64, Scalar.BF16)
    kernels = SimKernels(config, SimDevice(seed=2))
    plan = prefill_plan(problem, config.prefill.num_rows)
    both = Out(arrays.q.copy())
    sizes = (arrays.table.shape[1], problem.num_kv_heads, problem.group_size, 0, problem.scale, 0.0, 1.0)
    grid = (problem.num_kv_heads, len(plan.items))
    memory = (both.array, arrays.kv, arrays.table, plan.items, plan.indptr, both, None, None)
    kernels.launch("attn_prefill", grid, *memory, *sizes)
    assert np.array_equal(run_attention(SimDevice(), problem, "prefill", arrays=arrays), both.array)


def test_result_is_the_same_in_any_order_of_threads():
    problem = decode(3)
    first, *others = (run_attention(SimDevice(seed=seed), problem, "decode", chunk=32).tobytes() for seed in range(4))
    assert [first] * 3 == others


def test_rows_without_an_item_are_not_written():
    problem = Problem((20, 40), (1, 1), 4)
    arrays = make_arrays(problem)
    kernels = SimKernels(KernelConfig(Scalar.BF16, 64, 16, 64, Scalar.BF16), SimDevice())
    plan = decode_plan(problem, 1)
    out = Out(np.full_like(arrays.q, 7.0))
    sizes = (arrays.table.shape[1], problem.num_kv_heads, problem.group_size, 0, problem.scale, 0.0, 1.0)
    indptr = np.array([1, 2], np.int32)  # the second item only
    memory = (arrays.q, arrays.kv, arrays.table, plan.items, indptr, out, None, None)
    kernels.launch("attn_decode", (1, problem.num_kv_heads), *memory, *sizes)
    assert (out.array[0] == 7.0).all()
    assert np.isfinite(out.array[1].astype(np.float32)).all()
    assert not (out.array[1] == 7.0).any()
