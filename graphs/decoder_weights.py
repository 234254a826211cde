"""The names of a decoder's initializers, by role: what the weight stores write and the graph builder reads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from graphs.tensors import TensorSource
from graphs.weight_file import WeightFile


@dataclass(frozen=True, slots=True)
class FloatProjection:
    """weight [out_features, in_features] in float32, float16 or bfloat16."""

    out_features: int
    weight: str
    bias: str | None


@dataclass(frozen=True, slots=True)
class BlockProjection:
    """The initializers of `quantize.NBitsWeights`."""

    out_features: int
    in_features: int
    bits: int
    packed: str
    scales: str
    zero_points: str | None
    correction: str | None
    bias: str | None


@dataclass(frozen=True, slots=True)
class ChannelProjection:
    """The initializers of `quantize.ChannelWeights`."""

    out_features: int
    panels: str
    col_scale: str
    col_sum: str
    bias: str | None


Projection = FloatProjection | BlockProjection | ChannelProjection


@dataclass(frozen=True, slots=True)
class Embedding:
    """table [vocab_size, hidden_size], float32, float16 or bfloat16, or 8-bit codes with `scales` per block of 32."""

    table: str
    scales: str | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    norm1: str
    qkv: Projection
    q_norm: str | None
    k_norm: str | None
    o: Projection
    norm2: str
    gate_up: tuple[Projection, ...]  # one of both stacked, gate first, or one of each
    down: Projection


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole decoder."""

    embedding: Embedding
    layers: tuple[LayerWeights, ...]
    final_norm: str
    head: Projection
    cos: str  # [context_length, rotary_dim / 2]
    sin: str


class WeightStore(Protocol):
    """Writes a model's weights in one format, layer by layer, so that one layer at a time is in memory."""

    def embedding(self) -> Embedding:
        """Store the embedding, and the head with it when it is tied and the format can share it."""
        ...

    def layer(self, index: int) -> LayerWeights:
        """Store one layer."""
        ...

    def head(self) -> tuple[str, Projection]:
        """Store the final norm and the head; yield the norm's name and the head. Call it last."""
        ...


def store_decoder(
    source: TensorSource, store: WeightStore, file: WeightFile, advance: Callable[[], None]
) -> DecoderWeights:
    """Write all weights through `store`, the RoPE tables into `file`; call `advance` num_layers + 2 times.

    Raises ExportError when a tensor cannot be read or held.
    """
    spec = source.spec
    cos, sin = spec.rope.tables(spec.context_length)
    file.add("rope.cos", cos)
    file.add("rope.sin", sin)
    embedding = store.embedding()
    advance()
    layers = []
    for index in range(spec.num_layers):
        layers.append(store.layer(index))
        advance()
    final_norm, head = store.head()
    advance()
    return DecoderWeights(embedding, tuple(layers), final_norm, head, "rope.cos", "rope.sin")
