"""Attention problems for the CUDA kernels: random pages, a plan of items, and the answer in float64.

Whatever must not be read is poisoned: NaN in slots without a token, -1 in columns of the block table without a block.
"""

import itertools
import math
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from graphs.op_twins_attention import AttentionSpec, RaggedBatch, attend

SCALARS = {"bf16": np.dtype(ml_dtypes.bfloat16), "half": np.dtype(np.float16)}
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
SPARE_BLOCKS = 3


@dataclass(frozen=True)
class Problem:
    """Sequences of lengths `context` of which the last `q_lens` tokens are computed in this step."""

    context: tuple[int, ...]
    q_lens: tuple[int, ...]
    group_size: int
    num_kv_heads: int = 2
    head_dim: int = 64
    scalar: str = "bf16"
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    is_fp8: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def num_heads(self):
        return self.num_kv_heads * self.group_size

    @property
    def scale(self):
        """The kernel's argument: base 2, with the scale of the stored keys."""
        return math.log2(math.e) / math.sqrt(self.head_dim) * self.k_scale

    @property
    def starts(self):
        return np.concatenate([[0], np.cumsum(self.q_lens)]).astype(np.int32)

    @property
    def num_tokens(self):
        return int(self.starts[-1])


@dataclass(frozen=True)
class Arrays:
    q: np.ndarray  # [num_tokens, num_heads, head_dim]
    kv: np.ndarray  # [num_blocks, 2, num_kv_heads, block_size, head_dim]; NaN where no token is
    table: np.ndarray  # [num_seqs, columns]; the last sequence's row should be full, so that reading on leaves it


def make_arrays(problem, seed=1):
    rng = np.random.default_rng(seed)
    scalar = SCALARS[problem.scalar]
    num_blocks = [-(-length // problem.block_size) for length in problem.context]
    order = 1 + rng.permutation(sum(num_blocks) + SPARE_BLOCKS)
    table = np.full((len(num_blocks), max(num_blocks)), -1, np.int32)  # -1: nobody may look there
    begin = 0
    for row, count in zip(table, num_blocks, strict=True):
        row[:count] = order[begin : begin + count]
        begin += count
    shape = (len(order) + 1, 2, problem.num_kv_heads, problem.block_size, problem.head_dim)
    kv = np.full(shape, np.nan, np.float32)
    for row, length in zip(table, problem.context, strict=True):
        for token in range(length):
            at = row[token // problem.block_size], slice(None), slice(None), token % problem.block_size
            kv[at] = rng.standard_normal(kv[at].shape)
    kv = kv.astype(E4M3 if problem.is_fp8 else scalar)
    q = rng.standard_normal((problem.num_tokens, problem.num_heads, problem.head_dim)).astype(np.float32).astype(scalar)
    return Arrays(q=q, kv=kv, table=table)


def expected_attention(problem, arrays):
    """float64 [num_tokens, num_heads, head_dim] of the numbers that the kernels read."""
    spec = AttentionSpec(
        num_heads=problem.num_heads,
        num_kv_heads=problem.num_kv_heads,
        head_dim=problem.head_dim,
        sliding_window=problem.window,
        softcap=problem.softcap,
    )
    unused = np.zeros(0, np.int32)
    kv = arrays.kv.astype(np.float64) * np.array([problem.k_scale, problem.v_scale]).reshape(2, 1, 1, 1)
    q = arrays.q.astype(np.float64)
    out = np.zeros(q.shape)
    for row, context in enumerate(problem.context):
        if context == 0:
            continue  # padding: it sees nothing
        tokens = slice(problem.starts[row], problem.starts[row + 1])
        lengths = np.array([0, problem.q_lens[row]], np.int32)
        batch = RaggedBatch(lengths, np.array([context], np.int32), arrays.table[row : row + 1], unused, unused)
        out[tokens] = attend(spec, q[tokens], kv, batch).reshape(q[tokens].shape)
    return out


@dataclass(frozen=True)
class Plan:
    items: np.ndarray  # int32 [num_items, 8]
    indptr: np.ndarray  # int32: [P + 1] in decode, [1] in prefill
    merges: np.ndarray  # int32 [num_merges, 8]
    num_slots: int  # of 16 rows


def decode_plan(problem, num_blocks, chunk=0):
    """One item a sequence, or one for each `chunk` tokens; items dealt in runs to `num_blocks` thread blocks."""
    plan = _plan(problem, 16, chunk)
    return replace(plan, indptr=np.linspace(0, len(plan.items), num_blocks + 1).astype(np.int32))


def prefill_plan(problem, item_rows, chunk=0):
    """An item for every `item_rows` packed rows, or one for each `chunk` tokens that they see."""
    return _plan(problem, item_rows, chunk)


def _plan(problem, item_rows, chunk):
    items, merges, num_slots = [], [], 0
    for seq, (context, q_len) in enumerate(zip(problem.context, problem.q_lens, strict=True)):
        num_rows = q_len * problem.group_size
        for row in range(0, num_rows, item_rows):
            end_row = min(num_rows, row + item_rows)
            first, last = (context - q_len + at // problem.group_size for at in (row, end_row - 1))
            begin, end = (_first_seen(problem, first), last + 1) if context else (0, 0)
            cuts = [*range(begin, end, chunk or max(context, 1)), end] if context else [0, 0]
            width = -(-(end_row - row) // 16) if len(cuts) > 2 else 0
            for place, (kv_begin, kv_end) in enumerate(itertools.pairwise(cuts)):
                slot = num_slots + place * width if width else -1
                items.append([seq, row, q_len, kv_begin, kv_end, slot, problem.starts[seq], context])
            for place in range(width):
                rows = (row + 16 * place, min(16, end_row - row - 16 * place))
                merges.append([num_slots + place, len(cuts) - 1, width, *rows, problem.starts[seq], 0, 0])
            num_slots += width * (len(cuts) - 1)
    merges = np.array(merges, np.int32).reshape(-1, 8)
    return Plan(np.array(items, np.int32), np.array([len(items)], np.int32), merges, num_slots)


def _first_seen(problem, position):
    """The first token that the one at `position` sees, rounded down to a block's first."""
    first = max(0, position + 1 - problem.window) if problem.window else 0
    return first // problem.block_size * problem.block_size
