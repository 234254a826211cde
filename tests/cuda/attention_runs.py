"""The attention kernels on a problem, and whether they solved it."""

import math

import numpy as np

from service.executor.cuda.kernels import SMALLEST_PREFILL, KernelConfig, Scalar
from tests.cuda.attention_problem import decode_plan, expected_attention, make_arrays, prefill_plan
from tests.cuda.sim_kernels import Out, SimKernels

LIMIT = {"bf16": 5e-3, "half": 1e-3}  # relative error in the 2-norm
NUM_BLOCKS = 3


def run_attention(device, problem, shape, *, chunk=0, tile_tokens=64, prefill=SMALLEST_PREFILL, arrays=None):
    """What the kernels leave in `out`, which begins as NaN."""
    arrays = arrays or make_arrays(problem)
    scalar = Scalar(problem.scalar)
    config = KernelConfig(scalar, problem.head_dim, problem.block_size, tile_tokens, scalar, problem.is_fp8, prefill)
    kernels = SimKernels(config, device)
    rows = prefill.num_rows
    plan = decode_plan(problem, NUM_BLOCKS, chunk) if shape == "decode" else prefill_plan(problem, rows, chunk)
    out = Out(np.full_like(arrays.q, np.nan))
    part = Out(np.full((plan.num_slots, problem.num_kv_heads, 16, problem.head_dim), np.nan, np.float32))
    lse = Out(np.full(part.array.shape[:3], np.nan, np.float32))
    has_parts = plan.num_slots > 0
    heads = problem.num_kv_heads
    kernels.launch(
        f"attn_{shape}",
        (NUM_BLOCKS, heads) if shape == "decode" else (heads, len(plan.items) + 2),
        arrays.q,
        arrays.kv,
        arrays.table,
        plan.items,
        plan.indptr,
        out,
        part if has_parts else None,
        lse if has_parts else None,
        arrays.table.shape[1],
        problem.num_kv_heads,
        problem.group_size,
        problem.window,
        problem.scale,
        problem.softcap * math.log2(math.e),
        problem.v_scale,
    )
    if has_parts:
        grid = (len(plan.merges) + 2, problem.num_kv_heads)
        count = np.array([len(plan.merges)], np.int32)
        sizes = (problem.num_kv_heads, problem.group_size)
        kernels.launch("attn_combine", grid, part.array, lse.array, plan.merges, count, out, *sizes)
    return out.array


def check_attention(device, problem, shape, **options):
    """Against attention from its definition, in float64."""
    arrays = make_arrays(problem)
    got = run_attention(device, problem, shape, arrays=arrays, **options).astype(np.float64)
    expected = expected_attention(problem, arrays)
    assert np.linalg.norm(got - expected) < LIMIT[problem.scalar] * np.linalg.norm(expected)  # false for NaN
