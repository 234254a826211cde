"""The kernels of a step, cuda/README.md's, written from their definitions in numpy, behind cuLaunchKernel's form.

Device memory is host memory and T is float16. Every launch is logged as it came: name, grid, block, shared bytes and
the raw bytes of its arguments.
"""

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from graphs.op_twins_rows import sample_rows
from service.executor.cuda.kernels import SAMPLE_KERNELS
from service.executor.cuda.launch import FLOAT16, LoadedKernel, ModelKernels
from service.executor.cuda.plan_layout import DECODE_ROWS
from service.executor.logit_edits import log_softmax, token_logprobs
from tests.cuda.launch_type import LAUNCH_TYPE, PTR

INT, FLT = ctypes.c_int32, ctypes.c_float
SIGNATURES = {
    "rope_kv_write": (PTR, PTR, PTR, PTR, PTR, PTR, PTR, PTR, PTR, INT, INT, INT, FLT, FLT, FLT),
    "attn_decode": (PTR, PTR, PTR, PTR, PTR, PTR, PTR, PTR, INT, INT, INT, INT, FLT, FLT, FLT),
    "attn_prefill": (PTR, PTR, PTR, PTR, PTR, PTR, PTR, PTR, INT, INT, INT, INT, FLT, FLT, FLT),
    "attn_combine": (PTR, PTR, PTR, PTR, PTR, INT, INT),
    **dict.fromkeys(SAMPLE_KERNELS, (*[PTR] * 21, INT, INT)),
}
NAMES = list(SIGNATURES)
EMPTY_LSE = -1e30
INVALID_HANDLE = 400  # of cuLaunchKernel


class Launch(NamedTuple):
    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    arguments: bytes


def at(address: int | None, shape: tuple[int, ...], dtype: type = np.float16) -> np.ndarray:
    """The array at a device address."""
    count = int(np.prod(shape))
    bytes_ = (ctypes.c_uint8 * (count * np.dtype(dtype).itemsize)).from_address(address or 0)
    return np.frombuffer(bytes_, dtype, count).reshape(shape)


class NumpyKernels:
    """Kernels for one head dimension and block size. They are launched through `launch_address`."""

    def __init__(self, head_dim: int, block_size: int, tile_tokens: int = 64, prefill_rows: int = 64) -> None:
        self.head_dim, self.block_size = head_dim, block_size
        self.log: list[Launch] = []
        self.errors: list[BaseException] = []
        self._callback = LAUNCH_TYPE(self._launch)
        self.launch_address = ctypes.cast(self._callback, PTR).value
        loaded = [LoadedKernel(1 + place, 128, 1000 + place) for place in range(len(NAMES))]
        self.kernels = ModelKernels(*loaded, FLOAT16, FLOAT16, head_dim, block_size, tile_tokens, prefill_rows)

    def _launch(self, function, *rest) -> int:
        if not function or function > len(NAMES):
            return INVALID_HANDLE
        name = NAMES[function - 1]
        gx, gy, gz, bx, by, bz, shared_bytes, _, arguments, _ = rest
        types = SIGNATURES[name]
        raw = b"".join(ctypes.string_at(arguments[i], ctypes.sizeof(kind)) for i, kind in enumerate(types))
        self.log.append(Launch(name, (gx, gy, gz), (bx, by, bz), shared_bytes, raw))
        values = [ctypes.cast(arguments[i], ctypes.POINTER(kind))[0] for i, kind in enumerate(types)]
        try:
            getattr(self, f"_{name}")(values, (gx, gy))
        except Exception as error:  # must not cross the C caller
            self.errors.append(error)
            return 999
        return 0

    def _rope_kv_write(self, values, grid) -> None:
        qkv, positions, slots, cos, sin, q_norm, k_norm, q, kv, heads, kv_heads, half, epsilon, _, _ = values
        tokens, dim = grid[0], self.head_dim
        rows = at(qkv, (tokens, heads + 2 * kv_heads, dim)).astype(np.float64)
        positions, slots = at(positions, (tokens,), np.int32), at(slots, (tokens,), np.int32)
        for norm, chosen in ((q_norm, slice(0, heads)), (k_norm, slice(heads, heads + kv_heads))):
            if norm:
                mean = (rows[:, chosen] ** 2).mean(-1, keepdims=True)
                rows[:, chosen] *= at(norm, (dim,), np.float32) / np.sqrt(mean + epsilon)
        tables = (positions.max() + 1, half)
        cos, sin = (at(table, tables, np.float32)[positions][:, None] for table in (cos, sin))
        turned = rows[:, : heads + kv_heads]
        first, second = turned[..., :half].copy(), turned[..., half : 2 * half].copy()
        turned[..., :half], turned[..., half : 2 * half] = first * cos - second * sin, second * cos + first * sin
        at(q, (tokens, heads, dim))[:] = rows[:, :heads]
        blocks, offsets = slots // self.block_size, slots % self.block_size
        cache = self._cache(kv, kv_heads, max(0, int(blocks.max())))
        for token in np.flatnonzero(slots >= 0):
            cache[blocks[token], 0, :, offsets[token]] = rows[token, heads : heads + kv_heads]
            cache[blocks[token], 1, :, offsets[token]] = rows[token, heads + kv_heads :]

    def _attn_decode(self, values, grid) -> None:
        indptr = at(values[4], (grid[0] + 1,), np.int32)
        self._attend(values, range(int(indptr[0]), int(indptr[-1])), DECODE_ROWS)

    def _attn_prefill(self, values, grid) -> None:
        self._attend(values, range(min(grid[1], int(at(values[4], (1,), np.int32)[0]))), self.kernels.prefill_rows)

    def _attend(self, values, chosen, tile_rows: int) -> None:
        q, kv, table, items, _, out, part, lse, stride, kv_heads, group, window, scale, softcap, _ = values
        for seq, row0, q_len, begin, end, slot, first_token, context in at(items, (chosen.stop, 8), np.int32)[chosen]:
            row_ids = at(table, (seq + 1, stride), np.int32)[seq, : -(-end // self.block_size)]
            cache = self._cache(kv, kv_heads, int(row_ids.max()))[row_ids].astype(np.float64)
            keys, sums = (np.moveaxis(cache[:, which], 1, 0).reshape(kv_heads, -1, self.head_dim) for which in (0, 1))
            shape = (first_token + q_len, kv_heads, group, self.head_dim)
            for row in range(row0, min(row0 + tile_rows, q_len * group)):
                token, head = first_token + row // group, row % group
                position = context - q_len + row // group
                first = max(begin, position + 1 - window if window else 0)
                seen = slice(first, max(first, min(end, position + 1)))
                scores = np.einsum("hd,htd->ht", at(q, shape)[token, :, head].astype(np.float64), keys[:, seen]) * scale
                scores = softcap * np.tanh(scores / softcap) if softcap else scores
                top = scores.max(axis=1, initial=EMPTY_LSE)
                weights = np.exp2(scores - top[:, None])
                total = weights.sum(axis=1)
                result = np.einsum("ht,htd->hd", weights, sums[:, seen]) / np.maximum(total, 1e-300)[:, None]
                if slot < 0:
                    at(out, shape)[token, :, head] = result
                else:
                    mine, place = slot + (row - row0) // DECODE_ROWS, (row - row0) % DECODE_ROWS
                    at(part, (mine + 1, kv_heads, DECODE_ROWS, self.head_dim), np.float32)[mine, :, place] = result
                    logs = np.where(total > 0, top + np.log2(np.maximum(total, 1e-300)), EMPTY_LSE)
                    at(lse, (mine + 1, kv_heads, DECODE_ROWS), np.float32)[mine, :, place] = logs

    def _attn_combine(self, values, grid) -> None:
        part, lse, merges, num_merges, out, kv_heads, group = values
        count = min(grid[0], int(at(num_merges, (1,), np.int32)[0]))
        for slot, num_parts, distance, row0, num_rows, first_token, _, _ in at(merges, (count, 8), np.int32).tolist():
            slots = slot + distance * np.arange(num_parts)
            logs = at(lse, (slots[-1] + 1, kv_heads, DECODE_ROWS), np.float32)[slots, :, :num_rows].astype(np.float64)
            shape = (slots[-1] + 1, kv_heads, DECODE_ROWS, self.head_dim)
            parts = at(part, shape, np.float32)[slots, :, :num_rows].astype(np.float64)
            weights = np.exp2(logs - logs.max(axis=0))
            merged = (weights[..., None] * parts).sum(axis=0) / weights.sum(axis=0)[..., None]
            tokens, heads = np.divmod(row0 + np.arange(num_rows), group)
            rows = at(out, (first_token + tokens[-1] + 1, kv_heads, group, self.head_dim))
            rows[first_token + tokens, :, heads] = merged.transpose(1, 0, 2)

    def _sample_scan(self, values, grid) -> None:
        """Nothing: the last of the three does it all."""

    _sample_count = _sample_scan

    def _sample_draw(self, values, grid) -> None:
        rows, (vocab_size, max_top) = grid[0], values[21:]
        assert not any(values[13:15]), "no masks here"
        logits = at(values[0], (rows, vocab_size))
        before = logits.astype(np.float32)
        self._edit(logits, values)
        wide = logits.astype(np.float32)
        usable = np.isfinite(wide.max(axis=1))
        wide[~usable] = 0.0
        dtypes = (np.float32, np.int32, np.float32, np.float32, np.int64, np.int32)
        params = [at(address, (rows,), dtype) for address, dtype in zip(values[1:7], dtypes, strict=True)]
        tokens = at(values[16], (rows,), np.int32)
        tokens[:] = np.where(usable, sample_rows(wide, *params), -1)
        logprob, top_logprobs = at(values[17], (rows,), np.float32), at(values[19], (rows, max_top), np.float32)
        top_tokens = at(values[18], (rows, max_top), np.int32)
        for row, num_top in enumerate(at(values[15], (rows,), np.int32).tolist()):
            if num_top >= 0 and usable[row]:
                found = token_logprobs(log_softmax(before[row]), int(tokens[row]), num_top)
                logprob[row] = found.chosen
                top_tokens[row, :num_top], top_logprobs[row, :num_top] = found.top_token_ids, found.top_logprobs

    def _edit(self, logits, values) -> None:
        """One edit after the other, as cuda/README.md says it."""
        rows = len(logits)
        penalties, indptr = at(values[7], (rows, 3), np.float32), at(values[8], (rows + 1,), np.int32)
        columns = [at(values[9 + i], (indptr[-1],), dtype) for i, dtype in enumerate((np.int32, np.int32, np.float32))]
        kept = at(values[12], (indptr[-1],), np.float32)
        for row in range(rows):
            repetition, frequency, presence = penalties[row]
            for edit in range(indptr[row], indptr[row + 1]):
                token, count, bias = (column[edit] for column in columns)
                x = kept[edit] = logits[row, token].astype(np.float32)
                if count >= 0:
                    x = x / repetition if x > 0 else x * repetition
                if count >= 1:
                    x = x - frequency * np.float32(count) - presence
                logits[row, token] = x + bias

    def _cache(self, kv: int, kv_heads: int, last_block: int) -> np.ndarray:
        return at(kv, (last_block + 1, 2, kv_heads, self.block_size, self.head_dim))

    def close(self) -> None:
        """Nothing is held."""

    def take_log(self) -> Iterator[Launch]:
        """The launches since the last call."""
        taken, self.log = self.log, []
        return iter(taken)


def fixed_arguments(kernel: str, raw: bytes) -> tuple[bytes, ...]:
    """A launch's arguments without those that ONNX Runtime allocates: between nodes, on the CPU, it may move them."""
    moving = {"rope_kv_write": (0, 7), "attn_decode": (0, 5), "attn_prefill": (0, 5), "attn_combine": (4,)}
    arguments, start = [], 0
    for place, kind in enumerate(SIGNATURES[kernel]):
        size = ctypes.sizeof(kind)
        if place not in moving.get(kernel, ()):
            arguments.append(raw[start : start + size])
        start += size
    return tuple(arguments)
