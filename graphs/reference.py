"""A plain numpy forward pass: the oracle of the golden tests and of the exported graphs, and the model of calibration.

It says what a ModelSpec means, operation by operation, with nothing fused, paged or batched. In float64 by default, so
its own rounding never decides a comparison; in float32 it is four times as fast.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphs.spec import ModelSpec
from graphs.tensors import TensorSource

Array = NDArray[np.floating[Any]]
# Called with a GEMM's name and its input [num_tokens, in_features]. Names: layers.I.qkv, layers.I.o, layers.I.gate_up,
# layers.I.down, head. The array is only lent.
Observer = Callable[[str, Array], None]


class KeyValueCache:
    """Keys (rotated) and values of the tokens computed so far, of one sequence and one model."""

    def __init__(self) -> None:
        """Start empty."""
        self.num_tokens = 0
        self._layers: dict[int, tuple[Array, Array]] = {}

    def extend(self, layer: int, keys: Array, values: Array) -> tuple[Array, Array]:
        """Append keys and values [num_kv_heads, num_new, head_dim] of one layer; yield all of them so far."""
        if layer in self._layers:
            old_keys, old_values = self._layers[layer]
            keys = np.concatenate([old_keys, keys], axis=1)
            values = np.concatenate([old_values, values], axis=1)
        self._layers[layer] = keys, values
        return keys, values


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights; each GEMM's rows are stacked: q, k, v and gate, up."""

    norm1: Array
    qkv: Array
    qkv_bias: Array | None
    q_norm: Array | None
    k_norm: Array | None
    o: Array
    o_bias: Array | None
    norm2: Array
    gate_up: Array
    down: Array


class ReferenceModel:
    """Computes logits of token ids, in `dtype`."""

    def __init__(
        self, source: TensorSource, dtype: type[np.floating[Any]] = np.float64, *, keeps_layers: bool = True
    ) -> None:
        """Read every tensor of `source`. Without `keeps_layers` each pass reads the layers anew, and holds two of them.

        Raises ExportError, then from each pass too.
        """
        self.spec: ModelSpec = source.spec
        self._dtype = dtype
        self._embed = self._read(source, "embed")
        self._layer: Callable[[int], _Layer]
        if keeps_layers:
            self._layer = [self._read_layer(source, index) for index in range(self.spec.num_layers)].__getitem__
        else:
            self._layer = lru_cache(maxsize=1)(lambda index: self._read_layer(source, index))
        self._final_norm = self._read(source, "final_norm")
        self._head = self._embed if self.spec.tie_word_embeddings else self._read(source, "head")

    def forward(
        self, token_ids: Sequence[int], cache: KeyValueCache | None = None, observe: Observer | None = None
    ) -> Array:
        """Yield logits [num_tokens, vocab_size] of the next token after each of `token_ids`.

        With a cache the tokens follow those computed before, and are added to it; without one they start at position 0.
        Raises IndexError when a token id is outside the vocabulary.
        """
        return self.final_hidden(token_ids, cache, observe) @ self._head.T

    def final_hidden(
        self, token_ids: Sequence[int], cache: KeyValueCache | None = None, observe: Observer | None = None
    ) -> Array:
        """Yield what the head reads, [num_tokens, hidden_size]; arguments and errors as in `forward`."""
        cache = cache if cache is not None else KeyValueCache()
        see: Observer = observe if observe is not None else _ignore
        positions = np.arange(cache.num_tokens, cache.num_tokens + len(token_ids))
        hidden = self._embed[np.asarray(token_ids, dtype=np.int64)]
        for index in range(self.spec.num_layers):
            layer = self._layer(index)
            hidden = hidden + self._attention(index, self._rms_norm(hidden, layer.norm1), positions, cache, see)
            hidden = hidden + self._mlp(index, self._rms_norm(hidden, layer.norm2), see)
        cache.num_tokens += len(token_ids)
        final = self._rms_norm(hidden, self._final_norm)
        see("head", final)
        return final

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Yield the most likely continuation, up to and including an end-of-sequence token."""
        cache = KeyValueCache()
        pending, generated = list(prompt), list[int]()
        while len(generated) < max_tokens:
            pending = [int(self.forward(pending, cache)[-1].argmax())]
            generated += pending
            if pending[0] in self.spec.eos_token_ids:
                break
        return generated

    def _attention(
        self, index: int, x: Array, positions: NDArray[np.int64], cache: KeyValueCache, see: Observer
    ) -> Array:
        spec, layer = self.spec, self._layer(index)
        see(f"layers.{index}.qkv", x)
        qkv = _project(x, layer.qkv, layer.qkv_bias)
        q, k, v = np.split(qkv, [spec.q_size, spec.q_size + spec.kv_size], axis=1)
        queries, keys, values = (_split_heads(part, spec.head_dim) for part in (q, k, v))
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys = self._rms_norm(queries, layer.q_norm), self._rms_norm(keys, layer.k_norm)
        queries, keys = self._rotate(queries, positions), self._rotate(keys, positions)
        keys, values = cache.extend(index, keys, values)
        mixed = self._attend(queries, keys, values, positions)
        see(f"layers.{index}.o", mixed)
        return _project(mixed, layer.o, layer.o_bias)

    def _attend(self, queries: Array, keys: Array, values: Array, positions: NDArray[np.int64]) -> Array:
        """[num_heads, T, head_dim] over [num_kv_heads, S, head_dim], causal; yields [T, num_heads * head_dim]."""
        spec = self.spec
        group = spec.num_heads // spec.num_kv_heads  # query heads h * group ... share key head h
        grouped = queries.reshape(spec.num_kv_heads, group * len(positions), spec.head_dim)
        scores = grouped @ keys.transpose(0, 2, 1) * self._dtype(spec.attention_scale)
        if spec.softcap:
            scores = spec.softcap * np.tanh(scores / spec.softcap)
        distance = positions[:, None] - np.arange(keys.shape[1])  # [T, S]
        visible = distance >= 0
        if spec.sliding_window is not None:
            visible &= distance < spec.sliding_window
        scores = np.where(np.tile(visible, (group, 1)), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed: Array = weights @ values / weights.sum(axis=-1, keepdims=True)
        by_head = mixed.reshape(spec.num_heads, len(positions), spec.head_dim)
        return by_head.transpose(1, 0, 2).reshape(len(positions), -1)

    def _mlp(self, index: int, x: Array, see: Observer) -> Array:
        layer = self._layer(index)
        see(f"layers.{index}.gate_up", x)
        gate, up = np.split(x @ layer.gate_up.T, 2, axis=1)
        gated = _silu(gate) * up
        see(f"layers.{index}.down", gated)
        return gated @ layer.down.T

    def _rms_norm(self, x: Array, weight: Array) -> Array:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        normed: Array = x / np.sqrt(mean_square + self._dtype(self.spec.norm_epsilon)) * weight
        return normed

    def _rotate(self, heads: Array, positions: NDArray[np.int64]) -> Array:
        """RoPE on the first rotary_dim dimensions of [num_heads, T, head_dim]; dimension i pairs with i + half."""
        half = self.spec.rope.rotary_dim // 2
        angles = np.outer(positions.astype(np.float64), self.spec.rope.frequencies())
        cos, sin = np.cos(angles).astype(self._dtype), np.sin(angles).astype(self._dtype)
        low, high, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)

    def _read(self, source: TensorSource, *names: str) -> Array:
        """Read tensors and stack their rows."""
        parts = [source.float32(name) for name in names]
        return (parts[0] if len(parts) == 1 else np.concatenate(parts)).astype(self._dtype, copy=False)

    def _read_layer(self, source: TensorSource, index: int) -> _Layer:
        def read(*parts: str) -> Array:
            return self._read(source, *(f"layers.{index}.{part}" for part in parts))

        spec = self.spec
        return _Layer(
            norm1=read("norm1"),
            qkv=read("q", "k", "v"),
            qkv_bias=read("q.bias", "k.bias", "v.bias") if spec.has_qkv_bias else None,
            q_norm=read("q_norm") if spec.has_qk_norm else None,
            k_norm=read("k_norm") if spec.has_qk_norm else None,
            o=read("o"),
            o_bias=read("o.bias") if spec.has_o_bias else None,
            norm2=read("norm2"),
            gate_up=read("gate", "up"),
            down=read("down"),
        )


def log_softmax(logits: Array) -> Array:
    """Yield log probabilities along the last axis."""
    shifted: Array = logits - logits.max(axis=-1, keepdims=True)
    log_total: Array = np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted - log_total


def _project(x: Array, weight: Array, bias: Array | None) -> Array:
    y: Array = x @ weight.T
    return y if bias is None else y + bias


def _silu(x: Array) -> Array:
    decay = np.exp(-np.abs(x))  # at most 1, so nothing overflows
    y: Array = x * np.where(x >= 0, 1, decay) / (1 + decay)
    return y


def _split_heads(x: Array, head_dim: int) -> Array:
    """[T, num_heads * head_dim] to [num_heads, T, head_dim]."""
    return x.reshape(len(x), -1, head_dim).transpose(1, 0, 2)


def _ignore(name: str, x: Array) -> None:
    del name, x
