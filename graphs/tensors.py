"""Where weights come from: one protocol over GGUF files and Hugging Face folders, with one set of tensor names.

    embed                      [vocab_size, hidden_size]
    layers.I.norm1             [hidden_size]                      before attention
    layers.I.q                 [num_heads * head_dim, hidden_size]
    layers.I.k, layers.I.v     [num_kv_heads * head_dim, hidden_size]
    layers.I.o                 [hidden_size, num_heads * head_dim]
    layers.I.q_norm, k_norm    [head_dim]                         only with has_qk_norm
    layers.I.norm2             [hidden_size]                      before the MLP
    layers.I.gate, layers.I.up [intermediate_size, hidden_size]
    layers.I.down              [hidden_size, intermediate_size]
    final_norm                 [hidden_size]
    head                       [vocab_size, hidden_size]          the embedding when tied

A bias is named after its projection: layers.I.q.bias is [num_heads * head_dim]. Matrices are [out_features,
in_features]. Rows of q and k are in half-split order, whatever order the file has.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from re import Pattern
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from graphs.errors import ExportError
from graphs.rope import Float32Array
from graphs.spec import ModelSpec

UInt8Array = NDArray[np.uint8]
BLOCK_SIZE = 32  # weights of a row that share a scale, in every block format


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """A matrix on the file's own integer grid: weight = scale * code + offset, exactly, in float32."""

    bits: int  # 4 or 8: what a code needs
    codes: UInt8Array  # [out_features, in_features]
    scales: Float32Array  # [out_features, in_features / BLOCK_SIZE]
    offsets: Float32Array  # [out_features, in_features / BLOCK_SIZE]

    def dequantize(self) -> Float32Array:
        """Yield float32[out_features, in_features]."""
        grouped = self.codes.reshape(*self.scales.shape, BLOCK_SIZE).astype(np.float32)
        weights: Float32Array = grouped * self.scales[..., None] + self.offsets[..., None]
        return weights.reshape(self.codes.shape)


@dataclass(frozen=True, slots=True)
class StoredNames:
    """What a file format calls the canonical tensors."""

    top: Mapping[str, str]  # embed, final_norm and head -> stored name
    layers: str  # what the number of a layer follows
    parts: Mapping[str, str]  # part of a layer -> stored part, without ".weight" or ".bias"
    derived: Pattern[str]  # stored names of tensors that say nothing which the ModelSpec doesn't

    def stored(self, name: str, spec: ModelSpec) -> str:
        """The stored name of canonical tensor `name`; of a tied head, the embedding's."""
        if name == "head" and spec.tie_word_embeddings:
            name = "embed"
        if name in self.top:
            return self.top[name]
        _, layer, part = name.split(".", 2)
        part, _, kind = part.partition(".")
        return f"{self.layers}.{layer}.{self.parts[part]}.{kind or 'weight'}"


class TensorSource(Protocol):
    """A model's tensors by canonical name, read from the file when asked for and not kept."""

    @property
    def spec(self) -> ModelSpec:
        """What the model is."""

    @property
    def path(self) -> Path:
        """The file or folder that is read."""

    @property
    def dtype(self) -> str | None:
        """The one number type of all its matrices, "bfloat16" say; None when it does not tell what the model was."""

    def float32(self, name: str) -> Float32Array:
        """Yield the tensor as float32, in the shape that `tensor_shape` gives. The caller owns it.

        Raises ExportError when the tensor's type cannot be read or a value is not finite.
        """

    def blocks(self, name: str) -> BlockWeights | None:
        """Yield the matrix on the file's own grid, or None when the file has no such grid for it."""


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Yield every tensor that the model needs, by canonical name. A tied head is not listed."""
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embed": (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        shapes |= {f"layers.{layer}.{part}": shape for part, shape in _layer_shapes(spec).items()}
    shapes["final_norm"] = (hidden,)
    if not spec.tie_word_embeddings:
        shapes["head"] = (spec.vocab_size, hidden)
    return shapes


def _layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    hidden, q_size, kv_size = spec.hidden_size, spec.q_size, spec.kv_size
    shapes: dict[str, tuple[int, ...]] = {
        "norm1": (hidden,),
        "q": (q_size, hidden),
        "k": (kv_size, hidden),
        "v": (kv_size, hidden),
        "o": (hidden, q_size),
        "norm2": (hidden,),
        "gate": (spec.intermediate_size, hidden),
        "up": (spec.intermediate_size, hidden),
        "down": (hidden, spec.intermediate_size),
    }
    if spec.has_qkv_bias:
        shapes |= {"q.bias": (q_size,), "k.bias": (kv_size,), "v.bias": (kv_size,)}
    if spec.has_o_bias:
        shapes["o.bias"] = (hidden,)
    if spec.has_qk_norm:
        shapes |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    return shapes


def check_shapes(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], names: StoredNames) -> None:
    """Raise ExportError unless the file has every tensor of the model in its shape, and no other.

    `shapes` are the file's tensors by their own names.
    """
    needed = {names.stored(name, spec): shape for name, shape in tensor_shapes(spec).items()}
    for stored, expected in needed.items():
        if stored not in shapes:
            raise ExportError(f"tensor {stored} is missing")
        if shapes[stored] != expected:
            raise ExportError(f"tensor {stored}: shape {list(shapes[stored])} is not allowed: {list(expected)}")
    known = needed.keys() | {names.top["head"]}  # a tied head may have a copy of its own
    unknown = [name for name in shapes if name not in known and not names.derived.fullmatch(name)]
    if unknown:
        rest = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise ExportError(f"tensor {unknown[0]}{rest} is not known: without it the model would compute something else")


def require_finite(values: Float32Array, what: str) -> Float32Array:
    """Yield `values` as they are, or raise ExportError starting with `what` when one is infinite or no number."""
    if not np.isfinite(values).all():
        raise ExportError(f"{what}: a value is infinite or not a number")
    return values
