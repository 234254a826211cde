"""Ragged batches for PagedAttention, with everything that must not be read poisoned."""

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from graphs.op_twins_attention import (
    AttentionSpec,
    HeadTables,
    RaggedBatch,
    int8_views,
    keys_by_channel,
    keys_by_token,
)
from tests.unit.op_session import OpSession

KV_DTYPES = (np.float32, np.float16, np.int8)
SPEC = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=32)

# (tokens in this step, tokens of the sequence after it): around blocks of 16, tiles of 64 and splits of 512.
RAGGED = [(1, 1), (15, 15), (16, 16), (17, 17), (1, 63), (1, 64), (1, 65), (0, 0), (3, 130), (1, 513), (20, 600)]


@dataclass
class AttentionCase:
    spec: AttentionSpec
    qkv: np.ndarray
    kv_cache: np.ndarray
    batch: RaggedBatch
    tables: HeadTables
    workspace: np.ndarray

    def inputs(self) -> dict[str, np.ndarray | None]:
        batch, tables = self.batch, self.tables
        return {
            "qkv": self.qkv,
            "kv_cache": self.kv_cache,
            "cu_seqlens": batch.cu_seqlens,
            "context_lens": batch.context_lens,
            "block_table": batch.block_table,
            "slot_mapping": batch.slot_mapping,
            "positions": batch.positions,
            "cos": tables.cos,
            "sin": tables.sin,
            "workspace": self.workspace,
            "q_norm": tables.q_norm,
            "k_norm": tables.k_norm,
        }

    def run(self, num_threads: int = 1) -> np.ndarray:
        """The op's output; `kv_cache`, which is in the twin's order, and `workspace` are changed in place."""
        inputs = self.inputs()
        kv_cache = inputs["kv_cache"] = keys_by_channel(self.kv_cache)
        out = run_attention(self.spec, inputs, num_threads)
        self.kv_cache[...] = keys_by_token(kv_cache)
        return out

    def copy(self) -> "AttentionCase":
        """The same case with a KV buffer and a workspace of its own."""
        fields = (self.spec, self.qkv, self.kv_cache.copy(), self.batch, self.tables, self.workspace.copy())
        return AttentionCase(*fields)


def run_attention(spec: AttentionSpec, inputs: dict[str, np.ndarray | None], num_threads: int = 1) -> np.ndarray:
    attributes = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
    arrays = list(inputs.values())
    session = OpSession("PagedAttention", arrays, 1, (TensorProto.FLOAT,), num_threads, **attributes)
    return session.run(arrays)[0]


def make_case(
    spec: AttentionSpec,
    lengths: list[tuple[int, int]],
    kv_dtype: type = np.float32,
    *,
    block_size: int = 16,
    rotary_dim: int | None = None,
    has_norms: bool = False,
    workspace_floats: int = 0,
    seed: int = 0,
) -> AttentionCase:
    """Sequences of the given (new tokens, tokens in all), their blocks scattered over the buffer."""
    generator = np.random.default_rng(seed)
    batch = scatter_blocks(lengths, block_size, generator)
    half = (spec.head_dim if rotary_dim is None else rotary_dim) // 2
    max_position = max((context for _, context in lengths), default=1) + 1
    angles = np.arange(max_position)[:, None] * 100.0 ** (-np.arange(half) / max(half, 1))
    norms = generator.uniform(0.5, 1.5, (2, spec.head_dim)).astype(np.float32) if has_norms else (None, None)
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return AttentionCase(
        spec,
        generator.normal(size=(len(batch.positions), width)).astype(np.float32),
        filled_cache(spec, lengths, kv_dtype, block_size, batch, generator),
        batch,
        HeadTables(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), *norms),
        np.full(workspace_floats, np.nan, np.float32),
    )


def scatter_blocks(lengths, block_size, generator) -> RaggedBatch:
    num_blocks = [-(-context // block_size) for _, context in lengths]
    blocks = generator.permutation(np.arange(1, sum(num_blocks) + 1)).astype(np.int32)
    table = np.full((len(lengths), max(num_blocks, default=0) + 1), -7, np.int32)  # unused entries are never looked at
    positions = [np.arange(context - queries, context) for queries, context in lengths]
    slots = [np.empty(0, np.int64)]
    for row, last, count, tokens in zip(table, np.cumsum(num_blocks), num_blocks, positions, strict=True):
        row[:count] = blocks[last - count : last]
        slots.append(row[tokens // block_size].astype(np.int64) * block_size + tokens % block_size)
    return RaggedBatch(
        np.cumsum([0] + [queries for queries, _ in lengths]).astype(np.int32),
        np.array([context for _, context in lengths], np.int32),
        table,
        np.concatenate(slots).astype(np.int32),
        np.concatenate([np.empty(0, np.int32), *positions]).astype(np.int32),
    )


def filled_cache(spec, lengths, kv_dtype, block_size, batch, generator) -> np.ndarray:
    """Earlier tokens have values; all other slots, those of the new tokens included, are NaN."""
    num_blocks = sum(-(-context // block_size) for _, context in lengths) + 2
    shape = (num_blocks, 2, spec.num_kv_heads, block_size, spec.head_dim)
    is_known = np.zeros((num_blocks, block_size), bool)
    for (queries, context), row in zip(lengths, batch.block_table, strict=True):
        tokens = np.arange(context - queries)
        is_known[row[tokens // block_size], tokens % block_size] = True
    is_known = is_known[:, None, None, :]
    if kv_dtype == np.int8:
        cache = generator.integers(-127, 128, (*shape[:-1], spec.head_dim + 4), dtype=np.int8)
        scales = int8_views(cache)[1]
        scales[:] = np.where(is_known, generator.uniform(0.01, 0.02, scales.shape), np.nan)
        return cache
    return np.where(is_known[..., None], generator.normal(size=shape), np.nan).astype(kv_dtype)
