"""The w8a8 format: each GEMM's input smoothed and rotated, its weights in int8 with one scale per output channel."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from graphs.decoder_weights import ChannelProjection, Embedding, LayerWeights
from graphs.plain_store import to_float16
from graphs.quantize import quantize_channels
from graphs.rope import Float32Array
from graphs.rotation import rotate_channels, rotation_block
from graphs.smoothing import (
    EXPONENTS,
    Float64Array,
    channel_max,
    repeated_for_query_heads,
    shared_by_query_heads,
    smoothing_factors,
)
from graphs.tensors import TensorSource
from graphs.weight_file import WeightFile


@dataclass(slots=True)
class SmoothedLayer:
    """One layer's float32 weights with every smoothing factor folded in; not rotated yet."""

    norm1: Float32Array
    qkv: Float32Array
    qkv_bias: Float32Array | None
    o: Float32Array
    norm2: Float32Array
    gate_up: Float32Array
    down: Float32Array


class ChannelStore:
    """Smooths, rotates and quantises each projection; a `WeightStore`."""

    def __init__(self, source: TensorSource, file: WeightFile, relative_rms: Mapping[str, Float64Array]) -> None:
        """`relative_rms` holds what calibration saw at each GEMM's input: "layers.I.qkv", ..., "head" -> [K]."""
        self._source = source
        self._file = file
        self._relative_rms = relative_rms

    def embedding(self) -> Embedding:
        """A float16 table: its rows are read as they are, and the head has a copy of its own."""
        return Embedding(self._file.add("embed", to_float16("embed", self._source.float32("embed"))))

    def layer(self, index: int) -> LayerWeights:
        """One layer; gate and up are stacked, since the op that gates them reads them side by side."""
        spec, prefix, add = self._source.spec, f"layers.{index}", self._file.add
        smoothed = self._smooth(prefix)
        o_bias = self._source.float32(f"{prefix}.o.bias") if spec.has_o_bias else None
        norms = [
            add(f"{prefix}.{part}", self._source.float32(f"{prefix}.{part}"))
            for part in ("q_norm", "k_norm")
            if spec.has_qk_norm
        ]
        q_norm, k_norm = norms or (None, None)
        return LayerWeights(
            norm1=add(f"{prefix}.norm1", smoothed.norm1),
            qkv=self._project(f"{prefix}.qkv", smoothed.qkv, smoothed.qkv_bias),
            q_norm=q_norm,
            k_norm=k_norm,
            o=self._project(f"{prefix}.o", smoothed.o, o_bias, is_rotated=False),
            norm2=add(f"{prefix}.norm2", smoothed.norm2),
            gate_up=(self._project(f"{prefix}.gate_up", smoothed.gate_up),),
            down=self._project(f"{prefix}.down", smoothed.down),
        )

    def head(self) -> tuple[str, ChannelProjection]:
        """The final norm and the head's own smoothed copy."""
        weight = self._source.float32("head")
        factors = self._factors("head", "head", weight)
        norm = self._file.add("final_norm", self._source.float32("final_norm") / factors)
        weight *= factors
        return norm, self._project("head", weight)

    def _smooth(self, prefix: str) -> SmoothedLayer:
        """Read one layer and fold its factors: of o into v's rows, of down into up's rows, the rest into the norms."""
        spec = self._source.spec

        def read(*parts: str) -> Float32Array:
            return np.concatenate([self._source.float32(f"{prefix}.{part}") for part in parts])

        qkv, o, gate_up, down = read("q", "k", "v"), read("o"), read("gate", "up"), read("down")
        bias = read("q.bias", "k.bias", "v.bias") if spec.has_qkv_bias else None
        heads = spec.num_heads, spec.num_kv_heads, spec.head_dim

        value_factors = smoothing_factors(
            shared_by_query_heads(self._relative_rms[f"{prefix}.o"], *heads[1:]),
            shared_by_query_heads(channel_max(o), *heads[1:]),
            EXPONENTS["o"],
        )
        qkv[-spec.kv_size :] /= value_factors[:, None]
        if bias is not None:
            bias[-spec.kv_size :] /= value_factors
        o *= repeated_for_query_heads(value_factors, *heads)

        down_factors = self._factors(f"{prefix}.down", "down", down)
        gate_up[spec.intermediate_size :] /= down_factors[:, None]
        down *= down_factors

        qkv_factors = self._factors(f"{prefix}.qkv", "qkv", qkv)
        gate_up_factors = self._factors(f"{prefix}.gate_up", "gate_up", gate_up)
        qkv *= qkv_factors
        gate_up *= gate_up_factors
        return SmoothedLayer(read("norm1") / qkv_factors, qkv, bias, o, read("norm2") / gate_up_factors, gate_up, down)

    def _factors(self, gemm: str, kind: str, weight: Float32Array) -> Float32Array:
        return smoothing_factors(self._relative_rms[gemm], channel_max(weight), EXPONENTS[kind])

    def _project(
        self, name: str, weight: Float32Array, bias: Float32Array | None = None, *, is_rotated: bool = True
    ) -> ChannelProjection:
        add = self._file.add
        block = rotation_block(weight.shape[1]) if is_rotated else 0
        stored = quantize_channels(rotate_channels(weight, block))
        return ChannelProjection(
            out_features=weight.shape[0],
            values=add(name, stored.values),
            col_scale=add(f"{name}.col_scale", stored.col_scale),
            col_sum=add(f"{name}.col_sum", stored.col_sum),
            bias=None if bias is None else add(f"{name}.bias", bias),
        )
