"""PagedAttention written from its definition, in numpy and float64: the kernel's oracle and its specification.

For each token: optional RMS norm of its query and key heads, rotary embedding, key and value into the token's slot;
then for each query head the softmax-weighted sum of the values that it sees, read back through the block table. A token
sees the tokens of its own sequence up to itself, or the last `sliding_window` of them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Int32Array = npt.NDArray[np.int32]
KEY_GROUP = 16
KvArray = npt.NDArray[Any]  # float32, float16, or int8 with scales behind each head's run


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The op's attributes, with the op's defaults."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float = 0.0  # 0: 1 / sqrt(head_dim)
    sliding_window: int = 0  # tokens seen, itself included; 0: all
    softcap: float = 0.0  # 0: none; else scores become softcap * tanh(score / softcap)
    norm_epsilon: float = 1e-6


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Which tokens of which sequences a step computes, and where their keys and values lie."""

    cu_seqlens: Int32Array  # [num_seqs + 1]
    context_lens: Int32Array  # [num_seqs] tokens after this step
    block_table: Int32Array  # [num_seqs, max_blocks]
    slot_mapping: Int32Array  # [num_tokens]; -1: write nothing
    positions: Int32Array  # [num_tokens] rows of the rotary tables


@dataclass(frozen=True, slots=True)
class HeadTables:
    """What is applied to query and key heads before they meet."""

    cos: Float32Array  # [max_position, rotary_dim / 2]
    sin: Float32Array
    q_norm: Float32Array | None = None  # [head_dim]
    k_norm: Float32Array | None = None


def paged_attention(
    spec: AttentionSpec, qkv: Float32Array, kv_cache: KvArray, batch: RaggedBatch, tables: HeadTables
) -> Float64Array:
    """The op's output float64[num_tokens, num_heads * head_dim]; writes to `kv_cache` in place as the op does."""
    query, key, value = split_heads(spec, qkv, batch.positions, tables)
    write_kv(kv_cache, key, value, batch.slot_mapping)
    return attend(spec, query, kv_cache, batch)


def split_heads(
    spec: AttentionSpec, qkv: Float32Array, positions: Int32Array, tables: HeadTables
) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Normalised and rotated queries, keys, and plain values, each float64[num_tokens, heads, head_dim]."""
    heads = qkv.astype(np.float64).reshape(len(qkv), spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
    query, key, value = np.split(heads, [spec.num_heads, spec.num_heads + spec.num_kv_heads], axis=1)
    cos, sin = (table.astype(np.float64)[positions][:, None, :] for table in (tables.cos, tables.sin))
    query = _rotate(_rms_norm(query, tables.q_norm, spec.norm_epsilon), cos, sin)
    key = _rotate(_rms_norm(key, tables.k_norm, spec.norm_epsilon), cos, sin)
    return query, key, value


def write_kv(kv_cache: KvArray, key: Float64Array, value: Float64Array, slot_mapping: Int32Array) -> None:
    """Write each token's heads to its slot. float16 saturates; int8 has one scale per token and head, largest / 127."""
    block_size = kv_cache.shape[3]
    for token, slot in enumerate(slot_mapping):
        if slot < 0:
            continue
        block, offset = divmod(int(slot), block_size)
        for which, heads in enumerate((key[token], value[token])):
            if kv_cache.dtype == np.int8:
                values, scales = int8_views(kv_cache)
                rows = heads.astype(np.float32)
                largest = np.abs(rows).max(axis=1, keepdims=True)
                inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
                values[block, which, :, offset] = np.rint(rows * inverse)
                scales[block, which, :, offset] = largest[:, 0] / np.float32(127)
            elif kv_cache.dtype == np.float16:
                kv_cache[block, which, :, offset] = np.clip(heads, -65504.0, 65504.0)
            else:
                kv_cache[block, which, :, offset] = heads


def attend(spec: AttentionSpec, query: Float64Array, kv_cache: KvArray, batch: RaggedBatch) -> Float64Array:
    """Attention of rotated queries float64[num_tokens, num_heads, head_dim] over what `kv_cache` holds."""
    out = np.zeros((len(query), spec.num_heads, spec.head_dim))
    scale = spec.scale or spec.head_dim**-0.5
    for sequence, context_len in enumerate(batch.context_lens):
        first, last = (int(bound) for bound in batch.cu_seqlens[sequence : sequence + 2])
        if first == last:
            continue
        keys, values = gather_kv(kv_cache, batch.block_table[sequence], int(context_len), spec.head_dim)
        for token in range(first, last):
            end = int(context_len) - last + token + 1
            begin = max(0, end - spec.sliding_window) if spec.sliding_window else 0
            for head in range(spec.num_heads):
                kv_head = head * spec.num_kv_heads // spec.num_heads
                scores = scale * (keys[kv_head, begin:end] @ query[token, head])
                if spec.softcap:
                    scores = spec.softcap * np.tanh(scores / spec.softcap)
                weights = np.exp(scores - scores.max())
                out[token, head] = (weights / weights.sum()) @ values[kv_head, begin:end]
    return out.reshape(len(query), -1)


def gather_kv(
    kv_cache: KvArray, blocks: Int32Array, num_tokens: int, head_dim: int
) -> tuple[Float64Array, Float64Array]:
    """Keys and values of a sequence's first `num_tokens`, each float64[num_kv_heads, num_tokens, head_dim]."""
    block_size = kv_cache.shape[3]
    used = blocks[: -(-num_tokens // block_size)]
    if kv_cache.dtype == np.int8:
        values, scales = int8_views(kv_cache)
        runs = values[used].astype(np.float64) * scales[used].astype(np.float64)[..., None]
    else:
        runs = kv_cache[used].astype(np.float64)
    # [blocks, 2, heads, block_size, head_dim] -> [2, heads, blocks * block_size, head_dim]
    dense = runs.transpose(1, 2, 0, 3, 4).reshape(2, runs.shape[2], -1, head_dim)[:, :, :num_tokens]
    return dense[0], dense[1]


def int8_views(kv_cache: KvArray) -> tuple[npt.NDArray[np.int8], Float32Array]:
    """Views of an int8 buffer: values int8[blocks, 2, heads, block_size, head_dim], scales float32[..., block_size]."""
    num_blocks, two, num_kv_heads, block_size, width = kv_cache.shape
    runs = kv_cache.reshape(num_blocks, two, num_kv_heads, block_size * width)
    head_dim = width - 4
    values = runs[..., : block_size * head_dim].reshape(num_blocks, two, num_kv_heads, block_size, head_dim)
    scales = runs[..., block_size * head_dim :].view(np.float32)
    return values, scales


def keys_by_channel(kv_cache: KvArray) -> KvArray:
    """A copy with the keys as the CPU op keeps them: [head_dim, tokens] for each group of tokens in a block.

    A group is KEY_GROUP tokens, or the whole block if it is no multiple of that.
    """
    num_tokens = _key_group(kv_cache)
    return _transpose_groups(kv_cache, (num_tokens, -1))


def keys_by_token(kv_cache: KvArray) -> KvArray:
    """A copy of the CPU op's buffer in the order of everything else here."""
    num_tokens = _key_group(kv_cache)
    return _transpose_groups(kv_cache, (-1, num_tokens))


def _key_group(kv_cache: KvArray) -> int:
    block_size = kv_cache.shape[3]
    return block_size if block_size % KEY_GROUP else KEY_GROUP


def _transpose_groups(kv_cache: KvArray, group_shape: tuple[int, int]) -> KvArray:
    """A copy in which each group of a head's keys, which has `group_shape`, is transposed."""
    copy = kv_cache.copy()
    keys = (int8_views(copy)[0] if copy.dtype == np.int8 else copy)[:, 0]
    num_groups = kv_cache.shape[3] // _key_group(kv_cache)
    groups = keys.reshape(*keys.shape[:2], num_groups, *group_shape)
    keys[...] = groups.swapaxes(-2, -1).reshape(keys.shape)
    return copy


def _rms_norm(heads: Float64Array, weight: Float32Array | None, epsilon: float) -> Float64Array:
    if weight is None:
        return heads
    normed: Float64Array = heads / np.sqrt((heads**2).mean(axis=-1, keepdims=True) + epsilon)
    return normed * weight


def _rotate(heads: Float64Array, cos: Float64Array, sin: Float64Array) -> Float64Array:
    """Rotate the pairs (i, i + half) of each head; channels beyond the rotary dimension stay."""
    half = cos.shape[-1]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
